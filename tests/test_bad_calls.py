"""Bad calls of everything public: each ends in a result or in an error of onlynorm, never in a raw exception.

One argument of a small valid call is replaced in turn by each of many bad values, then two at random. What the caller's
own code raises passes through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import random
import re
import resource
import signal
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_calls
import pytest
import torch
from bad_values import ALWAYS, CALLABLE, UserError, variants
from public_calls import CALLS, Call, Fresh

from onlynorm.errors import OnlynormError, shown

ROOMS = ("display", "modules", "data", "models", "intervals", "features", "solvers", "spectrum", "alignment", "frozen",
         "optim", "reconstruction", "tuning", "rank", "identity", "files", "registry", "records", "page")  # fmt: skip
INSIDE = {"spectrum": "solvers", "registry": "evidence", "records": "evidence", "page": "evidence.report"}
CHECKED = "for the rooms below, which check what they are given"
COMMANDS = "for the command line, which checks what it is given"
UNTRIED: dict[str, str] = {
    "data.cifar100": "its data set is not shipped",
    "display.render": "for what draws pages",
    "display.seconds": "for what draws pages",
    "identity.relative_errors": COMMANDS,
    "display.Result": "a base class",
    "display.ShownResult": "a base class",
    "identity.AllConvolutional": "made by all_convolutional",
    "identity.Memorizer.enter": "a step of forward, which checks what it is given",
    "identity.Memorizer.move": "a step of forward, which checks what it is given",
    "identity.Memorizer.read": "a step of forward, which checks what it is given",
    "identity.NormMemorizer.activations": "a step of forward, which checks what it is given",
    "modules.default_loss": CHECKED,
    "modules.find_output": CHECKED,
    "modules.is_autocast": CHECKED,
    "modules.is_class_labels": CHECKED,
    "modules.need_model": CHECKED,
    "modules.tensors_in": CHECKED,
    "modules.unwrap": CHECKED,
    "modules.without_autocast": CHECKED,
    "rank.ChainState": "a step of simulate, which checks what it is given",
    "rank.ChainState.advance": "a step of simulate, which checks what it is given",
    "rank.ChainState.load": "a step of simulate, which checks what it is given",
    "rank.ChainState.save": "a step of simulate, which checks what it is given",
    "rank.ChainState.result": "a step of simulate, which checks what it is given",
    "reconstruction.compare": COMMANDS,
    "records.parse": "for what reads files, which checks what it is given",
    "records.write_record": "writes what was measured here",
    "registry.normal": "for checks",
    "registry.relative": "for checks",
    "registry.verdict": "for checks",
    "solvers.minimum_features": "takes the sizes of a checked shape",
    "solvers.solve_blocks": CHECKED,
    "tuning.make_fabric": COMMANDS,
    "tuning.NormHandle": "made by only_norms",
}
"""Public names that are not tried, and why."""

CALLBACKS = ("step", "progress", "loss", "output", "on_step", "call")
SECONDS = 5
"""Of processor time, so that a busy machine changes nothing."""
LONGEST = 900
EXTRA_MEMORY = 2 * 2**30
N_PAIRS = 2000


@dataclass(frozen=True)
class Failure:
    """A bad call that ended in something else than a result or an error of onlynorm."""

    call: str
    argument: str
    value: str
    what: str
    frame: str = ""

    def __str__(self) -> str:
        return f"{self.call}  {self.argument}={self.value}  {self.what}" + (f"  [{self.frame}]" if self.frame else "")


class Hang(BaseException):
    """A call that took too long."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limits the memory of this process, silences warnings, and puts the random state of torch back."""

    def stop(*_: Any) -> None:
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    handler = signal.signal(signal.SIGPROF, stop)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_MEMORY, before[1]))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


def parameters(call: Call, function: Callable[..., Any]) -> list[str]:
    """The names that a call can be given, by keyword."""
    hidden = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    shown = [name for name, p in inspect.signature(function).parameters.items() if p.kind not in hidden]
    return [name for name in dict.fromkeys([*call.arguments, *shown, *call.also]) if name not in call.untried]


def valid(value: Any) -> Any:
    """The valid value of an argument."""
    return value.make() if isinstance(value, Fresh) else value


def candidates(call: Call, name: str) -> Iterator[tuple[str, Any, bool]]:
    """(label, value, whether it must be accepted) for one argument of a call."""
    for label, make in ALWAYS.items():
        # A callable that does not take what a callback is given fails in the caller's own code.
        if (name, label) not in call.legal and not (name in CALLBACKS and label in CALLABLE):
            yield label, make(), False
    if name in call.arguments:
        yield from variants(valid(call.arguments[name]))


def outcome(call: Call, replaced: dict[str, Any], *, must: bool = False) -> tuple[str, str]:
    """What is wrong with how a call with these values ends, and where; empty where nothing is."""
    try:
        arguments = {name: valid(value) for name, value in call.arguments.items() if name not in replaced}
        function = call.make()
        signal.setitimer(signal.ITIMER_PROF, SECONDS if replaced else 10 * SECONDS)  # the first call also imports
        function(**arguments, **replaced)
    except UserError:
        return "", ""
    except OnlynormError as error:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return (f"refused: {error}" if must else wrong_with(str(error), replaced)), _where(error)
    except Hang as hang:
        return f"took more than {SECONDS} s", _where(hang)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        first = (str(error).splitlines() or [""])[0][:160]
        return f"{type(error).__name__}: {first}", _where(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return "", ""


def wrong_with(message: str, replaced: dict[str, Any]) -> str:
    """What is wrong with the message of an error: too long, too short, or silent about what it got."""
    if not 20 <= len(message) <= LONGEST:
        return f"message of {len(message)} characters: {message[:80]}"
    says_what_came = "got" in message or re.search(r"need.*[;:] ", message, re.DOTALL) is not None
    shows_it = any(shown(value).strip("'") in message for value in replaced.values())
    return "" if says_what_came or shows_it else f"message that does not say what came: {message[:120]}"


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/onlynorm/" in f.filename]
    return f"{frames[-1].filename.partition('/onlynorm/')[2]}:{frames[-1].lineno}" if frames else "no onlynorm frame"


def failures(name: str) -> list[Failure]:
    """Every bad call of one function that ends badly."""
    call, found = CALLS[name], []
    for argument in parameters(call, call.make()):
        for label, value, must in candidates(call, argument):
            what, frame = outcome(call, {argument: value}, must=must)
            if what:
                found.append(Failure(name, argument, label, what, frame))
    return found


def pairs(n: int, seed: int) -> Iterator[Failure]:
    """Bad calls with two bad arguments each, `n` of them drawn from the seed."""
    generator = random.Random(seed)
    names = list(CALLS)
    for _ in range(n):
        name = generator.choice(names)
        call = CALLS[name]
        known = parameters(call, call.make())
        chosen = generator.sample(known, min(2, len(known)))
        picked = {argument: generator.choice(list(candidates(call, argument))) for argument in chosen}
        what, frame = outcome(call, {argument: value for argument, (_, value, _) in picked.items()})
        if what:
            yield Failure(
                name, " and ".join(picked), " and ".join(label for label, _, _ in picked.values()), what, frame
            )


def public() -> dict[str, Any]:
    """Everything public that takes arguments: functions, classes and methods, by room.name or room.name.method.

    Records, dataclasses that check nothing, cannot fail when they are made. Forward passes are those of torch modules
    and fail as torch's own layers do.
    """
    found: dict[str, Any] = {}
    for room in ROOMS:
        module = importlib.import_module(".".join(["onlynorm", *([INSIDE[room]] if room in INSIDE else []), room]))
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            value = getattr(module, name)
            if inspect.isfunction(value) and inspect.signature(value).parameters:
                found[f"{room}.{name}"] = value
            elif inspect.isclass(value) and not issubclass(value, BaseException | enum.Enum):
                if not dataclasses.is_dataclass(value) or hasattr(value, "__post_init__"):
                    found[f"{room}.{name}"] = value
                found.update({f"{room}.{name}.{method}": one for method, one in methods(value)})
    return found


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods that a class defines and that take arguments."""
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_public = not name.startswith("_") or name == "__getitem__"
        is_tried = is_public and name != "forward" and isinstance(function, types.FunctionType)
        if is_tried and len(inspect.signature(function).parameters) > 1:
            yield name, function


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, shared: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a path that is missing for one call may be written by another
    monkeypatch.setenv("ONLYNORM_DATA", str(shared))
    monkeypatch.setattr(public_calls, "FOLDER", shared)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


def test_everything_public_is_tried() -> None:
    found = public()
    tried = {id(value) for name, value in found.items() if name in CALLS or name in UNTRIED}
    missing = sorted(name for name, value in found.items() if id(value) not in tried)
    assert not missing, f"no valid call in public_calls.py of {', '.join(missing)}"
    assert not UNTRIED.keys() - found.keys(), "names that are not public"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_end_in_a_result_or_in_an_error_of_ours(name: str) -> None:
    with bounded():
        assert outcome(CALLS[name], {}, must=True) == ("", ""), "the valid call fails"
        found = failures(name)
    assert not found, f"{len(found)} bad calls:\n" + "\n".join(map(str, found))


@pytest.mark.usefixtures("unchecked")
def test_two_bad_arguments_at_a_time_end_no_worse() -> None:
    with bounded():
        found = list(pairs(N_PAIRS, seed=0))
    assert not found, f"{len(found)} bad calls:\n" + "\n".join(map(str, found))
