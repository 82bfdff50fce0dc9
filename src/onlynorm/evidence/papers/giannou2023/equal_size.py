"""`pad_equal`: a rebuilt fully connected network whose frozen layers all have one size.

Every frozen matrix is padded with zeros to a square matrix, and norms get additional channels. The function does not
change, because the additional channels are multiplied by zero columns. Between the first and the last module, all
layers have the same form: Linear(width, width), a norm with `width` channels, an activation.

Theory: giannou2023:remark-8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, shown
from onlynorm.frozen import pair
from onlynorm.modules import activations, affine, need_model
from onlynorm.validate import is_whole_number, need_free_memory


class Resize(nn.Module):
    """Truncates the last axis, or pads it with zeros, to `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def extra_repr(self) -> str:
        return str(self.width)

    def forward(self, x: Tensor) -> Tensor:
        """The resized batch (samples, width)."""
        return functional.pad(x, [0, self.width - x.shape[-1]])


def pad_equal(network: nn.Sequential, *, width: int | None = None) -> nn.Sequential:
    """The same function as a sequence of frozen Linear(width, width) layers and norms of that width.

    `network` is a sequence of linear layers rebuilt by the wide construction and elementwise activations. By default,
    `width` is its largest number of features. Theory: giannou2023:remark-8
    """
    given = need_model("pad_equal", network)
    parts = list(given) if isinstance(given, nn.Sequential) else [given]
    blocks = [part for part in parts if type(part) is pair.NormOnlyBlock and not part.axes]
    for part in parts:
        if part not in blocks and (activations.known(part) is None or list(part.parameters())):
            raise ConversionError(
                "pad_equal needs a sequence of linear layers rebuilt by the wide construction and activations without "
                f"parameters; got {type(part).__name__}. Convolutions and other constructions cannot be padded."
            )
    if not blocks:
        raise ConversionError("pad_equal needs at least one rebuilt layer; got none. Call reconstruct first.")
    least = max(size for block in blocks for size in (block.n_features, *block.features[0].shape))
    width = least if width is None else width
    if not is_whole_number(width) or not least <= width < 2**31:
        raise ShapeError(
            f"pad_equal needs a width of at least {least}, the largest layer; got {shown(width)}. Leave it out."
        )
    width = int(width)
    need_free_memory(f"layers of {width:.3g} x {width:.3g}", 16.0 * len(blocks) * width**2, cure="Leave width out.")
    layers: list[nn.Module] = [Resize(width)]
    for part in parts:
        layers += _padded(part, width) if isinstance(part, pair.NormOnlyBlock) else [part]
    return nn.Sequential(*layers, Resize(blocks[-1].features[0].shape[0])).eval()


def _padded(block: pair.NormOnlyBlock, width: int) -> list[nn.Module]:
    features = block.features[0]
    like = block.first_norm.weight
    first, second = (_frozen(weight.to(like), width) for weight in (features.right(), features.left()))
    norms = (_padded_norm(norm, block.norms, width) for norm in (block.first_norm, block.second_norm))
    return [first, next(norms), block.activation, second, next(norms)]


def _frozen(weight: Tensor, width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False, dtype=weight.dtype, device=weight.device).requires_grad_(False)
    layer.weight.copy_(functional.pad(weight, [0, width - weight.shape[1], 0, width - weight.shape[0]]))
    return layer


@torch.no_grad()
def _padded_norm(norm: affine.Norm, kind: str, width: int) -> affine.Norm:
    missing = [0, width - norm.num_features]
    made = affine.make_norm(kind, width, axes=0, dtype=norm.weight.dtype).to(norm.weight.device)
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    scale, shift = (functional.pad(values, missing) for values in affine.affine(norm))
    if mean is not None and variance is not None:
        if isinstance(norm, affine.SharedNorm):
            mean, variance = (norm.sharing.spread(values) for values in (mean, variance))
        mean, variance = functional.pad(mean, missing), functional.pad(variance, missing, value=1.0)
    affine.set_affine(made, scale, shift, mean=mean, variance=variance)
    return made
