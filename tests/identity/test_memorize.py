"""`memorize`: every training point right, for any distinct points, within the parameters of the theorem."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import normals, some_labels
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import digits
from onlynorm.errors import ConversionError, FormatError, ShapeError, ValueRangeError
from onlynorm.identity.memorization.generalization import activation_distances, class_radii, measure_off_sample
from onlynorm.identity.memorization.memorize import FACTOR, memorize
from onlynorm.identity.memorization.memorizer import SILENT, Memorizer, MemorizerBlock
from onlynorm.identity.memorization.thresholds import by_length


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    split = digits()
    return split.train_inputs, split.train_labels, split.test_inputs, split.test_labels


@pytest.fixture(scope="module")
def network(images: tuple[Tensor, Tensor, Tensor, Tensor]) -> Memorizer:
    return memorize(images[0][:600], images[1][:600], seed=3)


# ------------------------------------------------------------------------------------- exact on the sample


def test_every_digit_gets_its_class_and_a_one_hot_output(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    x, labels = images[0][:600], images[1][:600]
    assert torch.equal(network.classify(x), labels)
    assert network.facts is not None
    error = float((network(x) - functional.one_hot(labels, 10)).abs().max().detach())
    assert error <= network.facts.rounding < 1e-6


def test_the_classes_do_not_depend_on_the_batch_or_its_order(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    x, labels = images[0][:600], images[1][:600]
    one_by_one = torch.cat([network.classify(x[i : i + 1]) for i in range(0, 600, 7)])
    assert torch.equal(one_by_one, labels[::7])
    assert torch.equal(network.classify(x.flip(0)), labels.flip(0))


def test_a_point_stays_bit_for_bit_until_its_block_and_then_never_moves_again(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    h = network.enter(network.rows(images[0][:600])).detach()
    moves = torch.zeros(600, dtype=torch.long)
    for block in network.blocks:
        after = block(h).detach()
        moves += (after != h).any(1)
        h = after
    assert torch.equal(moves, torch.ones(600, dtype=torch.long))
    torch.testing.assert_close(h[:, -1], -torch.ones(600).double(), rtol=0, atol=1e-9)


def test_the_blocks_are_as_many_and_as_wide_as_the_theorem_says(network: Memorizer) -> None:
    facts = network.facts
    assert facts is not None
    assert facts.width == math.ceil(FACTOR * math.log(600))
    assert facts.n_blocks == len(network.blocks) == math.ceil(600 / facts.width)
    counted = sum(p.numel() for p in network.parameters())
    k, r, d = facts.width, 10, 64
    assert facts.n_parameters == counted == k * d + k + facts.n_blocks * (2 * k * k + k) + k * r + r + r * r
    assert facts.constant == pytest.approx(counted / (600 * math.log(600) + r * r))


def test_the_constant_does_not_grow_with_the_sample() -> None:
    constants = []
    for n in (100, 400, 1600):
        facts = memorize(normals(n, 12), some_labels(n, 5)).facts
        assert facts is not None
        constants.append(facts.constant)
    assert max(constants) <= 12.0
    assert constants[-1] <= constants[0]


@pytest.mark.parametrize("projection", ["random", "principal"])
def test_real_targets_come_out_up_to_rounding(projection: str) -> None:
    x, targets = normals(300, 20), 100.0 * normals(300, 4, seed=1) + 7.0
    network = memorize(x, targets, projection=projection)
    assert network.facts is not None
    error = float((network(x) - targets).abs().max().detach())
    assert error <= network.facts.rounding <= 1e-7 * float(targets.abs().max())


def test_real_targets_may_have_one_axis_or_more_outputs_than_points_need() -> None:
    x = normals(5, 3)
    single = memorize(x, normals(5, 1)[:, 0])
    assert single(x).shape == (5, 1)
    many = memorize(x, normals(5, 40))
    assert many.width == 41
    torch.testing.assert_close(many(x).detach(), normals(5, 40), rtol=0, atol=1e-12)


def test_constant_targets_far_from_zero_are_reached() -> None:
    x = normals(6, 2)
    network = memorize(x, torch.full((6, 1), 1e6, dtype=torch.float64))
    torch.testing.assert_close(network(x).detach(), torch.full((6, 1), 1e6, dtype=torch.float64), rtol=1e-12, atol=0)


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**32))
def test_any_small_sample_is_memorized(n: int, d: int, r: int, seed: int) -> None:
    x, labels = normals(n, d, seed=seed), some_labels(n, r, seed=seed)
    assert torch.equal(memorize(x, labels, n_classes=r, seed=seed).classify(x), labels)


@pytest.mark.parametrize(("n", "d", "r"), [(1, 1, 1), (1, 3, 4), (2, 1, 2), (150, 1, 150), (40, 2, 1)])
def test_one_point_one_class_one_input_and_a_class_per_point_are_no_special_cases(n: int, d: int, r: int) -> None:
    x, labels = normals(n, d), torch.arange(n) % r
    assert torch.equal(memorize(x, labels, n_classes=r).classify(x), labels)


def test_points_on_a_grid_and_on_a_line_are_memorized() -> None:
    grid = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))  # many equal lengths, points inside the hull
    labels = some_labels(144, 3)
    assert torch.equal(memorize(grid, labels).classify(grid), labels)
    line = torch.arange(500.0)
    assert torch.equal(memorize(line, torch.arange(500) % 2).classify(line), torch.arange(500) % 2)


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-8])
def test_very_close_points_with_different_labels_are_told_apart(apart: float) -> None:
    x = normals(60, 20)
    x = torch.cat([x, x + apart * normals(60, 20, seed=1), x[:5] + apart * normals(5, 20, seed=2)])
    labels = torch.arange(125) % 7
    network = memorize(x, labels)
    assert torch.equal(network.classify(x), labels)
    assert network.facts is not None
    assert network.facts.n_tilted > 0 or apart > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64])
def test_inputs_of_any_dtype_count_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    x = (normals(80, 10) * 40.0 + 120.0).to(dtype)
    labels = some_labels(80, 3)
    network = memorize(x, labels)
    assert network.lift.weight.dtype == torch.float64
    assert torch.equal(network.classify(x), labels)
    assert torch.equal(network.classify(x.double()), labels)


@pytest.mark.parametrize("projection", ["random", "principal"])
@pytest.mark.parametrize("far", [1e5, 1e9, 1e15, 1e150, 1e300])
@pytest.mark.parametrize("n_far", [1, 2])
def test_points_far_out_cost_neither_themselves_nor_the_others_a_digit(projection: str, far: float, n_far: int) -> None:
    x = normals(502, 4)
    x[500], x[501] = far, (-far if n_far == 2 else 0.5)
    targets, labels = normals(502, 2, seed=1), some_labels(502, 5)
    network = memorize(x, targets, projection=projection)
    assert network.facts is not None
    error = float((network(x) - targets).abs().max().detach())
    assert error <= network.facts.rounding <= 1e-7
    assert torch.equal(memorize(x, labels, projection=projection).classify(x), labels)


def test_samples_with_heavy_tails_and_of_many_scales_are_memorized() -> None:
    cauchy = normals(800, 5) / normals(800, 5, seed=1)
    scales = normals(300, 4) * torch.logspace(-4, 5, 300).double()[:, None]
    crowd = normals(300, 4)
    crowd[:20] += 1e5  # a cluster far out, a hundred thousand times narrower than its distance
    for x in (cauchy, scales, crowd):
        targets = normals(len(x), 1, seed=2)
        network = memorize(x, targets)
        assert float((network(x) - targets).abs().max().detach()) <= 1e-6 * float(targets.abs().max())


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_the_scale_of_the_inputs_does_not_matter(size: float) -> None:
    x, targets, labels = normals(80, 4) * size, normals(80, 2, seed=1), some_labels(80, 3)
    assert torch.equal(memorize(x, labels).classify(x), labels)
    assert float((memorize(x, targets)(x) - targets).abs().max().detach()) <= 1e-9
    assert torch.equal(memorize(x, labels, projection="principal").classify(x), labels)


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e200, 1e307])
def test_the_scale_of_the_targets_does_not_matter(size: float) -> None:
    x, targets = normals(80, 4), normals(80, 2, seed=1) * size
    found = memorize(x, targets)(x).detach()
    assert float((found - targets).abs().max()) <= 1e-9 * float(targets.abs().max()) + 1e-323


def test_every_output_keeps_its_own_digits() -> None:
    x, targets = normals(60, 4), normals(60, 4, seed=1)
    targets *= torch.tensor([1e-150, 1.0, 0.0, 1e150], dtype=torch.float64)
    found = memorize(x, targets)(x).detach()
    assert bool(((found - targets).abs().amax(0) <= 1e-9 * targets.abs().amax(0)).all())


def test_numpy_arrays_count_as_the_tensors_they_hold() -> None:
    x, labels = normals(30, 4), some_labels(30, 3)
    network = memorize(x.numpy(), labels.numpy().astype("uint32"))
    assert torch.equal(network.classify(x.numpy()), labels)
    assert torch.equal(network(x.numpy()), memorize(x, labels)(x))


def test_real_targets_have_no_classes(network: Memorizer) -> None:
    x, labels = normals(30, 4), some_labels(30, 3)
    regression = memorize(x, labels.float())
    assert regression.is_real
    assert not network.is_real
    with pytest.raises(ConversionError, match=r"this one has 1 real outputs.*labels\.long\(\)"):
        regression.classify(x)


def test_autocast_takes_no_digits(network: Memorizer, images: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, labels = images[0][:600], images[1][:600]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network.classify(x), labels)
        assert network(x).dtype == torch.float64


def test_a_network_in_another_precision_claims_nothing() -> None:
    x, labels = normals(30, 4), some_labels(30, 3)
    network = memorize(x, labels)
    assert network.double().facts is not None
    assert network.float().facts is None
    assert network.double().facts is None  # the digits are gone


def test_images_keep_their_shape_at_the_door(images: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, labels = images[0][:50].reshape(50, 1, 8, 8), images[1][:50]
    network = memorize(x, labels)
    assert torch.equal(network.classify(x), network.classify(x.flatten(1)))


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    x, labels = normals(40, 6), some_labels(40, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = memorize(x, labels, seed=1), memorize(x, labels, seed=1), memorize(x, labels, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lift.weight, other.lift.weight)


# ------------------------------------------------------------------------------------- the module


def test_a_fresh_memorizer_is_all_identity_and_silence() -> None:
    empty = Memorizer(4, 3, width=5, n_blocks=2, n_cues=3)
    h = normals(7, 5)
    assert torch.equal(empty.move(h), h)
    assert torch.equal(empty.classify(normals(7, 4)), torch.full((7,), SILENT))


def test_streaming_over_rows_changes_nothing(network: Memorizer, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normals(40, 64)
    whole = network(x).detach()
    monkeypatch.setattr("onlynorm.identity.memorization.memorizer.ROWS", 7)
    torch.testing.assert_close(network(x).detach(), whole, rtol=0, atol=1e-9)


def test_a_state_dict_brings_the_same_network_back(network: Memorizer) -> None:
    facts = network.facts
    assert facts is not None
    twin = Memorizer(64, 10, width=facts.width, n_blocks=facts.n_blocks, n_cues=10)
    twin.load_state_dict(network.state_dict())
    x = normals(9, 64)
    assert torch.equal(twin(x), network(x))
    assert str(facts.width) in str(facts)


def test_a_file_whose_sizes_do_not_fit_its_numbers_is_refused(network: Memorizer, tmp_path: Path) -> None:
    wrong = Memorizer(64, 10, width=4, n_blocks=1, n_cues=10)
    wrong.width = 5
    on.save(wrong, tmp_path / "net.safetensors")
    with pytest.raises(FormatError, match="sizes that fit its parameters"):
        on.load(tmp_path / "net.safetensors")


def test_gradients_reach_the_input_and_all_weights_that_fire() -> None:
    x, labels = normals(30, 6), some_labels(30, 3)
    network = memorize(x, labels)
    x.requires_grad_()
    functional.cross_entropy(network(x), labels).backward()
    assert x.grad is not None
    assert bool((x.grad.abs().sum(1) > 0).all())
    first = network.blocks[0]
    assert isinstance(first, MemorizerBlock)
    assert first.inner.weight.grad is not None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(3, 5), (4,), (0, 6)])
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    network = memorize(normals(4, 6), torch.arange(4))
    with pytest.raises(ShapeError, match="needs samples of 6 real numbers"):
        network(torch.zeros(shape))


def test_at_a_class_vector_its_own_cue_speaks_alone(network: Memorizer) -> None:
    vectors = network.cues.weight.detach().clone()  # but for the flag, the cues are the class vectors
    vectors[:, -1] = -1.0
    fires = network.cues(vectors).detach() > 0.0
    assert torch.equal(fires, torch.eye(10, dtype=torch.bool))
    torch.testing.assert_close(network.read(vectors).detach(), torch.eye(10).double(), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------- off the sample


def test_inside_its_activation_distance_a_point_meets_the_same_neurons(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    x = images[0][:40].double()
    safe = activation_distances(network, x)
    assert bool((safe > 0.0).all())
    step = normals(40, 64, seed=9)
    step = step / torch.linalg.vector_norm(step, dim=1, keepdim=True)

    def first_firing(points: Tensor) -> list[Tensor]:
        h, found = network.enter(points).detach(), []
        waits = torch.ones(len(h), dtype=torch.bool)
        for block in network.blocks:
            assert isinstance(block, MemorizerBlock)
            fires = block.inner(h) > 0
            found.append(fires & waits[:, None])
            waits &= ~fires.any(1)
        return found

    inside = first_firing(x + 0.999 * safe[:, None] * step)
    assert all(torch.equal(a, b) for a, b in zip(first_firing(x), inside, strict=True))


def test_the_activation_distance_is_that_to_the_boundary_itself(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    x = images[0][:600].double()
    at = network.enter(x).detach()
    block = network.blocks[0]
    assert isinstance(block, MemorizerBlock)
    said, steep = block.inner(at).detach(), block.inner.weight.detach() @ network.lift.weight.detach()
    first = int(by_length(at[:, :-1])[0])  # the longest point has its neuron in the first block
    expected = (said[first].abs() / torch.linalg.vector_norm(steep, dim=1)).min()
    torch.testing.assert_close(activation_distances(network, x)[first], expected)


@pytest.mark.parametrize("projection", ["random", "principal"])
def test_no_attack_inside_its_class_radius_changes_a_class(
    images: tuple[Tensor, Tensor, Tensor, Tensor], projection: str
) -> None:
    x, labels = images[0][:300].double(), images[1][:300]
    network = memorize(x, labels, projection=projection)
    # Held-out samples, mostly silent, and points between two of the sample are certified as well.
    inputs = torch.cat([x, images[2][:100].double(), (x[:50] + x[50:100]) / 2.0])
    radii, answers = class_radii(network, inputs), network.classify(inputs)
    assert torch.equal(answers[:300], labels)
    assert bool((radii > 0.0).all())
    steps = [normals(len(inputs), 64, seed=seed) for seed in range(20)]
    inputs.requires_grad_()
    for direction in (1.0, -1.0):
        for output in network(inputs).mT:
            steps.append(direction * torch.autograd.grad(output.sum(), inputs, retain_graph=True)[0])
    inputs = inputs.detach()
    lost = torch.zeros(len(inputs), dtype=torch.bool)
    for step in steps:
        length = torch.linalg.vector_norm(step, dim=1, keepdim=True)
        step = step / torch.where(length > 0.0, length, 1.0)
        assert torch.equal(network.classify(inputs + 0.999 * radii[:, None] * step), answers)
        lost |= network.classify(inputs + 1.01 * radii[:, None] * step) != answers
    assert float(lost[:300].double().mean()) >= 0.8  # the radius is not far below what can be had
    ratio = radii[:300] / activation_distances(network, x)
    assert float(ratio.median()) < 0.2  # the firing pattern is far from telling the class


def test_a_class_radius_follows_the_units_of_the_inputs() -> None:
    x, labels = normals(60, 5), some_labels(60, 3)
    radii = class_radii(memorize(x, labels), x)
    torch.testing.assert_close(class_radii(memorize(1e6 * x, labels), 1e6 * x), 1e6 * radii, rtol=1e-6, atol=0)


def test_real_targets_have_no_class_radius() -> None:
    x = normals(6, 3)
    network = memorize(x, normals(6, 2))
    with pytest.raises(ConversionError, match="this one has 2 real outputs"):
        class_radii(network, x)
    assert bool((activation_distances(network, x) > 0.0).all())


def test_off_the_sample_everything_is_counted(
    images: tuple[Tensor, Tensor, Tensor, Tensor], network: Memorizer
) -> None:
    x, labels, test, test_labels = images
    x, labels = x[:600], labels[:600]
    told: list[tuple[int, int, str]] = []
    found = measure_off_sample(
        network, x, labels, held_out=(test, test_labels), sizes=(0.0, 1e-4, 0.1, 1.0), most=300,
        progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert [size for size, _ in found.noise] == [0.0, 1e-4, 0.1, 1.0]
    assert found.noise[0][1].right == 1.0
    assert found.noise[1][1].right == 1.0  # far below the smallest activation distance
    assert found.activation_distance[0] > 1e-4
    assert 0.0 < found.class_radius[0] < found.class_radius[1] < found.activation_distance[1]
    assert "class radius: at least" in str(found)
    assert found.noise[3][1].right < 0.5
    assert found.noise[2][1].wrong < found.noise[2][1].silent  # a cue speaks for its class alone
    for answers in (found.held_out, *(answers for _, answers in found.noise)):
        assert answers is not None
        assert answers.right + answers.silent + answers.wrong == pytest.approx(1.0)
    assert found.held_out is not None
    assert found.held_out.right < 0.5 < found.held_out.silent  # it does not generalise, and mostly says so
    assert found.n_noisy == 300
    assert told[-1][:2] == (6, 6)
    assert "held-out" in str(found)
    again = measure_off_sample(network, x, labels, sizes=(0.1,), most=300)
    assert again.noise[0] == found.noise[2]
    assert again.held_out is None


@pytest.mark.usefixtures("unchecked")
def test_off_sample_measures_refuse_what_they_cannot_judge(network: Memorizer) -> None:
    x = normals(6, 64)
    with pytest.raises(ShapeError, match=r"integer label.*got torch.float32"):
        measure_off_sample(network, x, torch.zeros(6))
    with pytest.raises(ValueRangeError, match=r"a size of noise .* number"):
        measure_off_sample(network, x, torch.arange(6), sizes=(-1.0,))
    with pytest.raises(ValueRangeError, match=r"most .* from 1; got 0"):
        measure_off_sample(network, x, torch.arange(6), most=0)


# ------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("make", [memorize, on.memorize_norms])
def test_an_exported_memorizer_takes_any_batch_and_gives_the_same_outputs(make: Callable[..., nn.Module]) -> None:
    x, labels = normals(20, 3), some_labels(20, 3)
    network = make(x, labels)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(network, (x,), dynamic_shapes=({0: batch},)).module()
    for n in (1, 2, 20, 8200):  # more than one part of the forward pass
        points = normals(n, 3, seed=n)
        assert torch.equal(exported(points), network(points))
