"""`onlynorm theorems`, `reproduce` and `report`: verdicts as exit codes, records, pages, disks that fail."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import RunCli

from onlynorm.cli import app
from onlynorm.display import Curve
from onlynorm.errors import MissingDataError
from onlynorm.evidence import registry
from onlynorm.evidence.artifacts import Artifact, Expectation
from onlynorm.evidence.papers import reproduce as run_module
from onlynorm.evidence.papers import table
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.registry import Evidence, Verdict

FIGURE = "random_features:fig-3"
CHECKED, UNCHECKED = "giannou2023:lemma-2", "giannou2023:lemma-3"


# ------------------------------------------------------------------------------- stand-ins for what takes long


def square(*, k: int) -> dict[str, float]:
    return {"square": float(k * k)}


def tiny_figure(run: Run) -> Outcome:
    run.announce(2)
    squares = [run.piece(f"k={k}", square, k=k)["square"] for k in (1, 2)]
    return Outcome({"sum": sum(squares), "nothing": math.nan}, [Curve("squares", [1.0, 2.0], squares, kind="points")])


def failing_figure(run: Run) -> Outcome:
    raise RuntimeError("a figure that cannot be drawn")


def figure_without_data(run: Run) -> Outcome:
    raise MissingDataError("cifar10 needs a folder; got none. Copy it.")


def killed_figure(run: Run) -> Outcome:
    run.piece("k=1", square, k=1)
    raise KeyboardInterrupt


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces every artifact of the papers by one small one."""

    def replace(function: Callable[[Run], Outcome] = tiny_figure, *, total: float = 5.0) -> None:
        sizes: dict[str, dict[str, int]] = {"quick": {}, "paper": {}}
        expected = Expectation("sum", "arithmetic", value=total, tolerance=0.5)
        one = Artifact(FIGURE, "Squares", "Squares grow.", "figure", (0,), sizes, (expected,), (), function, "digest")
        monkeypatch.setattr(run_module, "artifacts", lambda: {FIGURE: one})

    replace()
    return replace


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Verdict], None]:
    """Replaces every check by one, for one statement, with the verdict asked for."""

    def replace(verdict: Verdict) -> None:
        def measure(seed: int) -> Evidence:
            return Evidence(verdict, f"measured at seed {seed}", {"gap": math.nan, "seed": float(seed)})

        monkeypatch.setattr(table, "CHECKS", {CHECKED: measure})

    replace(Verdict.HOLDS)
    return replace


# ------------------------------------------------------------------------------- what cannot be written or read


@pytest.mark.parametrize("out", ["file", "file/deeper", "file/deeper/still"])
def test_records_that_cannot_be_written_are_refused_before_anything_is_computed(
    run: RunCli, figure: Callable[..., None], tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    figure(lambda run: pytest.fail("computed in vain"))
    ran = run("reproduce", FIGURE, "--out", tmp_path / out)
    assert ran.code == 2
    assert ran.stdout == ""
    assert ran.err.startswith("error: records need a writable folder; got ")


@pytest.mark.usefixtures("figure")
def test_a_disk_that_fails_during_the_run_is_an_error_in_one_line(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(app, "need_folder", lambda out: None)
    ran = run("reproduce", FIGURE, "--out", tmp_path / "file")
    assert ran.code == 2
    assert "saving results needs a writable folder with space" in ran.err


@pytest.mark.parametrize("out", [".", "folder", "file/report.html"])
def test_a_report_that_cannot_be_written_is_refused(run: RunCli, tmp_path: Path, out: str) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("in the way")
    ran = run("report", "--records", "records", "--out", out)
    assert ran.code == 2
    assert ran.stdout == ""
    assert re.search("a report needs a file name|saving (results )?needs a", ran.err)


def test_a_damaged_record_is_refused_with_its_cure(run: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "toy" / "fig-1" / "quick"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{")
    ran = run("report", "--records", "records", "--out", "page.html")
    assert ran.code == 2
    assert "damaged or truncated. Delete the file" in ran.err
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------------------------- theorems


def test_theorems_lists_every_statement(run: RunCli) -> None:
    listed = run("theorems", "--json").json()
    assert [app["key"] for app in listed] == [s.key for s in registry.statements()]
    assert not any("verdict" in app for app in listed)
    table = run("theorems")
    assert all(s.key in table.out for s in registry.statements())


def test_theorems_lists_those_of_one_paper(run: RunCli) -> None:
    listed = run("theorems", "--paper", "hardt_ma2017", "--json").json()
    assert [app["key"] for app in listed] == [s.key for s in registry.statements("hardt_ma2017")]


@pytest.mark.parametrize("paper", [(), ("--paper", "giannou2023")])
def test_theorems_shows_one_statement_whole(run: RunCli, paper: tuple[str, ...]) -> None:
    statement = registry.statement("giannou2023:thm-1")
    (facts,) = run("theorems", statement.key, *paper, "--json").json()
    assert (facts["key"], facts["says"], facts["assumes"]) == (statement.key, statement.says, list(statement.assumes))
    shown = run("theorems", statement.key, *paper)
    assert shown.out.startswith(f"{statement.key}: {statement.title}")
    assert " ".join(statement.says.split()) in shown.out


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.HOLDS, 0), (Verdict.CORRECTED, 0), (Verdict.FAILS, 1)],
)
@pytest.mark.parametrize("args", [(), (CHECKED,), ("--paper", "giannou2023")], ids=["all", "one", "paper"])
def test_a_failing_check_exits_with_1(
    run: RunCli, check: Callable[[Verdict], None], verdict: Verdict, code: int, args: tuple[str, ...]
) -> None:
    check(verdict)
    plain, told = run("theorems", *args, "--check", "--seed", 5, "--json"), run("theorems", *args, "--check")
    assert (plain.code, told.code) == (code, code)
    assert plain.stderr == ""
    facts = {app["key"]: app for app in plain.json()}
    assert facts[CHECKED]["verdict"] == str(verdict)
    assert facts[CHECKED]["measured"] == {"gap": None, "seed": 5.0}
    assert facts[CHECKED]["evidence"] == "measured at seed 5"
    assert "measured at seed 0" in told.out
    assert "checks" not in told.out.split()


@pytest.mark.usefixtures("check")
def test_a_statement_without_a_check_is_no_failure(run: RunCli) -> None:
    ran = run("theorems", UNCHECKED, "--check", "--json")
    assert ran.code == 0
    assert [app["verdict"] for app in ran.json()] == ["not yet checked"]


@pytest.mark.usefixtures("check")
def test_a_check_that_breaks_fails_and_says_why(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(seed: int) -> Evidence:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(table, "CHECKS", {CHECKED: break_down})
    ran = run("theorems", CHECKED, "--check", "--json")
    (facts,) = ran.json()
    assert ran.code == 1
    assert facts["verdict"] == "fails"
    assert facts["evidence"] == "the check raised ZeroDivisionError: a fault of ours"


# ------------------------------------------------------------------------------- reproduce


@pytest.mark.parametrize("ids", [(FIGURE,), ("random_features",), ()], ids=["artifact", "paper", "everything"])
@pytest.mark.usefixtures("figure")
def test_reproduce_prints_the_verdict_and_writes_the_record(run: RunCli, tmp_path: Path, ids: tuple[str, ...]) -> None:
    ran = run("reproduce", *ids, "--out", tmp_path / "out")
    assert ran.code == 0
    assert f"{FIGURE} Squares: " in ran.out
    assert "2/2" in ran.err
    assert "2/2" not in ran.out
    assert (tmp_path / "out" / "random_features" / "fig-3" / "quick" / "record.json").exists()


@pytest.mark.usefixtures("figure")
def test_reproduce_prints_one_json_document(run: RunCli, tmp_path: Path) -> None:
    ran = run("reproduce", FIGURE, "--scale", "paper", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    (facts,) = ran.json()
    assert (facts["artifact"], facts["scale"]) == (FIGURE, "paper")
    assert facts["values"] == {"sum": 5.0, "nothing": None}
    assert (tmp_path / "onlynorm-out" / "records").is_dir()


@pytest.mark.parametrize("function", [tiny_figure, failing_figure])
def test_what_is_not_reproduced_exits_with_1(
    run: RunCli, figure: Callable[..., None], function: Callable[[Run], Outcome]
) -> None:
    figure(function, total=50.0)
    told, plain = run("reproduce", FIGURE), run("reproduce", FIGURE, "--json")
    assert (told.code, plain.code) == (1, 1)
    assert plain.json()[0]["verdict"] == "not reproduced"
    assert "not reproduced" in told.out


def test_what_lacks_its_data_leaves_a_record_alone_and_is_no_verdict(run: RunCli, figure: Callable[..., None]) -> None:
    assert run("reproduce", FIGURE).code == 0
    figure(figure_without_data)
    told = run("reproduce", FIGURE)
    assert told.code == 2
    assert f"{FIGURE}: cifar10 needs a folder; got none. Copy it." in told.err
    assert run("report", "--json").json()["records"] == 1


def test_artifacts_with_their_data_run_before_the_missing_data_is_told(
    monkeypatch: pytest.MonkeyPatch, figure: Callable[..., None], tmp_path: Path
) -> None:
    (whole,) = run_module.artifacts().values()
    lacking = dataclasses.replace(whole, id="random_features:fig-4", function=figure_without_data)
    with pytest.raises(MissingDataError, match=r"^random_features:fig-4: cifar10 needs .* The others are done\.$"):
        run_module.reproduce([lacking, whole], out=tmp_path)
    assert [path.parent.parent.name for path in tmp_path.rglob("record.json")] == ["fig-3"]


def test_a_killed_run_keeps_its_pieces_and_goes_on(run: RunCli, figure: Callable[..., None], tmp_path: Path) -> None:
    figure(killed_figure)
    killed = run("reproduce", FIGURE)
    assert killed.code == 130
    assert killed.stdout == ""
    assert "onlynorm-out/records" in killed.err
    (first,) = (tmp_path / "onlynorm-out").rglob("pieces/*.json")
    written = first.stat().st_mtime_ns

    empty = run("report", "--json")
    assert empty.json()["records"] == 0
    assert "onlynorm-out/records has no records yet" in empty.err

    figure(tiny_figure)
    assert run("reproduce", FIGURE).code == 0
    assert first.stat().st_mtime_ns == written
    assert run("report", "--json").json()["records"] == 1
    run("reproduce", FIGURE, "--force")
    assert first.stat().st_mtime_ns > written


# ------------------------------------------------------------------------------- report


@pytest.mark.usefixtures("figure", "check")
def test_report_writes_one_page_of_records_and_verdicts(run: RunCli, tmp_path: Path) -> None:
    run("reproduce", FIGURE)
    told = run("report", "--check")
    assert told.code == 0
    page = tmp_path / "onlynorm-out" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "Squares" in text
    assert "measured at seed 0" in text
    assert re.match(r"onlynorm-out/report.html \(\S+ kB, 1 record\): open it in a browser", told.out)

    plain = run("report", "--out", "other.html", "--json")
    assert plain.stderr == ""
    size = (tmp_path / "other.html").stat().st_size
    assert plain.json() == {"page": "other.html", "bytes": size, "records": 1, "checked": 0}


@pytest.mark.usefixtures("figure")
def test_report_of_an_empty_folder_is_a_page_that_says_so(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    ran = run("report", "--records", "records", "--out", "page.html")
    assert ran.code == 0
    assert "0 records" in ran.out
    assert "records has no records yet" in ran.err
    assert "No records yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_report_with_a_failing_check_is_written_and_exits_with_1(
    run: RunCli, check: Callable[[Verdict], None], tmp_path: Path
) -> None:
    check(Verdict.FAILS)
    (tmp_path / "records").mkdir()
    ran = run("report", "--records", "records", "--out", "page.html", "--check", "--json")
    assert ran.code == 1
    assert ran.json()["checked"] == len(registry.statements())
    assert (tmp_path / "page.html").exists()
