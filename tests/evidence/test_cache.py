"""Finished pieces of work: read again, never trusted when damaged, and stale once the code that made them changed."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import onlynorm
from onlynorm.errors import FormatError
from onlynorm.evidence import cache as module
from onlynorm.evidence.cache import (
    CACHED,
    OLDER,
    PIECE,
    Cache,
    library_digest,
    source_digest,
    source_files,
    without_imports,
    worst_note,
)
from onlynorm.storage import read_sealed, write_sealed

PACKAGE = Path(onlynorm.__file__).parent
GOOD = {"accuracy": 0.5, "losses": [1.0, 2]}


def make(folder: Path, said: list[str] | None = None, **options: Any) -> Cache:
    status = [] if said is None else said
    return Cache(folder, modules=["onlynorm.evidence.bench.sweeps.adapt"], status=status.append, **options)


def test_a_piece_is_computed_once_and_read_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, Any]:
        calls.append(1)
        return {**GOOD, "pair": (1, float("inf"))}

    first = make(tmp_path).get_or_compute("a", {"seed": 1}, compute)
    again = make(tmp_path).get_or_compute("a", {"seed": 1}, compute)
    assert first.result == again.result == {**GOOD, "pair": [1, float("inf")]}
    assert (first.note, again.note) == ("", CACHED)
    assert (first.key, first.seconds) == (again.key, again.seconds)
    assert make(tmp_path).get_or_compute("a", {"seed": 2}, compute).note == ""
    assert make(tmp_path, force=True).get_or_compute("a", {"seed": 1}, compute).note == ""
    assert len(calls) == 3


def test_a_piece_that_the_check_refuses_is_computed_again(tmp_path: Path) -> None:
    make(tmp_path).get_or_compute("a", {}, lambda: {"accuracy": "high"})

    def check(result: Any) -> None:
        if not isinstance(result["accuracy"], float):
            raise FormatError("a run needs a number")

    said: list[str] = []
    found = make(tmp_path, said).get_or_compute("a", {}, lambda: GOOD, check=check)
    assert (found.result, found.note) == (GOOD, "")
    assert "damaged" in said[0]


@pytest.mark.parametrize("change", [{"key": "another"}, {"seconds": 1}, {"seconds": "fast"}, {"result": None}])
def test_a_piece_of_another_kind_is_computed_again(tmp_path: Path, change: dict[str, Any]) -> None:
    make(tmp_path).get_or_compute("a", {}, lambda: GOOD)
    (path,) = tmp_path.iterdir()
    body = read_sealed(path, kind=PIECE) | change
    write_sealed(path, {name: value for name, value in body.items() if value is not None}, kind=PIECE)
    assert make(tmp_path).get_or_compute("a", {}, lambda: GOOD).note == ""
    path.write_text("{")
    assert make(tmp_path).get_or_compute("a", {}, lambda: GOOD).note == ""


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make(tmp_path).get_or_compute("a", {}, lambda: 1 / 0)
    assert not list(tmp_path.glob("*.json"))


def test_the_worst_of_several_notes_is_row_text() -> None:
    assert [worst_note(notes) for notes in ([], ["", ""], ["", CACHED], [CACHED, OLDER, ""])] == ["", "", CACHED, OLDER]


# ------------------------------------------------------------------------------- changes of the code


def digest_of(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest that the library would have if it lay in this folder."""
    with monkeypatch.context() as patch:
        patch.setattr(module.inspect, "getfile", lambda _: str(root / "__init__.py"))
        return library_digest.__wrapped__(name)


@pytest.mark.parametrize(
    ("name", "changed", "is_noticed"),
    [
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/bench/sweeps/adapt.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/timing.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "tuning/train.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/bench/sweeps/predict.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "cli/evidence/bench.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "display/figure.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/cache.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/harness.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/sweep.py", False),
        ("onlynorm.evidence.bench.sweeps.scratch", "evidence/papers/random_features/scratch.py", True),
        ("onlynorm.evidence.bench.sweeps.scratch", "evidence/validation.py", True),  # through the experiment
        ("onlynorm.evidence.papers.burkholz2024.tables", "evidence/papers/burkholz2024/vgg_targets.py", True),
        ("onlynorm.evidence.papers.burkholz2024.tables", "evidence/papers/random_features/conditioning.py", False),
    ],
)
def test_results_notice_changes_of_the_code_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changed: str, is_noticed: bool
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "onlynorm", ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_of(tmp_path / "onlynorm", name, monkeypatch)
    with (tmp_path / "onlynorm" / changed).open("a") as file:
        file.write("\n# changed\n")
    assert (digest_of(tmp_path / "onlynorm", name, monkeypatch) != before) is is_noticed


def test_an_artifact_of_another_package_counts_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_study.py").write_text("from onlynorm.evidence import validation\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_study")
    assert PACKAGE / "evidence/validation.py" in source_files(PACKAGE, "my_study")
    assert PACKAGE / "evidence/validation.py" not in source_files(PACKAGE, "json")


def test_a_piece_of_changed_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path).get_or_compute("a", {}, lambda: GOOD)
    monkeypatch.setattr(module, "library_digest", lambda *modules: f"another {modules}")
    assert make(tmp_path).get_or_compute("a", {}, lambda: GOOD).note == OLDER


def test_the_source_of_a_piece_may_change_its_imports() -> None:
    one = "from a import (\n    b,\n)\nimport c\n\ndef f():\n    from d import e\n    return b\n"
    other = "import numpy\n\nfrom x.y import b\n\n\ndef f():\n    return b\n"
    assert without_imports(one) == without_imports(other)
    assert without_imports(one) != without_imports(one.replace("return b", "return c"))


def test_the_key_of_a_piece_does_not_depend_on_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for place, imports in enumerate(("import math\n", "import os\n\nfrom math import (\n    pi,\n)\n", "PI = 3\n")):
        path = tmp_path / f"study_{place}.py"
        path.write_text(f'"""A study."""\n\n{imports}\n\ndef measure() -> int:\n    return 1\n')
        monkeypatch.syspath_prepend(str(tmp_path))
        keys.append(source_digest(importlib.import_module(path.stem).measure))
    assert keys[0] == keys[1] != keys[2]


def test_a_piece_is_not_stale_because_a_module_of_the_library_imports_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "onlynorm.evidence.bench.sweeps.adapt"
    shutil.copytree(PACKAGE, tmp_path / "onlynorm", ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_of(tmp_path / "onlynorm", name, monkeypatch)
    with (tmp_path / "onlynorm" / "tuning/train.py").open("a") as file:
        file.write("\nimport this_and_that\n")
    assert digest_of(tmp_path / "onlynorm", name, monkeypatch) == before
