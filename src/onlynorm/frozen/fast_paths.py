"""Disables the fast path of torch's transformer layers, which reads the weights of Linear layers without calling them.

In evaluation mode `nn.TransformerEncoderLayer` passes `linear1.weight` and `linear2.weight` to one fused kernel, and
`nn.TransformerEncoder` converts sequences with padding to nested tensors, which only this kernel supports. A block has
no weight, so the fast path is disabled in modules that contain blocks. The outputs are the same: with nested tensors
the output at padding is zero before the last norm of the encoder, and `PaddedEncoder` sets it to zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.frozen.form import FrozenBlock


class PaddedEncoder(nn.TransformerEncoder):
    """An `nn.TransformerEncoder` without nested tensors, with the same outputs."""

    makes_nested: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _make_empty, (plain_kind(self),), self.__getstate__()  # type: ignore[no-untyped-call]

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """The output of `nn.TransformerEncoder`, with the same zeros at padding."""
        if src_key_padding_mask is None or not self._would_nest(src, mask, src_key_padding_mask):
            made: Tensor = super().forward(src, mask, src_key_padding_mask, is_causal)
            return made
        output = src
        for layer in self.layers:
            output = layer(output, src_key_padding_mask=src_key_padding_mask)
        output = output.masked_fill(_is_padding(src_key_padding_mask)[..., None], 0.0)
        return output if self.norm is None else self.norm(output)

    def _would_nest(self, src: Tensor, mask: Tensor | None, padding: Tensor) -> bool:
        """Whether `nn.TransformerEncoder.forward` would use nested tensors; the same conditions in the same order."""
        if not (self.makes_nested and torch.backends.mha.get_fastpath_enabled()) or self.layers[0].training:
            return False
        if src.is_nested or src.dim() != 3 or mask is not None or torch.is_autocast_enabled():
            return False
        if getattr(self, "mask_check", True):
            is_traced = torch.compiler.is_compiling()
            if is_traced or not torch._nested_tensor_from_mask_left_aligned(src, ~_is_padding(padding)):
                return False
        if src.device.type not in ("cpu", "cuda", "xpu"):
            return False
        return not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *self.layers[0].parameters())))


_padded_kinds: dict[type[nn.Module], type[PaddedEncoder]] = {nn.TransformerEncoder: PaddedEncoder}


def _padded_kind(kind: type[nn.Module]) -> type[PaddedEncoder]:
    """A subclass of this encoder class in which super().forward is that of `PaddedEncoder`."""
    if kind not in _padded_kinds:
        _padded_kinds[kind] = type(kind.__name__, (kind, PaddedEncoder), {})
    return _padded_kinds[kind]


def plain_kind(module: nn.Module) -> type[nn.Module]:
    """The original class of the module."""
    if not isinstance(module, PaddedEncoder):
        return type(module)
    return nn.TransformerEncoder if type(module) is PaddedEncoder else type(module).__mro__[1]


def _make_empty(kind: type[nn.Module]) -> PaddedEncoder:
    """An encoder without state, for copy and pickle, which cannot import a class created at run time."""
    padded = _padded_kind(kind)
    return padded.__new__(padded)


def set_fast_paths(network: nn.Module, *, calibrating: bool = False) -> nn.Module:
    """The network with the fast path disabled in modules with blocks, or everywhere if `calibrating`; in place."""
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            _set_layer(module, is_open=not calibrating and not _has_blocks(module))
        elif isinstance(module, nn.TransformerEncoder):
            _set_encoder(module, is_open=not calibrating and not _has_blocks(module))
    return network


def _has_blocks(module: nn.Module) -> bool:
    return any(isinstance(inner, FrozenBlock) for inner in module.modules())


def _set_layer(layer: nn.TransformerEncoderLayer, *, is_open: bool) -> None:
    """Sets `activation_relu_or_gelu`, which is used only by the fast path; 0 disables it."""
    if is_open and "fast_activation" in vars(layer):
        layer.activation_relu_or_gelu = vars(layer).pop("fast_activation")
    elif not is_open and "fast_activation" not in vars(layer):
        vars(layer)["fast_activation"], layer.activation_relu_or_gelu = layer.activation_relu_or_gelu, 0


def _set_encoder(encoder: nn.TransformerEncoder, *, is_open: bool) -> None:
    is_closed = "makes_nested" in vars(encoder)
    if is_open and is_closed:
        encoder.use_nested_tensor = vars(encoder).pop("makes_nested")
        object.__setattr__(encoder, "__class__", plain_kind(encoder))
    elif not is_open and not is_closed:
        vars(encoder)["makes_nested"] = getattr(encoder, "use_nested_tensor", False)
        encoder.use_nested_tensor = False
        object.__setattr__(encoder, "__class__", _padded_kind(type(encoder)))


def _is_padding(mask: Tensor) -> Tensor:
    """The padding mask as booleans; float masks are -inf at padding."""
    return mask if mask.dtype == torch.bool else mask != 0
