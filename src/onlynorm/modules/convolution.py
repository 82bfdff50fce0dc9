"""A target's kernel inside a larger source kernel, and the padding that leaves the function as it was.

A source kernel of K positions on an axis holds the k of the target in its middle: (K - k) // 2 positions before them,
the rest behind. Every other position is an equation "= 0". The input is padded by as many positions (times the
dilation) more on either side, in the target's own mode, so that output j still reads the same inputs.

An ordinary convolution pads both sides alike. Where K - k is odd, `plain_kernel` adds one position of zeros in front.

Theory: burkholz2024:thm-2.2
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ShapeError

Kernel = tuple[int, ...]


def source_shape(shape: tuple[int, ...], source_kernel: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The target's shape (out, inp, *kernel) with the source's kernel; a linear layer has none and stays."""
    kernel = shape[2:]
    if source_kernel is None or not kernel:
        return shape
    wanted = (source_kernel,) * len(kernel) if isinstance(source_kernel, int) else tuple(source_kernel)
    if len(wanted) != len(kernel) or any(mine < theirs for mine, theirs in zip(wanted, kernel, strict=True)):
        raise ShapeError(
            f"source_kernel needs at least the target's kernel {kernel} on every axis; got {source_kernel}. "
            "A smaller one cannot reach the outer weights: raise it, or leave it out for the target's own."
        )
    return (*shape[:2], *wanted)


def kernel_margins(kernel: Kernel, source_kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """Per axis: how many positions the source kernel has before and behind the target's."""
    return tuple(
        ((mine - theirs) // 2, mine - theirs - (mine - theirs) // 2)
        for theirs, mine in zip(kernel, source_kernel, strict=True)
    )


def embed(weight: Tensor, source_kernel: Kernel) -> Tensor:
    """The weight (out, inp, *kernel) with zeros around its kernel, (out, inp, *source_kernel)."""
    margins = kernel_margins(tuple(weight.shape[2:]), source_kernel)
    if not any(behind for _, behind in margins):  # a pad of nothing would be a copy
        return weight
    return functional.pad(weight, [n for pair in reversed(margins) for n in pair])


def plain_kernel(weight: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A weight with the source's kernel, and the options of the convolution that computes with it what the block does.

    `options` are the target's. Nothing changes where both kernels are the same.
    """
    kernel = tuple(options.get("kernel_size", ()))
    margins = kernel_margins(kernel, tuple(weight.shape[2:]))
    if not any(behind for _, behind in margins):
        return weight, options
    weight = functional.pad(weight, [n for before, behind in reversed(margins) for n in (behind - before, 0)])
    padding = options["padding"]
    if padding != "same":  # "same" pads half of the larger kernel by itself
        numbers = (0,) * len(kernel) if padding == "valid" else padding
        padding = tuple(
            number + step * behind
            for number, step, (_, behind) in zip(numbers, options["dilation"], margins, strict=True)
        )
    return weight, {**options, "kernel_size": tuple(weight.shape[2:]), "padding": padding}


def need_room(padding: Kernel, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises where a reflecting or circular padding, widened for the source kernel, is larger than the input."""
    mode = options.get("padding_mode", "zeros")
    if mode not in ("reflect", "circular"):
        return
    for axis, size in enumerate(reversed(shape[-len(padding) // 2 :])):
        widest = max(padding[2 * axis : 2 * axis + 2])
        most = size - 1 if mode == "reflect" else size
        if widest > most:
            raise ShapeError(
                f"padding_mode={mode!r} needs inputs larger than the padding; got {size} positions for {widest}, which "
                "the source kernel asks for. Leave source_kernel out, or take a smaller one."
            )


def pad_inputs(x: Tensor, *, axes: int, padding: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """What a layer would have taken, as (samples, channels, *positions) with the target's padding around it."""
    if not axes:
        return x.reshape(-1, x.shape[-1])
    batch = x if x.ndim == axes + 2 else x[None]
    mode = options["padding_mode"]
    return functional.pad(batch, padding, mode="constant" if mode == "zeros" else mode)


def explicit_padding(options: dict[str, Any], source_kernel: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Padding for functional.pad, last axis first, from numbers, "same" or "valid"; more for a larger source kernel."""
    kernel, dilation, padding = options["kernel_size"], options["dilation"], options["padding"]
    margins = kernel_margins(kernel, kernel if source_kernel is None else source_kernel)
    pairs: list[int] = []
    for axis in reversed(range(len(kernel))):
        before, behind = (dilation[axis] * n for n in margins[axis])
        if padding == "same":
            total = dilation[axis] * (kernel[axis] - 1)
            pairs += [before + total // 2, behind + total - total // 2]
        else:
            own = 0 if padding == "valid" else padding[axis]
            pairs += [before + own, behind + own]
    return tuple(pairs)
