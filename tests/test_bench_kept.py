"""Stored rows: read again, never trusted with other fields, and older once the code that made them changed."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import onlynorm
from onlynorm.evidence.bench.races.reconstruct import RebuiltRow
from onlynorm.evidence.bench.sweeps.adapt import AdaptRun
from onlynorm.evidence.bench.sweeps.frozen import FrozenRun
from onlynorm.evidence.bench.sweeps.repair import RepairRun
from onlynorm.evidence.bench.sweeps.scaled import ScaledRun
from onlynorm.evidence.bench.sweeps.scratch import ScratchRun
from onlynorm.evidence.bench.sweeps.text import TextRun
from onlynorm.evidence.cache import KEPT, OLDER, Rows, fields_of
from onlynorm.evidence.papers import reproduce as run_module
from onlynorm.evidence.papers.reproduce import library_digest, source_files
from onlynorm.storage import read_sealed, write_sealed

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
    return Rows(folder, kind=KIND, module="onlynorm.evidence.bench.sweeps.adapt", force=False, say=say.append)


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
    from onlynorm.evidence import cache

    for made in (AdaptRun, FrozenRun, RebuiltRow, RepairRun, ScratchRun, TextRun):
        assert {annotation.partition("[")[0] for annotation in fields_of(made).values()} <= set(cache._TYPES)
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
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/bench/sweeps/adapt.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/spread.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "tuning/train.py", True),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/bench/sweeps/predict.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "cli/evidence/bench.py", False),
        ("onlynorm.evidence.bench.sweeps.adapt", "evidence/cache.py", False),
        ("onlynorm.evidence.bench.sweeps.scratch", "evidence/papers/random_features/scratch_training.py", True),
        ("onlynorm.evidence.bench.sweeps.scratch", "evidence/validation.py", True),  # through scratch_training
        ("onlynorm.evidence.papers.burkholz2024.tables", "evidence/papers/burkholz2024/vgg_targets.py", True),
        ("onlynorm.evidence.papers.burkholz2024.tables", "evidence/papers/random_features/conditioning.py", False),
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
    (tmp_path / "my_study.py").write_text("from onlynorm.evidence import validation\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_study")
    assert PACKAGE / "evidence/validation.py" in source_files(PACKAGE, "my_study")
    assert PACKAGE / "evidence/validation.py" not in source_files(PACKAGE, "json")


def test_a_row_of_changed_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path).find("a", {}, lambda: GOOD, fields=FIELDS)
    monkeypatch.setattr("onlynorm.evidence.cache.library_digest", lambda *modules: f"another {modules}")
    assert rows(tmp_path).find("a", {}, lambda: GOOD, fields=FIELDS)["note"] == OLDER
