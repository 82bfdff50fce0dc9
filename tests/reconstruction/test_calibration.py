"""Calibration: every sample is held back once, and what that says about new inputs is true."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import RunCli, runner
from hypothesis import given
from hypothesis import strategies as st
from rebuilding import CONSTRUCTIONS, Branches, net, reconstruct_with
from tensors import normal
from torch import Tensor, nn

from onlynorm import Ranges, Wide
from onlynorm.intervals import Box
from onlynorm.models import mlp
from onlynorm.modules.layers import TargetLayer, find_layers
from onlynorm.reconstruction import reconstruct
from onlynorm.reconstruction.ranges import (
    LayerInputs,
    LeaveOneOut,
    collect_inputs,
    count_outside,
    count_samples,
    visit_layers,
    widen,
)
from onlynorm.reconstruction.result import Calibration, LayerResult


def leaves(network: nn.Module, *inputs: Tensor) -> Tensor:
    """Which samples leave a range of some block, run one at a time."""
    found = []
    with torch.no_grad():
        for i in range(len(inputs[0])):
            with count_outside(network) as outside:
                network(*(x[i : i + 1] for x in inputs))
            found.append(outside.fraction > 0.0)
    return torch.tensor(found)


@given(n=st.integers(2, 7), feat=st.integers(1, 5), seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.3, 2.0]))
def test_leave_one_out_in_one_pass_equals_leaving_each_sample_out(n: int, feat: int, seed: int, margin: float) -> None:
    low = normal(n, feat, seed=seed).round(decimals=1)  # ties, and features that are zero for all others
    high = low + normal(n, feat, seed=seed + 1).abs().round(decimals=0)
    held = LeaveOneOut(torch.arange(n), n)
    held.update(*held.extremes(low, high))
    expected = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        widened = widen(low[others].amin(0), high[others].amax(0), margin)
        # On the boundary itself the two ways of writing the comparison may round differently.
        room = 1e-12 * (1.0 + low.abs().max() + high.abs().max())
        if bool(((low[i] < widened[0] - room) | (high[i] > widened[1] + room)).any()):
            expected.append(i)
    assert set(expected) <= set(held.outside(margin))
    assert set(held.outside(margin + 1e-9)) <= set(expected)


@pytest.mark.parametrize(
    ("n_samples", "choices"),
    [(4, {}), (16, {}), (64, {}), (256, {}), (16, {"margin": 0.25}), (64, {"features": "id_cond"})],
    ids=str,
)
def test_the_reported_rate_is_the_rate_on_new_inputs(n_samples: int, choices: dict[str, Any]) -> None:
    """Over many batches of a size: the mean rate, and the coverage of the upper limit."""
    network, n_batches, n_new = mlp((12, 8, 5)).double().eval(), 24, 200
    reported, true, covered = [], [], 0
    for seed in range(n_batches):
        drawn = normal(n_samples + n_new, 12, seed=seed)
        made = reconstruct_with(network, drawn[:n_samples], activation=nn.ReLU(), **choices)
        assert made.calibration is not None
        assert made.calibration.rate is not None
        with count_outside(made.network) as outside, torch.no_grad():
            made.network(drawn[n_samples:])
        rate = float(torch.stack([torch.cat(calls) for calls in outside._calls.values()]).any(0).double().mean())
        reported.append(made.calibration.rate)
        true.append(rate)
        covered += rate <= made.calibration.upper
    ours, theirs = torch.tensor(reported), torch.tensor(true)
    # Both are means over batches; each batch has its own ranges, so their spread is that of the batches.
    error = float((ours.var() / n_batches + theirs.var() / n_batches).sqrt()) + 1e-3
    # Leaving one out leaves one sample fewer: at a rate that falls like 1 / n, the estimate is high by 1 / (n - 1).
    bias = float(theirs.mean()) / (n_samples - 1) + error
    assert -4 * error <= float(ours.mean() - theirs.mean()) <= 2 * bias + 4 * error
    # 95 % of the limits hold; of 24 at least 18 do with a probability above 0.9999.
    assert covered >= 18


@pytest.mark.parametrize("construction", sorted(CONSTRUCTIONS))
def test_every_construction_is_measured(construction: str) -> None:
    made = reconstruct_with(net(4, 3), normal(6, 4), activation=nn.ReLU(), construction=construction, margin=0.0)
    assert made.calibration is not None
    # Without a margin the sample with the largest value of a feature leaves, and there are more features than samples.
    assert made.calibration.n_outside == 6
    assert made.calibration.by_layer == {"0": 6}
    assert made.layers[0].needed_margin > 0.0
    wide = reconstruct_with(net(4, 3), normal(6, 4), activation=nn.ReLU(), construction=construction, margin=1e3)
    assert wide.calibration is not None
    assert wide.calibration.n_outside == 0


@pytest.mark.parametrize("construction", sorted(CONSTRUCTIONS))
def test_ranges_are_those_of_all_samples(construction: str) -> None:
    """No range is lost to what is held back: the batch itself stays inside without any margin."""
    x = normal(8, 4)
    made = reconstruct_with(net(4, 3), x, activation=nn.ReLU(), construction=construction, margin=1e-9)
    assert not bool(leaves(made.network, x).any())


def test_one_sample_cannot_be_held_back() -> None:
    made = reconstruct(net(), normal(1, 6), Wide(activation=nn.ReLU()))
    assert made.calibration is not None
    assert made.calibration.rate is None
    assert made.calibration.upper == 1.0
    assert len(made.warnings) == 1
    assert "calibrated on 1 distinct sample" in made.warnings[0]
    assert f"warning: {made.warnings[0]}" in str(made)


def test_copies_of_a_sample_count_once() -> None:
    """A copy that stays while the other is held back would hide that the sample is needed."""
    x = normal(4, 6)
    once = reconstruct(net(), x, Wide(activation=nn.ReLU())).calibration
    often = reconstruct(net(), x.repeat(16, 1), Wide(activation=nn.ReLU())).calibration
    assert once is not None
    assert once == often
    assert once.n_samples == 4
    same = reconstruct(net(), x[:1].repeat(64, 1), Wide(activation=nn.ReLU()))
    assert "1 distinct sample" in same.warnings[0]
    assert count_samples((x.repeat(3, 1), torch.arange(12))) == 12


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"activation": nn.Identity()},
        {"activation": nn.ReLU(), "box": Box(torch.full((6,), -9.0), torch.full((6,), 9.0))},
    ],
    ids=["no activation", "identity", "certified"],
)
def test_what_does_not_depend_on_calibrated_ranges_is_not_warned_of(choices: dict[str, Any]) -> None:
    made = reconstruct_with(net(), normal(1, 6), **choices)
    assert made.calibration is None
    assert made.warnings == ()
    assert "warning" not in str(made)


def test_many_samples_inside_need_no_warning() -> None:
    made = reconstruct(net(), normal(64, 6), Wide(activation=nn.ReLU()), ranges=Ranges(margin=1e3))
    assert made.calibration is not None
    assert made.calibration.upper == pytest.approx(1 - 0.05 ** (1 / 64))
    assert made.warnings == ()
    few = reconstruct(net(), normal(58, 6), Wide(activation=nn.ReLU()), ranges=Ranges(margin=1e3))
    assert "at most 5 %" in few.warnings[0]


def test_the_margin_that_is_named_holds_all_samples() -> None:
    x = normal(5, 6)
    first = reconstruct(net(), x, Wide(activation=nn.ReLU()), ranges=Ranges(margin=0.1)).calibration
    assert first is not None
    assert first.n_outside
    assert f"Ranges(margin={-(-11 * first.needed_margin // 10):.0f})" in first.warning
    again = reconstruct(
        net(), x, Wide(activation=nn.ReLU()), ranges=Ranges(margin=1.001 * first.needed_margin)
    ).calibration
    assert again is not None
    assert again.n_outside == 0


class Sequences(nn.Module):
    """Tokens with the samples on the axis that is asked for, and rows of several samples in one axis."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.embed = nn.Embedding(9, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.order == "time first":
            return self.linear(h.transpose(0, 1)).mean(0)
        if self.order == "rows of samples":
            return self.linear(h.flatten(0, 1)).unflatten(0, tokens.shape).mean(1)
        if self.order == "rows of times":
            return self.linear(h.transpose(0, 1).flatten(0, 1)).unflatten(0, tokens.mT.shape).mean(0)
        return self.linear(h).mean(1)


@pytest.mark.parametrize("order", ["samples first", "time first", "rows of samples", "rows of times"])
def test_the_axis_of_the_samples_is_found(order: str) -> None:
    torch.manual_seed(0)
    network = Sequences(order).double().eval()
    tokens = torch.randint(0, 9, (5, 5), generator=torch.Generator().manual_seed(1))  # as many times as samples
    seen = collect_inputs(network, find_layers(network).layers, (tokens,), None, with_leave_one_out=True)["linear"]
    assert seen.leave_one_out is not None
    rows = seen.inputs.reshape(-1, 4)
    for i in range(5):
        mine = rows[seen.leave_one_out.samples == i]
        assert torch.equal(mine, network.embed(tokens[i]))


def test_sequences_and_several_inputs_are_measured_by_sample() -> None:
    torch.manual_seed(0)
    network = Branches().double().eval()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 7, (40, 3), generator=generator)
    images = torch.randn(40, 1, 6, 6, dtype=torch.float64, generator=generator)
    made = reconstruct(network, (tokens[:8], images[:8]), Wide(activation=nn.ReLU()), ranges=Ranges(margin=0.1))
    assert made.calibration is not None
    assert made.calibration.unmeasured == ()
    assert made.calibration.n_samples == 8
    rate, new = made.calibration.rate, leaves(made.network, tokens[8:], images[8:]).double().mean()
    assert rate is not None
    # 8 samples know a rate to 3 standard errors of at most 0.53.
    assert abs(rate - float(new)) <= 3 * (0.25 / 8 + 0.25 / 32) ** 0.5


def test_a_network_without_an_axis_of_samples_says_so() -> None:
    class Whole(nn.Module):
        """Takes one image without a batch axis, and adds that axis itself on request."""

        def __init__(self, *, adds_axis: bool) -> None:
            super().__init__()
            self.conv, self.adds_axis = nn.Conv2d(3, 2, 3), adds_axis

        def forward(self, image: Tensor) -> Tensor:
            return self.conv(image[None] if self.adds_axis else image).mean((-2, -1))

    made = reconstruct(Whole(adds_axis=True).double().eval(), normal(3, 8, 8), Wide(activation=nn.ReLU()))
    assert made.calibration is not None
    assert made.calibration.unmeasured == ("conv",)
    assert "no layer's input could be split into samples" in made.warnings[0]
    made = reconstruct(Whole(adds_axis=False).double().eval(), normal(3, 8, 8), Wide(activation=nn.ReLU()))
    assert made.calibration is not None
    assert made.calibration.n_samples == 1
    assert "calibrated on 1 distinct sample" in made.warnings[0]


def test_a_layer_that_mixes_samples_is_named() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h - h.mean(0))

    made = reconstruct(Mixing().double().eval(), normal(64, 4), Wide(activation=nn.ReLU()), ranges=Ranges(margin=1e3))
    assert made.calibration is not None
    assert made.calibration.unmeasured == ("second",)
    assert "1 layers could not be measured" in made.warnings[0]


def test_a_resumed_run_reports_the_same(tmp_path: Path) -> None:
    x, choices = normal(7, 6), {"activation": nn.ReLU(), "margin": 0.1}
    whole = reconstruct_with(net(), x, **choices)
    first = reconstruct_with(net(), x, partial=tmp_path / "net.partial", **choices)
    again = reconstruct_with(net(), x, partial=tmp_path / "net.partial", **choices)
    assert whole.calibration == first.calibration == again.calibration
    assert [layer.outside for layer in whole.layers] == [layer.outside for layer in again.layers]


def test_holding_back_changes_nothing_else() -> None:
    """The network is the one that a check without samples gives, bit by bit."""
    network, x = net(), normal(9, 6)
    layers = find_layers(network).layers
    plain, held = (collect_inputs(network, layers, (x,), None, with_leave_one_out=hold) for hold in (False, True))
    assert all(torch.equal(plain[name].inputs, held[name].inputs) for name in plain)
    made = [reconstruct(network, x, Wide(activation=nn.ReLU())).network.state_dict() for _ in range(2)]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_the_check_is_plain_data() -> None:
    layers = [
        LayerResult("a", (1, 1), 1, "lu", 0.0, 0.0, 0.0, outside=(0, 2), needed_margin=float("inf")),
        LayerResult("b", (1, 1), 1, "lu", 0.0, 0.0, 0.0, outside=(2, 3), needed_margin=4.0),
    ]
    check = Calibration.of(layers, n_samples=100, margin=2.0)
    written = json.loads(json.dumps(check.as_dict(), allow_nan=False))
    assert (written["n_outside"], written["rate"], written["by_layer"]) == (3, 0.03, {"a": 2, "b": 2})
    assert written["needed_margin"] is None
    assert "margin=" not in check.warning
    assert "3 of 100 calibration samples (3 %)" in check.warning


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    return runner(monkeypatch, capsys, tmp_path, "reconstruct")


def test_the_command_shows_the_warning(run_cli: RunCli) -> None:
    args = ("mlp", "--data", "digits", "--features", "id_cond", "--calibration", "4", "--images", "0")
    shown = run_cli(*args)
    assert "warning:" in shown.out
    found = run_cli(*args, "--json").json()
    assert found["warnings"][0].partition(". ")[0] in shown.out  # the cure names options instead of arguments
    assert found["calibration"]["n_samples"] == 4
    assert found["calibration"]["n_outside"] > 0
    assert found["warnings"] == [found["calibration"]["warning"]]


def test_what_a_layer_received_is_gone_when_the_next_but_one_is_rebuilt() -> None:
    network, received = mlp((6,) * 9).double().eval(), []
    alive = []

    def visit(layer: TargetLayer, module: nn.Module, seen: LayerInputs) -> None:
        alive.append(sum(one() is not None for one in received))
        received.append(weakref.ref(seen.inputs))

    visit_layers(network, find_layers(network).layers, (normal(5, 6),), None, visit=visit)
    assert len(alive) == 8
    assert max(alive) <= 1


class Guarded(nn.Module):
    """Calls one layer twice, changes what it received in place, and runs the other in inference mode behind a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.first(torch.relu(x))
            x.mul_(0.5)
        try:
            with torch.inference_mode():
                return self.second(x).clone()
        except Exception:
            return torch.zeros(len(x), 3, dtype=x.dtype)


def test_layers_are_rebuilt_inside_whatever_the_network_does_around_them() -> None:
    target, x = Guarded().double().eval(), normal(6, 4)
    made = reconstruct(target, x, Wide(activation=nn.ReLU()))
    assert float((made.network(x) - target(x)).abs().max()) <= 1e-9
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in made.network.parameters())

    def stop(layer: TargetLayer, *_: object) -> None:
        if layer.name == "second":
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match=r"^enough$"):
        visit_layers(target, find_layers(target).layers, (x,), None, visit=stop)
    assert not target.second._forward_pre_hooks
