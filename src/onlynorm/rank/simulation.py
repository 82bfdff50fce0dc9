"""Long runs of chains: a state that can be kept in a file, and averages with error bars at the end.

A killed run goes on where its last state was written, with the same numbers as if it had never stopped: weights
depend on the step alone, and sums are taken in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onlynorm.errors import ConversionError, FormatError, ValueRangeError
from onlynorm.rank.chain import Chain, steps
from onlynorm.rank.chain_averages import BatchMeans, Estimate
from onlynorm.rank.chain_quantities import USUAL, check_quantities, observe
from onlynorm.storage import digest, read_tensors, write_tensors

KIND, FORMAT = "chain state", 1
SAVE_SECONDS = 30.0
_PAUSE = 1024  # steps between two looks at the clock
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ChainAverages:
    """Averages along the chains, by quantity, and the regularity constant `alpha` where its two parts were observed.

    `per_chain` holds the mean of every chain. `n_dead` chains have become zero: every unit of theirs is dead.
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
        return self.estimates[name]

    def __str__(self) -> str:
        lines = [str(self.chain), f"{self.n_steps:,} steps, {self.n_observed:,} observations of every chain"]
        lines += [f"  {name:14s} {estimate}" for name, estimate in self.estimates.items()]
        if self.n_dead:
            lines.append(f"  {self.n_dead} of {self.chain.n_chains} chains have become zero")
        return "\n".join(lines)


class ChainState:
    """Where chains stand: their H, the step, and the sums of what was observed every `every` steps after `burn_in`."""

    def __init__(
        self, chain: Chain, *, inputs: Tensor | None, quantities: Sequence[str], every: int, burn_in: int
    ) -> None:
        if every < 1 or burn_in < 0:
            raise ValueRangeError(
                f"a chain needs every >= 1 and burn_in >= 0, in steps; got {every!r} and {burn_in!r}. Try every=16."
            )
        self.chain, self.every, self.burn_in = chain, every, burn_in
        self.quantities = check_quantities(quantities)
        self.H = chain.ready_inputs(inputs)
        self.step = 0
        self.averages = BatchMeans(chain.n_chains, len(self.quantities))
        self.weights = chain.draw_weights()
        self._settings = {
            **chain.settings(),
            "quantities": list(self.quantities),
            "every": every,
            "burn_in": burn_in,
            "inputs": "drawn" if inputs is None else digest(self.H),
        }

    def advance(self, n_steps: int) -> None:
        """Take so many steps further."""
        stop = self.step + n_steps
        for depth, reached in steps(self.chain, self.H, weights=self.weights, start=self.step, stop=stop):
            self.step, self.H = depth, reached
            if depth % self.every == 0 and depth > self.burn_in:
                self.averages.add(observe(reached, self.quantities))

    def result(self, *, seconds: float) -> ChainAverages:
        """The averages so far."""
        if not self.averages.n_observed:
            raise ValueRangeError(
                f"averages need an observation; got none in {self.step} steps with every={self.every} and "
                f"burn_in={self.burn_in}. Take more steps, or lower one of them."
            )
        names = self.quantities
        estimates = {name: self.averages.estimate(place) for place, name in enumerate(names)}
        if "squares" in names and "cube" in names:
            estimates["alpha"] = self.averages.estimate_quotient(names.index("squares"), names.index("cube"))
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
        """Write the state as one sealed file, whole or not at all."""
        tensors = {"H": self.H.cpu(), "sums": self.averages.sums, "squares": self.averages.squares}
        counts = {"step": self.step, "length": self.averages.length, "n_observed": self.averages.n_observed}
        document: dict[str, Any] = {"settings": self._settings, "counts": counts}
        write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)

    def load(self, path: Path) -> None:
        """Go on from a file; one of another chain is refused."""
        cure = "Delete it to begin anew."
        document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=cure)
        kept = document.get("settings")
        if not isinstance(kept, dict):
            raise FormatError(f"a {KIND} needs its settings; {path.name} has none. {cure}")
        changed = [name for name, value in self._settings.items() if kept.get(name) != value]
        if changed:
            told = ", ".join(f"{name}: {kept.get(name)!r} there, {self._settings[name]!r} now" for name in changed[:4])
            raise ConversionError(f"resuming needs the chain of {path.name}; got another ({told}). {cure}")
        counts = document["counts"]
        self.H = tensors["H"].to(self.chain.device)
        self.step, means = counts["step"], self.averages
        means.sums, means.squares = tensors["sums"], tensors["squares"]
        means.length, means.n_observed = counts["length"], counts["n_observed"]


def simulate(
    chain: Chain,
    n_steps: int,
    *,
    inputs: Tensor | None = None,
    quantities: Sequence[str] = USUAL,
    every: int = 1,
    burn_in: int = 0,
    keep: Path | str | None = None,
    progress: Progress | None = None,
) -> ChainAverages:
    """Averages of the quantities over `n_steps` layers of all chains, every `every`-th layer after `burn_in`.

    Layers that follow each other are alike, so observing each of them costs much; how little it tells depends on gamma.
    At width 32, `every` = 16 has 1.2 (gamma 0.1) to 1.7 (gamma 0.5) times the error of every layer, 64 has 2.3 to 3.
    With `keep`, a file, the state is written there every half minute and at the end; a run that
    finds it goes on from it, also to more steps than were asked for before. `progress` hears (steps done, steps in
    all). Theory: daneshmand2020:thm-3
    """
    state = ChainState(chain, inputs=inputs, quantities=quantities, every=every, burn_in=burn_in)
    path = None if keep is None else Path(keep)
    if path is not None and path.exists():
        state.load(path)
        if state.step > n_steps:
            raise ValueRangeError(
                f"simulate needs n_steps >= {state.step}, where {path.name} stands; got {n_steps}. Delete the file."
            )
    start = saved = time.perf_counter()
    while state.step < n_steps:
        state.advance(min(n_steps - state.step, _PAUSE))
        if path is not None and time.perf_counter() - saved > SAVE_SECONDS:
            state.save(path)
            saved = time.perf_counter()
        if progress is not None:
            progress(state.step, n_steps)
    if path is not None:
        state.save(path)
    return state.result(seconds=time.perf_counter() - start)
