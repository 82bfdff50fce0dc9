"""The registry holds every numbered statement, and everything that cites or checks one agrees with it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import onlynorm
from onlynorm.errors import FormatError, UnknownNameError
from onlynorm.evidence import registry
from onlynorm.evidence.papers import table
from onlynorm.evidence.registry import Evidence, Finding, Verdict

SOURCE = Path(onlynorm.__file__).parent

# Written from the papers, not from the registry, so that a dropped entry is noticed. Left out because they
# only comment: giannou2023 remarks 6 and 10. Named but unnumbered statements stand after the bar.
NUMBERED = {
    "giannou2023": """
        thm-1 thm-2 thm-3 thm-4 thm-5 thm-6 thm-7 thm-8 thm-9 thm-10 thm-11
        lemma-1 lemma-2 lemma-3 lemma-4 lemma-5 lemma-6 lemma-7 lemma-8 lemma-9 lemma-10
        cor-1 cor-2 prop-1 fact-1
        remark-1 remark-2 remark-3 remark-4 remark-5 remark-7 remark-8 remark-9 remark-11""",
    "burkholz2024": """
        lemma-2.1 thm-2.2 thm-2.3 thm-2.4 thm-2.5 lemma-A.1
        eq-3 | activations composition""",
    "random_features": """
        thm-2.1 thm-2.2 thm-3.1 thm-4.1 thm-4.2 thm-4.3
        eq-3 | conclusion orthogonal-weights ortho-cond""",
    "hardt_ma2017": """
        thm-2.1 thm-2.2 ineq-2.3 claim-2.3 lemma-2.4 thm-3.2 lemma-3.3
        claim-A.1 lemma-B.1 lemma-B.2 claim-C.1 claim-C.2
        | positive-definite negative-determinant""",
    "daneshmand2020": """
        lemma-1 lemma-2 thm-3 lemma-4 thm-5 lemma-6 lemma-7 prop-8 example-9 lemma-10 lemma-11 lemma-12
        prop-13 example-14 lemma-15 example-16 example-17 lemma-18 thm-19 lemma-20 lemma-21""",
}
RESTATED = {
    "giannou2023:lemma-4": "giannou2023:lemma-1",
    "giannou2023:lemma-6": "giannou2023:lemma-2",
    "giannou2023:lemma-8": "giannou2023:lemma-3",
    "giannou2023:cor-2": "giannou2023:cor-1",
    "giannou2023:thm-8": "giannou2023:thm-1",
    "giannou2023:thm-9": "giannou2023:thm-2",
    "giannou2023:thm-10": "giannou2023:thm-4",
    "giannou2023:thm-11": "giannou2023:thm-3",
    "burkholz2024:lemma-A.1": "giannou2023:lemma-5",
    "hardt_ma2017:lemma-3.3": "hardt_ma2017:lemma-B.2",
    "daneshmand2020:thm-19": "daneshmand2020:thm-3",
    "daneshmand2020:lemma-21": "daneshmand2020:lemma-7",
}
FROM_ELSEWHERE = {
    *(f"giannou2023:{name}" for name in ("thm-4", "thm-5", "thm-6", "thm-7", "thm-10", "lemma-5")),
    "burkholz2024:lemma-A.1",
    "daneshmand2020:lemma-10",
}
KEY = r"[a-z0-9_]+:[a-z]+(?:-[\w.-]*\w)?"
RECORDED = json.loads((Path(__file__).parents[2] / "docs" / "verdicts.json").read_text(encoding="utf-8"))
"""The verdicts that the documentation shows."""
MENTION = re.compile(rf"Theory:[ \t]*((?:{KEY}(?:,[\s#]*)?)*)")
# Those of the reconstruction room have a file of their own, test_checks_reconstruction.
CHECKED = [
    s.key for s in registry.statements() if registry.where(s.key) and "reconstruction" not in registry.where(s.key)
]

VALID = """
[paper]
key = "p"
title = "t"
authors = "a"
year = 2000
short = "s"

[[statement]]
key = "p:thm-1"
kind = "theorem"
number = "1"
title = "t"
says = "s"
assumes = []
"""


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty table of checks for the length of one test."""
    monkeypatch.setattr(table, "CHECKS", {})


def check(*keys: str) -> Callable[[registry.Check], registry.Check]:
    """A decorator that puts a check into the table."""

    def add(function: registry.Check) -> registry.Check:
        table.CHECKS.update(dict.fromkeys(keys, function))
        return function

    return add


@pytest.mark.parametrize("paper", registry.PAPERS)
def test_every_statement_of_the_paper_is_there_and_no_other(paper: str) -> None:
    expected = {f"{paper}:{name}" for name in NUMBERED[paper].replace("|", " ").split()}
    assert {s.key for s in registry.statements(paper)} == expected


def test_papers_come_in_order_with_their_titles() -> None:
    found = registry.papers()
    assert tuple(p.key for p in found) == registry.PAPERS
    assert all(p.title and p.authors and p.short.endswith(".") and p.year > 2000 for p in found)
    assert str(found[0]).startswith("giannou2023: The Expressive Power")


@pytest.mark.parametrize("entry", registry.statements(), ids=lambda s: s.key)
def test_entry_is_well_formed(entry: registry.Statement) -> None:
    assert entry.key == f"{entry.paper}:{registry.KINDS[entry.kind]}{entry.number}"
    assert re.fullmatch(KEY, entry.key)
    assert registry.statement(entry.key) is entry
    assert entry.says.endswith((".", ")"))
    assert not entry.title.endswith(".")
    assert not re.search(r"[\\$]", entry.says + entry.slips), "formulas are plain text"
    assert entry.title in str(entry)
    assert entry.restates == RESTATED.get(entry.key, "")
    assert entry.from_elsewhere == (entry.key in FROM_ELSEWHERE)
    for cited in re.findall(KEY, " ".join((entry.says, entry.slips, *entry.assumes))):
        if cited.partition(":")[0] in registry.PAPERS:
            registry.statement(cited)


def test_all_statements_are_the_papers_one_after_the_other() -> None:
    joined = tuple(s for paper in registry.PAPERS for s in registry.statements(paper))
    assert registry.statements() == joined


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'giannou2023:thm-1'"):
        registry.statement("gianou2023:thm-1")
    with pytest.raises(UnknownNameError, match=r"paper needs a known name.*'burkholz2024'"):
        registry.statements("burkholz2023")


def test_statements_and_findings_read_well() -> None:
    text = str(registry.statement("giannou2023:thm-10"))
    assert "quoted by the paper from another work" in text
    assert "Restates giannou2023:thm-4." in text
    finding = Finding("giannou2023:thm-1", Verdict.HOLDS, "error 1e-13", {"error": 1e-13}, 0.25)
    assert str(finding) == "giannou2023:thm-1 holds (0.25 s)\n  error 1e-13"


@pytest.mark.usefixtures("no_checks")
def test_a_check_is_found_run_and_located() -> None:
    seeds = []

    @check("giannou2023:lemma-2", "random_features:thm-2.1")
    def both(seed: int) -> Evidence:
        seeds.append(seed)
        return Evidence(Verdict.CORRECTED, "condition number 12.5", {"kappa": 12.5})

    assert registry.has_check("giannou2023:lemma-2")
    assert not registry.has_check("giannou2023:lemma-1")
    line = both.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert registry.where("random_features:thm-2.1") == f"{__name__}:{line}"
    assert registry.where("giannou2023:lemma-1") == ""
    found = registry.run_check("giannou2023:lemma-2", seed=7)
    assert seeds == [7]
    assert (found.verdict, found.measured) == (Verdict.CORRECTED, {"kappa": 12.5})
    assert found.seconds >= 0


@pytest.mark.usefixtures("no_checks")
def test_restated_statement_shares_the_check_of_the_original() -> None:
    @check("giannou2023:thm-1")
    def wide(seed: int) -> Evidence:
        return Evidence(Verdict.HOLDS, "error 0")

    assert registry.has_check("giannou2023:thm-8")
    assert registry.where("giannou2023:thm-8") == registry.where("giannou2023:thm-1")
    found = registry.run_check("giannou2023:thm-8")
    assert (found.key, found.verdict) == ("giannou2023:thm-8", Verdict.HOLDS)


@pytest.mark.usefixtures("no_checks")
def test_run_checks_reports_progress_and_runs_a_shared_check_once() -> None:
    calls = []

    @check("giannou2023:thm-1")
    def wide(seed: int) -> Evidence:
        calls.append(seed)
        return Evidence(Verdict.HOLDS, "error 0")

    seen: list[Finding] = []
    found = registry.run_checks(seed=3, progress=seen.append)
    assert len(seen) == len(found)
    assert {f.key: f for f in seen} == {f.key: f for f in found}
    assert [f.key for f in found] == [s.key for s in registry.statements()]
    assert {f.key for f in found if f.verdict is Verdict.HOLDS} == {"giannou2023:thm-1", "giannou2023:thm-8"}
    assert calls == [3]


@pytest.mark.usefixtures("no_checks")
def test_statement_without_check_is_unchecked() -> None:
    found = registry.run_check("hardt_ma2017:thm-2.1")
    assert found.verdict is Verdict.UNCHECKED
    assert found.measured == {}
    assert "not yet checked" in str(found)


@pytest.mark.usefixtures("no_checks")
def test_check_that_raises_fails_with_the_reason_and_the_others_still_run() -> None:
    @check("giannou2023:thm-1")
    def broken(seed: int) -> Evidence:
        raise ZeroDivisionError("inside the check")

    @check("hardt_ma2017:thm-2.1")
    def whole(seed: int) -> Evidence:
        return Evidence(Verdict.HOLDS, "error 0")

    first, last = registry.run_checks(["giannou2023:thm-1", "hardt_ma2017:thm-2.1"])
    assert (first.verdict, first.evidence) == (Verdict.FAILS, "the check raised ZeroDivisionError: inside the check")
    assert first.measured == {}
    assert last.verdict is Verdict.HOLDS


@pytest.mark.usefixtures("no_checks")
def test_interrupting_a_check_ends_the_run() -> None:
    @check("giannou2023:thm-1")
    def endless(seed: int) -> Evidence:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.run_check("giannou2023:thm-1")


def test_every_check_is_of_a_statement_of_its_paper_that_restates_no_other() -> None:
    for paper in table.PAPERS:
        for key in paper.CHECKS:
            assert registry.statement(key).paper == paper.__name__.rpartition(".")[2]
            assert not registry.statement(key).restates
    assert len(table.CHECKS) == sum(len(paper.CHECKS) for paper in table.PAPERS)


def test_valid_text_is_parsed() -> None:
    paper, (entry,) = registry._parse(VALID, name="p/statements.toml")
    assert paper.year == 2000
    assert entry == registry.Statement("p:thm-1", "theorem", "1", "t", "s", ())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[paper]", "[paper", r"p/statements\.toml needs valid TOML"),
        ("[paper]", "[article]", r"p/statements\.toml needs one \[paper\].*unknown article"),
        ("year = 2000", 'year = "2000"', r"p/statements\.toml, \[paper\]: .*got year: Input should be a valid integer"),
        ("year = 2000", "", r"p/statements\.toml, \[paper\]: .*got year: Field required"),
        ('key = "p"', 'key = "q"', r"p/statements\.toml, \[paper\]: key needs to be the name of the folder; got 'q'"),
        ('says = "s"', "", r"p/statements\.toml, p:thm-1: .*got says: Field required"),
        ('says = "s"', 'says = ""', r"p/statements\.toml, p:thm-1: .*got says: String should have at least 1"),
        ('says = "s"', 'says = "s"\nsaid = "s"', r"p/statements\.toml, p:thm-1: .*got said: Unexpected keyword"),
        ("assumes = []", "assumes = [1]", r"got assumes\.0: Input should be a valid string"),
        ("assumes = []", "assumes = []\nfrom_elsewhere = 1", r"got from_elsewhere: Input should be a valid boolean"),
        ('number = "1"', 'number = "2"', r"key needs to be 'p:thm-2'; got 'p:thm-1'"),
        ('kind = "theorem"', 'kind = "lemma"', r"key needs to be 'p:lemma-1'"),
        ("[[statement]]", VALID[VALID.index("[[") :] + "[[statement]]", r"p:thm-1: key needs to be unique"),
    ],
)
def test_damaged_text_names_file_and_entry(old: str, new: str, message: str) -> None:
    assert old in VALID
    with pytest.raises(FormatError, match=message):
        registry._parse(VALID.replace(old, new, 1), name="p/statements.toml")


@pytest.mark.parametrize("target", ["giannou2023:thm-99", "giannou2023:thm-8"])
def test_restating_nothing_or_a_restatement_is_an_error(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = registry._read

    def with_wrong_target(paper: str) -> tuple[registry.Paper, tuple[registry.Statement, ...]]:
        found, entries = read(paper)
        wrong = dataclasses.replace(entries[0], restates=target)
        return found, (wrong, *entries[1:])

    monkeypatch.setattr(registry, "_read", with_wrong_target)
    with pytest.raises(FormatError, match=f"restates needs .*; got '{target}'"):
        registry._registry.__wrapped__()


def test_every_theory_mention_in_the_source_is_in_the_registry() -> None:
    wrong = []
    for file in sorted(SOURCE.rglob("*.py")):
        for mention in MENTION.finditer(file.read_text(encoding="utf-8")):
            keys = re.findall(KEY, mention[1])
            known = {s.key for s in registry.statements()}
            if not keys or not known.issuperset(keys):
                wrong.append(f"{file.relative_to(SOURCE)}: {mention[0].strip()}")
    assert not wrong


def test_theory_mentions_are_recognised_in_all_their_forms() -> None:
    text = "Theory: giannou2023:thm-1,\n    # hardt_ma2017:lemma-B.1, random_features:conclusion. And prose: x"
    mention = MENTION.search(text)
    assert mention is not None
    assert re.findall(KEY, mention[1]) == [
        "giannou2023:thm-1",
        "hardt_ma2017:lemma-B.1",
        "random_features:conclusion",
    ]


@pytest.mark.parametrize("key", CHECKED)
def test_the_check_supports_its_statement(key: str) -> None:
    found = registry.run_check(key)
    assert found.verdict is not Verdict.UNCHECKED, "a check must come to a verdict"
    assert re.search(r"\d", found.evidence), "evidence contains the measured numbers"
    assert all(isinstance(value, (int, float)) for value in found.measured.values())
    assert found.verdict.value == RECORDED[key]["verdict"], f"correct docs/verdicts.json: {found.evidence}"
    if found.verdict is Verdict.FAILS:
        assert registry.statement(key).slips, f"{key} fails and no slip explains it: {found.evidence}"
