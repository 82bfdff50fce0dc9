"""A target kernel embedded in a larger source kernel, with padding such that the function is the same.

A source kernel of size K has the target kernel of size k in its middle, with (K - k) // 2 positions before and the rest
after it. The weights at all other positions are zero. The input is padded by as many positions (times the dilation)
on either side, with the padding mode of the target, so that each output depends on the same inputs.

An ordinary convolution pads both sides equally. If K - k is odd, `plain_kernel` adds one zero at the start.

Theory: burkholz2024:thm-2.2
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ShapeError

Kernel = tuple[int, ...]


def source_shape(shape: tuple[int, ...], source_kernel: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape (out, inp, *kernel) of a target with the source kernel; unchanged for linear layers."""
    kernel = shape[2:]
    if source_kernel is None or not kernel:
        return shape
    source = (source_kernel,) * len(kernel) if isinstance(source_kernel, int) else tuple(source_kernel)
    if len(source) != len(kernel) or any(larger < own for larger, own in zip(source, kernel, strict=True)):
        raise ShapeError(
            f"source_kernel needs to be at least as large as the target's kernel {kernel} in every dimension; got "
            f"{source_kernel}. Increase it, or leave it out to use the target's kernel."
        )
    return (*shape[:2], *source)


def kernel_margins(kernel: Kernel, source_kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """(before, after) per dimension: positions of the source kernel around the target's."""
    return tuple(
        ((larger - own) // 2, larger - own - (larger - own) // 2)
        for own, larger in zip(kernel, source_kernel, strict=True)
    )


def embed(weight: Tensor, source_kernel: Kernel) -> Tensor:
    """The weight (out, inp, *kernel) zero-padded to (out, inp, *source_kernel)."""
    margins = kernel_margins(tuple(weight.shape[2:]), source_kernel)
    if not any(after for _, after in margins):  # padding by zero would copy
        return weight
    return functional.pad(weight, [n for pair in reversed(margins) for n in pair])


def plain_kernel(weight: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """(weight, options) of an ordinary convolution equivalent to the block, with the source kernel.

    `options` are those of the target; they are returned unchanged if both kernels have the same size.
    """
    kernel = tuple(options.get("kernel_size", ()))
    margins = kernel_margins(kernel, tuple(weight.shape[2:]))
    if not any(after for _, after in margins):
        return weight, options
    weight = functional.pad(weight, [n for before, after in reversed(margins) for n in (after - before, 0)])
    padding = options["padding"]
    if padding != "same":  # "same" pads half of the larger kernel
        sizes = (0,) * len(kernel) if padding == "valid" else padding
        padding = tuple(
            size + dilation * after
            for size, dilation, (_, after) in zip(sizes, options["dilation"], margins, strict=True)
        )
    return weight, {**options, "kernel_size": tuple(weight.shape[2:]), "padding": padding}


def need_room(padding: Kernel, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises if reflect or circular padding, increased for the source kernel, is larger than the input."""
    mode = options.get("padding_mode", "zeros")
    if mode not in ("reflect", "circular"):
        return
    for axis, size in enumerate(reversed(shape[-len(padding) // 2 :])):
        widest = max(padding[2 * axis : 2 * axis + 2])
        most = size - 1 if mode == "reflect" else size
        if widest > most:
            raise ShapeError(
                f"padding_mode={mode!r} needs inputs larger than the padding; got size {size} and padding {widest} "
                "with the source kernel. Leave source_kernel out, or reduce it."
            )


def pad_inputs(x: Tensor, *, axes: int, padding: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """The inputs of a layer as (samples, channels, *positions), with the padding of the target."""
    if not axes:
        return x.reshape(-1, x.shape[-1])
    batch = x if x.ndim == axes + 2 else x[None]
    mode = options["padding_mode"]
    return functional.pad(batch, padding, mode="constant" if mode == "zeros" else mode)


def convolve(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """The convolution of (samples, channels, *positions) with as many axes as the kernel has."""
    return (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3](x, weight, **options)


def explicit_padding(options: dict[str, Any], source_kernel: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The `padding` option as arguments of functional.pad, last dimension first; larger with a source kernel."""
    kernel, dilation, padding = options["kernel_size"], options["dilation"], options["padding"]
    margins = kernel_margins(kernel, kernel if source_kernel is None else source_kernel)
    pairs: list[int] = []
    for axis in reversed(range(len(kernel))):
        before, after = (dilation[axis] * n for n in margins[axis])
        if padding == "same":
            total = dilation[axis] * (kernel[axis] - 1)
            pairs += [before + total // 2, after + total - total // 2]
        else:
            own = 0 if padding == "valid" else padding[axis]
            pairs += [before + own, after + own]
    return tuple(pairs)
