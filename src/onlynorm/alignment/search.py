"""Greedy alignment: one pass over the outputs, those that miss most first, each swapped with the best partner.

The method of the paper's appendix, with its choices kept: the identity to begin with, outputs by falling weight, and
for each the swap with the row not yet fixed that lowers the missed energy most, if any does. All partners of an output
are scored at once from the tables, in rows x directions operations. `best_of_random` is what the paper compares with.

Swaps of two rows: the change of all of them in one table, kept up to date instead of computed again.

With the sum b of the chosen pieces, swapping the rows at outputs i and k adds

    d = pieces[i, p(k)] + pieces[k, p(i)] - pieces[i, p(i)] - pieces[k, p(k)]

to it and changes |b|^2 by 2 b.d + |d|^2. The products pieces . b are one table, which a swap updates with one matrix
product; the squares |d|^2 are another, of which a swap touches two rows and columns. All out^2 / 2 swaps are then read
off in out^2 operations.
"""

from __future__ import annotations

import numpy as np

from onlynorm.alignment.objective import Array, Objective, Order

ROUNDING = 1e-12
"""A swap has to gain more than this share of the energy: less may be rounding, and could go round in circles."""


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
        """The objective of the present permutation without its offset."""
        return self.sign * float(self._total @ self._total)

    def changes(self) -> Array:
        """The change of the score by swapping outputs i and k, at [i, k]; zero on the diagonal."""
        products = self._products[:, self.order]
        own = products.diagonal()
        linear = products + products.T - own[:, None] - own[None, :]
        return np.asarray(self.sign * (2.0 * linear + self._squares))

    def swap(self, first: int, second: int) -> None:
        """Exchanges the rows at two outputs."""
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
        """What a swap of `output` with each output adds to the sum."""
        order, row = self.order, self.order[output]
        steps = self.pieces[output, order] + self.pieces[self.outputs, row]
        return np.asarray(steps - self.pieces[output, row] - self.pieces[self.outputs, order])

    def _squares_of(self, output: int) -> Array:
        steps = self._steps(output)
        return np.asarray(np.einsum("nk,nk->n", steps, steps))


def two_opt(objective: Objective, order: Order) -> Order:
    """The permutation after the best swap has been taken again and again, until none lowers the objective."""
    swaps = Swaps(objective, order)
    while True:
        changes = swaps.changes()
        first, second = divmod(int(changes.argmin()), len(order))
        if changes[first, second] >= -ROUNDING * (objective.offset + abs(swaps.score)):
            return swaps.order
        swaps.swap(first, second)


def tabu_search(objective: Objective, order: Order, *, n_steps: int, seed: int) -> Order:
    """The best permutation on a walk that takes the best swap at every step, also where it loses, but never back.

    A row that leaves an output may not return to it for about as many steps as there are rows, unless that gives the
    best permutation so far (Taillard's robust tabu search): the walk leaves the valleys in which `two_opt` ends.
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


_AT_ONCE = 256  # permutations that are scored together


def greedy(objective: Objective) -> Order:
    """The permutation that one greedy pass from the identity finds; it never misses more than the identity."""
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
