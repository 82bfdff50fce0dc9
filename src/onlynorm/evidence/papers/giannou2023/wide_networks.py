"""Checks of giannou2023 on ReLU networks rebuilt with wide frozen layers.

Each check builds networks from frozen random layers, counts parameters and compares functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onlynorm.evidence.papers.giannou2023.equal_size import pad_equal
from onlynorm.evidence.registry import Evidence, normal, verdict
from onlynorm.features import draw
from onlynorm.frozen import pair
from onlynorm.modules import affine
from onlynorm.reconstruction import Construction, Ranges, Reconstruction, Wide, reconstruct, verify

EXACT = 1e-9
"""The largest relative error of an exact network; one feature less gives 1e-3 and more."""


def relu_network(widths: Sequence[int], *, seed: int) -> nn.Sequential:
    """A ReLU network without a last activation, with weights diag(g) W, |W| = 1, and biases."""
    parts: list[nn.Module] = []
    for i, (inp, out) in enumerate(itertools.pairwise(widths)):
        layer = nn.Linear(inp, out).double()
        weight = normal(seed, f"weight {i}", out, inp)
        gamma = 0.5 + normal(seed, f"gamma {i}", out, 1).abs()
        layer.weight.data = gamma * weight / torch.linalg.matrix_norm(weight, 2)
        layer.bias.data = 0.3 * normal(seed, f"bias {i}", out, 1)[:, 0]
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def unit_ball(n_points: int, d: int, *, seed: int) -> Tensor:
    """Points of the unit ball; every second one is on its surface."""
    points = torch.nn.functional.normalize(normal(seed, "ball", n_points, d))
    radius = draw("uniform", (n_points, 1), n_features=1, seed=seed, layer="radius").left().abs() ** (1.0 / d)
    return torch.where(torch.arange(n_points)[:, None] % 2 == 0, points, radius * points)


def rebuild(
    target: nn.Sequential, construction: Construction, *, seed: int, ranges: Ranges | None = None
) -> tuple[Reconstruction, float]:
    """The rebuilt target, calibrated on the unit ball, and its relative error on other points of the ball."""
    first = target[0]
    assert isinstance(first, nn.Linear)
    inputs = unit_ball(512, first.in_features, seed=seed)
    made = reconstruct(target, inputs[:256], construction, seed=seed, ranges=ranges)
    return made, verify(target, made.network, inputs[256:]).relative_error


def rebuild_error(target: nn.Sequential, construction: Construction, *, seed: int) -> float:
    """The relative error, on the unit ball, of the target rebuilt by this construction."""
    return rebuild(target, construction, seed=seed)[1]


def _blocks(network: nn.Module) -> list[pair.NormOnlyBlock]:
    return [module for module in network.modules() if isinstance(module, pair.NormOnlyBlock)]


def _covers_the_ball(target: nn.Sequential, network: nn.Module) -> bool:
    """Whether every ReLU is active for all inputs in the unit ball, proved from the norms of the layers."""
    radius, covers = 1.0, True
    layers = [layer for layer in target if isinstance(layer, nn.Linear)]
    for layer, block in zip(layers, _blocks(network), strict=True):
        reach = radius * block.features[0].right().norm(dim=1)
        scale, shift = affine.affine(block.first_norm)
        covers &= bool((shift - scale.abs() * reach >= 0.0).all())
        radius = radius * float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) + float(layer.bias.detach().norm())
    return covers


def a_wide_frozen_network_is_any_relu_network(seed: int) -> Evidence:
    d, depth, worst, covered, tried = 8, 3, 0.0, 0, 0
    shapes = set()
    for i, features in itertools.product(range(4), ("he_uniform", "uniform")):
        target = relu_network([d] * (depth + 1), seed=seed + i)
        # The margin makes features active on the whole ball, not only on the calibration samples.
        wide = Wide(features=features, excess=1.0, activation=nn.ReLU())
        made, error = rebuild(target, wide, seed=seed + i, ranges=Ranges(margin=300.0))
        worst, tried = max(worst, error), tried + 1
        covered += _covers_the_ball(target, made.network)
        shapes |= {
            (tuple(b.map(0).rows("right").shape), tuple(b.map(0).rows("left").mT.shape)) for b in _blocks(made.network)
        }
    target = relu_network([d] * (depth + 1), seed=seed)
    too_few = Wide(features="he_uniform", excess=1.0 - d**-2, activation=nn.ReLU())
    fewer = rebuild_error(target, too_few, seed=seed)
    is_as_said = shapes == {((d * d, d), (d, d * d))}
    return Evidence(
        verdict(worst <= EXACT and covered == tried and is_as_said and fewer > 1e3 * EXACT),
        f"d = {d}, depth {depth}: {tried} networks from bounded random layers of shapes "
        + " and ".join(f"{right} then {left}" for right, left in sorted(shapes))
        + f", error at most {worst:.1e}; in {covered} of them the norms of the layers prove every ReLU active on the "
        f"whole ball. With {d * d - 1} features the error is {fewer:.1e}",
        {"error": worst, "covered": covered, "tried": tried, "error with one feature fewer": fewer},
    )


def the_number_of_trainable_parameters_stays_of_the_same_order(seed: int) -> Evidence:
    depth, counts = 2, []
    for d in (4, 8, 16):
        target = relu_network([d] * (depth + 1), seed=seed)
        made, _ = rebuild(target, Wide(excess=1.0, activation=nn.ReLU()), seed=seed)
        frozen = sum(block.n_frozen for block in _blocks(made.network))
        counts.append((d, sum(p.numel() for p in target.parameters()), made.n_norm_parameters, frozen))
    ratios = [norms / own for _, own, norms, _ in counts]
    _, _, of_norms, of_frozen = (
        [math.log2(after / before) for before, after in itertools.pairwise(column)]
        for column in zip(*counts, strict=True)
    )
    is_cubic = all(abs(power - 3.0) <= 0.05 for power in of_frozen)
    return Evidence(
        verdict(max(ratios) <= 2.0 and max(of_norms) <= 2.0 and is_cubic),
        f"depth {depth}, d = 4, 8, 16: the norms have {', '.join(f'{ratio:.2f}' for ratio in ratios)} times the "
        "target's parameters (a scale and a shift per feature and output); doubling d multiplies them by "
        f"2^{max(of_norms):.2f} at most and the frozen weights by 2^{max(of_frozen):.2f}",
        {f"norm parameters, d = {d}": float(norms) for d, _, norms, _ in counts}
        | {f"frozen weights, d = {d}": frozen for d, _, _, frozen in counts}
        | {f"target parameters, d = {d}": own for d, own, _, _ in counts},
    )


def layers_may_be_padded_to_equal_size(seed: int) -> Evidence:
    widths = [5, 9, 3]
    target = relu_network(widths, seed=seed)
    made, _ = rebuild(target, Wide(excess=1.0, activation=nn.ReLU()), seed=seed)
    own = [
        tuple(weight.shape)
        for block in _blocks(made.network)
        for weight in (block.map(0).rows("right"), block.map(0).rows("left").mT)
    ]
    assert isinstance(made.network, nn.Sequential)
    padded = pad_equal(made.network)
    inputs = unit_ball(256, widths[0], seed=seed)
    errors = [verify(target, padded, inputs).relative_error]
    layers = [part for part in padded if isinstance(part, nn.Linear)]
    norms = [part for part in padded if isinstance(part, nn.BatchNorm1d)]
    for layer, norm in zip(layers, norms, strict=True):  # any values in the norms of the padding
        is_padding = ~(layer.weight != 0).any(1)
        free = normal(seed, "norms of the padding", len(is_padding), 2)
        norm.weight.data[is_padding], norm.bias.data[is_padding] = free[is_padding].unbind(1)
    errors.append(verify(target, padded, inputs).relative_error)
    for layer in layers:  # values other than zero
        layer.weight.data[layer.weight == 0] = 1.0
    errors.append(verify(target, padded, inputs).relative_error)
    sizes = {tuple(layer.weight.shape) for layer in layers}
    is_equal = sizes == {(max(map(max, own)),) * 2} and len(layers) == len(own)
    return Evidence(
        verdict(is_equal and max(errors[:2]) <= EXACT and errors[2] > 1e3 * EXACT),
        f"frozen layers {', '.join(map(str, own))} padded to {' and '.join(map(str, sizes))}: with zeros the error "
        f"is {errors[0]:.1e}, with random norms of the padding {errors[1]:.1e}; padded with ones it would be "
        f"{errors[2]:.1e}",
        {"error": errors[0], "error with other norms": errors[1], "error with ones": errors[2]},
    )
