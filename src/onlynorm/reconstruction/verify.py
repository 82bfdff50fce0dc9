"""`verify`: do two networks compute the same function, and is what is frozen really known by its seed?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.errors import ShapeError
from onlynorm.reconstruction.blocks import Block
from onlynorm.reconstruction.ranges import watching


@dataclass(frozen=True)
class Verification:
    """How far two networks differ on a batch. `outside` is the largest share of samples that left a block's range."""

    max_error: float
    relative_error: float
    agreement: float
    outside: float
    is_reproducible: bool
    n_samples: int

    def __str__(self) -> str:
        frozen = "every frozen tensor comes from the seed" if self.is_reproducible else "FROZEN TENSORS DIFFER"
        return (
            f"{self.n_samples} samples: relative error {self.relative_error:.1e}, largest {self.max_error:.1e}, same "
            f"prediction on {100 * self.agreement:.2f} %, {100 * self.outside:.2f} % outside the calibrated range; "
            f"{frozen}"
        )


@torch.no_grad()
def verify(target: nn.Module, network: nn.Module, inputs: Tensor) -> Verification:
    """The differences between target and network on a batch, each run in its own precision."""
    with watching(network) as outside:
        made = network(inputs.to(next(network.parameters()).dtype))
    wanted = target(inputs.to(next(target.parameters()).dtype))
    if not isinstance(made, Tensor) or not isinstance(wanted, Tensor) or made.shape != wanted.shape:
        raise ShapeError(
            "verify needs two networks that return one tensor of the same shape; got "
            f"{getattr(wanted, 'shape', type(wanted).__name__)} and {getattr(made, 'shape', type(made).__name__)}. "
            "Wrap them so that they return their logits."
        )
    made, wanted = made.double(), wanted.double()
    rest = made - wanted
    same = made.flatten(1).argmax(1) == wanted.flatten(1).argmax(1)
    return Verification(
        max_error=float(rest.abs().max()),
        relative_error=float(torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(wanted).clamp_min(1e-300)),
        agreement=float(same.double().mean()),
        outside=outside.share,
        is_reproducible=all(m.is_reproducible() for m in network.modules() if isinstance(m, Block)),
        n_samples=len(inputs),
    )
