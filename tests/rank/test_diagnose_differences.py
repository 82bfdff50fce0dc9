"""What becomes of samples' differences: contrast and directions against slow references, and where they lack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.rank import diagnose
from onlynorm.rank.diagnosis.gradients import MAX_SAMPLES
from onlynorm.rank.diagnosis.probes import LastLayer
from onlynorm.rank.diagnosis.separability import measure_last_layer
from onlynorm.seeds import own_randomness, seeded

SPLIT = digits()
INPUTS, CLASSES = SPLIT.train_inputs[:96], SPLIT.train_labels[:96]


def last(h: Tensor) -> LastLayer:
    return LastLayer("x", h if h.ndim == 3 else h[:, None], torch.zeros(1))


# ------------------------------------------------------------------------------- contrast


def speed(network: nn.Module, inputs: Tensor, output_grad: Tensor) -> float:
    """|J^T a|^2 / |a|^2 with the Jacobian formed row by row."""
    output = network(inputs)
    rows = [torch.autograd.grad(one, list(network.parameters()), retain_graph=True) for one in output.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return float((jacobian.mT @ output_grad.flatten()).square().sum() / output_grad.square().sum())


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_the_contrast_is_that_of_the_jacobian(norm: str) -> None:
    network, inputs, classes = mlp((64, 8, 6, 10), norm=norm).double(), INPUTS[:12].double(), CLASSES[:12]
    output_grad = (network(inputs).softmax(1) - functional.one_hot(classes, 10)).detach()
    common = output_grad.mean(0).expand_as(output_grad)
    expected = speed(network, inputs, output_grad - common) / speed(network, inputs, common)
    assert diagnose(network, inputs, classes).contrast == pytest.approx(expected, rel=1e-8)


def test_what_all_samples_share_wins_where_the_signal_has_collapsed() -> None:
    found = {depth: diagnose(mlp((64, *[64] * depth, 10)), INPUTS, CLASSES) for depth in (2, 24)}
    assert found[2].contrast is not None
    assert found[24].contrast is not None
    assert found[24].contrast < 1e-6 < 1e-3 < found[2].contrast
    assert found[2].verdict.word == "healthy"
    assert any("differences between samples are learned" in words for words in found[24].verdict.findings)


def test_gradients_of_signals_are_those_of_the_first_backward_pass() -> None:
    network = mlp((64, 16, 10))
    hidden = network[0](INPUTS)
    (expected,) = torch.autograd.grad(functional.cross_entropy(network[1:](hidden), CLASSES), hidden)
    read = {layer.name: layer.signal_gradient for layer in diagnose(network, INPUTS, CLASSES).layers}
    assert read["0"] == pytest.approx(float(expected.norm()), rel=1e-4)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp((64, 16, 16)), mlp((16, 10), seed=1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return made


def test_checkpointed_layers_have_the_contrast_of_plain_ones() -> None:
    network = Checkpointed()
    plain = diagnose(nn.Sequential(network.body, network.head), INPUTS, CLASSES)
    assert plain.contrast is not None
    assert diagnose(network, INPUTS, CLASSES).contrast == pytest.approx(plain.contrast, rel=1e-4)


class Once(torch.autograd.Function):
    """The identity, whose backward pass works once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_used = False
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if ctx.is_used:
            raise RuntimeError("used up")
        ctx.is_used = True
        return gradients[0]


def test_where_a_second_backward_pass_fails_the_contrast_is_left_out_and_rank_is_judged() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp((64, 16, 10))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Once.apply(self.network(x))
            return made

    found = diagnose(Fragile(), INPUTS, CLASSES)
    assert found.contrast is None
    assert found.skipped == ("the contrast of samples, because a second backward pass fails (used up)",)
    assert {"rank", "alignment", "vanishing", "directions"} <= set(found.verdict.parts)


def test_a_loss_that_the_model_takes_itself_has_no_contrast() -> None:
    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp((64, 16, 10))

        def forward(self, x: Tensor) -> Tensor:
            return functional.cross_entropy(self.network(x), CLASSES)

    found = diagnose(Losing(), INPUTS, loss=lambda output, _: output)
    assert found.contrast is None
    assert (
        "the contrast of samples, because the output in the loss is not a tensor with a row per sample" in found.skipped
    )


def test_a_wish_that_has_no_common_part_has_no_contrast() -> None:
    with own_randomness(0):
        model = nn.Linear(4, 2, bias=False)
    found = diagnose(model, torch.cat([torch.eye(4), -torch.eye(4)]), loss=lambda output, _: output.square().sum())
    assert found.contrast is None
    assert "the contrast of samples, because the mean output gradient has no effect on a parameter" in found.skipped


# ------------------------------------------------------------------------------- the loss at the start


def test_the_loss_is_compared_with_that_of_outputs_of_zero() -> None:
    network, wanted = mlp((64, 16, 10)), torch.randn(len(INPUTS), 10, generator=seeded(0))
    by_class, by_number = diagnose(network, INPUTS, CLASSES), diagnose(network, INPUTS, wanted)
    assert by_class.loss is not None
    assert by_class.initial_loss_ratio == pytest.approx(by_class.loss / math.log(10))
    assert by_number.loss is not None
    assert by_number.initial_loss_ratio == pytest.approx(by_number.loss / float(wanted.square().mean()))
    assert diagnose(network, INPUTS, torch.zeros(len(INPUTS), 10)).initial_loss_ratio is None
    assert diagnose(network, INPUTS, loss=lambda output, _: output.square().mean()).initial_loss_ratio is None


# ------------------------------------------------------------------------------- directions, and what they tell


def test_directions_are_counted_around_the_mean_and_without_the_bias_of_few_samples() -> None:
    n, d = 400, 5
    h = 100.0 + torch.randn(n, d, generator=seeded(0)).double()
    found = measure_last_layer(last(h), torch.arange(n) % 4)
    assert found is not None
    assert found[0] == pytest.approx(d, rel=5 * math.sqrt(2 / n) / d)  # five deviations of the squares
    assert found[1] < 5 / n**0.5


def test_one_number_for_each_sample_is_one_direction_and_tells_what_it_tells() -> None:
    classes = torch.arange(300) % 3
    line = torch.randn(7, generator=seeded(1)).double()
    noise = torch.randn(300, generator=seeded(2)).double()
    for amount in (0.0, 0.5):
        number = classes.double() + amount * noise
        found = measure_last_layer(last(2.0 + number[:, None] * line), classes)
        assert found is not None
        means = torch.stack([number[classes == k].mean() for k in range(3)])[classes]
        share = float((means - number.mean()).square().sum() / (number - number.mean()).square().sum())
        chance = 2 / 299
        assert found[0] == pytest.approx(1 / (1 - 1 / 299), rel=1e-9)
        assert found[1] == pytest.approx((share - chance) / (1 - chance), rel=1e-9)


def test_numbers_as_targets_explain_what_is_linear_in_them() -> None:
    targets = torch.randn(200, 2, generator=seeded(3)).double()
    h = targets @ torch.randn(2, 6, generator=seeded(4)).double()
    found = measure_last_layer(last(h), targets)
    assert found is not None
    assert found[1] == pytest.approx(1.0)


def test_classes_of_positions_go_with_positions_and_negative_ones_are_left_out() -> None:
    classes = torch.arange(60).reshape(20, 3) % 2
    h = functional.one_hot(classes, 2).double()
    found = measure_last_layer(last(h), classes)
    assert found is not None
    assert found[1] == pytest.approx(1.0)
    hidden = classes.clone()
    hidden[0] = -100
    h[0] = 7.0  # what the loss does not see
    left_out = measure_last_layer(last(h), hidden)
    assert left_out is not None
    assert left_out[1] == pytest.approx(1.0)


def test_a_signal_without_differences_has_one_direction_that_tells_nothing() -> None:
    assert measure_last_layer(last(torch.ones(50, 4)), torch.arange(50) % 2) == (1.0, 0.0)


def test_many_samples_are_thinned_out() -> None:
    n = 3 * MAX_SAMPLES
    found = measure_last_layer(
        last(torch.randn(n, 3, generator=seeded(5))), torch.randint(2, (n,), generator=seeded(6))
    )
    assert found is not None


@pytest.mark.parametrize(
    "targets",
    [
        None,
        torch.arange(20),
        torch.zeros(20, dtype=torch.long),
        torch.arange(9) % 2,
        torch.zeros(20, 4, 4).long(),
        "cat",
    ],
    ids=["none", "a class each", "one class", "other number", "other shape", "no tensor"],
)
def test_targets_that_do_not_allow_it_are_told(targets: Any) -> None:
    assert measure_last_layer(last(torch.randn(20, 3, generator=seeded(7))), targets) is None


def test_too_few_samples_are_told_and_rank_is_judged_instead() -> None:
    found = diagnose(mlp((64, 16, 10), norm="layer"), INPUTS[:10], CLASSES[:10])
    assert (found.directions, found.explained_variance) == (None, None)
    assert found.skipped == (
        "the variance explained by the targets in the last layer, because there are too few samples",
    )
    assert "rank" in found.verdict.parts
