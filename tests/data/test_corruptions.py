"""Corruptions do what they say, grow with their severity, are functions of their seed, and leave the images alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, corrupt
from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError

EPS = 2.0**-23


def photos(n: int = 3, *, channels: int = 3, height: int = 12, width: int = 10, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(st.sampled_from(CORRUPTIONS), st.floats(0.0, 5.0), st.integers(0, 2**63), st.integers(1, 4))
@example("blur", 5e-324, 0, 1)
def test_a_corrupted_image_is_an_image_and_a_function_of_the_seed(
    kind: str, severity: float, seed: int, channels: int
) -> None:
    images = photos(channels=channels)
    kept, state = images.clone(), torch.get_rng_state()
    made = corrupt(images, kind, severity=severity, seed=seed)
    assert made.shape == images.shape
    assert made.dtype == images.dtype
    assert 0.0 <= float(made.min()) <= float(made.max()) <= 1.0
    assert torch.equal(images, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(made, corrupt(images, kind, severity=severity, seed=seed))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_no_severity_is_no_corruption_and_more_is_more(kind: str) -> None:
    images = photos(n=8)
    untouched = corrupt(images, kind, severity=0.0)
    assert torch.equal(untouched, images)
    assert untouched.data_ptr() != images.data_ptr()
    distances = [float((corrupt(images, kind, severity=s) - images).norm()) for s in range(6)]
    assert all(more > less for less, more in pairwise(distances))


def test_only_noise_depends_on_the_seed() -> None:
    images = photos()
    for kind in CORRUPTIONS:
        is_same = torch.equal(corrupt(images, kind, seed=1), corrupt(images, kind, seed=2))
        assert is_same == (kind != "noise")


def test_noise_has_the_deviation_it_says() -> None:
    grey = torch.full((40, 3, 16, 16), 0.5, dtype=torch.float64)
    noise = corrupt(grey, "noise", severity=4.0, seed=3) - grey
    # 0.08 is six deviations away from both ends; five standard errors of mean and deviation of n numbers.
    n = grey.numel()
    assert abs(float(noise.mean())) <= 5 * 0.08 / n**0.5
    assert abs(float(noise.std()) - 0.08) <= 5 * 0.08 / (2 * n) ** 0.5


@pytest.mark.parametrize("severity", [0.5, 3.0, 5.0])
def test_blur_is_a_gaussian_mean_mirrored_at_the_border(severity: float) -> None:
    images = photos(n=1, channels=2, height=9, width=16).double()
    sigma = 0.2 * severity
    reach = math.ceil(3 * sigma)
    weights = [math.exp(-((step / sigma) ** 2) / 2) for step in range(-reach, reach + 1)]
    weights = [weight / sum(weights) for weight in weights]

    def mirrored(index: int, size: int) -> int:
        index = abs(index)
        return index if index < size else 2 * (size - 1) - index

    wanted = torch.zeros_like(images)
    for row in range(9):
        for column in range(16):
            for a, down in enumerate(weights):
                for b, right in enumerate(weights):
                    y, x = mirrored(row + a - reach, 9), mirrored(column + b - reach, 16)
                    wanted[..., row, column] += down * right * images[..., y, x]
    torch.testing.assert_close(corrupt(images, "blur", severity=severity), wanted, rtol=0, atol=200 * 2.0**-52)


def test_blur_of_a_uniform_image_and_of_a_tiny_one_changes_nothing_it_must_not() -> None:
    grey = torch.full((1, 3, 8, 8), 0.25)
    torch.testing.assert_close(corrupt(grey, "blur", severity=5.0), grey, rtol=0, atol=20 * EPS)
    one = torch.tensor([[[[0.75]]]])
    torch.testing.assert_close(corrupt(one, "blur", severity=5.0), one, rtol=0, atol=EPS)


def test_contrast_moves_each_image_towards_its_own_mean() -> None:
    images = photos().double()
    made = corrupt(images, "contrast", severity=5.0)
    torch.testing.assert_close(made.mean((1, 2, 3)), images.mean((1, 2, 3)), rtol=0, atol=100 * 2.0**-52)
    ratio = made.std((1, 2, 3)) / images.std((1, 2, 3))
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.1), rtol=0, atol=1e-12)


def test_inverted_colours_are_inverted_twice_the_same_and_bright_ones_first() -> None:
    images = photos()
    made = corrupt(images, "invert", severity=5.0)
    torch.testing.assert_close(made, 1.0 - images, rtol=0, atol=EPS)
    torch.testing.assert_close(corrupt(made, "invert", severity=5.0), images, rtol=0, atol=2 * EPS)
    half = corrupt(images, "invert", severity=2.0)
    bright = images >= 0.6
    assert torch.equal(half[~bright], images[~bright])
    torch.testing.assert_close(half[bright], 1.0 - images[bright], rtol=0, atol=EPS)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_normalised_images_are_corrupted_as_pixels_are(kind: str) -> None:
    images = photos().double()
    mean, std = (torch.tensor(values).double().reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    made = corrupt((images - mean) / std, kind, severity=4.0, mean=CIFAR_MEAN, std=CIFAR_STD)
    wanted = corrupt(images, kind, severity=4.0)
    # Mean and deviation are rounded to float32 on their way.
    torch.testing.assert_close(made * std + mean, wanted, rtol=0, atol=20 * EPS)


@pytest.mark.parametrize(
    ("images", "options", "error", "message"),
    [
        (photos(), {"kind": "fog"}, UnknownNameError, r"corruption needs a known name; got 'fog'"),
        (photos(), {"severity": 5.1}, ValueRangeError, r"severity .* in \[0, 5\]; got 5\.1\. Try 3"),
        (photos(), {"severity": float("nan")}, ValueRangeError, r"severity .* in \[0, 5\]"),
        (photos(), {"seed": -1}, ValueRangeError, r"seed .* integer"),
        (photos()[0], {}, ShapeError, r"images \(n, channels, height, width\); got .*\(3, 12, 10\)"),
        (photos()[:0], {}, ShapeError, r"floating-point images"),
        ((255 * photos()).byte(), {}, ShapeError, r"got torch.uint8 .*divide bytes by 255"),
        (2.0 * photos(), {}, ValueRangeError, r"pixels in \[0, 1\]; got values from .*CIFAR_MEAN"),
        (photos() * float("nan"), {}, ValueRangeError, r"pixels in \[0, 1\]"),
        (photos(), {"mean": (0.5,)}, ShapeError, r"one value per channel, 3, .*got \(0\.5,\)"),
        (photos(), {"std": (1.0, 0.0, 1.0)}, ShapeError, r"std positive ones"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_corrupted_is_refused(
    images: Tensor, options: dict[str, object], error: type[Exception], message: str
) -> None:
    chosen = {"kind": "blur"} | options
    with pytest.raises(error, match=message):
        corrupt(images, **chosen)  # type: ignore[arg-type]
