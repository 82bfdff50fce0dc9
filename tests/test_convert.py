"""Whole networks: error budgets, folded norms, runs that are killed and resumed, and every kind of bad input."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm.errors import (
    ConversionError,
    FormatError,
    InsufficientFeaturesError,
    ShapeError,
    StorageError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.models import mlp
from onlynorm.reconstruction import Reconstruction, collapse, reconstruct, verify
from onlynorm.reconstruction.blocks import NormOnlyBlock
from onlynorm.reconstruction.folding import FoldedNorm
from onlynorm.reconstruction.ranges import Box

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def net(*widths: int) -> nn.Sequential:
    return mlp(widths or (6, 5, 4)).double().eval()


X = batch(30, 6)


def is_untouched(network: nn.Module, before: dict[str, Tensor]) -> bool:
    now = network.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


# ------------------------------------------------------------------------------- error budgets


@pytest.mark.parametrize("error", [1e-4, 1e-8, 1e-11])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Softsign()], ids=lambda a: type(a).__name__)
def test_an_error_that_is_asked_for_is_reached(error: float, activation: nn.Module) -> None:
    network = net(6, 5, 5, 4)
    result = reconstruct(network, inputs=X, error=error, activation=activation)
    assert verify(network, result.network, X).is_same(error)
    assert result.error is not None
    assert result.error <= error
    assert all(layer.error <= error / 3 for layer in result.layers)
    assert result.recipe.window == result.recipe.tolerance == error / 12
    assert f"relative output error {result.error:.1e}" in str(result)


def test_a_looser_error_takes_wider_windows() -> None:
    loose, tight = (reconstruct(net(), inputs=X, error=e, activation=nn.Tanh()) for e in (1e-4, 1e-8))
    assert all(a.error > 100 * b.error for a, b in zip(loose.layers, tight.layers, strict=True))


def test_errors_of_layers_are_measured_without_a_budget_too() -> None:
    result = reconstruct(net(), inputs=X, excess=0.5)
    layer, block = net()[0], result.network[0]
    wanted = layer(X[:4]).detach()
    rest = block(X[:4]).detach() - wanted
    assert result.layers[0].error == pytest.approx(float(rest.norm() / wanted.norm()), rel=1e-9)
    assert result.layers[0].error > 0.01
    assert f"output error {result.layers[0].error:.1e}" in str(result)
    assert result.error is None


def test_a_missed_share_names_the_layer() -> None:
    with pytest.raises(ToleranceError, match=r"layer '0' needs an output error of at most 5.0e-13.*measured.*window"):
        reconstruct(net(), inputs=X, error=1e-12, activation=nn.Sigmoid())


def test_a_missed_residual_names_the_layer() -> None:
    with pytest.raises(InsufficientFeaturesError, match=r"layer '0': "):
        reconstruct(net(), inputs=X, error=1e-8, excess=0.5)
    with pytest.raises(ValueRangeError, match=r"layer '0': .*density"):
        reconstruct(net(), inputs=X, density=0.5)


class Difference(nn.Module):
    """Two layers that nearly cancel: what they leave is a millionth of what either makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)
        self.two.load_state_dict({name: value * (1 + 1e-6) for name, value in self.one.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.two(x)


def test_layers_that_amplify_errors_are_noticed() -> None:
    with pytest.raises(ToleranceError, match=r"network needs a relative output error of at most 1.0e-08.*amplify"):
        reconstruct(Difference().double().eval(), inputs=X, error=1e-8, activation=nn.Tanh())


@pytest.mark.parametrize("error", [0.0, -1.0, 1.0, float("nan")])
def test_an_error_is_a_positive_number(error: float) -> None:
    with pytest.raises(ValueRangeError, match=r"error needs a number in \(0, 1\)"):
        reconstruct(net(), inputs=X, error=error)


def test_a_tolerance_and_a_window_of_ones_own_win_over_the_share() -> None:
    recipe = reconstruct(net(), inputs=X, error=1e-6, tolerance=1e-9, window=1e-8).recipe
    assert (recipe.tolerance, recipe.window) == (1e-9, 1e-8)


# ------------------------------------------------------------------------------- networks of all kinds


class Branches(nn.Module):
    """Two inputs, one of them tokens; a layer called with and without leading axes, one on images of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.linear = nn.Linear(6, 3)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        h = self.linear(self.embed(tokens)).sum(1) + self.linear(self.embed(tokens[:, 0]))
        pooled = nn.functional.avg_pool2d(images, 2)
        seen = self.conv(images).mean((2, 3)) + self.conv(pooled).amax((2, 3))
        return torch.cat([h, seen * torch.exp(self.mask)], 1)


def test_several_inputs_tokens_and_calls_of_several_sizes_are_taken() -> None:
    network = Branches().double().eval()
    tokens = torch.arange(24).reshape(8, 3) % 7
    images = batch(8, 1, 6, 6)
    result = reconstruct(network, inputs=(tokens, images), activation=nn.ReLU(), error=1e-8)
    check = verify(network, result.network, (tokens, images))
    assert check.is_same(1e-8)
    assert check.outside == 0.0
    assert [item.name for item in result.left] == ["embed"]


def test_tokens_alone_are_not_cast() -> None:
    network = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)).eval()
    tokens = torch.arange(12).reshape(4, 3) % 7
    result = reconstruct(network, inputs=tokens)
    assert verify(network, result.network, tokens).relative_error <= 1e-4  # float32
    assert next(result.network.parameters()).dtype == torch.float32


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv1d(6, 4, 3)], ids=["Linear", "Conv1d"])
def test_a_single_layer_is_a_network(layer: nn.Module) -> None:
    layer = layer.double().eval()
    x = batch(30, 6) if isinstance(layer, nn.Linear) else batch(30, 6, 5)
    result = reconstruct(layer, inputs=x, activation=nn.ReLU())
    assert isinstance(result.network, NormOnlyBlock)
    assert verify(layer, result.network, x).relative_error <= EXACT
    assert type(collapse(result.network)) is type(layer)
    with pytest.raises(ConversionError, match=r"in_place needs a network around its layers; got a single"):
        reconstruct(layer, inputs=x, in_place=True)


def test_a_batch_of_one_sample_works() -> None:
    assert verify(net(), reconstruct(net(), inputs=X[:1], activation=nn.ReLU()).network, X[:1]).is_same(EXACT)


def test_the_activation_of_the_caller_is_left_alone() -> None:
    activation = nn.PReLU()
    result = reconstruct(net(), inputs=X, activation=activation)
    assert activation.weight.dtype == torch.float32
    assert verify(net(), result.network, X).is_same(EXACT)


def test_collapse_gives_tied_layers_back_as_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.inner = nn.Sequential(self.one)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.one(x)))

    network = Twice().double().eval()
    result = reconstruct(network, inputs=X, activation=nn.ReLU())
    assert len(result.layers) == 1
    assert result.network.one is result.network.inner[0]
    plain = collapse(result.network)
    assert isinstance(plain.one, nn.Linear)
    assert plain.one is plain.inner[0]
    assert verify(network, plain, X).is_same(EXACT)


# ------------------------------------------------------------------------------- folding, in place


def with_norm() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        network(X)
    return network.eval()


def test_norms_may_be_folded_first() -> None:
    network = with_norm()
    result = reconstruct(network, inputs=X, fold_norms=True, activation=nn.ReLU())
    assert result.folded == ("1",)
    assert isinstance(result.network[1], FoldedNorm)
    assert verify(network, result.network, X).is_same(EXACT)
    assert "folded: 1" in str(result)
    assert isinstance(network[1], nn.BatchNorm1d)
    assert reconstruct(network, inputs=X).folded == ()


def test_in_place_the_target_becomes_the_result() -> None:
    network = with_norm()
    wanted = network(X).detach()
    result = reconstruct(network, inputs=X, fold_norms=True, in_place=True)
    assert result.network is network
    assert isinstance(network[0], NormOnlyBlock)
    assert isinstance(network[1], FoldedNorm)
    assert torch.allclose(network(X), wanted, rtol=EXACT, atol=EXACT)


def test_a_failure_leaves_the_target_alone_even_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    network = with_norm()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ToleranceError, match=r"layer '0'"):
        reconstruct(network, inputs=X, error=1e-13, activation=nn.Sigmoid(), in_place=True, fold_norms=True)
    counted(monkeypatch, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(network, inputs=X, in_place=True, fold_norms=True)
    assert is_untouched(network, before)


# ------------------------------------------------------------------------------- killed and resumed


def test_a_run_that_was_stopped_resumes_behind_the_last_finished_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = net(6, 5, 5, 4)
    whole = reconstruct(network, inputs=X, activation=nn.ReLU())
    folder = tmp_path / "net.partial"
    built = counted(monkeypatch, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(network, inputs=X, activation=nn.ReLU(), partial=folder)
    assert built == ["0", "2", "4"]
    assert sorted(path.name for path in folder.iterdir()) == ["layer-0000.safetensors", "layer-0001.safetensors"]
    built = counted(monkeypatch)
    told: list[str] = []
    resumed = reconstruct(
        network, inputs=X, activation=nn.ReLU(), partial=folder, step=lambda name, n, residual: told.append(name)
    )
    assert built == ["4"]
    assert told[:2] == ["0", "2"]
    assert is_untouched(resumed.network, whole.network.state_dict())
    assert torch.equal(resumed.network(X), whole.network(X))
    assert [layer.error for layer in resumed.layers] == [layer.error for layer in whole.layers]
    assert resumed.partial == folder
    built = counted(monkeypatch)
    again = reconstruct(network, inputs=X, activation=nn.ReLU(), partial=folder)
    assert built == []
    assert again.layers == resumed.layers


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The layers that are really built from now on; the last of them is interrupted."""
    from onlynorm.reconstruction import recipe

    monkeypatch.undo()
    real = recipe._CONSTRUCTIONS["wide"]
    built: list[str] = []

    def build(target: Any, *rest: Any) -> Any:
        built.append(target.name)
        if len(built) == stop_at:
            raise KeyboardInterrupt
        return real.build(target, *rest)

    counting = recipe.Construction("wide", build, real.estimate, real.fields)
    monkeypatch.setitem(recipe._CONSTRUCTIONS, "wide", counting)
    return built


KILLED = """
import os, signal, sys, torch
from torch import nn
from onlynorm import reconstruct
from onlynorm.models import mlp

real, calls = os.fsync, []
def fsync(handle):
    calls.append(handle)
    if len(calls) > 2:  # each layer is flushed as a file and in its folder: the second dies with its file half made
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
x = torch.randn((30, 6), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
reconstruct(mlp((6, 5, 4)).double().eval(), inputs=x, activation=nn.ReLU(), partial=sys.argv[1])
"""


def test_a_killed_process_loses_at_most_the_layer_it_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "net.partial"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, timeout=600, check=False)
    assert ran.returncode == -signal.SIGKILL
    kept = sorted(path.name for path in folder.iterdir())
    assert [name for name in kept if not name.startswith(".")] == ["layer-0000.safetensors"]
    assert len(kept) == 2  # and the file that was being written, which no reader takes for a layer
    built = counted(monkeypatch)
    resumed = reconstruct(net(), inputs=X, activation=nn.ReLU(), partial=folder)
    assert built == ["2"]
    assert is_untouched(resumed.network, reconstruct(net(), inputs=X, activation=nn.ReLU()).network.state_dict())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"another seed \(0 then, 1 now\)"),
        ({"features": "he_uniform"}, r"another features \(he_normal then, he_uniform now\)"),
        ({"activation": nn.Tanh()}, r"another activation \("),
        ({"inputs": batch(30, 6, seed=1)}, r"another calibration batch \("),
        ({"fold_norms": True}, r"another fold_norms \(False then, True now\)"),
        ({"error": 1e-6}, r"another error \(None then, 1e-06 now\); tolerance \(None then, .*; window \("),
    ],
)
def test_other_arguments_do_not_mix_with_a_partial_run(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    arguments = {"inputs": X, "activation": nn.ReLU(), "partial": tmp_path / "partial"}
    reconstruct(net(), **arguments)
    with pytest.raises(FormatError, match=rf"resuming needs the arguments.*{says}.*Delete the folder .* to start anew"):
        reconstruct(net(), **{**arguments, **changes})


def test_another_target_does_not_mix_with_a_partial_run(tmp_path: Path) -> None:
    reconstruct(net(), inputs=X, partial=tmp_path)
    other = net()
    with torch.no_grad():
        other[2].bias[0] += 1e-12
    with pytest.raises(FormatError, match=r"got another target network \(.*Delete the folder"):
        reconstruct(other, inputs=X, partial=tmp_path)
    leaky = nn.Sequential(other[0], nn.LeakyReLU(), net()[2])
    with pytest.raises(FormatError, match=r"got another architecture \(.*Delete the folder"):
        reconstruct(leaky, inputs=X, partial=tmp_path)


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    reconstruct(net(), inputs=X, partial=tmp_path)
    piece = tmp_path / "layer-0001.safetensors"
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(data)
    with pytest.raises(FormatError, match=r"whole safetensors file.*layer-0001.*Delete the folder .* to start anew"):
        reconstruct(net(), inputs=X, partial=tmp_path)
    piece.write_bytes((tmp_path / "layer-0000.safetensors").read_bytes())
    with pytest.raises(FormatError, match=r"layer-0001.safetensors needs to hold '2'; it holds '0'"):
        reconstruct(net(), inputs=X, partial=tmp_path)
    with pytest.raises(StorageError, match=r"partial needs the path of a folder"):
        reconstruct(net(), inputs=X, partial=piece)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.float16, r"got torch.float16\. Call network.float\(\)"),
        (torch.bfloat16, r"got torch.bfloat16\. Call network.float\(\)"),
        (torch.complex64, r"got torch.complex64\. Write complex layers as real ones"),
    ],
)
def test_other_precisions_are_refused(dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ConversionError, match=rf"needs a float32 or float64 network; {says}"):
        reconstruct(nn.Sequential(nn.Linear(6, 4, dtype=dtype)), inputs=X)


def test_mixed_missing_and_empty_parameters_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4).double())
    with pytest.raises(ConversionError, match=r"got torch.float32 and torch.float64\. Call network.float"):
        reconstruct(mixed, inputs=X)
    with pytest.raises(ConversionError, match=r"got no parameters\. Pass a network with layers"):
        reconstruct(nn.Sequential(nn.ReLU()), inputs=X)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(ConversionError, match=r"needs weights; got a network on the meta device"):
        reconstruct(empty, inputs=X)


def test_numbers_that_are_not_finite_are_named_by_their_place() -> None:
    for place, tensor in (("0", "weight"), ("0", "bias"), ("1", "running_var"), ("1", "weight")):
        network = with_norm()
        with torch.no_grad():
            getattr(network.get_submodule(place), tensor)[0] = torch.nan
        with pytest.raises(ValueRangeError, match=rf"NaN or infinity in the {tensor} of '{place}'\. Load a checkpoint"):
            reconstruct(network, inputs=X)


def test_a_layer_that_receives_infinity_is_named() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.exp(1e6 * self.first(x)))

    with pytest.raises(ValueRangeError, match=r"'second' receives NaN or infinity on this batch"):
        reconstruct(Overflowing().double().eval(), inputs=X)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(5), nn.Dropout()], ids=["BatchNorm1d", "Dropout"])
def test_training_mode_is_refused_with_what_it_means(module: nn.Module) -> None:
    network = nn.Sequential(nn.Linear(6, 5), module.train()).double()
    name = type(module).__name__
    with pytest.raises(
        ValueRangeError, match=rf"evaluation mode; got {name} in training mode at '1', whose output depends.*eval\(\)"
    ):
        reconstruct(network, inputs=X)


@pytest.mark.parametrize(
    ("inputs", "kind", "says"),
    [
        (X[:0], ValueRangeError, r"calibration needs a batch of finite inputs; got shape \(0, 6\), empty"),
        (X / 0.0, ValueRangeError, r"batch of finite inputs; got shape \(30, 6\).*NaN or infinity"),
        (X.to("meta"), ValueRangeError, r"inputs on the network's device, cpu; got meta\. Call inputs.to"),
        (X.to(torch.complex128), ValueRangeError, r"calibration needs real inputs; got torch.complex128"),
        ((), ShapeError, r"a batch, or a tuple of batches; got nothing"),
        (batch(30, 7), ConversionError, r"take the inputs, \(30, 7\) float64.*failed with: .*shapes cannot be mult"),
        ((X, X), ConversionError, r"take the inputs, \(30, 6\) float64, \(30, 6\) float64.*positional arguments"),
    ],
)
def test_bad_batches_are_refused(inputs: Any, kind: type[Exception], says: str) -> None:
    network = net()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(kind, match=says):
        reconstruct(network, inputs=inputs)
    assert is_untouched(network, before)


def test_a_layer_that_is_not_called_is_refused_before_anything_is_solved() -> None:
    network = net()
    network[0].spare = nn.Linear(2, 2).double()
    with pytest.raises(ConversionError, match=r"'0.spare' was not on this batch\. Remove the unused layer"):
        reconstruct(network, inputs=X)


def test_a_layer_called_by_keyword_is_refused() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    with pytest.raises(ConversionError, match=r"'layer' is called with input\. Call it as layer\(x\)"):
        reconstruct(Keyword().double().eval(), inputs=X)


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    network = net()
    network[0].cached = network[0].weight * 2.0
    with pytest.raises(ConversionError, match=r"needs to be copied, so that it is left alone; copy.deepcopy says"):
        reconstruct(network, inputs=X)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"field of a recipe needs a known name; got 'exces'\. Did you mean"):
        reconstruct(net(), inputs=X, exces=1.5)
    with pytest.raises(UnknownNameError, match=r"features needs a known name; got 'he_norml'"):
        reconstruct(net(), inputs=X, features="he_norml")


def test_a_box_certifies_the_ranges_of_every_input_inside() -> None:
    network = net()
    box = Box(torch.full((6,), -4.0, dtype=torch.float64), torch.full((6,), 4.0, dtype=torch.float64))
    corners = 4.0 * batch(200, 6, seed=1).sign()
    calibrated, certified = (
        verify(network, reconstruct(network, inputs=X, activation=nn.ReLU(), margin=0.0, box=one).network, corners)
        for one in (None, box)
    )
    assert calibrated.outside > 0.5
    assert certified.outside == 0.0
    assert certified.is_same(EXACT)


@pytest.mark.usefixtures("unchecked")
def test_a_bare_function_is_no_activation_of_a_block() -> None:
    with pytest.raises(ValueRangeError, match=r"activation needs a module.*got .*tanh.*Pass torch.nn.Tanh\(\)"):
        reconstruct(net(), inputs=X, activation=torch.tanh)


def test_an_error_needs_outputs_to_compare() -> None:
    class Silent(nn.Sequential):
        def forward(self, x: Tensor) -> None:
            super().forward(x)

    network = Silent(nn.Linear(6, 4)).double().eval()
    assert len(reconstruct(network, inputs=X).layers) == 1
    with pytest.raises(ConversionError, match=r"error needs a network that returns tensors"):
        reconstruct(network, inputs=X, error=1e-8)


def test_boxes_that_do_not_hold_the_batch_are_refused() -> None:
    box = Box(torch.full((6,), -1.0), torch.full((6,), 1.0))
    with pytest.raises(ValueRangeError, match=r"a box that holds the calibration batch; got inputs outside"):
        reconstruct(net(), inputs=X, box=box)
    with pytest.raises(ShapeError, match=r"shape of one sample, \(6,\); got \(5,\) and \(5,\)"):
        reconstruct(net(), inputs=X, box=Box(torch.zeros(5), torch.ones(5)))
    network = Branches().double().eval()
    inputs = (torch.zeros(2, 3, dtype=torch.long), batch(2, 1, 6, 6))
    with pytest.raises(ValueRangeError, match=r"a box needs a network with one input; got 2"):
        reconstruct(network, inputs=inputs, box=box)


def test_a_result_says_what_was_done() -> None:
    result = reconstruct(net(), inputs=X, activation=nn.ReLU())
    assert isinstance(result, Reconstruction)
    assert str(result).startswith("2 layers from he_normal features, seed 0: 144 norm parameters (576 B in float32)\n")
