"""What a terminal and a machine get to see: tables, facts, JSON without NaN, progress on standard error only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import RunCli
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.progress import Progress
from safetensors.torch import save_file as torch_save
from torch import nn

from onlynorm import Wide
from onlynorm.cli.terminal import (
    WIDE,
    bar,
    counter,
    errors,
    layer_bars,
    percent,
    print_bench,
    print_facts,
    print_json,
    print_layers,
    print_plan,
    print_record,
    print_statements,
    record_facts,
    screen,
    spinner,
    stages,
    statement_facts,
)
from onlynorm.errors import visible
from onlynorm.evidence import registry
from onlynorm.evidence.bench.duels import Row
from onlynorm.evidence.bench.races import reconstruct as rebuilding
from onlynorm.evidence.bench.races import solve as solving
from onlynorm.evidence.bench.races.reconstruct import RebuiltRow
from onlynorm.evidence.harness import Goal, goal_table
from onlynorm.evidence.papers.reproduce import PieceProgress
from onlynorm.evidence.records import Record, RecordVerdict
from onlynorm.evidence.registry import Finding
from onlynorm.reconstruction import plan, reconstruct

Output = pytest.CaptureFixture[str]
HOSTILE = "a [b]bold[/b] [/] [red] word"  # rich would swallow or refuse it as markup
NAN = math.nan
BENCH_COLUMNS = ("tiny", "excess", "ours by", "time", "error", "rival", "time", "error", "ratio", "memory")
ROWS = [
    Row("linear 4x4", 16, 1.25, "onlynorm", 0.5, 1.0, 2_000, 3e-12, 7, HOSTILE, "tiny", 3e-12),
    Row("linear 4x4", 16, 1.25, "QR", NAN, NAN, 0, NAN, 0, "90 s", "tiny"),
]
REBUILT_ROW = RebuiltRow(
    "id_cond", 1.25, 2e-16, 3e-12, 0.015, 1.0, 0.998, 0.9173, 0.918, 34_000_000, 99.6, 8, 7, 6, HOSTILE
)
REBUILT = rebuilding.race.result([("rows", REBUILT_ROW), *(("papers", row) for row in ROWS)])
REBUILT_COLUMNS, PAPERS_COLUMNS = (rebuilding.race.columns[part] for part in ("rows", "papers"))


def bench(*rows: Row, goals: Sequence[Goal] = ()) -> Any:
    """What a run of the solvers measured, with goals of our own."""
    return SimpleNamespace(tables=solving.race.result([("rows", row) for row in rows]).tables, goals=goals)


BENCH = bench(*ROWS, goals=[Goal(HOSTILE, "N^2.00", True), Goal("aim", HOSTILE, False)])


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which nothing is folded."""
    monkeypatch.setattr(screen, "width", 300)


def flat(text: str) -> str:
    """Text as it reads, whatever the width of the terminal folded it to."""
    return " ".join(text.split())


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def record() -> Record:
    return Record(
        artifact="toy:fig-1", title=HOSTILE, claim="c", kind="figure", scale="quick", verdict=RecordVerdict.CAVEAT,
        reasons=(HOSTILE,), checks=(), values={"a": NAN}, sizes={}, seeds=(0,),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- JSON

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DOCUMENTS = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def expected(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: expected(item) for name, item in value.items()}
    return [expected(item) for item in value] if isinstance(value, list | tuple) else value


@given(value=DOCUMENTS)
def test_any_plain_value_prints_as_one_json_document_without_nan(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        print_json(value)
    assert len(printed) == 1
    assert json.loads(printed[0], parse_constant=refuse) == expected(value)


def test_facts_of_records_and_statements_are_plain_data(capsys: Output) -> None:
    finding = Finding("giannou2023:thm-1", registry.Verdict.CORRECTED, "seen", {"gap": NAN}, 0.5)
    statement = registry.statement("giannou2023:thm-1")
    print_json(
        [record_facts(record()), statement_facts(statement, "a:1", finding), statement_facts(statement, "", None)]
    )
    kept, checked, listed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert kept["artifact"] == "toy:fig-1"
    assert kept["verdict"] == RecordVerdict.CAVEAT.value
    assert kept["values"] == {"a": None}
    assert checked["verdict"] == "holds with a corrected constant"
    assert checked["measured"] == {"gap": None}
    assert "verdict" not in listed
    assert listed["says"] == statement.says


# ---------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.5, "0.5"),
        (1.23456e-11, "1.235e-11"),
        (["a", "b"], "a b"),
        ({"gap": 0.25, "n": 1000}, "gap: 0.25 n: 1,000"),
        (HOSTILE, HOSTILE),
        ([HOSTILE], HOSTILE),
        ({HOSTILE: HOSTILE}, f"{HOSTILE}: {HOSTILE}"),
    ],
)
def test_a_fact_is_shown_as_people_read_it(capsys: Output, value: object, shown: str) -> None:
    print_facts("title", {"": value})
    assert flat(capsys.readouterr().out) == f"title {shown}"


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (0.914, "91.4 %"), (1.0, "100 %"), (0.0, "0 %"), (0.5, "50.0 %"), (0.99996, "99.996 %"), (2e-4, "0.02 %"),
        (1e-12, "0 %"),
    ],
)  # fmt: skip
def test_a_fraction_is_shown_in_percent_and_rounded_to_0_or_100_only_where_it_is(fraction: float, shown: str) -> None:
    assert percent(fraction) == shown


def test_accuracies_are_shown_in_percent_and_stay_fractions_in_json(capsys: Output) -> None:
    facts = {"target_accuracy": 0.914, "agreement": 1, "tolerance": 0.01, "outside": math.nan}
    print_facts("title", facts)
    assert flat(capsys.readouterr().out) == (
        "title target accuracy 91.4 % same prediction 100 % tolerance 0.01 outside the calibrated range nan"
    )
    print_json(facts)
    assert json.loads(capsys.readouterr().out)["target_accuracy"] == 0.914


def test_findings_are_readable_on_80_columns(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "width", 80)
    chosen = list(registry.statements("daneshmand2020"))
    evidence = "the ratio is 1.000 for 40 matrices " * 9
    found = {s.key: Finding(s.key, registry.Verdict.CORRECTED, evidence, {}, 0.0) for s in chosen}
    print_statements([(s, "") for s in chosen], found)
    lines = capsys.readouterr().out.splitlines()
    assert f"{chosen[0].key}: holds with a corrected constant" in lines
    assert len(lines) <= 9 * len(chosen)
    assert max(map(len, lines)) <= 80


def test_empty_facts_are_left_out_and_zeros_are_not(capsys: Output) -> None:
    print_facts("title", {"none": "", "nothing": [], "no": {}, "zero": 0, "false": False, "small": 0.0})
    assert flat(capsys.readouterr().out) == "title zero 0 false no small 0"


def test_a_title_is_text_not_markup(capsys: Output) -> None:
    print_facts(HOSTILE, {"a fact": "as wide as its title at the least"})
    assert flat(capsys.readouterr().out).startswith(HOSTILE)


def test_a_record_is_shown_with_its_verdict_and_reasons(capsys: Output) -> None:
    print_record(record())
    assert flat(capsys.readouterr().out) == f"toy:fig-1 {HOSTILE}: {RecordVerdict.CAVEAT.value} {HOSTILE}"


def test_statements_without_checks_show_where_theirs_stand(capsys: Output) -> None:
    chosen = list(registry.statements("hardt_ma2017"))
    print_statements([(s, registry.where(s.key)) for s in chosen], {})
    words = flat(capsys.readouterr().out)
    assert all(s.key in words for s in chosen)
    assert words.startswith("key title ")
    assert words.endswith(f"{len(chosen)} statements; `onlynorm theorems KEY` shows one")


def test_statements_with_findings_show_verdicts_and_a_count_of_each(capsys: Output) -> None:
    chosen = list(registry.statements("hardt_ma2017"))[: len(registry.Verdict)]
    found = {
        s.key: Finding(s.key, verdict, f"{HOSTILE} of {verdict.name}", {}, 0.0)
        for s, verdict in zip(chosen, registry.Verdict, strict=True)
    }
    print_statements([(s, "") for s in chosen], found)
    words = flat(capsys.readouterr().out)
    assert "4 statements: 1 holds, 1 holds with a corrected constant, 1 fails, 1 not yet checked" in words
    assert "of FAILS" in words
    assert "of UNCHECKED" not in words


@pytest.mark.usefixtures("wide")
def bench_markdown(result: Any) -> str:
    return "\n\n".join(table.markdown() for table in (*result.tables(), goal_table(result)))


def test_the_bench_table_shows_every_cell_and_dashes_for_what_was_not_run(capsys: Output) -> None:
    print_bench([*BENCH.tables(), goal_table(BENCH)])
    words = flat(capsys.readouterr().out)
    assert "nan" not in words
    rows, _, goals = words.partition(" goal measured met ")
    family, _, left_out = rows.partition(" system excess omitted")
    assert family == f"{' '.join(BENCH_COLUMNS)} linear 4x4 1.25 {HOSTILE} 500 ms 3e-12 none - - - 2 kB"
    assert left_out.endswith(" linear 4x4 1.25 QR (90 s)")
    assert goals == f"{HOSTILE} N^2.00 yes aim {HOSTILE} no"


def test_the_bench_markdown_has_as_many_cells_in_every_row_as_in_its_head() -> None:
    rows, left_out, goals = (part.splitlines() for part in bench_markdown(BENCH).split("\n\n"))
    assert rows[0] == "| " + " | ".join(BENCH_COLUMNS) + " |"
    assert {line.count("|") for line in rows} == {len(BENCH_COLUMNS) + 1}
    assert {line.count("|") for line in goals} == {4}
    assert rows[2] == f"| linear 4x4 | 1.25 | {HOSTILE} | 500 ms | 3e-12 | none | - | - | - | 2 kB |"
    assert left_out[2] == "| linear 4x4 | 1.25 | QR (90 s) |"
    assert [line.rsplit("| ", 1)[1] for line in goals[2:]] == ["yes |", "no |"]


@pytest.mark.parametrize("width", [80, 300])
def test_the_showcase_is_a_row_per_kind_of_features_whatever_the_terminal(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(screen, "width", width)
    print_bench([*REBUILT.tables(), goal_table(REBUILT)])
    words = flat(capsys.readouterr().out)
    cells = "id_cond 1.25 2.0e-16 3.0e-12 1.50 100.00 99.80 91.73 91.80 34 MB 100"
    assert words.startswith(f"{' '.join(REBUILT_COLUMNS)} {cells} a [b]bold")
    assert " float64 error " in words
    assert "extra memory" in words or width == 80


def test_the_showcase_markdown_has_three_tables() -> None:
    rebuilt, papers, goals = (part.splitlines() for part in bench_markdown(REBUILT).split("\n\n"))
    assert {line.count("|") for line in rebuilt} == {len(REBUILT_COLUMNS) + 1}
    assert {line.count("|") for line in papers} == {len(PAPERS_COLUMNS) + 1}
    assert goals[2].endswith("| error 3.0e-12, 100.00 %, 99.80 %, 1 s | yes |")


# ---------------------------------------------------------------------------------------------- networks


ODD = "[b]odd[/]"


def network() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    layers.add_module(ODD, nn.Linear(3, 2))
    return layers.double()


TOKENS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("width", [WIDE - 1, WIDE])
def test_a_plan_shows_as_much_as_the_terminal_has_room_for(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(screen, "width", width)
    planned = plan(network(), TOKENS, Wide(excess=0.5))
    print_plan(HOSTILE, planned)
    words = flat(capsys.readouterr().out)
    assert f"Plan for {HOSTILE}" in words
    assert ("operations" in words) == (width == WIDE)
    assert f"{ODD} 6 3 " in words
    assert " total 18 9 " in words
    assert f"{ODD}: 3 features too few: least squares" in words
    assert words.endswith("left as it is: 0 (Embedding): neither linear nor convolutional")


@pytest.mark.usefixtures("wide")
def test_rebuilt_layers_are_shown_with_their_evidence(capsys: Output) -> None:
    made = reconstruct(network(), TOKENS, Wide(excess=0.5))
    print_layers(made)
    words = flat(capsys.readouterr().out)
    first, second = made.layers
    for layer in (first, second):
        assert f"{layer.name} {layer.n_features} {layer.method} {layer.residual:.1e} " in words
        assert flat(layer.shortfall) in words


# ---------------------------------------------------------------------------------------------- progress


def show_stages(show: Callable[[PieceProgress], None]) -> None:
    show(PieceProgress("toy:fig-1", "k=1", "started", 0, None))
    show(PieceProgress("toy:fig-1", "k=1", "computed", 1, 2))
    show(PieceProgress("toy:fig-2", "k=1", "reloaded", 1, 1))
    show(PieceProgress("toy:fig-1", "", "finished", 1, 2))


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda hidden: spinner("work", hidden=hidden), lambda say: say("first step")),
        (lambda hidden: bar("work", 2, hidden=hidden), lambda say: say("first step")),
        (lambda hidden: counter("work", hidden=hidden), lambda tell: tell(3, 7, "first step")),
        (lambda hidden: layer_bars([HOSTILE], hidden=hidden), lambda step: step(HOSTILE, 5, 1e-3)),
        (lambda hidden: stages(hidden=hidden), show_stages),
    ],
    ids=["spinner", "bar", "counter", "layers", "stages"],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_progress_never_reaches_standard_output(
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[bool], AbstractContextManager[Callable[[Any], None]]],
    use: Callable[[Callable[[Any], None]], None],
    hidden: bool,
) -> None:
    monkeypatch.setattr(errors, "_force_terminal", True)
    with make(hidden) as show:
        use(show)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert bool(seen.err) != hidden


@pytest.mark.parametrize("make", [spinner, counter])
def test_a_file_that_collects_messages_has_no_lines_of_progress(capsys: Output, make: Any) -> None:
    with make("work", hidden=False):
        pass
    assert capsys.readouterr().err == ""


def test_stages_keep_a_line_per_artifact_with_its_count(capsys: Output) -> None:
    with stages(hidden=False) as show:
        show_stages(show)
    words = flat(capsys.readouterr().err)
    assert words.count("toy:fig-1") == words.count("toy:fig-2") == 1
    assert words.count("1/1") == 2


def test_layer_bars_follow_the_residual_from_layer_to_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Progress] = []

    class Kept(Progress):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("onlynorm.cli.terminal.Progress", Kept)
    with layer_bars(["a", "b", "c"], hidden=True) as step:
        layers, present = made[0].tasks
        step("a", 10, 1e-5)
        assert (layers.completed, present.description) == (0, "a")
        assert present.completed == pytest.approx(0.5)
        assert present.fields["note"] == "residual 1.0e-05 after 10 iterations"
        step("c", 0, 1.0)
        assert (layers.completed, layers.fields["note"], present.description) == (2, "2/3", "c")
        assert present.completed == 0.0
        for residual in (0.0, 1e-300, 1e-12):
            step("c", 1, residual)
            assert present.completed == 1.0
        step("c", 1, math.inf)
        assert present.completed == 0.0
    assert layers.completed == 3


# ------------------------------------------------------------------------------- characters that command a terminal


COMMANDS = "\x1b[2J\x1b]0;title\x07\r\x9b31m\x08\u202eabc\u2028\udc80"


def test_characters_that_command_a_terminal_are_written_out() -> None:
    assert visible(COMMANDS) == r"\x1b[2J\x1b]0;title\x07\r\x9b31m\x08\u202eabc\u2028\udc80"
    assert visible("plain text,\ttabs\nand é, ≤ 5 %") == "plain text,\ttabs\nand é, ≤ 5 %"


@given(st.text())
def test_what_is_visible_has_no_control_characters(text: str) -> None:
    shown = visible(text)
    assert not any(c < " " and c not in "\t\n" for c in shown)
    assert not any("\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in shown)
    assert visible(shown) == shown


def test_names_from_files_reach_no_terminal_as_commands(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_force_terminal", True)
    screen.print(escape(COMMANDS), highlight=False)
    print_facts(COMMANDS, {COMMANDS: COMMANDS, "list": [COMMANDS], "table": {COMMANDS: 1.5}})
    print(bench_markdown(bench(Row(COMMANDS, 16, 1.25, "onlynorm", 0.5, 1.0, 2_000, 3e-12, 7, COMMANDS))))
    print_json({COMMANDS: COMMANDS})
    with spinner("x", hidden=False) as say, bar("y", 1, hidden=False) as advance:
        say(COMMANDS + HOSTILE)
        advance(COMMANDS + HOSTILE)
    seen = capsys.readouterr()
    for text in (seen.out, seen.err):
        assert "\x1b[2J" not in text
        assert "\x1b]0;" not in text
        assert not any(c in text for c in "\x07\x08\x9b\u202e\u2028\udc80")
    assert r"\x1b[2J" in seen.out


def test_the_name_of_a_file_or_tensor_in_an_error_is_written_out(run: RunCli, tmp_path: Path) -> None:
    name = "a\x1b[2J.safetensors"
    torch_save({"weight\x1b[31m": torch.ones(2, 2), "b\x1b[32m": torch.ones(2, 2)}, tmp_path / name)
    for words in (("factorize", name), ("factorize", "none\x1b[2J.npy"), ("verify", name, "--model", "mlp")):
        ran = run(*words)
        assert ran.code == 2
        assert "\x1b[" not in ran.stderr + ran.stdout
        assert "\\x1b[" in ran.stderr
