"""`simulate`: long runs of chains with checkpoints, and averages with standard errors.

An interrupted run resumes from the last saved state with bit-identical results: weights depend on the step only, and
sums are computed in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onlynorm.display import Curve, Figure, Panel, ShownResult, Table, View
from onlynorm.errors import ConversionError, FormatError, ValueRangeError
from onlynorm.progress import with_progress
from onlynorm.rank.chains.averages import ROOM, BatchMeans, Estimate
from onlynorm.rank.chains.chain import MAX_STEPS, Chain, steps
from onlynorm.rank.chains.quantities import ROWWISE, USUAL, check_quantities, observe
from onlynorm.storage import changed_settings, claiming, digest, make_checked, read_tensors, write_tensors
from onlynorm.validate import Progress, need_choice, need_instance, need_integer, need_path, need_progress

KIND, FORMAT = "chain state", 1
SAVE_SECONDS = 30.0
_PAUSE = 1024  # steps between two checks of the time
_AT_ONCE, _MOST_SLOTS = 2**17, 256  # entries of H, and layers of all chains, that are observed together


@dataclass(frozen=True, repr=False)
class ChainAverages(ShownResult):
    """Averages along the chains by quantity, with the regularity constant `alpha` if squares and cube are observed.

    `per_chain` has the mean of each chain. `n_dead` is the number of chains that became zero: all their units are dead.
    """

    chain: Chain
    n_steps: int
    n_observed: int
    estimates: Mapping[str, Estimate]
    per_chain: Mapping[str, tuple[float, ...]]
    n_dead: int
    seconds: float

    def __getitem__(self, name: str) -> Estimate:
        """The estimate of one quantity."""
        return self.estimates[need_choice("quantity", name, self.estimates)]

    def plot(self) -> Figure:
        """The mean of every chain, and their average, for each quantity."""
        curves, panels = [], []
        for name, estimate in self.estimates.items():
            panels.append(Panel(name, name, "chain", "mean over depth"))
            found = [(place, y) for place, y in enumerate(self.per_chain.get(name, ()), 1) if math.isfinite(y)]
            if found:
                xs, ys = zip(*found, strict=True)
                curves.append(Curve("mean of a chain", xs, ys, "points", name))
                if math.isfinite(estimate.value):
                    ends = (0.5, self.chain.chains + 0.5)
                    curves.append(Curve("average", ends, (estimate.value,) * 2, panel=name, style="law"))
        return Figure(curves, panels)

    def view(self) -> View:
        """The chain and a table of the averages."""
        rows = [
            (name, *(f"{value:.5g}" for value in (one.value, one.error, one.deviation)))
            for name, one in self.estimates.items()
        ]
        heads = ("quantity", "average", "standard error", "deviation of one observation")
        return View(
            "Averages along random chains", lines=[f"{self.chain}."],
            facts={
                "steps": self.n_steps, "observations of every chain": self.n_observed, "chains": self.chain.chains,
                "chains that became zero": self.n_dead, "seconds": self.seconds,
            },
            tables={"Averages": Table(heads, rows)},
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [str(self.chain), f"{self.n_steps:,} steps, {self.n_observed:,} observations per chain"]
        lines += [f"  {name:14s} {estimate}" for name, estimate in self.estimates.items()]
        if self.n_dead:
            lines.append(f"  {self.n_dead} of {self.chain.chains} chains became zero")
        return "\n".join(lines)


class ChainState:
    """The state of a run: H, the step, and sums of observations at every `every`-th step after `burn_in`."""

    def __init__(
        self, chain: Chain, *, inputs: Tensor | None, quantities: Sequence[str], every: int, burn_in: int
    ) -> None:
        every = need_integer("every", every, low=1, cure="Pass every=16 to observe every 16th layer.")
        burn_in = need_integer("burn_in", burn_in, low=0, cure="Pass the number of layers to skip, such as 100.")
        self.chain, self.every, self.burn_in = chain, every, burn_in
        self.quantities = check_quantities(quantities)
        is_rowwise = chain.norm == "none" and ROWWISE.keys() <= set(self.quantities)
        self.observed = (*self.quantities, *(ROWWISE.values() if is_rowwise else ()))
        self.H = chain.ready_inputs(inputs)
        self.step = 0
        self.averages = BatchMeans(chain.chains, len(self.observed))
        self.weights = chain.draw_weights()
        self._n_slots, self._n_waiting = max(1, min(_AT_ONCE // (self.H.numel() * every), _MOST_SLOTS)), 0
        self._waiting = self.H.new_zeros(self._n_slots, *chain.shape)
        self._slots = self._waiting.unbind()
        self._settings = {
            **chain.settings(),
            "quantities": list(self.observed),
            "every": every,
            "burn_in": burn_in,
            "inputs": "drawn" if inputs is None else digest(self.H),
        }

    def __repr__(self) -> str:
        observed = ", ".join(self.quantities)
        return (
            f"ChainState of {self.chain}: step {self.step:,}, {self.averages.n_observed:,} observations of {observed}"
        )

    def advance(self, n_steps: int) -> None:
        """Runs `n_steps` more steps."""
        stop = self.step + n_steps
        for depth, reached in steps(self.chain, self.H, weights=self.weights, start=self.step, stop=stop):
            self.step, self.H = depth, reached
            if depth % self.every == 0 and depth > self.burn_in:
                self._store(reached)
        self._observe()

    def _store(self, H: Tensor) -> None:
        """Stores H in its slot; observes all slots together when the last one is filled."""
        slot = (self.averages.n_observed + self._n_waiting) % self._n_slots
        self._slots[slot].copy_(H)
        self._n_waiting += 1
        if slot == self._n_slots - 1:
            self._observe()

    def _observe(self) -> None:
        """Observes stored slots. All slots are computed, so that rounding is the same in an interrupted run."""
        if not self._n_waiting:
            return
        first = self.averages.n_observed % self._n_slots
        found = observe(self._waiting.flatten(0, 1), self.observed).unflatten(0, (self._n_slots, -1))
        self.averages.add(found[first : first + self._n_waiting])
        self._n_waiting = 0

    def result(self, *, seconds: float) -> ChainAverages:
        """The averages so far."""
        if not self.averages.n_observed:
            raise ValueRangeError(
                f"averages need an observation; got none in {self.step} steps with every={self.every} and "
                f"burn_in={self.burn_in}. Run more steps, or lower one of them."
            )
        names = self.quantities
        estimates = {name: self.averages.estimate(place) for place, name in enumerate(names)}
        if ROWWISE.keys() <= set(names):
            parts = (ROWWISE[name] if ROWWISE[name] in self.observed else name for name in ("squares", "cube"))
            estimates["alpha"] = self.averages.estimate_quotient(*map(self.observed.index, parts))
        means = self.averages.means()
        return ChainAverages(
            chain=self.chain,
            n_steps=self.step,
            n_observed=self.averages.n_observed,
            estimates=estimates,
            per_chain={name: tuple(means[:, place].tolist()) for place, name in enumerate(names)},
            n_dead=int((self.H.abs().amax((1, 2)) == 0).sum()),
            seconds=seconds,
        )

    def save(self, path: Path) -> None:
        """Saves the state to a file atomically."""
        tensors = {"H": self.H.cpu(), "sums": self.averages.sums, "squares": self.averages.squares}
        counts = {"step": self.step, "length": self.averages.length, "n_observed": self.averages.n_observed}
        document: dict[str, Any] = {"settings": self._settings, "counts": counts}
        write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)

    def load(self, path: Path) -> None:
        """Loads the state from a file; raises if it is of another chain."""
        cure = "Delete it to start again."
        document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=cure)
        saved = document.get("settings")
        if not isinstance(saved, dict):
            raise FormatError(f"a {KIND} needs its settings; {path.name} has none. {cure}")
        if changed := changed_settings(saved, self._settings):
            text = ", ".join(list(changed.values())[:4])
            raise ConversionError(f"resuming needs the chain of {path.name}; got another ({text}). {cure}")
        means = self.averages
        try:
            counts = make_checked(_Counts, document.get("counts"))
            self._need_counts(counts)
            for name, own in (("H", self.H), ("sums", means.sums), ("squares", means.squares)):
                if (tensors[name].shape, tensors[name].dtype) != (own.shape, own.dtype):
                    raise ValueError(f"{name} of {tensors[name].dtype} and shape {tuple(tensors[name].shape)}")
        except (KeyError, ValueError) as error:
            raise FormatError(f"a {KIND} needs counts and sums of this chain; {path.name}: {error}. {cure}") from error
        self.H, self.step = tensors["H"].to(self.chain.device), counts.step
        means.sums, means.squares = tensors["sums"], tensors["squares"]
        means.length, means.n_observed = counts.length, counts.n_observed

    def _need_counts(self, counts: _Counts) -> None:
        """Raises ValueError unless steps, observations and batch length are consistent."""
        n_observed = counts.step // self.every - min(counts.step, self.burn_in) // self.every
        length = 1
        while ROOM * length < n_observed:
            length *= 2
        if counts.step < 0 or counts.step >= 2**63 or (counts.n_observed, counts.length) != (n_observed, length):
            raise ValueError(f"{counts.n_observed} observations in {counts.step} steps")


@dataclass(frozen=True)
class _Counts:
    """The counters in a saved state."""

    step: int
    length: int
    n_observed: int


@claiming("checkpoint")
@with_progress
def simulate(
    chain: Chain,
    n_steps: int,
    *,
    inputs: Tensor | None = None,
    quantities: Sequence[str] = USUAL,
    every: int = 1,
    burn_in: int = 0,
    checkpoint: Path | str | None = None,
    progress: Progress | bool | None = None,
) -> ChainAverages:
    """Averages of the quantities over `n_steps` layers of all chains, every `every`-th layer after `burn_in`.

    Consecutive layers are correlated, so observing all of them is expensive and adds little information, depending on
    gamma. At width 32, `every` = 16 has 1.2 (gamma 0.1) to 1.7 (gamma 0.5) times the error of every layer, 64 has 2.3
    to 3. The state is saved to the file `checkpoint` every 30 seconds and at the end; a run resumes from an existing
    file, and may have more steps than before. `progress=True` shows a bar; a function is called with (steps done, total
    steps, message).
    Theory: daneshmand2020:thm-3

    Examples:
        >>> import onlynorm as on
        >>> averages = on.simulate(on.Chain(width=8, n_samples=8, n_chains=4), 50, burn_in=10)
        >>> averages.n_observed
        40
        >>> 1.0 < averages["r"].value < 8.0  # the rank ratio
        True
    """
    need_instance("simulate", chain, Chain, cure="Pass Chain(width=32).")
    n_steps = need_integer("n_steps", n_steps, low=1, high=MAX_STEPS, cure="Pass the number of layers, such as 1000.")
    progress = need_progress(progress)
    state = ChainState(chain, inputs=inputs, quantities=quantities, every=every, burn_in=burn_in)
    path = None if checkpoint is None else need_path("checkpoint", checkpoint)
    if path is not None and path.exists():
        state.load(path)
        if state.step > n_steps:
            raise ValueRangeError(
                f"simulate needs n_steps >= {state.step}, the step of {path.name}; got {n_steps}. Delete the file."
            )
    start = saved = time.perf_counter()
    while state.step < n_steps:
        state.advance(min(n_steps - state.step, _PAUSE))
        if path is not None and time.perf_counter() - saved > SAVE_SECONDS:
            state.save(path)
            saved = time.perf_counter()
        if progress is not None:
            progress(state.step, n_steps, f"{state.step} of {n_steps} layers")
    if path is not None:
        state.save(path)
    return state.result(seconds=time.perf_counter() - start)
