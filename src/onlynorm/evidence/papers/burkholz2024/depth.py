"""`tradeoff`: width against depth at equal accuracy, one row per number of frozen layers.

Both papers discuss it without a figure: L layers need about weights / (L - 1) features each instead of one per
weight, with as many norm parameters in all, but the dense layers between them cost multiplications and frozen
parameters.

Theory: burkholz2024:thm-2.5, burkholz2024:thm-2.2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import onlynorm as on
from onlynorm.data import digits
from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.features import check_shape, draw, streams
from onlynorm.models import mlp
from onlynorm.solvers import solve_multilayer, widths_for
from onlynorm.validate import need_sizes

N_LAYERS = (2, 3, 4, 6, 10)


@dataclass(frozen=True)
class DepthRow:
    """Costs of L frozen layers; `residual` and `seconds` are measured at a smaller size, or None.

    `width` is the width of the widest hidden layer.
    """

    n_layers: int
    width: int
    n_norm_parameters: int
    n_frozen: int
    residual: float | None = None
    seconds: float | None = None

    @property
    def n_multiplications(self) -> int:
        """Per output position: with the kernel in the first layer, every frozen parameter is used once."""
        return self.n_frozen


@dataclass(frozen=True)
class Tradeoff:
    """Width against depth for a target of one shape."""

    shape: tuple[int, ...]
    excess: float
    rows: tuple[DepthRow, ...]
    measured: tuple[int, ...] | None = None

    def __str__(self) -> str:
        small = "" if self.measured is None else f"; residual and seconds measured at {self.measured}"
        lines = [f"a {self.shape} target at excess {self.excess:g}{small}"]
        for row in self.rows:
            line = (
                f"{row.n_layers:3d} layers: {row.width:,} wide, {row.n_norm_parameters:,} norm parameters, "
                f"{row.n_frozen:,} frozen parameters, as many multiplications"
            )
            lines.append(line if row.residual is None else f"{line}, {row.residual:.1e} in {row.seconds:.2g} s")
        return "\n".join(lines)


def tradeoff(
    shape: Sequence[int],
    n_layers: Sequence[int] = N_LAYERS,
    *,
    excess: float = 1.1,
    measured: Sequence[int] | None = None,
    features: str = "orthogonal",
    seed: int = 0,
) -> Tradeoff:
    """Counts for a target (out, inp, *kernel) rebuilt from 2, 3, ... frozen layers, all exact at this excess.

    With `measured`, a smaller shape, a random target of that shape is also solved for every number of layers.
    """
    shape = check_shape(shape)
    measured = None if measured is None else check_shape(measured)
    rows = []
    for n in need_sizes("n_layers", n_layers, low=2, cure="Pass a list such as (2, 3, 6)."):
        widths = (math.prod(shape[1:]), *widths_for(shape, n_layers=n, excess=excess), shape[0])
        n_frozen = sum(before * after for before, after in itertools.pairwise(widths))
        residual = seconds = None
        if measured is not None:
            residual, seconds = _measure(measured, n, excess, features, seed)
        rows.append(DepthRow(n, max(widths[1:-1]), 2 * sum(widths[1:]), n_frozen, residual, seconds))
    return Tradeoff(tuple(shape), excess, tuple(rows), None if measured is None else tuple(measured))


def _measure(shape: Sequence[int], n_layers: int, excess: float, features: str, seed: int) -> tuple[float, float]:
    """Residual and seconds of a Gaussian target."""
    out, inp = shape[0], math.prod(shape[1:])
    widths = (inp, *widths_for(shape, n_layers=n_layers, excess=excess), out)
    weights = [
        draw(features, (1, before), n_features=after, seed=seed, layer=f"tradeoff/source {i}").right()
        for i, (before, after) in enumerate(itertools.pairwise(widths), 1)
    ]
    target = torch.from_numpy(streams.Stream(seed, "tradeoff", "target").normals(0, out * inp)).reshape(out, inp)
    solution = solve_multilayer(weights, target)
    return solution.residual, solution.seconds


def depth_rows(*, shape: Sequence[int], n_layers: int, measured: Sequence[int], seed: int) -> dict[str, Any]:
    """Costs of L frozen layers for a layer of this shape, with residual and seconds at a smaller shape."""
    (row,) = tradeoff(tuple(shape), [n_layers], measured=tuple(measured), seed=seed).rows
    return asdict(row)


def whole_network(*, widths: Sequence[int], n_layers: int, seed: int) -> dict[str, float]:
    """Errors on test images of a network trained on digits and rebuilt with L frozen layers per layer."""
    split = digits(seed=seed)
    target = mlp(list(widths), seed=seed)
    on.fit(target, (split.train_inputs, split.train_labels), schedule=on.Schedule(epochs=30, seed=seed))
    target = target.double().eval()
    images = split.test_inputs.double()
    result = on.reconstruct(
        target, split.train_inputs.double(), on.Multilayer(n_layers=n_layers, activation=nn.ReLU()), seed=seed
    )
    check = on.verify(target, result.network, images)
    right = float((target(images).argmax(1) == split.test_labels).double().mean())
    return {"error": check.relative_error, "agreement": check.agreement, "accuracy": right}


def width_depth(run: Run) -> Outcome:
    """Width, frozen parameters and norm parameters against the number of frozen layers, at equal accuracy.

    Theory: burkholz2024:thm-2.5
    """
    shape, measured, layers = run.sizes["shape"], run.sizes["measured"], run.sizes["n_layers"]
    deeper = [n for n in layers if n > 2]
    run.announce(len(layers) + len(deeper))
    rows: list[Mapping[str, Any]] = [
        run.piece(f"L={n}", depth_rows, shape=shape, n_layers=n, measured=measured, seed=run.seeds[0]) for n in layers
    ]
    networks: list[Mapping[str, float]] = [
        run.piece(f"network L={n}", whole_network, widths=run.sizes["network"], n_layers=n, seed=run.seeds[0])
        for n in deeper
    ]
    first, last = rows[0], rows[-1]
    values = {
        "largest residual": max(float(row["residual"]) for row in rows),
        "a whole network on digits: largest error of its outputs": max(float(one["error"]) for one in networks),
        "a whole network on digits: lowest fraction of equal predictions": min(one["agreement"] for one in networks),
        "a whole network on digits: its accuracy": float(networks[0]["accuracy"]),
        "widest layer of the deepest source over that of two layers": last["width"] / first["width"],
        "norm parameters of the deepest source over those of two layers": (
            last["n_norm_parameters"] / first["n_norm_parameters"]
        ),
        "multiplications of the deepest source over those of two layers": last["n_frozen"] / first["n_frozen"],
    }
    names = (("width of a layer", "width"), ("norm parameters", "n_norm_parameters"), ("multiplications", "n_frozen"))
    curves = [Curve(name, list(layers), [row[key] for row in rows], kind="points") for name, key in names]
    columns = ["layers", "width", "norm parameters", "frozen parameters", "residual", "seconds"]
    keys = ["n_layers", "width", "n_norm_parameters", "n_frozen", "residual", "seconds"]
    panel = Panel("", "Depth instead of width", "frozen layers", "parameters per output position", y_log=True)
    table = Table(columns, [[row[key] for key in keys] for row in rows])
    return Outcome(values=values, curves=curves, panels=(panel,), table=table)
