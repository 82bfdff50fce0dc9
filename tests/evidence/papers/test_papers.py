"""The reproduction harness: artifacts from TOML, pieces that survive a kill, records."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onlynorm.errors import FormatError, StorageError, UnknownNameError, ValueRangeError
from onlynorm.evidence import cache as cache_module
from onlynorm.evidence.artifacts import Artifact, artifacts, load_artifacts
from onlynorm.evidence.papers.reproduce import Outcome, PieceProgress, reproduce
from onlynorm.evidence.records import RecordVerdict, read_record, read_records
from onlynorm.storage import digest

TOML = """
[paper]
key = "toy"

[[statement]]
key = "toy:thm-1"

[[artifact]]
id = "toy:fig-1"
title = "Squares"
claim = "Squares grow."
kind = "figure"
seeds = [0, 1, 2]

[artifact.sizes.quick]
n = 2
[artifact.sizes.paper]
n = 3

[[artifact.expect]]
name = "sum"
value = { quick = 5, paper = 14 }
tolerance = 0.5
source = "arithmetic"
"""

CODE = """
from pathlib import Path
from onlynorm.evidence.papers.reproduce import Outcome
from onlynorm.display import Curve, Table

LOG = Path(__file__).with_suffix(".log")

def square(*, k):
    with LOG.open("a") as log:
        log.write(f"{k}\\n")
    return {"square": k * k}

def figure(run):
    run.announce(run.sizes["n"])
    ks = range(1, run.sizes["n"] + 1)
    squares = [run.piece(f"k={k}", square, k=k)["square"] for k in ks]
    return Outcome(
        values={"sum": sum(squares)},
        curves=[Curve("squares", list(ks), squares, kind="points")],
        table=Table(["k", "square"], list(zip(ks, squares))),
    )
"""


class Toy:
    """One artifact in a folder of its own, whose module can be rewritten and whose calls are counted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"toy_{digest(str(folder))[:12]}"
        self.path = folder / f"{self.name}.py"
        self.out = folder / "out"
        self.write()

    def write(self, *, toml: str = TOML, code: str = CODE) -> None:
        self.path.write_text(code)
        self.path.with_suffix(".toml").write_text(toml)

    def load(self) -> Artifact:
        return load_artifacts(self.path.with_suffix(".toml"), {"toy:fig-1": self.module().figure})["toy:fig-1"]

    def module(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module
        # A rewritten file within the same second would otherwise be taken from the bytecode cache.
        exec(compile(self.path.read_text(), str(self.path), "exec"), module.__dict__)
        return module

    def run(self, **options: Any) -> Any:
        return reproduce(self.load(), out=self.out, **options)[0]

    def calls(self) -> list[str]:
        log = self.path.with_suffix(".log")
        lines = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def pieces(self) -> list[Path]:
        return sorted(self.out.rglob("pieces/*.json"))


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    one = Toy(tmp_path)
    yield one
    sys.modules.pop(one.name, None)


# ---------------------------------------------------------------------------------------------- artifacts


def test_every_artifact_of_the_package_loads_with_its_function() -> None:
    known = artifacts()
    assert "random_features:fig-3" in known
    assert all(one.id == id and callable(one.function) for id, one in known.items())


def test_a_toml_artifact_carries_sizes_seeds_and_expectations_per_scale(toy: Toy) -> None:
    one = toy.load()
    assert one.seeds == (0, 1, 2)
    assert one.sizes["paper"]["n"] == 3
    assert [item.value for item in one.expectations_at("quick")] == [5.0]
    assert [item.value for item in one.expectations_at("paper")] == [14.0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "toy:fig-1"', 'id = "Toy fig"', "got id: String should match pattern"),
        ('kind = "figure"', 'kind = "song"', "got kind: Input should be 'figure'"),
        ("seeds = [0, 1, 2]", "seeds = []", "got seeds: Tuple should have at least 1 item"),
        ("[artifact.sizes.paper]\nn = 3", "", r"got sizes\.paper: Field required"),
        ('title = "Squares"\n', "", "got title: Field required"),
        ('title = "Squares"', 'title = "Squares"\ncolour = "red"', "got colour: Unexpected keyword"),
        ("tolerance = 0.5", "", "tolerance, a min or a max; got none"),
        ("tolerance = 0.5", "tolerance = 0", "positive tolerance"),
        ("tolerance = 0.5", "tolerance = true", r"got expect\.0\.tolerance\.float: Input should be a valid number"),
        ("tolerance = 0.5", "tolerance = 0.5\nsoft = true", "an expectation that is not soft"),
        ('source = "arithmetic"', "", r"got expect\.0\.source: Field required"),
        ("seeds = [0, 1, 2]", "seeds = [0,", "needs valid TOML"),
    ],
)
def test_a_wrong_toml_table_says_what_it_needs(toy: Toy, old: str, new: str, message: str) -> None:
    toy.write(toml=TOML.replace(old, new))
    with pytest.raises(FormatError, match=message):
        toy.load()


def test_an_artifact_needs_both_halves(toy: Toy) -> None:
    toy.write(toml=TOML.replace("toy:fig-1", "toy:fig-2"))
    with pytest.raises(FormatError, match=r"toy:fig-2.*needs a function"):
        toy.load()
    toy.write(toml="")
    with pytest.raises(FormatError, match=r"needs an \[\[artifact\]\] table"):
        toy.load()


def test_an_unknown_artifact_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'random_features:fig-3'"):
        reproduce("random_features:fig3", out=tmp_path)


def test_an_unknown_scale_is_refused(toy: Toy) -> None:
    with pytest.raises(ValueRangeError, match="scale in"):
        toy.run(scale="huge")


# ---------------------------------------------------------------------------------------------- running


def test_a_run_writes_a_record_with_the_papers_number_beside_ours(toy: Toy) -> None:
    record = toy.run(scale="paper")
    assert record.verdict is RecordVerdict.REPRODUCED
    assert [(item.value, item.ours) for item in record.checks] == [(14.0, 14.0)]
    folder = toy.out / "toy" / "fig-1" / "paper"
    assert read_record(folder / "record.json") == record
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "figure.svg").read_bytes()
    assert set(record.versions) == {"onlynorm", "python", "torch", "numpy", "scipy"}
    assert [piece.name for piece in record.pieces] == ["k=1", "k=2", "k=3"]


def test_a_record_names_neither_the_machine_nor_its_folders(toy: Toy) -> None:
    toy.run()
    text = (toy.out / "toy/fig-1/quick/record.json").read_text()
    assert os.uname().nodename not in text
    assert str(toy.folder) not in text


def test_a_second_run_computes_nothing(toy: Toy) -> None:
    toy.run()
    assert toy.calls() == ["1", "2"]
    again = toy.run()
    assert toy.calls() == []
    assert all(piece.is_reloaded for piece in again.pieces)


def test_a_larger_scale_keeps_the_pieces_it_shares(toy: Toy) -> None:
    toy.run(scale="quick")
    toy.calls()
    toy.run(scale="paper")
    assert toy.calls() == ["3"]


def test_force_computes_everything_again(toy: Toy) -> None:
    toy.run()
    toy.calls()
    toy.run(force=True)
    assert toy.calls() == ["1", "2"]


def test_a_changed_configuration_computes_only_what_changed(toy: Toy) -> None:
    toy.run()
    toy.calls()
    toy.write(toml=TOML.replace("n = 2", "n = 4"))
    toy.run()
    assert toy.calls() == ["3", "4"]


def test_pieces_of_one_name_and_different_configuration_are_different_pieces(toy: Toy) -> None:
    toy.write(code=CODE.replace('f"k={k}"', '"the same name"'))
    assert toy.run().values["sum"] == 5
    assert toy.calls() == ["1", "2"]
    assert toy.run().values["sum"] == 5
    assert toy.calls() == []


def test_changed_source_text_computes_again(toy: Toy) -> None:
    toy.run()
    toy.calls()
    toy.write(code=CODE.replace("k * k", "k ** 2"))
    toy.run()
    assert toy.calls() == ["1", "2"]


def test_another_version_of_onlynorm_computes_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.run()
    toy.calls()
    monkeypatch.setattr("onlynorm.__version__", "99.0")
    toy.run()
    assert toy.calls() == ["1", "2"]


def test_a_piece_of_another_library_state_is_a_caveat(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.run(scale="paper")
    monkeypatch.setattr(cache_module, "library_digest", lambda *_: "another state")
    stale = toy.run(scale="paper")
    assert stale.verdict is RecordVerdict.CAVEAT
    assert any("another version of the library" in reason for reason in stale.reasons)
    assert toy.run(scale="paper", force=True).verdict is RecordVerdict.REPRODUCED


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "other kind", "newer"])
def test_a_damaged_piece_is_computed_again(toy: Toy, damage: str) -> None:
    toy.run()
    toy.calls()
    path = toy.pieces()[0]
    sealed = json.loads(path.read_text())
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flip":
        sealed["body"]["result"]["square"] += 1
        path.write_text(json.dumps(sealed))
    else:
        path.write_text(json.dumps(sealed | ({"kind": "x"} if damage == "other kind" else {"format": 99})))
    record = toy.run()
    assert toy.calls() == ["1"]
    assert record.values["sum"] == 5


def test_a_piece_needs_a_plain_function_without_a_closure(toy: Toy) -> None:
    code = CODE.replace("square, k=k", "lambda: {'square': k}")
    toy.write(code=code)
    record = toy.run()
    assert record.verdict is RecordVerdict.NOT_REPRODUCED
    assert "needs a plain function without a closure" in record.reasons[0]


def test_an_artifact_that_raises_becomes_a_record_that_says_so(toy: Toy) -> None:
    toy.write(code=CODE.replace("return {", "raise RuntimeError(f'no {LOG} here')\n    return {"))
    record = toy.run()
    assert record.verdict is RecordVerdict.NOT_REPRODUCED
    assert record.reasons[0].startswith("The run stopped: RuntimeError: no …/toy_")
    assert record.checks[0].ours is None


def test_progress_counts_pieces_and_tells_reloaded_from_computed(toy: Toy) -> None:
    seen: list[PieceProgress] = []
    toy.run(progress=seen.append)
    toy.run(progress=seen.append)
    states = [(event.state, event.done, event.total) for event in seen]
    one = [("started", 0, 2), ("computed", 1, 2), ("started", 1, 2), ("computed", 2, 2), ("finished", 2, 2)]
    two = [(state.replace("computed", "reloaded"), done, total) for state, done, total in one]
    assert states == one + two


def test_fresh_and_reloaded_results_are_the_same_objects_to_an_artifact(toy: Toy) -> None:
    code = CODE.replace('{"square": k * k}', '{"square": k * k, "odd": (float("nan"), float("inf"))}')
    toy.write(code=code)
    fresh, kept = toy.run(), toy.run()
    assert fresh.values == kept.values


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is a POSIX signal")
def test_a_killed_run_goes_on_where_it_stopped(toy: Toy) -> None:
    """A real process gets SIGKILL inside its third piece; the next one computes only what is missing."""
    wait = 'if k == 3 and not LOG.with_suffix(".go").exists(): import time; time.sleep(600)\n    '
    toy.write(code=CODE.replace('return {"square"', wait + 'return {"square"'), toml=TOML.replace("n = 2", "n = 4"))
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(toy.folder)!r})
        import {toy.name} as module
        from onlynorm.evidence.artifacts import load_artifacts
        from onlynorm.evidence.papers.reproduce import reproduce
        one = load_artifacts({str(toy.path.with_suffix(".toml"))!r}, {{"toy:fig-1": module.figure}})["toy:fig-1"]
        reproduce(one, out={str(toy.out)!r})
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        log = toy.path.with_suffix(".log")
        deadline = time.monotonic() + 120
        while not (log.exists() and "3" in log.read_text().split()):
            assert process.poll() is None, "the process ended before it was killed"
            assert time.monotonic() < deadline, "the third piece never started"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert len(toy.pieces()) == 2
    assert not list(toy.out.rglob("record.json"))
    toy.calls()
    toy.path.with_suffix(".go").touch()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert toy.calls() == ["3", "4"]
    (record,) = read_records(toy.out)
    assert [piece.is_reloaded for piece in record.pieces] == [True, True, False, False]


# ---------------------------------------------------------------------------------------------- files


def test_an_unwritable_folder_is_a_clear_error(toy: Toy) -> None:
    toy.out.write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="needs a writable folder"):
        toy.run()


def test_a_damaged_record_is_an_error_not_a_guess(toy: Toy) -> None:
    toy.run()
    path = toy.out / "toy/fig-1/quick/record.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="damaged or truncated"):
        read_records(toy.out)
    path.write_text(whole.replace("with a caveat", "reproduced", 1))
    with pytest.raises(FormatError, match="altered or damaged"):
        read_records(toy.out)


def test_an_outcome_of_one_artifact_does_not_stop_the_others(toy: Toy, tmp_path: Path) -> None:
    other = Artifact(**{**vars(toy.load()), "id": "toy:fig-2", "function": _fails})
    records = reproduce([other, toy.load()], out=toy.out)
    assert [record.verdict for record in records] == [RecordVerdict.NOT_REPRODUCED, RecordVerdict.CAVEAT]


def _fails(run: Any) -> Outcome:
    raise ArithmeticError("no")
