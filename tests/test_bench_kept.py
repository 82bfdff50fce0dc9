"""Stored rows: read again, never trusted with other fields, and older once the code that made them changed."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import onlynorm
from onlynorm.bench import AdaptRun, FrozenRun, RebuiltRow, RepairRun, ScaledRun, ScratchRun, TextRun
from onlynorm.bench.kept import KEPT, OLDER, Rows, fields_of
from onlynorm.papers import run as run_module
from onlynorm.papers.run import library_digest, source_files
from onlynorm.report.sealed import read_sealed, write_sealed

PACKAGE = Path(onlynorm.__file__).parent
KIND = "onlynorm-test-row"
GOOD: dict[str, Any] = {"accuracy": 0.5, "n_trained": 3, "is_exact": True, "losses": [1.0, 2], "method": "a"}


@dataclass(frozen=True)
class Made:
    seed: int
    accuracy: float
    n_trained: int
    is_exact: bool
    losses: tuple[float, ...]
    method: str
    note: str = ""


FIELDS = fields_of(Made, "seed")


def rows(folder: Path, said: list[str] | None = None) -> Rows:
    say = [] if said is None else said
    return Rows(folder, kind=KIND, module="onlynorm.bench.adapt", force=False, say=say.append)


def test_a_row_is_measured_once_and_read_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return GOOD

    assert rows(tmp_path).find("a", {"seed": 1}, measure, fields=FIELDS) == {**GOOD, "note": ""}
    assert rows(tmp_path).find("a", {"seed": 1}, measure, fields=FIELDS) == {**GOOD, "note": KEPT}
    assert rows(tmp_path).find("a", {"seed": 2}, measure, fields=FIELDS)["note"] == ""
    assert len(calls) == 2


@pytest.mark.parametrize(
    "row",
    [
        None, [], {}, "text", {**GOOD, "extra": 1.0}, {**GOOD, "accuracy": "high"}, {**GOOD, "accuracy": None},
        {**GOOD, "accuracy": True}, {**GOOD, "n_trained": 0.5}, {**GOOD, "is_exact": 1}, {**GOOD, "losses": ["a"]},
        {**GOOD, "losses": 1.0}, {name: value for name, value in GOOD.items() if name != "method"},
    ],
)  # fmt: skip
def test_a_row_with_other_fields_is_measured_again(tmp_path: Path, row: Any) -> None:
    rows(tmp_path).find("a", {}, lambda: GOOD, fields=FIELDS)
    (path,) = tmp_path.iterdir()
    write_sealed(path, {**read_sealed(path, kind=KIND), "row": row}, kind=KIND)
    said: list[str] = []
    assert rows(tmp_path, said).find("a", {}, lambda: GOOD, fields=FIELDS) == {**GOOD, "note": ""}
    assert "other fields" in said[0]


def test_the_fields_of_every_benchmark_can_be_checked() -> None:
    from onlynorm.bench import kept

    for made in (AdaptRun, FrozenRun, RebuiltRow, RepairRun, ScratchRun, TextRun):
        assert {annotation.partition("[")[0] for annotation in fields_of(made).values()} <= set(kept._TYPES)
    assert "scale" not in fields_of(ScaledRun, "scale")


# ---------------------------------------------------------------------------------------------- changes of the code


def digest_of(root: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest that the library would have if it lay in this folder."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module.inspect, "getfile", lambda _: str(root / "__init__.py"))
        return library_digest.__wrapped__(module)


@pytest.mark.parametrize(
    ("module", "changed", "is_noticed"),
    [
        ("onlynorm.bench.adapt", "bench/adapt.py", True),
        ("onlynorm.bench.adapt", "bench/adapt_ways.py", True),
        ("onlynorm.bench.adapt", "tuning/train.py", True),
        ("onlynorm.bench.adapt", "bench/predict.py", False),
        ("onlynorm.bench.adapt", "cli/measure.py", False),
        ("onlynorm.bench.adapt", "bench/kept.py", False),
        ("onlynorm.bench.scratch", "papers/scratch_training.py", True),
        ("onlynorm.bench.scratch", "papers/lessons.py", True),  # through scratch_training
        ("onlynorm.papers.burkholz2024", "papers/vgg_targets.py", True),
        ("onlynorm.papers.burkholz2024", "papers/conditioning.py", False),
    ],
)
def test_results_notice_changes_of_the_code_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, changed: str, is_noticed: bool
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "onlynorm", ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_of(tmp_path / "onlynorm", module, monkeypatch)
    with (tmp_path / "onlynorm" / changed).open("a") as file:
        file.write("\n# changed\n")
    assert (digest_of(tmp_path / "onlynorm", module, monkeypatch) != before) is is_noticed


def test_an_artifact_of_another_package_counts_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_study.py").write_text("from onlynorm.papers import lessons\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_study")
    assert PACKAGE / "papers/lessons.py" in source_files(PACKAGE, "my_study")
    assert PACKAGE / "papers/lessons.py" not in source_files(PACKAGE, "json")


def test_a_row_of_changed_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path).find("a", {}, lambda: GOOD, fields=FIELDS)
    monkeypatch.setattr("onlynorm.bench.kept.library_digest", lambda *modules: f"another {modules}")
    assert rows(tmp_path).find("a", {}, lambda: GOOD, fields=FIELDS)["note"] == OLDER
