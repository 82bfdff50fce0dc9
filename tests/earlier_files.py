"""Files as earlier versions wrote them: rebuilt networks, with a number per feature for statistics, range and line, and
models of norm-only layers, when these had a kind of file of their own.

    PYTHONPATH=<that version>/src:tests python tests/earlier_files.py

wrote them. Targets are the same in every version of torch: their weights are sines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onlynorm as on

FOLDER = Path(__file__).with_name("files")


def _conv(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, **options))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "id_cond_groups": (lambda: _conv(groups=2), {"features": "id_cond"}),
    "id_cond_affine": (_conv, {"features": "id_cond", "norms": "affine", "activation": nn.ReLU()}),
    "id_cond_low_rank": (_conv, {"features": "id_cond", "construction": "low_rank", "activation": nn.ReLU()}),
    "ortho_cond_second": (
        lambda: _conv(stride=2), {"features": "ortho_cond", "activation": nn.Tanh(), "kernel": "second"}
    ),
    "ortho_cond_residual": (_conv, {"features": "ortho_cond", "construction": "residual", "activation": nn.ReLU()}),
    "minimal": (_conv, {"features": "id_cond_minimal", "activation": nn.LeakyReLU(0.3)}),
    "sparse": (_conv, {"features": "id_cond", "density": 0.5, "activation": nn.Sigmoid()}),
    "he_normal": (lambda: _conv(groups=2), {"features": "he_normal", "activation": nn.LeakyReLU(0.3)}),
}  # fmt: skip


def sines(*shape: int, step: float = 0.7) -> Tensor:
    """Numbers that no generator makes."""
    return torch.sin(step * torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 1.0).reshape(shape)


def make_target(name: str) -> tuple[nn.Module, Tensor]:
    """The target of a file and its calibration batch, in float64."""
    network = CASES[name][0]().double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(sines(*parameter.shape, step=0.7 + number))
            if name == "sparse" and parameter.ndim > 1:  # weights without a feature are zero
                mask = on.draw("id_cond", tuple(parameter.shape), density=0.5, layer="0").structure
                parameter.mul_(mask.apply(torch.ones(mask.n_features)).reshape(parameter.shape))
    return network, sines(8, 4, 5, 5, step=0.37)


NORM_ONLY: dict[str, Callable[[], nn.Sequential]] = {
    "norm_only_linear": lambda: nn.Sequential(*(nn.Linear(4, 4, bias=i != 4) for i in range(7))),
    "norm_only_conv": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
    ),
}
"""Layers with features of every kind, seed 3: a mask, a condition number, a spectrum, ortho_cond, id_cond_minimal, two
blocks of he_normal, id_cond; and he_normal in groups (half precision), ortho_cond, a norm (bfloat16), and ortho_cond
with the gammas of the one before."""


def norm_only_target(name: str) -> nn.Sequential:
    """The ordinary model that a file of norm-only layers was made from, in float64."""
    model = NORM_ONLY[name]()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(sines(*parameter.shape, step=0.7 + number))
        if name == "norm_only_conv":
            model[3].weight = model[1].weight
    return model.double()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case, (_, choices) in CASES.items():
        target, inputs = make_target(case)
        on.save(on.reconstruct(target, inputs=inputs, **choices), FOLDER / f"{case}.safetensors", dtype=torch.float64)
