"""Searches over permutations: greedy, random, two-opt and tabu search.

`greedy` is the method of the paper's appendix: starting at the identity, outputs are visited by decreasing weight, and
each is swapped with the free row that reduces the missed energy most, if any. All partners of an output are scored at
once from the tables, in rows x directions operations. `best_of_random` is the baseline of the paper.

`Swaps` has the change of the objective for all swaps of two rows in one table, which is updated incrementally.

With the sum b of the chosen pieces, swapping the rows at outputs i and k adds

    d = pieces[i, p(k)] + pieces[k, p(i)] - pieces[i, p(i)] - pieces[k, p(k)]

to it and changes |b|^2 by 2 b.d + |d|^2. The products pieces . b are one table, which a swap updates with one matrix
product; the squares |d|^2 are another, of which a swap changes two rows and columns. The changes of all out^2 / 2 swaps
then take out^2 operations.
"""

from __future__ import annotations

import numpy as np

from onlynorm.alignment.objective import Array, Objective, Order

ROUNDING = 1e-12
"""Minimum gain of a swap as a fraction of the energy; a smaller gain may be rounding, and could cycle."""


class Swaps:
    """A permutation with the change of the objective for every swap of two rows."""

    def __init__(self, objective: Objective, order: Order) -> None:
        self.pieces, self.sign = objective.pieces, objective.sign
        self.order = order.copy()
        self.outputs = np.arange(len(order))
        self._flat = self.pieces.reshape(len(order) ** 2, -1)
        self._total = objective.total(order)
        self._products = self._times(self._total)
        self._squares = np.stack([self._squares_of(output) for output in range(len(order))])

    @property
    def score(self) -> float:
        """The objective of the current permutation without its offset."""
        return self.sign * float(self._total @ self._total)

    def changes(self) -> Array:
        """The change of the score if outputs i and k are swapped, as [i, k]."""
        products = self._products[:, self.order]
        own = products.diagonal()
        linear = products + products.T - own[:, None] - own[None, :]
        return np.asarray(self.sign * (2.0 * linear + self._squares))

    def swap(self, first: int, second: int) -> None:
        """Swaps the rows at two outputs."""
        order = self.order
        step = self._steps(first)[second]
        order[first], order[second] = order[second], order[first]
        self._total = self._total + step
        self._products += self._times(step)
        for output in (first, second):
            squares = self._squares_of(output)
            self._squares[output], self._squares[:, output] = squares, squares

    def _times(self, vector: Array) -> Array:
        return np.asarray((self._flat @ vector).reshape(len(self.order), -1))

    def _steps(self, output: int) -> Array:
        """The change of the sum if `output` is swapped with each output."""
        order, row = self.order, self.order[output]
        steps = self.pieces[output, order] + self.pieces[self.outputs, row]
        return np.asarray(steps - self.pieces[output, row] - self.pieces[self.outputs, order])

    def _squares_of(self, output: int) -> Array:
        steps = self._steps(output)
        return np.asarray(np.einsum("nk,nk->n", steps, steps))


def two_opt(objective: Objective, order: Order) -> Order:
    """The permutation after repeated best swaps, until none reduces the objective."""
    swaps = Swaps(objective, order)
    while True:
        changes = swaps.changes()
        first, second = divmod(int(changes.argmin()), len(order))
        if changes[first, second] >= -ROUNDING * (objective.offset + abs(swaps.score)):
            return swaps.order
        swaps.swap(first, second)


def tabu_search(objective: Objective, order: Order, *, n_steps: int, seed: int) -> Order:
    """The best permutation found by tabu search, which takes the best allowed swap at every step, even if it is worse.

    A row that leaves an output may not return to it for about as many steps as there are rows, unless that gives the
    best permutation so far (Taillard's robust tabu search). This escapes the local minima in which `two_opt` ends.
    """
    generator = np.random.default_rng(seed)
    swaps, n_rows = Swaps(objective, order), len(order)
    shortest, longest = int(0.9 * n_rows), int(1.1 * n_rows) + 4
    banned_until = np.zeros((n_rows, n_rows), dtype=np.int64)
    best, lowest = swaps.order.copy(), swaps.score
    for step in range(n_steps if n_rows > 1 else 0):
        changes = swaps.changes()
        is_banned = banned_until[:, swaps.order] > step
        gains = swaps.score + changes < lowest - ROUNDING * abs(lowest)
        changes[is_banned & is_banned.T & ~gains] = np.inf
        np.fill_diagonal(changes, np.inf)
        first, second = divmod(int(changes.argmin()), n_rows)
        for output in (first, second):
            banned_until[output, swaps.order[output]] = step + generator.integers(shortest, longest)
        swaps.swap(first, second)
        if swaps.score < lowest:
            best, lowest = swaps.order.copy(), swaps.score
    return best


_AT_ONCE = 256  # permutations scored together


def greedy(objective: Objective) -> Order:
    """The permutation after one greedy pass from the identity; never worse than the identity."""
    pieces, sign = objective.pieces, objective.sign
    outputs = np.arange(objective.n_rows)
    order, is_open = outputs.copy(), np.ones(len(outputs), dtype=np.bool_)
    chosen = pieces[outputs, order]
    total = chosen.sum(0)
    for output in np.argsort(-objective.weights, kind="stable"):
        row, seats = order[output], np.flatnonzero(is_open)
        totals = pieces[output].take(order[seats], axis=0)
        totals += pieces[seats, row]
        totals -= chosen.take(seats, axis=0)
        totals += total - chosen[output]
        scores = sign * np.einsum("nk,nk->n", totals, totals)
        best = int(scores.argmin())
        seat, is_open[output] = seats[best], False
        if seat != output and scores[best] < sign * float(total @ total):
            total = totals[best]
            order[output], order[seat] = order[seat], row
            chosen[output], chosen[seat] = pieces[output, order[output]], pieces[seat, row]
    return order


def best_of_random(objective: Objective, *, n_tries: int, seed: int) -> Order:
    """The best of the identity and `n_tries` random permutations."""
    generator = np.random.default_rng(seed)
    outputs = np.arange(objective.n_rows)
    best, lowest = outputs, objective.missed(outputs)
    for start in range(0, n_tries, _AT_ONCE):
        n = min(_AT_ONCE, n_tries - start)
        orders = generator.permuted(np.broadcast_to(outputs, (n, len(outputs))), axis=1)
        totals = sum(objective.pieces[output, orders[:, output]] for output in outputs)
        scores = objective.offset + objective.sign * np.einsum("nk,nk->n", totals, totals)
        if scores.min() < lowest:
            lowest, best = float(scores.min()), orders[scores.argmin()]
    return best
