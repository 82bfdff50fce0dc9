"""What surrounds a swapped layer stays as it was: its hooks, its readers, wrappers around the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rebuilding import X, net, reconstruct_with, with_norm
from tensors import normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError
from onlynorm.frozen.form import find_blocks
from onlynorm.modules.fold import find_pairs, fold_network

TOLERANCE = 1e-9
"""Ten times the residual that the solver aims at."""


def double(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2.0 * output


def hooked() -> nn.Sequential:
    """A network whose first layer has hooks of every kind on its calls."""
    network = net(6, 5, 4)
    network[0].register_forward_pre_hook(lambda module, args: (5.0 * args[0] - 1.0,))
    network[0].register_forward_pre_hook(lambda module, args, named: ((args[0].sin(),), named), with_kwargs=True)
    network[0].register_forward_hook(double)
    network[0].register_forward_hook(lambda module, args, named, output: output + args[0][:, :5], with_kwargs=True)
    network[0].register_forward_hook(lambda module, args, output: output.abs(), always_call=True)
    return network


@pytest.mark.parametrize("construction", ["wide", "low_rank", "residual", "deep", "multilayer"])
def test_hooks_go_over_to_the_block_and_back(construction: str, tmp_path: Path) -> None:
    network, plain = hooked(), net(6, 5, 4)
    assert on.verify(network, plain, X).relative_error > 0.1
    result = reconstruct_with(network, X, activation=nn.ReLU(), construction=construction)
    assert on.verify(network, result, X).is_same(TOLERANCE)
    assert on.verify(network, result, X).outside == 0.0  # calibrated on what the pre-hooks return
    assert on.verify(network, on.collapse(result), X).is_same(TOLERANCE)
    on.save(result, tmp_path / "net")
    assert on.verify(network, on.load(tmp_path / "net", like=hooked()), X).is_same(TOLERANCE)
    assert on.verify(network, hooked(), X).max_error == 0.0


def test_a_file_remembers_that_there_were_hooks(tmp_path: Path) -> None:
    on.save(on.reconstruct(hooked(), X), tmp_path / "net")
    with pytest.raises(FormatError, match=r"hooks.* at '0' are \[0, 0\] in the network and \[2, 3\] in the file"):
        on.load(tmp_path / "net", like=net(6, 5, 4))
    on.save(on.reconstruct(net(6, 5, 4), X), tmp_path / "plain")
    with pytest.raises(FormatError, match=r"hooks.* at '0' are \[2, 3\] in the network and \[0, 0\] in the file"):
        on.load(tmp_path / "plain", like=hooked())


def test_a_handle_still_removes_its_hook_after_a_rebuild_in_place() -> None:
    network = net(6, 5, 4)
    wanted = network(X)
    handle = network[0].register_forward_hook(double)
    on.reconstruct(network, X, in_place=True)
    assert not isinstance(network[0], nn.Linear)
    assert not torch.allclose(network(X), wanted, rtol=0.01)
    handle.remove()
    torch.testing.assert_close(network(X), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_backward_hooks_go_over() -> None:
    network, seen = net(6, 5, 4), []
    network[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    rebuilt = on.reconstruct(network, X).network
    rebuilt(X.requires_grad_()).sum().backward()
    X.requires_grad_(False)
    assert [one.shape for one in seen] == [(30, 4)]
    assert bool((seen[0] == 1.0).all())


def test_norms_with_hooks_are_not_folded() -> None:
    for place in (0, 1):
        network = with_norm()
        network[place].register_forward_hook(double)
        assert fold_network(network, X).names == ()
        assert "hook" in find_pairs(network, (X,))[1]["1"]
        result = on.reconstruct(network, X, fold_norms=True)
        assert result.folded == ()
        assert on.verify(network, result, X).is_same(TOLERANCE)
    network = with_norm()
    network[0].register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    result = on.reconstruct(network, X, fold_norms=True, in_place=False)
    assert result.folded == ("1",)
    assert on.verify(network, result, X).is_same(TOLERANCE)


class Tied(nn.Module):
    """An autoencoder whose decoder reads the weight of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(self.encode(x))) @ self.encode.weight


def test_a_layer_whose_weight_is_read_stays_as_it_is() -> None:
    network = Tied().double().eval()
    result = on.reconstruct(network, X, on.Wide(activation=nn.ReLU()))
    assert [layer.name for layer in result.layers] == ["middle"]
    assert [str(item) for item in result.left] == [
        "encode (Linear): its weight is read directly, by a hook or by another module"
    ]
    assert on.verify(network, result, X).is_same(TOLERANCE)
    assert type(network.encode) is type(result.network.get_submodule("encode")) is nn.Linear
    with pytest.raises(ConversionError, match=r"strict.*1 other modules with weights: encode \(Linear\)"):
        on.reconstruct(network, X, strict=True)


class ReadsSizes(nn.Module):
    """A network that asks its layers for their sizes, as many do before they flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3, stride=2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-1] - self.conv.kernel_size[0]) // self.conv.stride[0] + 1
        made = self.conv(x).reshape(-1, self.conv.out_channels * size**2)
        return self.head(made.reshape(-1, self.head.in_features)) / self.head.out_features


@pytest.mark.parametrize("construction", ["wide", "low_rank", "residual", "deep", "multilayer"])
def test_sizes_of_a_layer_can_be_read_from_its_block(construction: str, tmp_path: Path) -> None:
    network, inputs = ReadsSizes().double().eval(), normal(30, 2, 5, 5)
    result = reconstruct_with(network, inputs, construction=construction, activation=nn.ReLU())
    assert on.verify(network, result, inputs).is_same(TOLERANCE)
    on.save(result, tmp_path / "net")
    assert on.verify(result, on.load(tmp_path / "net", like=ReadsSizes().double()), inputs).max_error == 0.0
    assert on.verify(network, on.collapse(result), inputs).is_same(TOLERANCE)


def test_a_layer_whose_hook_reads_its_weight_stays_as_it_is() -> None:
    network = net(6, 5, 4)
    network[0].register_forward_hook(lambda module, args, output: output / module.weight.norm())
    result = on.reconstruct(network, X)
    assert [item.name for item in result.left] == ["0"]
    assert on.verify(network, result, X).is_same(TOLERANCE)


def test_a_folded_norm_is_not_lost_where_its_layer_stays_as_it_is() -> None:
    for in_place in (False, True):
        network = with_norm()
        network[0].register_forward_pre_hook(lambda module, args: (args[0] / module.weight.norm(),))
        wanted = network(X)
        result = on.reconstruct(network, X, fold_norms=True, in_place=in_place)
        assert (result.folded, [item.name for item in result.left]) == ((), ["0"])
        torch.testing.assert_close(result.network(X), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def replaced(layer: nn.Linear) -> None:
    forward = layer.forward
    layer.forward = lambda x: 3.0 * forward(x)  # type: ignore[method-assign]


def pruned(layer: nn.Linear) -> None:
    with torch.no_grad():
        prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "its forward is overridden"),
        (pruned, "its weight is computed by a hook"),
        (parametrizations.weight_norm, "parametrized; remove_parametrizations makes it ordinary"),
    ],
)
def test_layers_that_are_more_than_their_weight_stay_as_they_are(change: Any, reason: str) -> None:
    network = net(6, 5, 4)
    change(network[0])
    network.eval()
    result = on.reconstruct(network, X)
    assert [item.name for item in result.left] == ["0"]
    assert result.left[0].reason.startswith(reason)
    assert on.verify(network, result, X).is_same(TOLERANCE)


def test_a_scripted_part_stays_as_it_is() -> None:
    with pytest.warns(DeprecationWarning, match=r"torch.jit"):
        scripted = torch.jit.script(net(5, 5).requires_grad_(False))
    network = nn.Sequential(nn.Linear(6, 5).double(), scripted).eval()
    result = on.reconstruct(network, X)
    assert [item.reason for item in result.left] == ["compiled by torch.jit"]
    assert on.verify(network, result, X).is_same(TOLERANCE)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda inner: torch.compile(inner, backend="eager")])
def test_wrapped_networks_are_unwrapped(wrap: Any, tmp_path: Path) -> None:
    network = net(6, 5, 4)
    result = on.reconstruct(wrap(network), X)
    assert [layer.name for layer in result.layers] == ["0", "2"]
    assert on.verify(wrap(network), wrap(result.network), X).is_same(TOLERANCE)
    on.save(wrap(result.network), tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=wrap(net(6, 5, 4)))
    assert on.verify(result, loaded, X).max_error == 0.0
    assert on.verify(network, on.collapse(wrap(loaded)), X).is_same(TOLERANCE)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_layer_is_rebuilt_inside_its_wrapper(in_place: bool, tmp_path: Path) -> None:
    def compiled() -> nn.Sequential:
        network = net(6, 5, 4).float()
        network[2] = torch.compile(network[2], backend="eager")
        return network

    network, inputs = compiled(), X.float()
    result = on.reconstruct(network, inputs, on.Wide(features="id_cond"), in_place=in_place)
    assert result.warnings == ()
    assert on.verify(compiled(), result, inputs).is_same(1e-5)
    on.save(result, tmp_path / "net")
    assert on.verify(result, on.load(tmp_path / "net", like=compiled()), inputs).max_error == 0.0
    assert on.verify(compiled(), on.collapse(result), inputs).is_same(1e-5)
    with torch.no_grad():
        for block in find_blocks(result.network).values():
            block.first_norm.weight.zero_()
    assert on.verify(compiled(), result, inputs).relative_error > 0.1  # it is the block that is called


def test_a_compiled_layer_becomes_norm_only_inside_its_wrapper() -> None:
    network = net(6, 5, 4)
    network[2] = torch.compile(network[2], backend="eager")
    converted = on.to_norm_only(network)
    assert on.verify(network, converted, X).is_same(TOLERANCE)
    with torch.no_grad():
        converted.get_submodule("2._orig_mod").gamma.zero_()
    assert on.verify(network, converted, X).relative_error > 0.1  # it is the gammas that are applied


def test_a_layer_at_two_places_keeps_its_hooks_at_both() -> None:
    layer = nn.Linear(6, 6).double()
    layer.register_forward_hook(double)
    network = nn.Sequential(layer, nn.Tanh(), layer).eval()
    result = on.reconstruct(network, X)
    assert result.network[0] is result.network[2]
    assert on.verify(network, result, X).is_same(TOLERANCE)


def test_inputs_changed_in_place_after_a_layer_do_not_reach_its_calibration() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = x.clone()
            made = self.linear(h)
            h.mul_(1e-3)
            return made + h

    network = InPlace().double().eval()
    result = on.reconstruct(network, normal(80, 6), on.Wide(activation=nn.ReLU()), ranges=on.Ranges(margin=0.1))
    check = on.verify(network, result, normal(80, 6))
    assert check.outside == 0.0
    assert check.is_same(TOLERANCE)
