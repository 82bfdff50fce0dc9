"""The registry of all numbered statements of the five papers and of their checks.

A statement is an entry of `papers/<paper>/statements.toml`: our wording, its assumptions, and errors in the printed
text. Its check is a function in the same folder, listed in `CHECKS` of the paper:

    def random_products_are_invertible(seed: int) -> Evidence: ...

    CHECKS = {"giannou2023:lemma-2": products.random_products_are_invertible, ...}

`run_check` runs it and returns a `Finding`. Keys have the form paper:kind-number, as in `hardt_ma2017:lemma-B.1`.
Docstrings cite them after the word Theory; a test checks that cited keys exist.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from onlynorm.cluster import Task, TaskOutcome, need_results, open_engine, run_tasks
from onlynorm.errors import AccuracyWarning, FormatError
from onlynorm.evidence.records import STRICT, Filled, parse
from onlynorm.features import draw
from onlynorm.validate import need_callable, need_choice, need_items, need_seed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPERS = ("giannou2023", "burkholz2024", "random_features", "hardt_ma2017", "daneshmand2020")
_PLAIN = ("lemma", "claim", "remark", "example", "fact")
KINDS = {
    "theorem": "thm-",
    "proposition": "prop-",
    "corollary": "cor-",
    "conjecture": "conj-",
    "inequality": "ineq-",
    "equation": "eq-",
    "named": "",  # not numbered in its paper; a name replaces the number
    **{kind: f"{kind}-" for kind in _PLAIN},
}


class Verdict(str, Enum):
    """The verdict of a check on its statement."""

    HOLDS = "holds"
    CORRECTED = "holds with a corrected constant"
    FAILS = "fails"
    UNCHECKED = "not yet checked"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Paper:
    """One of the five papers; `short` is its main result for this library."""

    key: Filled
    title: Filled
    authors: Filled
    year: int
    short: Filled

    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        return f"{self.key}: {self.title} ({self.authors}, {self.year})"


@dataclass(frozen=True)
class Statement:
    """A statement of a paper in our words; `slips` lists errors in the printed text and their corrections."""

    key: Filled
    kind: Filled
    number: Filled
    title: Filled
    says: Filled
    assumes: tuple[Filled, ...]
    slips: str = ""
    restates: str = ""
    from_elsewhere: bool = False

    __pydantic_config__ = STRICT

    @property
    def paper(self) -> str:
        return self.key.partition(":")[0]

    def __str__(self) -> str:
        origin = ", quoted by the paper from another work" if self.from_elsewhere else ""
        parts = [self.says]
        if self.restates:
            parts.append(f"Restates {self.restates}.")
        if self.assumes:
            parts.append("Assumes: " + "; ".join(self.assumes) + ".")
        if self.slips:
            parts.append("Corrections: " + self.slips)
        body = "\n".join(_indented(part) for part in parts)
        return f"{self.key} ({self.kind}{origin}): {self.title}\n{body}"


@dataclass(frozen=True)
class Evidence:
    """The result of a check: its verdict, a description of the measurements, and the measured values by name."""

    verdict: Verdict
    text: str
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The outcome of running the check of one statement."""

    key: str
    verdict: Verdict
    evidence: str
    measured: dict[str, float]
    seconds: float

    def __str__(self) -> str:
        return f"{self.key} {self.verdict} ({self.seconds:.2f} s)\n{_indented(self.evidence)}"


Check = Callable[[int], Evidence]
_CURE = "Correct the field in that file."


def papers() -> tuple[Paper, ...]:
    """Returns the five papers, in the order of the table in the documentation."""
    return tuple(_read(key)[0] for key in PAPERS)


def statements(paper: str | None = None) -> tuple[Statement, ...]:
    """Returns all statements, or those of one paper, in the order of the paper."""
    if paper is None:
        return tuple(_registry().values())
    need_choice("paper", paper, PAPERS)
    return tuple(s for s in _registry().values() if s.paper == paper)


def statement(key: str) -> Statement:
    """Returns the statement with this key."""
    return _registry()[need_choice("statement", key, _registry())]


def has_check(key: str) -> bool:
    """Whether the statement, or the one it restates, has a check."""
    return _check_of(key) is not None


def where(key: str) -> str:
    """Returns "module:line" of the check of a statement, or an empty string if it has none."""
    function = _check_of(key)
    if function is None:
        return ""
    function = inspect.unwrap(function)
    return f"{function.__module__}:{inspect.getsourcelines(function)[1]}"


def run_check(key: str, *, seed: int = 0) -> Finding:
    """Runs the check of one statement and returns the finding; a check that raises an error fails."""
    return run_checks([key], seed=seed)[0]


def run_checks(
    keys: Iterable[str] | None = None,
    *,
    seed: int = 0,
    workers: int | None = None,
    cluster: str | None = None,
    threads: int = 1,
    progress: Callable[[Finding], None] | None = None,
) -> tuple[Finding, ...]:
    """Runs the checks of the given statements, by default all; a check of several statements runs once.

    `workers`, `cluster` and `threads` are those of `cluster.open_engine`; findings do not depend on the number of
    workers, except their seconds. `progress` is called with each finding, in the order in which checks finish.
    """
    listed = _registry() if keys is None else need_items("run_checks", keys, cure='List keys: ["giannou2023:thm-1"].')
    chosen = [statement(key).key for key in listed]
    seed = need_seed(seed)
    if progress is not None:
        need_callable("progress", progress, cure="It is called with each finding.")
    statements_of: dict[Check, list[str]] = {}
    found: dict[str, Finding] = {}

    def finish(keys: Iterable[str], evidence: Evidence, seconds: float) -> None:
        for key in keys:
            one = Finding(key, evidence.verdict, evidence.text, dict(evidence.measured), seconds)
            found[key] = one
            if progress is not None:
                progress(one)

    for key in dict.fromkeys(chosen):
        function = _check_of(key)
        if function is None:
            finish([key], Evidence(Verdict.UNCHECKED, "this statement has no check"), 0.0)
        else:
            statements_of.setdefault(function, []).append(key)
    by_first_key = {keys[0]: keys for keys in statements_of.values()}

    def on_done(outcome: TaskOutcome) -> None:
        if outcome.error is None:
            finish(by_first_key[outcome.name], outcome.result, outcome.seconds)

    tasks = [Task(key, _find_evidence, (key, seed)) for key in by_first_key]
    with open_engine(workers=workers, cluster=cluster, threads=threads) as engine:
        need_results(run_tasks(tasks, engine, on_done=on_done))
    return tuple(found[key] for key in chosen)


def _find_evidence(key: str, seed: int) -> Evidence:
    """The result of the check of a statement that has one; an error of the check is a failure."""
    function = _check_of(key)
    assert function is not None
    return _run(function, seed)


def _run(function: Check, seed: int) -> Evidence:
    """The result of a check; an error is returned as a failure, so that further checks still run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)  # checks measure the accuracy themselves
            return function(seed)
    except Exception as error:
        return Evidence(Verdict.FAILS, f"the check raised {type(error).__name__}: {error}")


def _check_of(key: str) -> Check | None:
    from onlynorm.evidence.papers.table import CHECKS  # avoids a circular import

    one = statement(key)
    return CHECKS.get(one.key) or CHECKS.get(one.restates)


def _indented(text: str) -> str:
    return textwrap.fill(text, width=100, initial_indent="  ", subsequent_indent="  ")


@cache
def _registry() -> dict[str, Statement]:
    registry = {s.key: s for paper in PAPERS for s in _read(paper)[1]}
    for entry in registry.values():
        if entry.restates and (entry.restates not in registry or registry[entry.restates].restates):
            raise FormatError(
                f"{entry.paper}/statements.toml, {entry.key}: restates needs the key of an original statement; "
                f"got {entry.restates!r}. Use the key of the original."
            )
    return registry


@cache
def _read(paper: str) -> tuple[Paper, tuple[Statement, ...]]:
    file = resources.files("onlynorm") / "evidence" / "papers" / paper / "statements.toml"
    return _parse(file.read_text(encoding="utf-8"), name=f"{paper}/statements.toml")


def _parse(text: str, *, name: str) -> tuple[Paper, tuple[Statement, ...]]:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{name} needs valid TOML; got: {error}. Correct the file.") from error
    unknown = sorted(raw.keys() - {"paper", "statement"})
    if unknown or "paper" not in raw:
        got = f"unknown {', '.join(unknown)}" if unknown else "no [paper]"
        raise FormatError(f"{name} needs one [paper] and [[statement]] tables; got {got}. Check the spelling.")
    paper = parse(Paper, raw["paper"], what=f"{name}, [paper]:", cure=_CURE)
    if name != f"{paper.key}/statements.toml":
        raise FormatError(f"{name}, [paper]: key needs to be the name of the folder; got {paper.key!r}. Rename one.")
    entries: dict[str, Statement] = {}
    for i, table in enumerate(raw.get("statement", []), start=1):
        where = f"{name}, {table.get('key', f'statement {i}')}"
        entry = parse(Statement, table, what=f"{where}:", cure=_CURE)
        expected = f"{paper.key}:{KINDS.get(entry.kind, '?-')}{entry.number}"
        if entry.key != expected:
            raise FormatError(f"{where}: key needs to be {expected!r}; got {entry.key!r}. Correct key, kind or number.")
        if entry.key in entries:
            raise FormatError(f"{where}: key needs to be unique; got it twice. Remove or renumber one entry.")
        entries[entry.key] = entry
    return paper, tuple(entries.values())


EPS = torch.finfo(torch.float64).eps


def normal(seed: int, name: str, *shape: int) -> Tensor:
    """A matrix of standard normal entries, determined by seed, name and shape (rows, cols)."""
    rows, cols = shape
    return draw("er_normal", (rows, 1), n_features=cols, density=1.0, seed=seed, layer=name).left().contiguous()


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def verdict(holds: bool, *, as_printed: bool = True) -> Verdict:
    """HOLDS, CORRECTED if only the corrected statement holds, or FAILS."""
    if not holds:
        return Verdict.FAILS
    return Verdict.HOLDS if as_printed else Verdict.CORRECTED
