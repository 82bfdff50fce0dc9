"""Checks of random_features on training: id_cond features train exactly like ordinary weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, relu

from onlynorm.evidence.registry import Evidence, normal, relative, verdict
from onlynorm.features import Features, draw
from onlynorm.solvers import KhatriRao

SIZES = (12, 16, 8)
N_STEPS = 30
ROUNDING = 1e-9
"""Limit of rounding errors after thirty steps in float64; other training paths differ by a thousandth or more."""
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}
Layer = Callable[[Tensor, Tensor], Tensor]


def ordinary(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer."""
    return x @ weight.mT


def masked(mask: Tensor) -> Layer:
    """A linear layer with only the weights in the mask."""
    return lambda x, weight: x @ (weight * mask).mT


def norm_only(features: Features) -> Layer:
    """Two frozen layers with the scales gamma between them."""
    left, right = features.left(), features.right()
    return lambda x, gamma: (x @ right.mT * gamma) @ left.mT


def path(layers: list[Layer], starts: list[Tensor], name: str, seed: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Parameters and outputs after every step of training two layers, with a batch norm and a ReLU after the first."""
    x, y = normal(seed, "inputs", 40, SIZES[0]), normal(seed, "labels", 40, SIZES[2])
    held_out = normal(seed, "held out", 20, SIZES[0])
    weights = [start.clone().requires_grad_() for start in starts]
    scale = torch.ones(SIZES[1], dtype=x.dtype, requires_grad=True)
    shift = torch.zeros(SIZES[1], dtype=x.dtype, requires_grad=True)
    optimizer = OPTIMIZERS[name]([*weights, scale, shift])

    def predict(inputs: Tensor) -> Tensor:
        hidden = layers[0](inputs, weights[0])
        return layers[1](relu(batch_norm(hidden, None, None, scale, shift, training=True)), weights[1])

    for _ in range(N_STEPS):
        optimizer.zero_grad()
        (predict(x) - y).square().mean().backward()
        optimizer.step()
        yield [weight.detach().clone() for weight in weights], predict(held_out).detach()


def starting_weights(seed: int) -> list[Tensor]:
    """Weights of two ordinary layers with the usual variance."""
    pairs = zip(SIZES[1:], SIZES[:-1], strict=True)
    return [normal(seed, f"weight {i}", out, inp) / inp**0.5 for i, (out, inp) in enumerate(pairs)]


def id_cond_features_train_like_ordinary_weights(seed: int) -> Evidence:
    shapes = [(SIZES[1], SIZES[0]), (SIZES[2], SIZES[1])]
    features = [draw("id_cond", shape, seed=seed) for shape in shapes]
    matrices = [KhatriRao(f.left(), f.right()).materialise() for f in features]
    is_identity = all(torch.equal(m, torch.eye(len(m), dtype=m.dtype)) for m in matrices)
    weights = starting_weights(seed)
    apart = {}
    for name in OPTIMIZERS:
        theirs = path([ordinary, ordinary], weights, name, seed)
        ours = path([norm_only(f) for f in features], [w.flatten() for w in weights], name, seed)
        apart[name] = max(
            relative(gamma, weight.flatten())
            for (gammas, _), (usual, _) in zip(ours, theirs, strict=True)
            for gamma, weight in zip(gammas, usual, strict=True)
        )
    # Other features that can represent every target, with the same initial effective weights: the path differs.
    dense = [draw("he_normal", shape, excess=1.25, seed=seed) for shape in shapes]
    starts = [
        torch.linalg.pinv(KhatriRao(f.left(), f.right()).materialise()) @ w.flatten()
        for f, w in zip(dense, weights, strict=True)
    ]
    control = max(
        relative(KhatriRao(f.left(), f.right()).apply(gamma), weight)
        for (gammas, _), (usual, _) in zip(
            path([norm_only(f) for f in dense], starts, "SGD", seed),
            path([ordinary, ordinary], weights, "SGD", seed),
            strict=True,
        )
        for f, gamma, weight in zip(dense, gammas, usual, strict=True)
    )
    worst = max(apart.values())
    return Evidence(
        verdict(is_identity and worst <= ROUNDING and control > 1e-3),
        f"12-16-8 with batch norm and ReLU, {N_STEPS} steps: gammas and ordinary weights differ at most by "
        + ", ".join(f"{value:.1e} ({name})" for name, value in apart.items())
        + f"; with he_normal features by {control:.2f}. M is {'exactly' if is_identity else 'not'} the identity: "
        f"{sum(int((m != 0).sum()) for m in matrices)} nonzeros for as many equations; with fewer, an equation has "
        "none",
        {f"difference, {name}": value for name, value in apart.items()}
        | {"difference, he_normal": control, "is identity": is_identity},
    )


def random_masks_and_random_id_cond_features_are_one_network(seed: int) -> Evidence:
    density, shapes = 0.2, [(SIZES[1], SIZES[0]), (SIZES[2], SIZES[1])]
    features = [draw("id_cond", shape, density=density, seed=seed, layer=f"{i}") for i, shape in enumerate(shapes)]
    masks = []
    for f in features:
        assert f.structure is not None
        masks.append(f.structure.apply(torch.ones(f.n_features, dtype=torch.float64)))
    weights = starting_weights(seed)
    starts = [w[mask != 0] for w, mask in zip(weights, masks, strict=True)]
    apart = {}
    for name in OPTIMIZERS:
        ours = path([norm_only(f) for f in features], starts, name, seed)
        theirs = path([masked(mask) for mask in masks], weights, name, seed)
        apart[name] = max(relative(mine, other) for (_, mine), (_, other) in zip(ours, theirs, strict=True))
    sizes = [shape[0] * shape[1] for shape in shapes]
    deviations = []
    for size, shape in zip(sizes, shapes, strict=True):
        counts = [draw("id_cond", shape, density=density, seed=seed + i).n_features for i in range(200)]
        spread = (density * (1 - density) / size / len(counts)) ** 0.5
        deviations.append(abs(sum(counts) / len(counts) / size - density) / spread)
    counted = all(f.n_features == int(mask.sum()) for f, mask in zip(features, masks, strict=True))
    worst = max(apart.values())
    return Evidence(
        verdict(worst <= ROUNDING and counted and max(deviations) <= 4.0),
        f"12-16-8 at density {density:g}, {' and '.join(str(f.n_features) for f in features)} features for "
        f"{' and '.join(map(str, sizes))} weights: predictions on held-out inputs differ at each of {N_STEPS} steps "
        "at most by "
        + ", ".join(f"{value:.1e} ({name})" for name, value in apart.items())
        + f" from those of the masked network; p c0 c2 features on average, off by {max(deviations):.1f} standard "
        "errors over 200 draws",
        {f"difference, {name}": value for name, value in apart.items()} | {"standard errors": max(deviations)},
    )
