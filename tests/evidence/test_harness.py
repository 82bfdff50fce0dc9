"""The harness of benchmarks, on a sweep and a race of our own: sizes, learning rates, resuming, tables, command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import RunCli

from onlynorm.data import Split
from onlynorm.display import Curve, Figure
from onlynorm.errors import ConversionError, OnlynormError, TrainingError, UnknownNameError, ValueRangeError
from onlynorm.evidence import harness
from onlynorm.evidence.bench import table
from onlynorm.evidence.cache import CACHED
from onlynorm.evidence.harness import Goal, Session, Sizes, is_met, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.sweep import Measured, Results, Sweep, TrainingRun, Trial, best_lr, first, mean, percent, try_lrs


@dataclass(frozen=True)
class ToySizes(Sizes):
    """Of the toy sweep."""

    kinds: tuple[str, ...] = setting(("good", "bad"), choices=("good", "bad", "odd"), help="Kinds.", is_key=False)
    seeds: int = setting(3, quick=2, high=50, help="Seeds.", is_key=False)
    steps: int = setting(100, quick=10, help="Steps.")
    decay: float = 0.5
    damping: float = setting(0.5, help="Damping.", is_key=False)
    epochs: int | None = setting(None, help="Epochs.")
    rates: tuple[float, ...] = (0.1, 0.2)


class Case(NamedTuple):
    kind: str
    depth: int


@dataclass(frozen=True)
class Row:
    accuracy: float
    losses: tuple[float, ...]
    seconds: float


def make_sweep(**options: Any) -> tuple[Sweep[ToySizes, Case], list[tuple[Any, ...]]]:
    """A sweep whose good cases do best at 0.1, the others at 0.01, and the calls it gets."""
    calls: list[tuple[Any, ...]] = []
    sweep = Sweep(
        "toy", "A toy.", ToySizes, cases=lambda sizes: [Case(k, d) for k in sizes.kinds for d in (1, 2)],
        **{"lrs": (0.01, 0.1, 1.0), "columns": {
            "accuracy %": percent("accuracy"), "seconds": mean("seconds", ".1f"), "losses": first("losses"),
        }, **options},
    )  # fmt: skip

    @sweep.trial
    def validate(case: Case, run: TrainingRun, sizes: ToySizes) -> float:
        calls.append(("trial", *case, run.lr, run.seed))
        return 1.0 - abs(math.log10(run.lr / (0.1 if case.kind == "good" else 0.01))) / 10

    @sweep.measure
    def train(case: Case, run: TrainingRun, sizes: ToySizes) -> Row:
        calls.append(("run", *case, run.lr, run.seed))
        run.status("working")
        return Row((0.8 if case.kind == "good" else 0.5) + 0.01 * run.seed, (1.0, math.inf), 1.0)

    @sweep.goals
    def goals(results: Results[ToySizes, Case]) -> Iterator[Goal]:
        gap = results.gap(Case("good", 1), Case("bad", 1))
        yield Goal("good is better", f"{gap.percent()} points", gap.mean > 0.0)

    @sweep.figures
    def draw(results: Results[ToySizes, Case]) -> dict[str, Figure]:
        return {"line": Figure([Curve("accuracy", range(len(results.runs)), list(results.runs["accuracy"]))])}

    return sweep, calls


# ------------------------------------------------------------------------------- sizes


def test_quick_sizes_replace_the_usual_ones_and_options_replace_both() -> None:
    assert ToySizes.make(quick=True) == ToySizes(quick=True, seeds=2, steps=10)
    assert ToySizes.make(quick=True, steps=7, seeds=None).steps == 7
    assert ToySizes().key() == {"steps": 100, "decay": 0.5, "epochs": None, "rates": (0.1, 0.2)}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"seeds": 0}, ValueRangeError), ({"seeds": 51}, ValueRangeError), ({"steps": 1.5}, OnlynormError),
        ({"decay": -0.1}, ValueRangeError), ({"decay": math.nan}, ValueRangeError), ({"epochs": 0}, ValueRangeError),
        ({"kinds": ["odder"]}, UnknownNameError), ({"kinds": 1.5}, OnlynormError), ({"rates": ["a"]}, OnlynormError),
        ({"quick": 1}, OnlynormError), ({"steps": None}, OnlynormError), ({"steps": True}, OnlynormError),
    ],
)  # fmt: skip
def test_sizes_out_of_range_are_refused(change: dict[str, Any], error: type[OnlynormError]) -> None:
    with pytest.raises(error, match=rf"{next(iter(change))}.* (needs|must)"):
        ToySizes(**change)


def test_one_name_is_a_list_of_one() -> None:
    assert ToySizes(kinds="odd").kinds == ("odd",)  # type: ignore[arg-type]
    assert ToySizes(kinds=iter(["bad"])).kinds == ("bad",)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- learning rates


def test_learning_rates_are_widened_until_the_best_lies_between_two_others() -> None:
    grid = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    for best in (0.01, 1.0, 10.0):
        asked: list[float] = []
        tried = try_lrs(
            grid, lambda lr, best=best, asked=asked: asked.append(lr) or -abs(math.log(lr / best)), start=(0.1, 1.0)
        )
        assert best_lr(tried) == best
        assert len(asked) == len(set(asked)), "none is tried twice"
        place = grid.index(best)
        assert set(grid[place - 1 : place + 2]) <= set(tried)
    assert set(try_lrs(grid, lambda lr: lr, start=(0.1,))) >= {10.0, 100.0}, "it stops at the end of the grid"
    assert list(try_lrs((0.1, 1.0), lambda lr: lr)) == [0.1, 1.0]
    assert try_lrs((), lambda lr: lr) == {}


def test_the_lower_one_of_equal_learning_rates_is_taken_and_diverged_ones_never() -> None:
    assert best_lr({0.3: 0.5, 0.1: 0.5, 1.0: 0.4, 3.0: math.nan}) == 0.1
    with pytest.raises(TrainingError, match="needs a trial with a finite loss; got none of 1"):
        best_lr({0.1: math.nan})


def test_every_case_has_its_own_learning_rate_unless_they_share_one(tmp_path: Path) -> None:
    sweep, calls = make_sweep()
    results = sweep.run(out=tmp_path)
    assert [results.lr(case) for case in results.cases] == [0.1, 0.1, 0.01, 0.01]
    assert {call[-1] for call in calls if call[0] == "trial"} == {100}
    sharing, calls = make_sweep(lr_group=lambda case: case.depth, trial_seeds=lambda _: (7, 8))
    shared = sharing.run(out=tmp_path / "shared")
    assert len({shared.lr(case) for case in shared.cases}) == 1
    assert sum(call[0] == "trial" for call in calls) == 4 * 3 * 2
    plain, calls = make_sweep(lrs=())
    assert all(math.isnan(lr) for lr in plain.run(out=tmp_path / "plain").runs["lr"])
    assert not any(call[0] == "trial" for call in calls)


def test_a_case_can_be_trained_at_the_learning_rate_of_another_as_well(tmp_path: Path) -> None:
    sweep, _ = make_sweep(also_at=lambda case: case._replace(kind="good"))
    results = sweep.run(ToySizes(seeds=1), out=tmp_path)
    assert [(r.run.lr, r.case.kind) for r in results.measured if r.case.depth == 1] == [
        (0.1, "good"), (0.01, "bad"), (0.1, "bad"),
    ]  # fmt: skip
    assert len(results.of(Case("bad", 1), lr=0.1)) == len(results.of(Case("bad", 1))) == 1


# ------------------------------------------------------------------------------- resuming


def test_a_killed_sweep_resumes_and_more_seeds_add_to_fewer(tmp_path: Path) -> None:
    sweep, calls = make_sweep()

    def stop(text: str) -> None:
        if text.startswith("bad, 1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(out=tmp_path, on_row=stop)
    done = list(calls)
    results = sweep.run(out=tmp_path)
    assert len(calls) == len(set(calls)) == 4 * 3 + 4 * 3
    assert list(results.runs["note"]) == [CACHED] * 7 + [""] * 5
    assert set(done) < set(calls)
    calls.clear()
    again = sweep.run(out=tmp_path)
    assert calls == []
    assert again.runs.drop(columns="note").equals(results.runs.drop(columns="note"))
    sweep.run(ToySizes(seeds=4), out=tmp_path)
    assert [call[-1] for call in calls] == [3, 3, 3, 3]
    calls.clear()
    sweep.run(ToySizes(steps=7), out=tmp_path)
    assert len(calls) == 24, "other sizes are other pieces"
    sweep.run(out=tmp_path, force=True)
    assert len(calls) == 48


def test_a_run_depends_on_the_tensors_of_its_data(tmp_path: Path) -> None:
    data = [
        Split("toy", torch.full((2, 1), value), torch.zeros(2), torch.zeros(1, 1), torch.zeros(1))
        for value in (0.0, 1.0)
    ]
    given = [data[0]]
    sweep, calls = make_sweep(made_of=lambda _case, _sizes: {"data": given[0]}, lrs=())
    for one, n_trained in ((data[0], 4), (data[1], 8), (dataclasses.replace(data[0]), 8)):
        given[0] = one
        sweep.run(ToySizes(seeds=1), out=tmp_path)
        assert len(calls) == n_trained


def test_a_stored_run_with_other_fields_is_measured_again(tmp_path: Path) -> None:
    sweep, calls = make_sweep()
    sweep.run(out=tmp_path)
    sweep.kind = dataclasses.make_dataclass("Other", [("accuracy", float), ("extra", int)])
    calls.clear()
    with pytest.raises(OnlynormError, match="needs all fields"):
        sweep.run(out=tmp_path)
    assert len(calls) == 1


# ------------------------------------------------------------------------------- results


def made(case: Case, seed: int, accuracy: float, lr: float = 0.1) -> Measured:
    return Measured(case, TrainingRun(seed, lr), Row(accuracy, (1.0,), 2.0))


def test_results_have_intervals_gaps_by_seed_and_tables() -> None:
    sweep, _ = make_sweep()
    good, bad = Case("good", 1), Case("bad", 1)
    runs = [made(good, s, x) for s, x in enumerate((0.8, 0.82, 0.84))] + [made(bad, s, 0.5) for s in (2, 1)]
    trials = [Trial(case, TrainingRun(100, lr), lr) for case in (good, bad) for lr in (0.01, 0.1)]
    results = sweep.results(runs, trials)
    assert results.spread(good).percent() == "82.0 ± 5.0"
    assert (results.gap(good, bad).n, results.gap(good, bad).mean) == (2, pytest.approx(0.33))
    assert results.values(bad) == [0.5, 0.5]
    assert results.spread(Case("odd", 1)).n == 0
    cases, tried = results.tables()
    assert cases.columns == ("kind", "depth", "accuracy %", "seconds", "losses", "lr", "seeds", "note")
    assert cases.rows[0] == ("good", "1", "82.0 ± 5.0", "2.0", "(1.0,)", "0.1", "3", "")
    assert tried.rows[0] == ("good, 1", "1.0", "10.0")
    edge = sweep.results(runs, [Trial(good, TrainingRun(100, 1.0), 1.0)])
    assert edge._edge(good) == ", the end of the grid"
    facts = json.loads(json.dumps(results.as_dict()))
    assert [run["accuracy"] for run in facts["runs"]] == [0.8, 0.82, 0.84, 0.5, 0.5]
    assert set(facts) == {"sizes", "runs", "trials", "goals"}
    assert is_met(results)


def test_runs_have_derived_columns_and_cases_have_axes(tmp_path: Path) -> None:
    sweep, _ = make_sweep(derived={"percent": lambda row: 100 * row.accuracy}, lrs=(), columns={
        "accuracy %": percent("accuracy", where=lambda case: case.kind == "good"),
    })  # fmt: skip
    results = sweep.run(ToySizes(seeds=2), out=tmp_path)
    assert list(results.runs["percent"]) == [100 * accuracy for accuracy in results.runs["accuracy"]]
    assert "percent" in results.as_dict()["runs"][0]
    assert results.axis("depth") == [1, 2]
    assert results.axis("kind", "depth") == [("good", 1), ("good", 2), ("bad", 1), ("bad", 2)]
    assert [row[2] for row in results.tables()[0].rows] == ["80.5 ± 6.4", "80.5 ± 6.4", "-", "-"]


def test_nothing_measured_promises_nothing() -> None:
    sweep, _ = make_sweep()
    assert sweep.results([]).goals == []


def test_figures_are_written_and_named(tmp_path: Path) -> None:
    sweep, _ = make_sweep()
    told: list[str] = []
    results = sweep.run(out=tmp_path, on_row=told.append)
    assert results.figures == (str(tmp_path / "toy" / "line.png"),)
    assert Path(results.figures[0]).with_suffix(".svg").exists()
    assert told[-1] == f"figure: {results.figures[0]}"
    assert told[0] == "good, 1, lr 0.1, seed 0: 80.0 %"


@pytest.mark.parametrize("name", ["progress", "on_row", "out", "sizes", "force"])
def test_bad_arguments_are_refused_before_any_work(tmp_path: Path, name: str) -> None:
    sweep, calls = make_sweep()
    for value in (1.5, object(), {"a": 1}):
        with pytest.raises(OnlynormError, match=r"needs|must"):
            sweep.run(**{"out": tmp_path, name: value})
    assert calls == []
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- races


def test_a_race_has_a_table_for_each_part() -> None:
    race = Race("toy", "A toy.", Sizes, columns={
        "fast": {"method": lambda row: row[0]}, "slow": {"method": lambda row: row[0]},
    })  # fmt: skip

    @race.measure
    def measure(sizes: Sizes, session: Session) -> Iterator[tuple[str, tuple[str, float]]]:
        session.status("timing")
        yield "slow", ("b", 2.0)
        yield "fast", ("a", 1.0)

    @race.goals
    def goals(result: RaceResult[Sizes]) -> Iterator[Goal]:
        yield Goal("one second", "", result.parts["fast"][0][1] <= 1.0)

    said: list[str] = []
    result = race.run(progress=said.append)
    assert said == ["timing"]
    assert [table.rows for table in result.tables()] == [(("a",),), (("b",),)]
    assert is_met(result)
    with pytest.raises(ConversionError, match="progress "):
        race.run(progress=3)


@dataclass(frozen=True)
class Timed:
    """Of one method on one case."""

    case: str
    method: str
    seconds: float
    memory: int = 0


@pytest.mark.parametrize(
    ("column", "value", "cell"),
    [
        ("seconds", 0.5, "0.5"),
        ("seconds:.3f", 0.5, "0.500"),
        ("seconds*1e3:.1f", 0.01234, "12.3"),
        ("seconds:time", 24.4e-6, "24 us"),
        ("seconds:time", 0.0123, "12.3 ms"),
        ("seconds:short", 9.94, "9.9"),
        ("seconds:short", 12.4, "12"),
        ("seconds*100:.2f", math.nan, "-"),
        ("memory:bytes", 0.5, "-"),
        (lambda row: row.method.upper(), 0.5, "A"),
    ],
)
def test_a_column_has_a_field_a_factor_and_a_format(column: Any, value: float, cell: str) -> None:
    race = Race("toy", "A toy.", Sizes, columns={"rows": {"head": column}})
    assert race.result([("rows", Timed("one", "a", value))]).tables()[0].rows == ((cell,),)


def test_rows_are_found_in_pairs_and_by_a_field() -> None:
    race = Race("toy", "A toy.", Sizes, columns={"rows": {}})
    rows = [Timed("one", "a", 1.0), Timed("two", "a", 2.0), Timed("one", "b", 3.0)]
    result = race.result([("rows", rows)])
    assert result.pair("a", "b", case="one") == [(rows[0], rows[2])]
    assert result.pair("a", "b", case="two") == []
    assert result.by("case") == {"one": [rows[0], rows[2]], "two": [rows[1]]}


# ------------------------------------------------------------------------------- the command


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    sweep, calls = make_sweep()
    monkeypatch.setitem(table.BENCHMARKS, "toy", sweep)
    return calls


@pytest.mark.parametrize("how", [(), ("--markdown",), ("--json",)], ids=["table", "markdown", "json"])
@pytest.mark.parametrize("is_good", [True, False])
def test_the_command_shows_tables_and_exits_with_1_when_a_goal_is_missed(
    run: RunCli, toy: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...], is_good: bool
) -> None:
    if not is_good:
        table.BENCHMARKS["toy"].judge = lambda _: [Goal("an aim", "too little", False)]  # type: ignore[attr-defined]
    ran = run("bench", "toy", "--quick", "--kinds", "good", "--kinds", "bad", "--steps", 7, "--out", "records", *how)
    assert ran.code == (0 if is_good else 1)
    assert {call[-1] for call in toy if call[0] == "run"} == {0, 1}
    assert "good, 1, lr 0.1, seed 0: 80.0 %" in ran.err
    assert "working" not in ran.out
    if "--json" in how:
        assert ran.json()["sizes"]["steps"] == 7
        assert ran.json()["goals"][0]["is_met"] is is_good
        assert ran.json()["runs"][0]["losses"] == [1.0, None]
    elif how:
        assert "| good | 1 | 80.5 ± 6.4 |" in ran.stdout
        assert "| too little | no |" in ran.stdout or is_good
    else:
        assert "good 1 80.5 ± 6.4" in ran.out
    toy.clear()
    run("bench", "toy", "--quick", "--steps", 7, "--out", "records", *how)
    assert toy == []


def test_an_option_can_be_zero(run: RunCli, toy: list[tuple[Any, ...]]) -> None:
    assert run("bench", "toy", "--quick", "--damping", 0, "--json").json()["sizes"]["damping"] == 0.0
    assert run("bench", "toy", "--quick", "--json").json()["sizes"]["damping"] == 0.5


def test_the_command_refuses_bad_options_and_knows_its_own(run: RunCli, toy: list[tuple[Any, ...]]) -> None:
    assert run("bench", "toy", "--seeds", 0).code == 2
    assert run("bench", "toy", "--kinds", "odder").code == 2
    assert run("bench", "nothing").code == 2
    told = run("bench", "toy", "--help").out
    for words in ("--steps", "Steps (100, 10 if quick).", "--kinds", "--out", "--force", "--markdown", "--json"):
        assert words in told
    assert "--decay" not in told
    assert toy == []


@pytest.mark.parametrize("name", table.BENCHMARKS)
def test_every_benchmark_has_a_command_with_its_options(run: RunCli, name: str) -> None:
    told = run("bench", name, "--help").out
    one = table.BENCHMARKS[name]
    options = [f.name for f in dataclasses.fields(one.sizes) if f.metadata.get("help")]
    assert all(f"--{option.replace('_', '-')}" in told for option in ("quick", "json", "markdown", *options))
    assert ("--out" in told) == one.is_stored
    assert one.about.split()[0] in told


@pytest.mark.parametrize(("name", "quick"), list(itertools.product(table.BENCHMARKS, (False, True))))
def test_the_sizes_of_every_benchmark_are_valid(name: str, quick: bool) -> None:
    sizes = table.BENCHMARKS[name].sizes.make(quick=quick)
    assert sizes.quick is quick
    assert "seeds" not in sizes.key()
    json.dumps(sizes.key())


@pytest.mark.parametrize("package", ["jinja2", "pandas", "pydantic"])
def test_a_missing_package_names_the_extra_to_install(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    import importlib.util
    import sys

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else there(name, *a))
    for name in [name for name in sys.modules if name.startswith("onlynorm.evidence")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("onlynorm.evidence", raising=False)
    for words in (("theorems",), ("bench", "solve", "--quick"), ("reproduce",), ("report",)):
        ran = run(*words)
        assert ran.code == 2
        assert f"need {package}; not installed. Run `pip install onlynorm[evidence]`" in ran.err
    assert harness.__name__ not in sys.modules
