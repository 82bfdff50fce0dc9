"""Only norms are trained, statistics do what was asked for, and everything can be undone."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_norms import (
    FrozenBatchNorm2d,
    GemmaRMSNorm,
    GlobalResponseNorm,
    LayerNorm1P,
    LlamaRMSNorm,
    OwnBatchNorm,
    UnitNorm,
)
from tensors import single_normal
from torch import Tensor, nn

from onlynorm.errors import ConversionError, UnknownNameError, ValueRangeError
from onlynorm.models import CifarResNet
from onlynorm.modules import find_norms
from onlynorm.tuning import init_gamma, only_norms


class Net(nn.Module):
    """A convolution, a batch norm, dropout, a layer norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.ln = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(self.drop(torch.relu(self.bn(self.conv(x))).mean((2, 3)))))


def images(n: int = 16, seed: int = 0) -> Tensor:
    return 3.0 * single_normal(n, 3, 8, 8, seed=seed) + 1.0


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


NORMS = {"bn.weight", "bn.bias", "ln.weight", "ln.bias"}


def test_only_norms_are_trained_and_undo_brings_all_back() -> None:
    model = Net()
    model.conv.bias.requires_grad_(False)
    before = trained(model)
    handle = only_norms(model)
    assert trained(model) == NORMS == {name for name, _ in handle.named_parameters()}
    assert (handle.n_trainable, handle.n_total) == (16, 138)
    handle.undo()
    assert trained(model) == before


@pytest.mark.parametrize("also", ["head", ("head",), ("head.weight", "head.bias"), ("he*",)])
def test_heads_are_trained_along(also: str | tuple[str, ...]) -> None:
    model = Net()
    only_norms(model, also=also)
    assert trained(model) == NORMS | {"head.weight", "head.bias"}


@pytest.mark.parametrize("which", ["b*", lambda norm: norm.kind == "batch"])
def test_norms_are_chosen_by_pattern_or_function(which: object) -> None:
    model = Net()
    only_norms(model, which=which)  # type: ignore[arg-type]
    assert trained(model) == {"bn.weight", "bn.bias"}


@pytest.mark.parametrize(("which", "told"), [("layer4.*", "'layer4.*'"), (lambda norm: False, "a function")])
def test_a_choice_that_fits_no_norm_is_told_which_norms_there_are(which: object, told: str) -> None:
    with pytest.raises(ConversionError, match=rf"got {re.escape(told)}.* norms are .*'bn'"):
        only_norms(Net(), which=which)  # type: ignore[arg-type]


def test_a_step_changes_norms_only() -> None:
    model = Net().train()
    handle = only_norms(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1)
    model(images()).square().sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == NORMS


def statistics_after(model: nn.Module) -> Tensor:
    model.train()
    model(images())
    return model.get_submodule("bn").running_mean.clone()


def test_tracked_statistics_follow_the_batches() -> None:
    model = Net()
    only_norms(model, statistics="track")
    assert not torch.equal(statistics_after(model), torch.zeros(4))


@pytest.mark.parametrize("statistics", ["freeze", "recalibrate"])
@pytest.mark.parametrize("wrap", [lambda m: m, copy.deepcopy, lambda m: copy.deepcopy(copy.deepcopy(m)), nn.Sequential])
def test_frozen_statistics_stay_after_train(statistics: str, wrap: object) -> None:
    model = Net()
    only_norms(model, statistics=statistics)
    wrapped = wrap(model)  # type: ignore[operator]
    inner = wrapped[0] if isinstance(wrapped, nn.Sequential) else wrapped
    wrapped.train()
    wrapped(images())
    assert torch.equal(inner.bn.running_mean, torch.zeros(4))
    assert not inner.bn.training
    assert inner.drop.training, "the rest of the model follows train() as ever"
    wrapped.eval()
    assert not inner.drop.training


TRACKING: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without affine": lambda: nn.BatchNorm2d(4, affine=False),
    "sync without affine": lambda: nn.SyncBatchNorm(4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "instance without affine": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "own class": lambda: OwnBatchNorm(4),
}


@pytest.mark.parametrize("name", [name for name in TRACKING if "sync" not in name])
@pytest.mark.parametrize("statistics", ["track", "freeze", "recalibrate"])
def test_the_policy_covers_every_module_with_running_statistics(name: str, statistics: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), TRACKING[name](), nn.GroupNorm(2, 4))
    only_norms(model, statistics=statistics)
    before = {key: value.clone() for key, value in model[1].named_buffers()}
    model.train()
    model(images())
    moved = {key for key, value in model[1].named_buffers() if not torch.equal(value, before[key])}
    floating = {key for key, value in before.items() if value.is_floating_point()}
    assert moved - {"num_batches_tracked"} == (floating if statistics == "track" else set())
    assert statistics == "track" or not moved


def test_the_policy_covers_synchronized_norms_without_scale() -> None:
    # Their training pass needs several processes, so their mode has to do.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), TRACKING["sync without affine"](), nn.GroupNorm(2, 4))
    only_norms(model, statistics="freeze")
    assert not model.train()[1].training


def test_a_deep_copy_keeps_a_policy_of_its_own() -> None:
    model = Net()
    handle = only_norms(model, statistics="freeze")
    twin = copy.deepcopy(model)
    handle.undo()
    assert not torch.equal(statistics_after(model), torch.zeros(4))
    assert torch.equal(statistics_after(twin), torch.zeros(4))


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def mean_after_training(model: nn.Module) -> list[float]:
    """Runs in a process of its own."""
    return [float(x) for x in statistics_after(model)]


def through_spawn(model: nn.Module) -> nn.Module:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(mean_after_training, (model,)) == [0.0] * 4
        return copy.deepcopy(pool.apply(copy.copy, (model,)))  # processes share the memory of tensors


@pytest.mark.parametrize(
    "carry", [through_pickle, through_torch, through_spawn, lambda m: through_pickle(copy.deepcopy(m))]
)
def test_a_model_with_frozen_statistics_can_be_pickled_and_keeps_the_policy(carry: Any) -> None:
    model = Net()
    handle = only_norms(model, statistics="freeze", also="head")
    twin = carry(model)
    assert torch.equal(statistics_after(twin), torch.zeros(4))
    assert twin.bn.train.module is twin.bn, "the policy belongs to the copy"
    assert trained(twin) == trained(model)
    handle.undo()
    assert not torch.equal(statistics_after(model), torch.zeros(4))
    assert torch.equal(statistics_after(twin), torch.zeros(4))


def test_frozen_statistics_survive_compilation() -> None:
    model = Net()
    only_norms(model, statistics="freeze")
    compiled = torch.compile(model, backend="eager")
    compiled.train()
    compiled(images())
    assert torch.equal(model.bn.running_mean, torch.zeros(4))


def test_recalibration_averages_over_the_batches_with_dropout_off() -> None:
    model = Net()
    handle = only_norms(model, statistics="recalibrate")
    model.train()
    batches = [images(seed=s) for s in range(3)]
    handle.recalibrate(batches)
    seen = torch.stack([model.conv(x).mean((0, 2, 3)) for x in batches])
    torch.testing.assert_close(model.bn.running_mean, seen.mean(0).detach())
    assert not model.bn.training
    assert model.drop.training
    before = model.bn.running_mean.clone()
    model.train()
    model(images(seed=9))
    assert torch.equal(model.bn.running_mean, before)


@pytest.mark.parametrize("name", ["batch without affine", "instance", "instance without affine"])
def test_recalibration_reaches_instance_norms_and_norms_without_scale(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), TRACKING[name](), nn.GroupNorm(2, 4))
    momentum = model[1].momentum
    handle = only_norms(model, statistics="recalibrate", which="2")
    batches = [images(seed=s) for s in range(3)]
    handle.recalibrate((x, None) for x in batches)
    seen = torch.stack([model[0](x).mean((0, 2, 3)) for x in batches]).mean(0).detach()
    # The mean over 3 batches of 16 x 36 float32 numbers of size 3.
    torch.testing.assert_close(model[1].running_mean, seen, rtol=0.0, atol=3 * 1728 * 2.0**-23)
    assert model[1].momentum == momentum


def test_a_recalibration_that_fails_leaves_the_statistics() -> None:
    model = Net()
    handle = only_norms(model, statistics="recalibrate")
    handle.recalibrate([images()])
    before = model.bn.running_mean.clone()
    with pytest.raises(ValueRangeError, match="at least one batch; got none"):
        handle.recalibrate([])
    with pytest.raises(ConversionError, match="failed at batch 2"):
        handle.recalibrate([images(seed=1), torch.zeros(3)])
    assert torch.equal(model.bn.running_mean, before)
    assert model.bn.momentum == 0.1


def test_undo_gives_statistics_back_to_train() -> None:
    model = Net()
    only_norms(model, statistics="freeze").undo()
    assert not torch.equal(statistics_after(model), torch.zeros(4))
    assert "train" not in model.bn.__dict__


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.LayerNorm([4, 6, 6], elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.InstanceNorm2d(4),
        nn.RMSNorm([4, 6, 6], elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_without_scale_get_one_that_changes_nothing(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm).eval()
    wanted = model(images())
    handle = only_norms(model, add_affine=True)
    torch.testing.assert_close(model(images()), wanted)
    assert handle.n_trainable >= 4
    assert all(name.startswith("1.") for name in trained(model))
    handle.undo()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    torch.testing.assert_close(model(images()), wanted)


def test_frozen_batch_norms_are_thawed_on_request() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4), nn.GroupNorm(2, 4))
    handle = only_norms(model)
    assert trained(model) == {"2.weight", "2.bias"}
    assert "thaw=True" in str(handle)
    handle.undo()
    wanted = model(images())
    handle = only_norms(model, thaw=True)
    assert trained(model) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(model(images()), wanted)
    handle.undo()
    assert {name for name, _ in model[1].named_buffers()} == {"weight", "bias", "running_mean", "running_var"}


def test_a_tied_parameter_is_trained_if_one_of_its_names_is() -> None:
    norm = nn.LayerNorm(3)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Linear(3, 3)})
    only_norms(model)
    assert trained(model) == {"a.weight", "a.bias"}


def test_the_table_says_what_is_trained() -> None:
    text = str(only_norms(CifarResNet(20), also="linear", statistics="freeze"))
    assert "layer3.2.bn2.weight" in text
    assert "2,026 of 269,722 parameters are trained (0.751 %)" in text
    assert "19 norms, statistics: freeze; also: linear" in text


@pytest.mark.parametrize(
    ("how", "low", "high"),
    [("uniform", 0.0, 1.0), ("ones", 1.0, 1.0), ("fixed", 0.5, 0.5), ("positive-negative", -1.0, 1.0)],
)
def test_scales_start_as_frankle_et_al_compared_them(how: str, low: float, high: float) -> None:
    model = CifarResNet(20)
    handle = only_norms(model)
    init_gamma(handle, how=how, seed=3)
    scales = torch.cat([p.detach() for name, p in handle.named_parameters() if name.endswith("weight")])
    shifts = torch.cat([p.detach() for name, p in handle.named_parameters() if name.endswith("bias")])
    assert float(scales.min()) >= low
    assert float(scales.max()) <= high
    if low < high:
        # 688 uniform numbers: their mean lies within five standard errors of the middle.
        assert abs(float(scales.mean()) - (low + high) / 2) <= 5.0 * (high - low) / (12 * len(scales)) ** 0.5
    assert not shifts.any()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (GemmaRMSNorm(6), (2, 5, 6)),
        (LayerNorm1P(6), (2, 5, 6)),
        (LlamaRMSNorm(6), (2, 5, 6)),
        (nn.LayerNorm(6), (2, 5, 6)),
        (nn.BatchNorm2d(6), (2, 6, 4, 4)),
        (GemmaRMSNorm(6).bfloat16(), (2, 5, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize(("how", "scale"), [("ones", 1.0), ("fixed", 0.5)])
def test_scales_are_those_that_the_norm_applies(
    norm: nn.Module, shape: tuple[int, ...], how: str, scale: float
) -> None:
    model = nn.Sequential(copy.deepcopy(norm)).eval()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=next(norm.parameters()).dtype)
    init_gamma(only_norms(model), how="ones")
    unit = model(x).float().detach()
    # Both kinds of norm give a mean square of one, but for the running statistics of batch norms, zero and one.
    assert 0.8 <= float(unit.square().mean()) <= 1.25
    other = nn.Sequential(copy.deepcopy(norm)).eval()
    init_gamma(only_norms(other), how=how)
    torch.testing.assert_close(other(x).float(), scale * unit, rtol=4 * 2.0**-8, atol=0.0)


def test_a_global_response_norm_adds_nothing_at_a_scale_of_one() -> None:
    model = nn.Sequential(GlobalResponseNorm(4))
    init_gamma(only_norms(model), how="ones")
    x = single_normal(2, 3, 3, 4)
    torch.testing.assert_close(model(x), x)


def test_a_norm_whose_scale_cannot_be_measured_is_named() -> None:
    class OddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.LayerNorm(3), OddNorm())
    handle = only_norms(model)
    with pytest.raises(ConversionError, match=r"the scale of 1 \(OddNorm\)"):
        init_gamma(handle, how="fixed")
    assert torch.equal(model[0].weight, torch.ones(3)), "nothing was changed"


def test_an_affine_map_is_offered_only_where_it_can_be_given() -> None:
    model = nn.Sequential(nn.Linear(3, 4), UnitNorm())
    (skipped,) = find_norms(model).skipped
    assert "add_affine" not in str(skipped)
    with pytest.raises(ConversionError, match=r"UnitNorm has no option for them") as caught:
        only_norms(model, add_affine=True)
    assert "add_affine" not in str(caught.value)
    with pytest.raises(ConversionError, match="add_affine=True"):
        only_norms(nn.Sequential(nn.LayerNorm(2, elementwise_affine=False)))
    with pytest.raises(ConversionError, match="thaw=True"):
        only_norms(nn.Sequential(FrozenBatchNorm2d(2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_affine_map_has_the_precision_of_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)).to(dtype)
    only_norms(model, add_affine=True)
    assert model[1].weight.dtype == dtype


def test_only_chosen_norms_get_an_affine_map() -> None:
    model = nn.Sequential(*(nn.LayerNorm(2, elementwise_affine=False) for _ in range(3)))
    handle = only_norms(model, add_affine=True, which="1")
    assert [norm.weight is None for norm in model] == [True, False, True]
    handle.undo()
    assert [norm.weight is None for norm in model] == [True, True, True]


def test_a_refused_call_takes_back_what_it_added() -> None:
    model = nn.Sequential(nn.LayerNorm(2, elementwise_affine=False), FrozenBatchNorm2d(2))
    with pytest.raises(UnknownNameError, match="heat"):
        only_norms(model, add_affine=True, thaw=True, also="heat")
    assert list(model.parameters()) == []
    with pytest.raises(ConversionError, match="which needs a function of a NormLayer; it failed for 0"):
        only_norms(model, add_affine=True, which=lambda norm: norm.nothing)
    assert list(model.parameters()) == []


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model = Net()
    before = trained(model)
    with pytest.raises(UnknownNameError, match=r"statistics.*'freez'.*freeze"):
        only_norms(model, statistics="freez")
    with pytest.raises(UnknownNameError, match=r"heat.*head"):
        only_norms(model, also="heat")
    with pytest.raises(ConversionError, match="norms to train; got none in Sequential"):
        only_norms(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConversionError, match="no scale and no shift"):
        only_norms(nn.Sequential(nn.LayerNorm(2, elementwise_affine=False)))
    assert trained(model) == before
    handle = only_norms(model)
    with pytest.raises(ConversionError, match=r"already prepared\. Call undo"):
        only_norms(model)
    with pytest.raises(UnknownNameError, match=r"gamma.*'one'.*ones"):
        init_gamma(handle, how="one")


class MeanNorm(nn.Module):
    """A norm of one's own whose statistics have a name of their own."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_channels))
        self.weight = nn.Parameter(torch.ones(n_channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean) * self.weight


def test_frozen_statistics_of_own_norms_stay_whatever_they_are_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), MeanNorm(4))
    handle = only_norms(model, statistics="freeze")
    model.train()(torch.ones(3, 4))
    assert not model[1].mean.any()
    handle.undo()
    model.train()(torch.ones(3, 4))
    assert model[1].mean.any()


class DeafLayerNorm(nn.LayerNorm):
    """A LayerNorm that never looks at its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape)


class LastLayerNorm(nn.LayerNorm):
    """A LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_a_scale_is_not_added_to_a_norm_that_would_not_use_it() -> None:
    deaf = nn.Sequential(nn.Linear(4, 4), DeafLayerNorm(4, elementwise_affine=False))
    with pytest.raises(ConversionError, match="DeafLayerNorm") as caught:
        only_norms(deaf, add_affine=True)
    assert "add_affine" not in str(caught.value)
    images = nn.Sequential(nn.Conv2d(3, 4, 1), LastLayerNorm(4, elementwise_affine=False))
    assert only_norms(images, add_affine=True).n_trainable == 8


class HalfGemmaRMSNorm(nn.Module):
    """Computes (1 + weight) and returns bfloat16, whatever it is given."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_channels))

    def forward(self, x: Tensor) -> Tensor:
        size = x.float().square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return (x.float() / size * (1.0 + self.weight)).bfloat16()


def test_the_scale_of_a_norm_that_returns_a_lower_precision_is_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 6), HalfGemmaRMSNorm(6))
    init_gamma(only_norms(model), how="ones")
    assert torch.equal(model[1].weight, torch.zeros(6))
