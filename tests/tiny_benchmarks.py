"""Every benchmark made tiny: toy data and networks in place of real ones, and sizes that take a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, Split
from onlynorm.evidence.bench import tasks
from onlynorm.evidence.bench.races import align, chain, diagnose, norm_only, reconstruct, solve, tune
from onlynorm.evidence.bench.sweeps import adapt, frozen, predict, repair, scaled, scratch, text
from onlynorm.evidence.bench.sweeps.reviews import Texts
from onlynorm.evidence.bench.systems import System
from onlynorm.evidence.harness import Sizes
from onlynorm.evidence.papers.random_features import scaled as scaled_training
from onlynorm.evidence.papers.random_features import scratch as scratch_training
from onlynorm.models import CifarResNet, cifar_resnet, mlp
from onlynorm.seeds import own_randomness, seeded

SYSTEMS = (
    System("flat", "1 x 6", (1, 6), 0.5),
    System("flat", "1 x 6", (1, 6), 1.25),
    System("square", "4 x 4", (4, 4), 1.25),
    System("sparse", "4 x 5", (4, 5), 2.0, "sparse_he_normal", 0.5),
    System("convolution", "conv 3x3, 2 ch", (2, 2, 3, 3), 1.0),
    System("convolution", "conv 3x3, 2 ch", (2, 2, 3, 3), 1.25),
)
RESNET = diagnose.Network("ResNet-18, tiny", 18, 4, 2, 32)
TRAINING = scratch_training.ScratchTraining(
    "toy", ((3,), (4,)), image_size=4, n_train=48, n_validation=20, n_test=30, epochs=2, batch_size=16, warmup=0.0
)


def images(n_train: int, n_test: int, *shape: int, seed: int = 0) -> Split:
    """Standard normal images with labels from 0 to 9 in turn."""
    n = n_train + n_test
    inputs, labels = torch.randn(n, *shape, generator=seeded(seed)), torch.arange(n) % 10
    return Split("toy", inputs[:n_train], labels[:n_train], inputs[n_train:], labels[n_train:])


def normalised() -> Split:
    """Pixels at random, normalised as CIFAR-10's are."""
    pixels = torch.rand(80, 3, 8, 8, generator=seeded(0))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    inputs, labels = (pixels - mean) / std, torch.arange(80) % 10
    return Split("toy", inputs[:60], labels[:60], inputs[60:], labels[60:])


def stripes() -> Split:
    """Images whose class is the place of a bright column."""
    labels = torch.arange(400) % 10
    inputs = 0.1 * torch.randn(400, 1, 8, 20, generator=seeded(0))
    inputs[torch.arange(400), :, :, 2 * labels] += 1.0
    return Split("stripes", inputs[:320], labels[:320], inputs[320:], labels[320:])


def two_kinds() -> Split:
    """Two kinds of images that a line separates, with ten labels of which two occur."""
    inputs, labels = torch.randn(150, 2, 8, 8, generator=seeded(0)), torch.arange(150) % 2
    inputs = inputs + labels[:, None, None, None].float()
    return Split("toy", inputs[:110], labels[:110], inputs[110:], labels[110:])


def calibrated() -> Split:
    """Noise; the test images are those that calibrated, so that none leaves a range."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 3, 12, 12, generator=generator)
    labels = torch.randint(0, 10, (6,), generator=generator)
    return Split("toy", inputs, labels, inputs[:5], labels[:5])


def narrow(width: int = 2) -> nn.Module:
    """A ResNet-8 of this first width."""
    with own_randomness(0):
        return CifarResNet(8, width=width).eval()


def made_texts(n: int = 200) -> Texts:
    """Texts whose class is told by one of two words, among others of different number."""
    labels = tuple(i % 2 for i in range(n))
    return Texts(
        tuple(f"film {'splendid' if k else 'dreadful'}" + " and so on" * (i % 3) for i, k in enumerate(labels)), labels
    )


def _adapt(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(adapt, "split", functools.cache(normalised))
    patch.setattr(adapt, "base", functools.cache(lambda: cifar_resnet(8, width=2).eval()))
    patch.setattr(adapt.sweep, "grid", lambda case: (0.01, 0.1) if case.method in adapt.TRAINED else ())
    return adapt.AdaptSizes(
        corruptions=("noise",), seeds=1, epochs=1, images=24, n_validation=10, n_test=20, batch_size=8
    )


def _frozen(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(frozen, "images", lambda _: images(40, 20, 3, 8, 8))
    patch.setattr(frozen, "NETWORKS", ((8, 2), (8, 4), (14, 2)))
    return frozen.FrozenSizes(seeds=1, images=24, n_test=20, epochs=1, batch_size=8)


def _predict(patch: pytest.MonkeyPatch) -> Sizes:
    predict._split.cache_clear()
    patch.setitem(predict._DATA, predict.FASHION, stripes)
    chosen = [predict.NetworkSpec("MLP", depth, 8, "none", "standard") for depth in (1, 24)]
    patch.setattr(predict, "subjects", lambda _: dict(enumerate(chosen, 5000)))
    return predict.PredictSizes(n_diagnosed=32, steps=20, batch_size=16, lrs=(0.001, 0.1))


def _repair(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(repair, "split", lambda: images(60, 20, 1, 3, 4))
    patch.setattr(repair, "MAIN", (2, "tanh"))
    patch.setattr(repair, "NETWORKS", ((2, "tanh"), (3, "relu")))
    patch.setattr(repair.sweep, "grid", (0.01, 0.1))
    return repair.RepairSizes(
        width=8, steps=4, trial_steps=2, batch_size=8, n_repair=16, n_validation=10, n_test=20, seeds=2
    )


def _scaled(patch: pytest.MonkeyPatch) -> Sizes:
    subject = scaled_training.ScaledTask(
        lambda: images(80, 40, 1, 4, 4), lambda seed: nn.Sequential(nn.Flatten(), *mlp((4, 5, 10), seed=seed))
    )
    patch.setitem(scaled_training.TASKS, "toy", subject)
    patch.setattr(scaled_training, "N_VALIDATION", 40)
    patch.setattr(scaled.sweep, "grid", (0.01, 0.1))
    conditions = {scaled.SEMICIRCLE: (1.0, 30.0), scaled.GEOMETRIC: (30.0,)}
    patch.setattr(scaled, "CONDITIONS", conditions)
    scaled_training.images_of.cache_clear()
    return scaled.ScaledSizes(data=("toy",), seeds=2, images=32, epochs=1, trial_epochs=1, batch_size=8)


def _scratch(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(scratch_training, "DATA", {"toy": two_kinds})
    patch.setitem(scratch.TRAININGS, "toy", TRAINING)
    patch.setattr(scratch.sweep, "grid", (0.03, 0.1))
    patch.setattr(scratch.sweep, "start", (0.03, 0.1))
    patch.setattr(
        scratch, "METHODS",
        {name: scratch.METHODS[name] for name in (scratch.ORDINARY, scratch.ID_COND, *_drawn())},
    )  # fmt: skip
    scratch_training.images.cache_clear()
    return scratch.ScratchSizes(data=("toy",), seeds=2, trials=2)


def _drawn() -> list[str]:
    return [name(excess) for name in (scratch.plain, scratch.followed) for excess in scratch.EXCESSES]


def _text(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(text, "read_reviews", made_texts)
    patch.setattr(text.sweep, "grid", (5e-3, 3e-2))
    for function in (text.encoder, text.parts):
        function.cache_clear()
    return text.TextSizes(quick=True, texts=64, n_validation=16, n_test=40, tokens=6, epochs=1, batch_size=32, seeds=2)


def _solve(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(solve, "GRID", SYSTEMS)
    patch.setattr(solve, "iteration_rate", lambda shape: 0.9)
    return solve.SolveSizes(repeats=1)


def _reconstruct(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(reconstruct, "cifar10", calibrated)
    patch.setattr(reconstruct, "make_target", lambda *, quick: narrow())
    patch.setattr(reconstruct, "race_layers", lambda *_, **__: [])
    return reconstruct.ReconstructSizes(features=("id_cond",), calibration=6, exact=2, images=3, collapsed=5)


def _tune(patch: pytest.MonkeyPatch) -> Sizes:
    name = "ResNet-8, narrow"
    patch.setattr(tune, "subjects", lambda *, quick: [(name, lambda: tasks.images_subject(quick=True))])
    return tune.TuneSizes(quick=True, repeats=1)


def _chain(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(chain, "WIDTHS", (8, 32))
    return chain.ChainSizes(repeats=1)


def _align(patch: pytest.MonkeyPatch) -> Sizes:
    return align.AlignSizes(quick=True, repeats=1)


def _diagnose(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(diagnose, "QUICK", (RESNET,))
    return diagnose.DiagnoseSizes(quick=True, repeats=1)


def _layers(patch: pytest.MonkeyPatch) -> Sizes:
    patch.setattr(norm_only, "_subjects", lambda: [("tiny", nn.Linear(6, 5), torch.ones(4, 6))])
    patch.setattr(norm_only, "_linear", lambda n, n_samples: ("few", nn.Linear(6, 6), torch.ones(2, 6)))
    step, blocks = norm_only.measure_step, norm_only.measure_blocks
    patch.setattr(norm_only, "measure_step", lambda n, repeats: step(2, repeats=repeats, n_images=2))
    patch.setattr(norm_only, "measure_blocks", lambda n, repeats: blocks(8, repeats=repeats))
    return norm_only.LayersSizes(quick=True, repeats=1)


TINY: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "solve": _solve, "reconstruct": _reconstruct, "tune": _tune, "adapt": _adapt, "frozen": _frozen, "chain": _chain,
    "align": _align, "diagnose": _diagnose, "layers": _layers, "predict": _predict, "repair": _repair,
    "scaled": _scaled, "scratch": _scratch, "text": _text,
}  # fmt: skip
"""Functions that make a benchmark tiny for one test and return its sizes."""
