"""Greedy alignment: one pass over the outputs, those that miss most first, each swapped with the best partner.

The method of the paper's appendix, with its choices kept: the identity to begin with, outputs by falling weight, and
for each the swap with the row not yet fixed that lowers the missed energy most, if any does. All partners of an output
are scored at once from the tables, in rows x directions operations. `best_of_random` is what the paper compares with.
"""

from __future__ import annotations

import numpy as np

from onlynorm.alignment.objective import Objective, Order

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
