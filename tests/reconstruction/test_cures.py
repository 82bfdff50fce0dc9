"""The cures that the deep and the multilayer construction name in a shortfall hold when they are followed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import AccuracyWarning, ToleranceError
from onlynorm.features import draw
from onlynorm.modules import find_layers
from onlynorm.reconstruction import Construction, Settings
from onlynorm.reconstruction.constructions.deep import estimate
from onlynorm.solvers.multilayer.gammas import solve_multilayer, widths_for

SHAPES = [(5, 7), (11, 9), (3, 14), (10, 4), (3, 4, 3)]
"""None of those that the limits were chosen with."""
OPTION = re.compile(r"(excess|inputs_per_slice|n_layers)=([\d.]+\d|\d)")


def network(shape: tuple[int, ...], *, seed: int, rank: int | None = None) -> tuple[nn.Sequential, Tensor]:
    """One layer with normal weights, or with a product of two normal factors, and a batch."""
    out, inp, *kernel = shape
    layer = nn.Conv1d(inp, out, *kernel) if kernel else nn.Linear(inp, out)
    weight = normal(*shape, seed=seed)
    if rank is not None:
        weight = (normal(out, rank, seed=seed) @ normal(rank, weight[0].numel(), seed=seed + 1)).reshape(shape)
    network = nn.Sequential(layer).double().eval()
    with torch.no_grad():
        layer.weight.copy_(weight)
    return network, normal(12, inp, *(6 for _ in kernel), seed=seed)


def cures(shortfall: str) -> list[dict[str, Any]]:
    """The options that the end of a shortfall names, one dict for each alternative."""
    found = []
    for text in re.split(r"cure: |; use ", shortfall)[-1].split(", or "):
        changes: dict[str, Any] = {
            name: float(value) if name == "excess" else int(value) for name, value in OPTION.findall(text)
        }
        if "features='orthogonal'" in text:
            changes |= {"features": "orthogonal", "density": None}
        assert changes, text
        found.append(changes)
    return found


def follow(options: Construction, shape: tuple[int, ...], *, seed: int, rank: int | None = None) -> int:
    """Rebuilds a layer, and again with each cure of its shortfall, which must hold; returns the number of cures."""
    model, x = network(shape, seed=seed, rank=rank)
    (layer,) = find_layers(model).layers
    try:
        on.reconstruct(model, x, options, seed=seed, tolerance=1e-10)
        return 0
    except ToleranceError as error:
        message = str(error)
    shortfall = re.split(r"[.,] [oO]r (leave|omit) ", message)[0]
    listed = cures(shortfall)
    for changes in listed:
        again = dataclasses.replace(options, **changes)
        (made,) = on.reconstruct(model, x, again, seed=seed, tolerance=1e-10).layers
        assert made.residual <= 1e-10, (layer.name, again)
    return len(listed)


@pytest.mark.parametrize(
    "options",
    [
        on.Deep(features="er_sign"),
        on.Deep(features="er_normal", density=0.3, inputs_per_slice=2),
        on.Deep(features="sparse_he_normal", excess=1.5),
        on.Deep(excess=1.0),
        on.Deep(excess=1.0, features="uniform"),
        on.Deep(excess=0.7, features="he_uniform", inputs_per_slice=2),
        on.Deep(excess=0.9, features="orthogonal"),
    ],
)
def test_the_cures_of_a_deep_block_are_true(options: on.Deep) -> None:
    assert sum(follow(options, shape, seed=seed) for shape in SHAPES for seed in (101, 102))


def test_wider_slices_are_no_cure_where_their_features_would_be_too_few() -> None:
    """At excess 0.9 a slice of one input has enough features, rounded up, but one of all inputs has not."""
    model, x = network((3, 14), seed=102)
    options = on.Deep(excess=0.9, features="orthogonal")
    with pytest.raises(ToleranceError) as caught:
        on.reconstruct(model, x, options, seed=102, tolerance=1e-13)
    assert "excess=" in str(caught.value)
    assert "inputs_per_slice" not in str(caught.value)
    assert "inputs_per_slice" not in str(on.plan(model, x, options))


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(
    "options",
    [
        on.Multilayer(features="er_sign", density=0.3),
        on.Multilayer(features="er_sign", density=0.3, n_layers=2, excess=1.5),
        on.Multilayer(n_layers=30, excess=1.0),
        on.Multilayer(n_layers=2, excess=1.0),
        on.Multilayer(n_layers=2, excess=1.0, features="orthogonal"),
        on.Multilayer(n_layers=4, excess=1.0, features="er_sign", density=0.3),
    ],
)
def test_the_cures_of_a_multilayer_block_are_true(options: on.Multilayer, rank: int | None) -> None:
    n_followed = sum(follow(options, shape, seed=seed, rank=rank) for shape in SHAPES for seed in (101, 102))
    assert n_followed or rank == 1


def test_the_shortfalls_of_an_outside_test_name_no_cure_that_does_not_hold() -> None:
    x, target = normal(40, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double().eval()
    with torch.no_grad():
        for layer, seed in ((target[0], 3), (target[2], 4)):
            layer.weight.copy_(normal(*layer.weight.shape, seed=seed))
    cases: list[tuple[Construction, str]] = [
        (on.Deep(features="er_sign"), r"cure: features='orthogonal' \(without a density\)$"),
        (
            on.Multilayer(n_layers=30, excess=1.0),
            r"use n_layers=3 and features='orthogonal' and excess=1.25 \(the widths of widths_for\)$",
        ),
    ]
    for options, words in cases:
        with pytest.warns(AccuracyWarning, match="fell short"):
            short = [layer.shortfall for layer in on.reconstruct(target, x, options).layers if layer.shortfall]
        assert short
        assert all(re.search(words, text) for text in short)
    model, _ = network((8, 6), seed=1)
    (layer,) = find_layers(model).layers
    note = estimate(layer, on.Deep(features="er_sign"), Settings()).note
    assert note == ("sparse features often miss the predicted error; cure: features='orthogonal' (without a density)")


def test_a_solve_that_was_stopped_names_the_limit_of_steps() -> None:
    widths = widths_for((5, 4), n_layers=3, excess=1.25)
    sizes = (4, *widths, 5)
    weights = [
        draw("orthogonal", (1, sizes[i]), n_features=sizes[i + 1], seed=1, layer=str(i)).right() for i in range(3)
    ]
    with pytest.raises(ToleranceError, match="leave max_steps out, which allows 500"):
        solve_multilayer(weights, normal(5, 4), max_steps=2, tolerance=1e-10)
    assert solve_multilayer(weights, normal(5, 4)).is_exact
