"""Checking and calling a model, and iterating over its modules: inputs, outputs, wrappers, and the places of a module.

A place is the path of a module in a model, as in `named_modules`; one module may have several.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, ValueRangeError, first_line, shown
from onlynorm.validate import as_tensor

Output = Callable[[Any], Any]
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|[Ii]nput type|not implemented for '")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested lists, tuples and mappings, in order.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import tensors_in
        >>> len(list(tensors_in({"hidden": [torch.rand(2), torch.rand(3)], "n": 4})))
        2
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def find_output(returned: Any) -> Tensor:
    """The `logits` in the output of a model, else its first floating-point tensor.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import find_output
        >>> find_output({"logits": torch.zeros(2, 10), "loss": torch.tensor(0.5)}).shape
        torch.Size([2, 10])
    """
    named = returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)
    found = named if isinstance(named, Tensor) else next(tensors_in(returned), None)
    if found is None:
        raise ConversionError(
            f"a loss needs a tensor in the output of the model; got {type(returned).__name__} without one. Pass a "
            "function that selects it as output=."
        )
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel`, `DataParallel`, `torch.compile` and Fabric wrappers.

    The parameters are shared, so changes of the inner model apply to the wrapper too.

    Examples:
        >>> import torch
        >>> from onlynorm.models import mlp
        >>> from onlynorm.modules import unwrap
        >>> model = mlp((8, 4))
        >>> unwrap(torch.nn.DataParallel(model)) is model
        True
    """
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile; isinstance would import dynamo
        if inner is None and type(model).__name__ == "_FabricModule":
            inner = getattr(model, "_original_module", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of this tensor.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import is_autocast
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print(is_autocast(torch.ones(1)))
        True
    """
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast on this device.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import is_autocast, without_autocast
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast(torch.device("cpu")):
        ...     print(is_autocast(torch.ones(1)))
        False
    """
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_compiling() -> AbstractContextManager[object]:
    """A context in which compiled modules run eagerly, with all hooks.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import without_compiling
        >>> model = torch.compile(torch.nn.Linear(8, 4), backend="eager")
        >>> with without_compiling():
        ...     print(model(torch.rand(2, 8)).shape)
        torch.Size([2, 4])
    """
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    if set_stance is None or "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes seconds
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A batch, or a tuple of batches for a network with several inputs."""


def as_inputs(what: str, inputs: Any) -> tuple[Tensor, ...]:
    """The positional arguments of a network: a batch, or a tuple or list of batches, as tensors."""
    cure = "Pass a batch, or a tuple of batches, as tensors or NumPy arrays with samples first."
    is_several = isinstance(inputs, tuple) or (
        isinstance(inputs, list) and any(hasattr(item, "shape") for item in inputs)
    )
    given = tuple(inputs) if is_several else (inputs,)
    if not given:
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got nothing. {cure}")
    return tuple(as_tensor(f"{what}: inputs", item, cure=cure) for item in given)


def first_samples(inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first `n_samples` samples if all inputs have the same length; else the inputs."""
    if any(x.ndim == 0 or len(x) != len(inputs[0]) for x in inputs):
        return inputs
    return tuple(x[:n_samples] for x in inputs)


def accepted_samples(network: nn.Module, inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first `n_samples` samples if the network accepts them; else the inputs."""
    few = first_samples(inputs, n_samples)
    try:
        run(network, few)
    except OnlynormError:
        return inputs
    return few


@contextlib.contextmanager
def counting_samples(network: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of samples after a pass of the network inside the context.

    Inputs are one sample without a batch axis if the first linear or convolutional layer receives an axis less than a
    batch has.
    """
    is_single: list[bool] = []

    def record(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_single and args and isinstance(args[0], Tensor):
            n_axes = len(vars(layer)["kernel_size"]) + 2 if "in_channels" in vars(layer) else 2
            is_single.append(args[0].ndim < n_axes)

    layers = [module for module in network.modules() if vars(module).keys() & {"in_features", "in_channels"}]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield lambda: 1 if any(is_single) or not inputs[0].ndim else len(inputs[0])
    finally:
        for hook in hooks:
            hook.remove()


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs as the positional arguments of the network."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
    """The inputs with floating-point tensors in this dtype; integers (tokens, masks) are not cast."""
    return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in as_tuple(inputs))


def precision(network: nn.Module) -> torch.dtype:
    """The dtype of the network's inputs: that of its tensors outside blocks, else of its blocks, else float64.

    A layer with `weight_dtype` counts with that: the gammas of a norm-only layer may have a higher precision.
    """
    blocks = (module for module in network.modules() if getattr(module, "keeps_precision", False))
    inner = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in network.modules() if id(module) not in inner]
    dtypes = itertools.chain(
        (getattr(module, "weight_dtype", p.dtype) for module in others for p in module.parameters(recurse=False)),
        (b.dtype for module in others for b in module.buffers(recurse=False)),
        (p.dtype for p in network.parameters()),
    )
    return next((d for d in dtypes if isinstance(d, torch.dtype) and d.is_floating_point), torch.float64)


def copy_network(network: nn.Module) -> nn.Module:
    """A deep copy of the network."""
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ConversionError(
            f"the network needs to be copied; copy.deepcopy failed with: {first_line(error)}. Create a new one and "
            "load its weights (remove weight_norm hooks first)."
        ) from error


@torch.no_grad()
def run(network: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """The output of the network for these inputs."""
    try:
        with without_compiling():
            return network(*inputs)
    except OnlynormError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs)
        cure = "Pass inputs that forward accepts, and remove casts to a fixed dtype or device from it."
        # Floating-point inputs are cast to the precision of the network.
        given = [x for x in inputs if not x.is_floating_point() or "'indices'" in str(error)]
        raise ConversionError(
            f"the network needs inputs that it accepts; got {shapes}, and it failed with: {first_line(error)}. "
            f"{input_cure(network, given, error, otherwise=cure)}"
        ) from error


def input_cure(network: nn.Module, inputs: Any, error: BaseException, *, otherwise: str) -> str:
    """The cure for inputs on which the network failed: their dtype if the error is about dtypes, else `otherwise`."""
    text = str(error)
    tensors = [x for x in (inputs if isinstance(inputs, list | tuple) else [inputs]) if isinstance(x, Tensor)]
    if "'indices'" in text and any(x.dtype not in (torch.int64, torch.int32) for x in tensors):
        return "Pass the indices of an embedding as int64, with inputs.long()."
    dtype = precision(network)
    if _ABOUT_DTYPES.search(text) and any(x.dtype != dtype for x in tensors):
        return f"Pass inputs of the dtype of the model, with inputs.to({dtype})."
    return otherwise


def outputs_of(returned: object) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, of any dtype."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, list | tuple):
        return [tensor for item in returned for tensor in outputs_of(item)]
    return []


def relative_difference(actual: list[Tensor], expected: list[Tensor], *, scale: list[Tensor] | None = None) -> float:
    """|actual - expected| / |expected| over all tensors; relative to `scale` (or absolute) if expected is zero."""
    error = _norm([a.double() - b.double() for a, b in zip(actual, expected, strict=True)])
    return error / (_norm(expected) or _norm(scale or []) or 1.0)


def _norm(tensors: list[Tensor]) -> float:
    sizes = [torch.linalg.vector_norm(tensor.double()) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(sizes))) if sizes else 0.0


HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""Attributes in which torch stores forward and backward hooks; state dict hooks are not included."""
SIZES = ("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "dilation")
"""Attributes of a layer that code around it reads, as in x.view(-1, self.head.in_features)."""


def swap(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replaces the module at this place and returns the network; returns the module if the place is ""."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    owner = network.get_submodule(parent)
    setattr(owner, child, module)
    if child == "_orig_mod":  # the wrapper of torch.compile caches the call of its module
        owner._initialize()  # type: ignore[operator]
    return network


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Shares the hook tables of `old` with `new`, so that handles still remove their hooks."""
    for name in HOOKS:
        setattr(new, name, getattr(old, name))


def carry_sizes(old: nn.Module, new: nn.Module) -> None:
    """Copies size attributes such as `in_features` from `old` to `new`."""
    for name in SIZES:
        if name in vars(old):
            vars(new)[name] = vars(old)[name]


def replace_layer(network: nn.Module, names: Iterable[str], new: nn.Module) -> nn.Module:
    """The network with `new` at these places of one layer, whose hooks and sizes go over to it."""
    for number, name in enumerate(names):
        if number == 0:
            old = network.get_submodule(name)
            carry_hooks(old, new)
            carry_sizes(old, new)
        network = swap(network, name, new)
    return network


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks, which may change its inputs or outputs."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def places_of(network: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """All modules of the network with their places, in the order of the first place."""
    places: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        places[module] = (*places.get(module, ()), name)
    return places


def replace_module(model: nn.Module, old: nn.Module, *, new: nn.Module) -> None:
    """Replaces `old` by `new` at all its places, in the same mode."""
    new.train(old.training)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old and parent is not new:
                setattr(parent, name, new)


def need_model(what: str, model: Any, *, is_empty_allowed: bool = True) -> nn.Module:
    """`model` as an `nn.Module` whose parameters have values; for a result object, its `network`.

    `what` names the caller in errors. Raises for lazy layers and parameters on the meta device, and for models without
    parameters unless `is_empty_allowed`.

    Examples:
        >>> from onlynorm.models import mlp
        >>> from onlynorm.modules import need_model
        >>> model = mlp((8, 4))
        >>> need_model("my_function", model) is model
        True
    """
    if not isinstance(model, nn.Module):
        inner = None if isinstance(model, type) else getattr(model, "network", None)
        if not isinstance(inner, nn.Module):
            raise ConversionError(
                f"{what} needs a model, a torch.nn.Module; got {shown(model)}. Pass the network itself."
            )
        model = inner
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(x) for x in tensors):
        raise ConversionError(
            f"{what} needs initialized weights; got a lazy layer in {type(model).__name__}. Run one batch through the "
            "model first."
        )
    if any(x.is_meta for x in tensors):
        raise ConversionError(
            f"{what} needs a model whose weights have values; got a {type(model).__name__} on the meta device. Create "
            "it on another device."
        )
    if not tensors and not is_empty_allowed:
        raise ConversionError(f"{what} needs a model with parameters; got a {type(model).__name__} without any.")
    return model


def need_open(what: str, network: nn.Module) -> None:
    """Raises for a network made by torch.jit, whose layers cannot be replaced; `what` names the caller in errors."""
    if isinstance(network, torch.jit.ScriptModule):
        raise ConversionError(
            f"{what} needs layers that Python calls; got a traced or scripted {type(network).__name__}. Pass the model "
            "that it was made from."
        )


def need_batch(what: str, network: nn.Module, inputs: Inputs) -> None:
    """Raises unless the inputs are non-empty, real, finite tensors on the device of the network."""
    given = as_tuple(inputs)
    if not given or not all(isinstance(x, Tensor) for x in given):
        counts = Counter(type(x).__name__ for x in given)
        kinds = ", ".join(f"{n:,} x {kind}" if n > 1 else kind for kind, n in counts.items()) or "nothing"
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got {kinds}. Pass tensors, samples first.")
    devices = {x.device for x in (*network.parameters(), *network.buffers())}
    for x in given:
        if devices and x.device not in devices:
            raise ValueRangeError(
                f"{what} needs inputs on the network's device, {', '.join(map(str, devices))}; got {x.device}. Call "
                "inputs.to(device)."
            )
        if x.is_complex():
            raise ValueRangeError(f"{what} needs real inputs; got {x.dtype}. Pass real and imaginary parts separately.")
        if not x.numel() or not bool(torch.isfinite(x).all()):
            raise ValueRangeError(
                f"{what} needs a batch of finite inputs; got shape {tuple(x.shape)}, empty or with NaN or infinity. "
                "Pass a few dozen real samples."
            )


def need_evaluation(what: str, network: nn.Module) -> None:
    """Raises if a batch norm or dropout of the network is in training mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in network.named_modules():
        if isinstance(module, kinds) and module.training:
            raise ValueRangeError(
                f"{what} needs a target in evaluation mode; got {type(module).__name__} in training mode at {name!r}, "
                "whose output depends on the other samples or is random. Call network.eval() first."
            )
