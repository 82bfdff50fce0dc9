"""`memorize_norms`: frozen random weights, norms chosen, every training point right; and the same by reconstruction."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.data import digits
from onlynorm.errors import (
    ConversionError,
    InsufficientFeaturesError,
    OnlynormError,
    ShapeError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.evidence.registry import normal
from onlynorm.files import load, save
from onlynorm.identity.memorization.by_norms import KIND, NormMemorizer, memorize_norms
from onlynorm.identity.memorization.memorize import memorize
from onlynorm.identity.memorization.points import relative_errors
from onlynorm.reconstruction import reconstruct, verify
from onlynorm.storage import read_tensors


@pytest.fixture(scope="module")
def sample() -> tuple[Tensor, Tensor]:
    split = digits()
    return split.train_inputs[:250], split.train_labels[:250]


@pytest.fixture(scope="module")
def network(sample: tuple[Tensor, Tensor]) -> NormMemorizer:
    return memorize_norms(*sample, seed=2)


def test_norms_alone_have_every_digit_right(sample: tuple[Tensor, Tensor], network: NormMemorizer) -> None:
    x, labels = sample
    assert torch.equal(network.classify(x), labels)
    facts = network.facts
    assert facts is not None
    error = float((network(x)[:, 0] - labels).abs().max().detach())
    assert error == pytest.approx(facts.error, rel=1e-3, abs=1e-12)
    assert facts.error < 1e-6


def test_only_norms_are_parameters_and_the_rest_comes_from_the_seed(
    sample: tuple[Tensor, Tensor], network: NormMemorizer
) -> None:
    facts = network.facts
    assert facts is not None
    assert {name.split(".")[0] for name, _ in network.named_parameters()} == {"norm1", "norm2"}
    assert set(network.state_dict()) == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert facts.n_norm_parameters == 4 * facts.n_features
    assert facts.n_features == round(1.25 * 250)
    assert torch.equal(network.right, network.features.right())
    twin = NormMemorizer(network.features, code="number")
    twin.load_state_dict(network.state_dict())
    assert torch.equal(twin(sample[0]), network(sample[0]))
    assert str(facts.n_features) in str(facts)


def test_another_seed_gives_another_network_that_is_right_as_well(sample: tuple[Tensor, Tensor]) -> None:
    x, labels = sample[0][:60], sample[1][:60]
    first, second = memorize_norms(x, labels, seed=0), memorize_norms(x, labels, seed=1)
    assert not torch.equal(first.right, second.right)
    assert torch.equal(first.classify(x), second.classify(x))


def test_one_hot_outputs_take_a_feature_per_point_and_class(sample: tuple[Tensor, Tensor]) -> None:
    x, labels = sample[0][:40], sample[1][:40]
    network = memorize_norms(x, labels, code="one-hot")
    facts = network.facts
    assert facts is not None
    assert facts.n_equations == 400
    assert facts.n_features == 500
    assert torch.equal(network.classify(x), labels)
    torch.testing.assert_close(network(x).detach(), functional.one_hot(labels, 10).double(), rtol=0, atol=1e-6)


def test_real_targets_are_reached_up_to_the_residual(sample: tuple[Tensor, Tensor]) -> None:
    x, targets = sample[0][:50], normal(0, "targets", 50, 2)
    network = memorize_norms(x, targets)
    assert network.facts is not None
    error = torch.linalg.vector_norm(network(x) - targets).detach() / torch.linalg.vector_norm(targets)
    assert float(error) == pytest.approx(network.facts.residual, rel=0.5, abs=1e-11)
    assert float(error) < 1e-8


def test_fewer_features_than_points_cannot_remember_random_targets(sample: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(InsufficientFeaturesError, match=r"excess.*; got 0\.9"):
        memorize_norms(*sample, excess=0.9)


@pytest.mark.parametrize("n_inputs", [1, 2, 7])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 40])
def test_small_samples_and_single_inputs_need_no_larger_excess(n: int, n_inputs: int) -> None:
    for seed in range(10):
        x, targets = normal(seed, "x", n, n_inputs), normal(seed, "targets", n, 2)
        network = memorize_norms(x, targets, seed=seed)
        torch.testing.assert_close(network(x).detach(), targets, rtol=0, atol=1e-8)
        labels = (targets[:, 0].abs() * 1e6).long() % 10
        assert torch.equal(memorize_norms(x, labels, seed=seed).classify(x), labels)


def test_every_threshold_lies_just_below_its_point(sample: tuple[Tensor, Tensor], network: NormMemorizer) -> None:
    """Every point is the lowest at which some features fire, as many times as there are features per point."""
    with torch.no_grad():
        said = network.activations(sample[0].double())
    smallest = torch.where(said > 0.0, said, torch.inf).argmin(0)
    assert int(smallest.bincount(minlength=250).min()) >= 1
    assert bool((said > 0.0).any(0).all())


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_inputs_and_targets_may_have_any_scale(size: float) -> None:
    x, targets = normal(0, "x", 20, 3), normal(0, "targets", 20, 2)
    torch.testing.assert_close(memorize_norms(x * size, targets)(x * size).detach(), targets, rtol=0, atol=1e-9)
    found = memorize_norms(x, targets * size)(x).detach()
    assert float((found / size - targets).abs().max()) <= 1e-9


def test_real_targets_that_are_missed_are_refused() -> None:
    x = torch.zeros(6, 2, dtype=torch.float64)
    x[:, 1] = 1e-17 * torch.arange(6)
    x[:, 0] = 1.0
    with pytest.raises(ToleranceError, match="within 1e-06 of its largest target; the largest error is"):
        memorize_norms(x, normal(0, "targets", 6, 1))


SCALES = [(1e-8, 1.0), (1e-10, 1e10), (1e-300, 1e300), (0.0, 1e-9, 1.0), (1e307, 1e307), (1.7e308,), (1e-310,)]


@pytest.mark.parametrize("scales", SCALES)
def test_every_output_is_fit_at_its_own_scale(scales: tuple[float, ...], tmp_path: Path) -> None:
    x, targets = normal(0, "x", 100, 3), normal(0, "targets", 100, len(scales))
    targets = targets / targets.abs().amax(0) * torch.tensor(scales, dtype=torch.float64)
    network = memorize_norms(x, targets)
    made = network(x).detach()
    assert float(relative_errors(made, targets).amax()) <= 1e-9
    assert {name.split(".")[0] for name, _ in network.named_parameters()} == {"norm1", "norm2", "norm3"}
    assert network.facts is not None
    assert network.facts.n_norm_parameters == 4 * network.facts.n_features + 2 * len(scales)
    save(network, tmp_path / "made.safetensors")
    loaded = load(tmp_path / "made.safetensors")
    assert torch.equal(loaded(x), made)
    assert loaded.facts == network.facts


def test_outputs_of_similar_scale_need_no_third_norm(tmp_path: Path) -> None:
    x, targets = normal(0, "x", 20, 3), normal(0, "targets", 20, 2) * torch.tensor([100.0, 1.0])
    network = memorize_norms(x, targets)
    assert network.norm3 is None
    save(network, tmp_path / "made.safetensors")
    document, tensors = read_tensors(tmp_path / "made.safetensors", kind=KIND, format=1, cure="")  # as before
    assert document["format"] == 1
    assert set(tensors) == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}


def standardised(x: Tensor) -> Tensor:
    spread = x.std(0, correction=0)
    return (x - x.mean(0)) / torch.where(spread > 0.0, spread, 1.0)


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_cure_of_a_missed_fit_is_true(seed: int, n_outputs: int) -> None:
    def missed(x: Tensor, targets: Tensor, words: str) -> re.Match[str]:
        with pytest.raises(ToleranceError, match=words) as error:
            memorize_norms(x, targets, seed=seed)
        assert "excess" not in str(error.value)
        found = re.search(words, str(error.value))
        assert found is not None
        return found

    x, targets = normal(seed, "x", 50, 3), normal(seed, "targets", 50, n_outputs)
    twins = x.clone()
    twins[7] = twins[31] + 1e-13
    found = missed(twins, targets, r"Remove one of points that nearly coincide: (\d+) and (\d+) are 1\.\de-13 median")
    assert found.groups() == ("7", "31")
    kept = torch.arange(50) != 7
    memorize_norms(twins[kept], targets[kept], seed=seed)
    far = x.clone()
    far[9] *= 1e14
    found = missed(far, targets, r"Remove outliers: point (\d+) is \d\.\de\+1\d median distances")
    assert found.groups() == ("9",)
    kept = torch.arange(50) != 9
    memorize_norms(far[kept], targets[kept], seed=seed)
    uneven = x.clone()
    uneven[:, 0] *= 1e-13
    uneven[:, 1:] = torch.arange(50)[:, None] % 5
    missed(uneven, targets, r"Standardise the inputs \(subtract the mean of each, and divide by its deviation\)\.$")
    memorize_norms(standardised(uneven), targets, seed=seed)


@pytest.mark.parametrize("size", [1e-310, 1e-320, 1e308])
def test_points_beyond_the_range_of_float64_are_refused(size: float) -> None:
    with pytest.raises(
        ValueRangeError, match=r"memorize_norms needs points in the range.*Scale the inputs to about one"
    ):
        memorize_norms(normal(0, "x", 20, 3).clamp(-1.0, 1.0) * size, normal(0, "targets", 20, 1))


def test_real_targets_have_no_classes() -> None:
    x = normal(0, "x", 5, 3)
    with pytest.raises(ConversionError, match="this one has 2 real outputs"):
        memorize_norms(x, normal(0, "targets", 5, 2)).classify(x)


def test_numpy_arrays_count_as_the_tensors_they_hold() -> None:
    x, labels = normal(0, "x", 5, 3), torch.arange(5)
    network = memorize_norms(x.numpy(), labels.numpy())
    assert torch.equal(network.classify(x.numpy()), labels)


def test_points_that_no_feature_tells_apart_are_refused() -> None:
    x = torch.zeros(6, 2, dtype=torch.float64)
    x[:, 0] = 1.0
    x[:, 1] = 1e-17 * torch.arange(6)  # drowned by the first coordinate
    with pytest.raises(ToleranceError, match=r"within 0\.25 of its class"):
        memorize_norms(x, torch.arange(6))


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused(sample: tuple[Tensor, Tensor], network: NormMemorizer) -> None:
    x, labels = sample
    with pytest.raises(UnknownNameError, match="one-hot"):
        memorize_norms(x, labels, code="onehot")
    with pytest.raises(UnknownNameError, match="code needs a known name; got None"):
        memorize_norms(x, labels, code=None)  # type: ignore[arg-type]
    for excess in (float("nan"), float("inf"), "much"):
        with pytest.raises(ValueRangeError, match=r"excess .* number"):
            memorize_norms(x, labels, excess=excess)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match="equal points with different targets at 0 and 2"):
        memorize_norms(x[[0, 1, 0]], torch.arange(3))
    with pytest.raises(ShapeError, match="needs samples of 64 real numbers"):
        network(torch.zeros(3, 5))


@pytest.mark.usefixtures("unchecked")
def test_errors_name_the_function_that_was_called() -> None:
    labels = torch.tensor([0, 1, 0])
    for points, own in [
        (torch.ones(3, 2), labels),
        (torch.tensor([[0.0], [1.0], [math.nan]]), labels),
        (torch.empty(3, 0), labels),
        (torch.eye(3), labels[:2]),
        (torch.eye(3), torch.full((3,), math.inf)),
    ]:
        for memorizing in (memorize, memorize_norms):
            with pytest.raises(OnlynormError, match=rf"^{memorizing.__name__} needs "):
                memorizing(points, own)


def test_a_memorizer_rebuilt_by_its_norms_is_right_everywhere_too(sample: tuple[Tensor, Tensor]) -> None:
    x, labels = sample[0][:40].double(), sample[1][:40]
    plain = memorize(x, labels)
    made = reconstruct(plain, x, seed=0)
    assert torch.equal(made.network(x).argmax(1), labels)
    check = verify(plain, made.network, x)
    assert check.is_reproducible
    assert check.n_other == 0  # every number is frozen or in a norm
    direct = memorize_norms(x, labels)
    assert direct.facts is not None
    assert made.n_norm_parameters > 5 * direct.facts.n_norm_parameters
