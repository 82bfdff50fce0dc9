"""The block of the residual construction: a pair of frozen layers with a skip connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features
from onlynorm.frozen.maps import features_from_settings, make_maps
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.modules.affine import affine, normalise
from onlynorm.modules.convolution import embed, explicit_padding
from onlynorm.modules.layers import options_from_settings, per_output


class SkipBlock(NormOnlyBlock):
    """A block with a frozen skip connection. `skips` are its features, empty for the identity."""

    kind = "residual"

    def __init__(
        self,
        options: dict[str, Any],
        features: list[Features],
        *,
        skips: list[Features],
        place: str,
        activation: nn.Module | None = None,
        norms: str = "batch",
        storage: str = "dense",
    ) -> None:
        super().__init__(options, features, activation=activation, norms=norms, storage=storage)
        self.skips = skips
        self.frozen_skips = make_maps(skips, storage=storage, dtype=self.low.dtype, sides=("right",))
        self.place = place

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {'random' if self.skips else 'identity'} skip, norm {self.place}"

    def settings(self) -> dict[str, Any]:
        skips = [one.settings() for one in self.maps[len(self.features) :]]
        return {**super().settings(), "skips": skips, "place": self.place}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> SkipBlock:
        features, skips = ([features_from_settings(one) for one in settings[name]] for name in ("features", "skips"))
        return cls(
            options_from_settings(settings["options"]), features, skips=skips, place=settings["place"],
            activation=activation, norms=settings["norms"], storage=storage,
        )  # fmt: skip

    def finish(self, made: Tensor, batch: Tensor) -> Tensor:
        if self.place == "outside":
            return normalise(self.second_norm, made + self.skipped(batch), slice(None))
        return normalise(self.second_norm, made, slice(None)) + self.skipped(batch)

    def skipped(self, batch: Tensor) -> Tensor:
        """The output of the skip connection for a batch (samples, channels, *positions)."""
        if not self.skips:
            return batch
        weight = self._skip_rows().to(batch)
        parts = zip(self.group_inputs(batch), weight.chunk(len(self.features)), strict=True)
        return torch.cat([self.convolve(inputs, part) for (_, _, inputs), part in parts], 1)

    def skip_weight(self) -> Tensor:
        """The skip connection as a weight in the shape of the frozen kernel, in float64 on the CPU."""
        shape = self.features[0].shape
        if self.skips:
            return self._skip_rows(torch.empty(0, dtype=torch.float64, device="cpu"))
        weight = torch.eye(shape[0], dtype=torch.float64).repeat(len(self.features), 1)
        return self._at(weight, identity_position(self.options) or ())

    def effective(self) -> tuple[Tensor, Tensor]:
        weight, added = self.branch()
        scale, shift = (values.detach().double().cpu() for values in affine(self.second_norm))
        skip = self.skip_weight()
        factor = per_output(scale, weight)
        whole = factor * (weight + skip) if self.place == "outside" else factor * weight + skip
        return whole, shift + scale * added

    def _skip_rows(self, like: Tensor | None = None) -> Tensor:
        """The random weights of the skip connection, at the middle of the kernel."""
        weight = torch.cat([one.rows("right", like=like) for one in self.maps[len(self.features) :]])
        return self._at(weight, tuple(size // 2 for size in self.options.get("kernel_size", ())))

    def _at(self, weight: Tensor, position: tuple[int, ...]) -> Tensor:
        """A weight in the shape of the frozen kernel, zero except at one position of the target's kernel."""
        sizes = self.options.get("kernel_size", ())
        pads = [n for number, size in zip(position, sizes, strict=True) for n in (size - 1 - number, number)]
        whole = functional.pad(weight.reshape(*weight.shape, *(1,) * self.axes), pads[::-1])
        return embed(whole, self.features[0].shape[2:])


def identity_position(options: dict[str, Any]) -> tuple[int, ...] | None:
    """The kernel position that reads the input at the position of the output; None if there is none."""
    if not options:
        return ()
    pads = explicit_padding(options)
    position = []
    for axis, (size, step) in enumerate(zip(options["kernel_size"], options["dilation"], strict=True)):
        before, after = pads[-2 * axis - 2], pads[-2 * axis - 1]
        number, rest = divmod(before, step)
        if options["stride"][axis] != 1 or rest or before + after != step * (size - 1):
            return None
        position.append(number)
    return tuple(position)
