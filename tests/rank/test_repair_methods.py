"""Each repair by itself: what it sets exactly, what it may not touch, and the watch on the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from diagnosed import INPUTS
from tensors import single_normal
from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.models import cifar_resnet, mlp
from onlynorm.rank.measures import rank_ratio
from onlynorm.rank.repairs.ascent import PAPER_STEP
from onlynorm.rank.repairs.repair import repair
from onlynorm.rank.repairs.rescale import Skip, find_branches
from onlynorm.rank.repairs.visits import find_route
from onlynorm.seeds import seeded

FLOAT = 1e-4
"""Of float32 sums over a few thousand numbers, relative."""


def deep(activation: type[nn.Module] = nn.ReLU, depth: int = 6) -> nn.Sequential:
    return mlp((12, *[16] * depth, 5), activation=activation, seed=1)


def batch(n: int = 32, *shape: int) -> Tensor:
    return single_normal(n, *(shape or (12,))) + 0.5


def linears(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


# ---------------------------------------------------------------------------------------------- new weights


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_mirrored_networks_start_as_linear_maps(activation: type[nn.Module]) -> None:
    model = repair(deep(activation), batch(), method="mirrored").model
    x, y = batch(8), torch.randn(8, 12, generator=seeded(1))
    assert torch.allclose(model(x) - model(y), model(x - y), atol=20 * FLOAT)
    assert torch.allclose(model(3.0 * x), 3.0 * model(x), atol=20 * FLOAT)


def test_mirrored_relu_networks_keep_rank_scale_and_gradient_in_every_layer() -> None:
    result = repair(deep(depth=24), batch(), method="mirrored")
    hidden = result.after.weighted_layers[:-1]
    assert [layer.r for layer in hidden] == pytest.approx([hidden[0].r] * len(hidden), rel=10 * FLOAT)
    assert [layer.scale for layer in hidden] == pytest.approx([1.0] * len(hidden), rel=FLOAT)
    # the halves of a gradient pass where u is positive and where it is negative: equal on the average, not exactly
    assert result.after.gradient_ratio == pytest.approx(1.0, rel=0.25)
    assert "scale 1" in result.remark


def test_the_watch_makes_signals_small_where_the_activation_bends() -> None:
    result = repair(deep(nn.Tanh, depth=30), batch(), method="mirrored")
    assert result.after.weighted_layers[5].scale < 1.0
    assert result.after.weighted_layers[5].scale == pytest.approx(float(result.remark.rpartition(" ")[2]), rel=FLOAT)
    assert abs(math.log(result.after.gradient_ratio)) < math.log(1.25)


def test_mirrored_convolutions_pass_images_on_by_the_middle_of_their_kernels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(),
                          nn.Conv2d(6, 6, 2, stride=2), nn.Flatten(), nn.Linear(54, 4))  # fmt: skip
    made = repair(model, batch(8, 3, 6, 6), method="mirrored").model
    assert isinstance(made, nn.Sequential)
    inner, patches = (made.state_dict()[name] for name in ("2.weight", "4.weight"))
    centre = inner[:, :, 1, 1]
    assert float(inner.abs().sum()) == pytest.approx(float(centre.abs().sum()))
    assert torch.equal(centre[:3], -centre[3:])
    assert torch.equal(centre[:, :4], -centre[:, 4:])
    block = centre[:3, :4]
    assert torch.allclose(block @ block.mT, torch.eye(3) * block[0].square().sum(), atol=FLOAT)
    assert float((patches != 0).float().mean()) == 1.0  # windows that do not overlap look at every pixel


def test_equal_halves_do_not_cancel() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(12, 8), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            out: Tensor = self.last(torch.relu(self.second(torch.cat([h, h], 1))))
            return out

    result = repair(Twice(), batch(), method="mirrored")
    assert result.after.weighted_layers[1].scale == pytest.approx(1.0, rel=FLOAT)


def test_near_identity_layers_are_near_the_identity_and_others_orthogonal() -> None:
    first, *inner, last = linears(repair(deep(), batch(), method="near_identity").model)
    for layer in inner:
        # noise of entries 0.1 / sqrt(16) has spectral norm about 0.2; 0.5 is far in its tail
        assert torch.linalg.matrix_norm(layer.weight - torch.eye(16), 2).item() < 0.5
        assert not bool(layer.bias.any())
    for layer in (first, last):
        W = layer.weight.detach()
        gram = W.mT @ W if W.shape[0] > W.shape[1] else W @ W.mT
        assert torch.allclose(gram, gram[0, 0] * torch.eye(len(gram)), atol=FLOAT)


@pytest.mark.parametrize("method", ["lsuv", "orthogonal"])
def test_orthogonal_weights_are_orthogonal_and_lsuv_sets_every_scale(method: str) -> None:
    result = repair(deep(), batch(), method=method)
    layers = linears(result.model)
    for layer in layers[1:-1]:
        gram = (layer.weight @ layer.weight.mT).detach()
        assert torch.allclose(gram, gram[0, 0] * torch.eye(16), atol=FLOAT)
    scales = [layer.scale for layer in result.after.weighted_layers]
    if method == "lsuv":
        assert scales == pytest.approx([1.0] * len(scales), rel=FLOAT)
    else:
        assert scales[:2] == pytest.approx([1.0, 1.0], rel=FLOAT)
        gains = [float(layer.weight.detach().norm()) for layer in layers[1:-1]]
        assert gains == pytest.approx([gains[0]] * len(gains), rel=FLOAT)


# ---------------------------------------------------------------------------------------------- ascent


def test_a_step_of_the_papers_ascent_moves_a_weight_by_its_share_along_the_gradient_of_r() -> None:
    model = deep(depth=1)
    inputs = batch(2)  # half of two samples would be one: both are taken
    made = repair(model, inputs, method="paper", n_steps=1).model
    old, new = linears(model)[0], linears(made)[0]
    weight = old.weight.detach().clone().requires_grad_(True)
    rank_ratio((inputs @ weight.mT + old.bias).mT).backward()
    assert weight.grad is not None
    step = PAPER_STEP * weight.detach().norm() * weight.grad / weight.grad.norm()
    assert torch.allclose(new.weight, weight.detach() + step, atol=FLOAT)
    assert torch.equal(new.bias, old.bias)
    assert torch.equal(linears(made)[1].weight, linears(model)[1].weight)


def test_more_steps_give_more_rank() -> None:
    few, many = (repair(deep(), batch(), method="paper", n_steps=n).after.weighted_layers for n in (2, 20))
    assert all(more.r > less.r for less, more in zip(few[:-1], many[:-1], strict=True))


def test_the_ascent_stops_at_its_target_with_unit_scale_and_no_bias() -> None:
    result = repair(deep(), batch(), method="rank", target_rank=2.5, max_ratio=1e9)
    assert "ascent to 100 %" in result.remark
    before, after = result.before.weighted_layers[:-1], result.after.weighted_layers[:-1]
    assert min(layer.r for layer in before) < 1.5
    assert min(layer.r for layer in after[:2]) > 4.0  # what passes the target already is not pulled down
    # a step of 0.5 % of a weight changes r by a few percent, so that no target is overshot by more
    assert all(2.5 <= layer.r < 2.5 * 1.1 for layer in after[2:])
    assert [layer.scale for layer in result.after.weighted_layers] == pytest.approx(
        [1.0] * len(result.after.weighted_layers), rel=FLOAT
    )
    assert not any(bool(layer.bias.any()) for layer in linears(result.model))


def test_the_watch_asks_for_less_rank_until_gradients_are_within_bounds() -> None:
    free = repair(deep(depth=12), batch(), method="rank", target_rank=6.0, max_ratio=1e9)
    bound = free.after.gradient_ratio / 2.0
    watched = repair(deep(depth=12), batch(), method="rank", target_rank=6.0, max_ratio=bound)
    assert watched.after.gradient_ratio <= bound
    assert watched.after.weighted_layers[-2].r < free.after.weighted_layers[-2].r
    assert "ascent to 100 %" not in watched.remark


def test_an_ascent_that_no_rank_allows_says_so() -> None:
    result = repair(deep(depth=12), batch(), method="rank", target_rank=6.0, max_ratio=1e-9)
    assert result.remark.startswith("zero biases and unit scales without any ascent")
    assert "0 %" not in result.remark


def test_the_ascent_of_all_layers_at_once_raises_ranks_and_takes_back_the_step_too_far() -> None:
    none, some = (repair(deep(), batch(), method="whole", n_steps=n, max_ratio=1e9) for n in (0, 8))
    assert "8 ascent steps" in some.remark
    assert sum(math.log(layer.r) for layer in some.after.weighted_layers[:-1]) > sum(
        math.log(layer.r) for layer in none.after.weighted_layers[:-1]
    )
    assert [layer.scale for layer in some.after.weighted_layers] == pytest.approx(
        [1.0] * len(some.after.weighted_layers), rel=FLOAT
    )
    bound = (none.after.gradient_ratio * some.after.gradient_ratio) ** 0.5
    assert none.after.gradient_ratio < bound < some.after.gradient_ratio
    watched = repair(deep(), batch(), method="whole", n_steps=8, max_ratio=bound)
    assert watched.after.gradient_ratio <= bound
    assert "8 ascent steps" not in watched.remark


# ---------------------------------------------------------------------------------------------- what is put in


def test_batch_norms_are_inserted_after_hidden_layers_that_have_none() -> None:
    model = deep()
    model.insert(1, nn.BatchNorm1d(16))  # type: ignore[no-untyped-call]
    result = repair(model, batch(), method="batch_norm")
    assert result.remark == "5 batch norms inserted"
    kinds = [type(module).__name__ for module in result.model.modules()]
    assert kinds.count("BatchNorm1d") == 6
    outputs = []
    for module in result.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    result.model.train()(batch())
    for output in outputs:
        assert torch.allclose(output.mean(0), torch.zeros(16), atol=10 * FLOAT)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(linears(model), linears(result.model), strict=True))


def test_batch_norms_after_tokens_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"outputs \(samples, channels\); '0' gives \(4, 6, 16\)"):
        repair(deep(), batch(4, 6, 12), method="batch_norm")


def test_a_network_without_skips_gets_them_with_small_branches() -> None:
    result = repair(deep(), batch(), method="residual")
    skips = [module for module in result.model.modules() if isinstance(module, Skip)]
    assert [skip.scale for skip in skips] == [pytest.approx(5**-0.5)] * 5
    x = batch(4, 16)
    assert torch.allclose(skips[0](x), x + 5**-0.5 * skips[0].layer(x))
    assert "scale=0.4472" in repr(skips[0])


def test_the_branches_of_a_residual_network_are_found_and_scaled() -> None:
    model, images = cifar_resnet(14, width=4), batch(4, 3, 16, 16)
    found = find_branches(model, (images,))
    # two blocks in each of three stages; those that halve the images change the shape
    names = [name for name, module in model.named_modules() if module in found]
    assert len(names) == 4
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = repair(model, images, method="residual")
    assert result.remark == "4 residual branches scaled"
    for name, tensor in result.model.state_dict().items():
        share = 0.5 if name.rpartition(".")[0] in names and name.endswith(("weight", "bias")) else 1.0
        assert torch.equal(tensor, before[name] * share if share != 1.0 else before[name])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_network_that_has_no_place_for_skips_is_refused() -> None:
    with pytest.raises(ConversionError, match="needs residual blocks, or layers that keep the shape"):
        repair(mlp((12, 8, 6, 5)), batch(), method="residual")


# ---------------------------------------------------------------------------------------------- visiting


def test_a_visit_shows_every_layer_what_it_receives_after_the_changes_before_it() -> None:
    model, inputs = deep(), batch()
    route = find_route(model, (inputs,))
    received: list[Tensor] = []

    def halve(place: object, x: Tensor) -> None:
        received.append(x)
        route.layers[len(received) - 1].module.weight.mul_(0.5)

    route.visit(halve)
    signal = inputs
    for layer in model:
        if isinstance(layer, nn.Linear):
            assert torch.equal(received.pop(0), signal)
        signal = layer(signal).detach()
    assert received == []


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_inputs_whose_squares_leave_float64_are_scaled_like_others(size: float) -> None:
    model = mlp((64, *[32] * 6, 10)).double()
    for method in ("mirrored", "lsuv", "orthogonal"):
        result = repair(model, INPUTS.double() * size, method=method)
        usual = repair(model, INPUTS.double(), method=method)
        for one, other in zip(result.after.weighted_layers[1:], usual.after.weighted_layers[1:], strict=True):
            assert one.scale == pytest.approx(other.scale, rel=1e-6)
            assert one.r == pytest.approx(other.r, rel=1e-6)
