"""The package as a whole: what importing it costs, what it ships, and that the house keeps its own rules."""

from __future__ import annotations

import ast
import collections
import importlib.resources
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onlynorm
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.papers import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCE = Path(onlynorm.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PYPROJECT = SOURCE.parent.parent / "pyproject.toml"

# A room imports only rooms above it in this list; "onlynorm" is the package's own front door, which opens onto the
# library. The evidence and the command line stand on top of the library.
ROOMS = [
    "errors", "validate", "progress", "memory", "seeds", "storage", "cluster", "display", "modules", "data", "models",
    "intervals", "features", "solvers", "alignment", "frozen", "optim", "reconstruction", "tuning", "rank", "identity",
    "files", "onlynorm", "evidence", "cli", "__main__",
]  # fmt: skip
FLOOR = {room: floor for floor, room in enumerate(ROOMS)}
ON_TOP = ("evidence", "cli", "__main__")
MOST_FILES = 12
HEAVY = (
    "scipy",
    "matplotlib",
    "jinja2",
    "pydantic",
    "sklearn",
    "pandas",
    "typer",
    "rich",
    "joblib",
    "lightning",
    "lightning_fabric",
    "PIL",
    "tensorboard",
    "torchvision",
)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: Path) -> str:
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "onlynorm" if name == "__init__" else name


def imported_rooms(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The rooms a file imports, wherever in the file, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "onlynorm":
                room = rest.partition(".")[0]
                yield (room if (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").exists() else ""), node.lineno


def named(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


# ------------------------------------------------------------------------------- what users get


def test_importing_prints_nothing_and_loads_nothing_that_only_commands_need() -> None:
    on_top = tuple(f"onlynorm.{room}" for room in ON_TOP)
    code = (
        "import sys, onlynorm; "
        f"print([name for name in sys.modules if name in {HEAVY} or name.startswith({on_top})], file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.stdout == ""
    assert ran.stderr == "[]\n"


def test_every_public_name_exists_once() -> None:
    assert len(set(onlynorm.__all__)) == len(onlynorm.__all__)
    for name in onlynorm.__all__:
        assert getattr(onlynorm, name) is not None


def test_every_name_a_room_exports_exists() -> None:
    for path in FILES:
        if path.name != "__init__.py":
            continue
        module = importlib.import_module(".".join(("onlynorm", *path.parent.relative_to(SOURCE).parts)))
        assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


def test_the_types_are_shipped() -> None:
    assert importlib.resources.files("onlynorm").joinpath("py.typed").is_file()
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/onlynorm"]


def test_the_version_is_the_one_the_build_reads() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    read = PYPROJECT.parent / project["tool"]["hatch"]["version"]["path"]
    written = re.findall(r'^__version__ = "(\d+\.\d+\.\d+\S*)"$', read.read_text(encoding="utf-8"), re.MULTILINE)
    assert written == [onlynorm.__version__]


def imported(path: Path) -> set[str]:
    """The packages that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_everything_that_is_installed_is_imported_and_by_the_right_storey() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]

    def packages(requirements: list[str]) -> set[str]:
        names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in requirements}
        return {{"pillow": "PIL", "scikit_learn": "sklearn"}.get(name, name) for name in names}

    below = set().union(*(imported(path) for path in FILES if room_of(path) != "evidence"))
    above = set().union(*(imported(path) for path in FILES if room_of(path) == "evidence"))
    library, evidence = packages(project["dependencies"]), packages(project["optional-dependencies"]["evidence"])
    assert library <= below, "the library does not import these"
    assert (evidence - {"jinja2"}).isdisjoint(below), "pages need Jinja2, which torch brings"
    assert evidence <= above | {"jinja2"}


# ------------------------------------------------------------------------------- the house rules


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR, f"{named(path)} is in no room of the house"
    for other, line in imported_rooms(parse(path)):
        other = other or "onlynorm"
        if other != room:
            assert FLOOR[other] < FLOOR[room], f"{named(path)}:{line} imports {other}, which is not above {room}"


def test_the_rule_of_the_rooms_would_notice_a_breach() -> None:
    tree = ast.parse("from onlynorm import optim\nimport onlynorm as on\n\ndef f():\n    from onlynorm.cli import app")
    assert list(imported_rooms(tree)) == [("optim", 1), ("", 2), ("cli", 5)]
    assert FLOOR["cli"] > FLOOR["evidence"] > FLOOR["solvers"] > FLOOR["features"] > FLOOR["errors"]


def test_every_room_of_the_list_exists() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_private_name_is_imported(path: Path) -> None:
    nodes = (node for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom) and node.module)
    ours = (node for node in nodes if str(node.module).partition(".")[0] == "onlynorm")
    assert [alias.name for node in ours for alias in node.names if alias.name.startswith("_")] == []


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in ON_TOP], ids=named)
def test_the_evidence_and_the_command_line_use_public_names_only(path: Path) -> None:
    assert list(private_imports(parse(path))) == []


def private_imports(tree: ast.Module) -> Iterator[str]:
    """What a file imports from inside a room of the library instead of from what the room exports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if alias.name.startswith("onlynorm."))
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "onlynorm":
            parts = str(node.module).split(".")
            if len(parts) > 1 and parts[1] in ON_TOP:
                continue
            module = importlib.import_module(".".join(parts[:2]))
            exported = set(module.__all__) if hasattr(module, "__path__") else set(vars(module))
            exported |= set(ROOMS) if len(parts) == 1 else set()
            for alias in node.names:
                if len(parts) > 2 or alias.name not in exported:
                    yield f"{node.lineno}: {node.module}.{alias.name}"


def test_the_rule_of_public_names_would_notice_a_breach() -> None:
    tree = ast.parse(
        "from onlynorm import plan, rank\nfrom onlynorm.storage import claim\nfrom onlynorm.solvers import KhatriRao\n"
        "from onlynorm.solvers import Operator\nfrom onlynorm.solvers.spectrum import edges\nimport onlynorm.rank"
    )
    assert list(private_imports(tree)) == [
        "4: onlynorm.solvers.Operator", "5: onlynorm.solvers.spectrum.edges", "6: onlynorm.rank",
    ]  # fmt: skip


def test_no_folder_has_more_files_than_one_takes_in_at_a_glance() -> None:
    files = (path for path in SOURCE.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    counts = collections.Counter(path.parent.relative_to(SOURCE).as_posix() for path in files)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_module_is_a_drawer_for_leftovers() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts}
    assert names.isdisjoint({"utils", "util", "misc", "common", "helpers", "helper"})


@pytest.mark.parametrize("path", FILES, ids=named)
def test_modules_and_public_functions_and_classes_say_what_they_are(path: Path) -> None:
    tree = parse(path)
    silent = [] if ast.get_docstring(tree) else ["the module"]
    checks = {function.__name__ for function in table.CHECKS.values()}  # the statement says what a check is
    for node in tree.body:
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_named and any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list):
            continue  # the function itself says it
        if is_named and not node.name.startswith("_") and not ast.get_docstring(node) and node.name not in checks:
            silent.append(node.name)
    assert silent == []


def test_no_two_classes_have_the_same_name() -> None:
    nodes = (node for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    counts = collections.Counter(node.name for node in nodes)
    assert [name for name, n in counts.items() if n > 1] == []


def test_nothing_registers_itself_when_it_is_imported() -> None:
    """Tables of checks and artifacts are written out, so that an editor finds who uses a function."""
    assert set(table.ARTIFACTS) == set(artifacts())
    listed = {*table.CHECKS.values(), *table.ARTIFACTS.values()}
    assert all(getattr(importlib.import_module(one.__module__), one.__name__) is one for one in listed)


def test_rules_of_intervals_and_distributions_stand_in_tables() -> None:
    """The decorators that add to these tables are for users."""
    functions = (node for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef))
    calls = [one for function in functions for one in function.decorator_list if isinstance(one, ast.Call)]
    assert {one.func.id for one in calls if isinstance(one.func, ast.Name)}.isdisjoint({"interval_rule", "register"})


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) != "cli"], ids=named)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))
    assert [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"] == []


def test_every_numerical_test_is_run_with_the_rounding_of_another_processor_too() -> None:
    tests = Path(__file__).parent
    listed = (tests / "numerical.txt").read_text().split()
    assert listed == sorted(set(listed))
    assert [name for name in listed if not (tests.parent / name).is_file()] == []
    # Commands, benchmarks and papers are long, and show numbers that others compute.
    others = re.compile(r"test_(bench|cli|papers|train|demo|screen|.*_refused|only_norms|package)")
    compares = re.compile(r"allclose|assert_close|is_same\(|\bEPS\b|\bTOLERANCE\b|\bROUNDING\b")
    found = [path for path in sorted(tests.rglob("test_*.py")) if not others.match(path.name)]
    numerical = [
        path.relative_to(tests.parent).as_posix() for path in found if len(compares.findall(path.read_text())) >= 3
    ]
    assert [name for name in numerical if name not in listed] == []
