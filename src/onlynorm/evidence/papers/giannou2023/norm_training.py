"""Three methods to set the norms of a frozen network (giannou2023, appendix E), with all repeats in one batch.

A teacher g(x) = sum_i relu((W x)_i) labels Gaussian inputs. A frozen network with norms is fitted to it:

    f(x) = sum_i relu(norm2(left relu(norm1(right x)))_i)

Its norms are trained by SGD (`train_norms`), or set by the construction of Theorem 1, from the teacher or from a dense
student of the teacher's shape that was trained on the same data (`construct_norms`). The first axis of every tensor is
the repeats, so that one step of all repeats is a few batched products.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

import onlynorm as on

Moments: TypeAlias = tuple[Tensor, Tensor]
Predict: TypeAlias = Callable[[Float[Tensor, "repeats samples width"]], Float[Tensor, "repeats samples"]]
_EPS = 1e-5  # of torch's batch norms
_CHUNK = 5_000  # samples per evaluation; limits memory and does not affect the result
_PILOT = 1_000_003  # the seed of the repeat for the selection of learning rates


# ------------------------------------------------------------------------------- pieces


def train_norms(*, n_features: int, density: float, rates: Sequence[float], task: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate selected on a separate repeat, and the relative test losses of all repeats after SGD."""
    taught = TeacherTask(**task)
    pilot = replace(taught, seeds=[_PILOT] * len(rates))
    rate = _best(rates, pilot.loss(_trained_net(pilot, n_features, density, rates)))
    net = _trained_net(taught, n_features, density, [rate] * len(taught.seeds))
    return {"rate": rate, "losses": taught.loss(net)}


def construct_norms(
    *, n_features: Sequence[int], density: float, rates: Sequence[float], task: Mapping[str, Any]
) -> dict[str, Any]:
    """Relative test losses of a dense student, and of both constructions for every number of features.

    The student is trained like the norms: on the same samples, with the learning rate selected on a separate repeat.
    """
    taught = TeacherTask(**task)
    pilot = replace(taught, seeds=[_PILOT] * len(rates))
    rate = _best(rates, pilot.loss(functools.partial(relu_sums, _trained_student(pilot, rates))))
    student = _trained_student(taught, [rate] * len(taught.seeds))
    found: dict[str, Any] = {"rate": rate, "student": taught.loss(functools.partial(relu_sums, student))}
    found["from teacher"], found["from student"] = [], []
    for count in n_features:
        left, right = draw_frozen(taught, n_features=count, density=density)
        targets = torch.stack([taught.teacher, student], 1)
        # The pseudo-inverse, as in the paper: it also works if features are too few or too sparse.
        solved = [on.solve(*system, method="svd") for system in zip(left, right, targets, strict=True)]
        gamma = torch.stack([solution.gamma for solution in solved])
        for place, name in enumerate(("from teacher", "from student")):
            found[name].append(taught.loss(constructed(left, right, gamma[:, place])))
    return found


# ------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class TeacherTask:
    """A random teacher of this width and its data, for every repeat; each training sample is used once."""

    width: int
    seeds: Sequence[int]
    n_train: int
    n_test: int
    batch: int
    momentum: float

    @property
    def teacher(self) -> Float[Tensor, "repeats width width"]:
        """The teachers' weights."""
        return self.weights("teacher")

    def weights(self, purpose: str) -> Float[Tensor, "repeats width width"]:
        """Normal entries of variance 1/width, so that inputs of neurons have unit variance."""
        shape = self.width, self.width
        drawn = [
            torch.randn(shape, generator=generator, dtype=torch.float64) for generator in self._generators(purpose)
        ]
        return torch.stack(drawn) / math.sqrt(self.width)

    def inputs(self, purpose: str, *, n_samples: int, size: int) -> Iterator[Float[Tensor, "repeats size width"]]:
        """Gaussian inputs in batches; equal purposes give equal samples."""
        generators = self._generators(f"{purpose} inputs")
        for start in range(0, n_samples, size):
            shape = min(size, n_samples - start), self.width
            yield torch.stack([torch.randn(shape, generator=generator) for generator in generators])

    def teach(self, predict: Predict, parameters: Sequence[Tensor], *, rates: Sequence[float]) -> None:
        """Trains the parameters in place by SGD with momentum, each repeat with its own constant learning rate.

        Repeats share no parameters, so the gradient of the summed loss is that of each repeat. The squared error is
        divided by the width, because the variance of the teacher grows with it: the same learning rates then suit all
        widths.
        """
        teacher, pace = self.teacher.float(), torch.tensor(rates)
        velocities = [torch.zeros_like(parameter) for parameter in parameters]
        for x in self.inputs("train", n_samples=self.n_train, size=self.batch):
            error = (predict(x) - relu_sums(teacher, x)).square().mean(1) / self.width
            gradients = torch.autograd.grad(error.sum(), parameters)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                    velocity.mul_(self.momentum).add_(gradient)
                    parameter.sub_(pace.reshape(-1, *(1,) * (parameter.ndim - 1)) * velocity)

    @torch.no_grad()
    def loss(self, predict: Predict) -> Float[Tensor, " repeats"]:
        """Test mean squared error over the variance of the teacher's output; the best constant has loss 1."""
        teacher, error, outputs = self.teacher, torch.zeros(len(self.seeds), dtype=torch.float64), []
        for x in self.inputs("test", n_samples=self.n_test, size=_CHUNK):
            outputs.append(relu_sums(teacher, x.double()))
            error += (predict(x).double() - outputs[-1]).square().sum(1)
        return error / self.n_test / torch.cat(outputs, 1).var(1)

    def _generators(self, purpose: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(zlib.crc32(f"{purpose} {seed}".encode())) for seed in self.seeds]


def relu_sums(
    weights: Float[Tensor, "repeats width width"], x: Float[Tensor, "repeats samples width"]
) -> Float[Tensor, "repeats samples"]:
    """The sum of ReLU neurons with these weights: the output of the teacher and of the dense student."""
    return torch.relu(x.to(weights.dtype) @ weights.mT).sum(-1)


def _trained_student(task: TeacherTask, rates: Sequence[float]) -> Float[Tensor, "repeats width width"]:
    student = task.weights("student").float().requires_grad_()
    task.teach(functools.partial(relu_sums, student), [student], rates=rates)
    return student.detach().double()


def _best(rates: Sequence[float], losses: Float[Tensor, " rates"]) -> float:
    """The learning rate with the smallest loss; a loss that diverged counts as infinite."""
    return rates[int(losses.nan_to_num(nan=math.inf).argmin())]


# ------------------------------------------------------------------------------- frozen networks


def draw_frozen(
    task: TeacherTask, *, n_features: int, density: float
) -> tuple[Float[Tensor, "repeats width feat"], Float[Tensor, "repeats feat width"]]:
    """Left and right frozen weights of every repeat; each weight is nonzero with probability `density`."""
    shape = task.width, task.width
    name, thinned = ("he_normal", None) if density == 1.0 else ("sparse_he_normal", density)
    drawn = [on.draw(name, shape, n_features=n_features, seed=seed, density=thinned) for seed in task.seeds]
    return torch.stack([features.left() for features in drawn]), torch.stack([features.right() for features in drawn])


class NormNet:
    """The frozen network of all repeats with batch norms after both layers; only gamma and beta are trained."""

    def __init__(self, left: Float[Tensor, "repeats width feat"], right: Float[Tensor, "repeats feat width"]) -> None:
        self.left, self.right = left.float(), right.float()
        n_repeats, width, n_features = left.shape
        self.gamma1, self.gamma2 = (torch.ones(n_repeats, 1, n, requires_grad=True) for n in (n_features, width))
        self.beta1, self.beta2 = (torch.zeros(n_repeats, 1, n, requires_grad=True) for n in (n_features, width))
        self.stored: tuple[Moments, Moments] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters: gamma and beta of the norms."""
        return [self.gamma1, self.beta1, self.gamma2, self.beta2]

    def __call__(self, x: Float[Tensor, "repeats samples width"]) -> Float[Tensor, "repeats samples"]:
        """The outputs, with the statistics of the batch or the stored ones."""
        first = _projected_moments(self.right, x) if self.stored is None else self.stored[0]
        second = self._second_inputs(x, first)
        mean, deviation = _moments(second) if self.stored is None else self.stored[1]
        return torch.relu(self.gamma2 * (second - mean) / deviation + self.beta2).sum(-1)

    @torch.no_grad()
    def store_statistics(self, x: Float[Tensor, "repeats samples width"]) -> None:
        """Stores the statistics of this batch for all later calls, as in evaluation mode."""
        first = _projected_moments(self.right, x)
        self.stored = first, _moments(self._second_inputs(x, first))

    def _second_inputs(self, x: Tensor, first: Moments) -> Tensor:
        mean, deviation = first
        # The first norm is folded into the frozen weights, which saves a pass over the features (giannou2023:prop-1).
        scale = self.gamma1 / deviation
        hidden = torch.baddbmm(self.beta1 - scale * mean, x, (scale.mT * self.right).mT).relu()
        return hidden @ self.left.mT


def _trained_net(task: TeacherTask, n_features: int, density: float, rates: Sequence[float]) -> NormNet:
    net = NormNet(*draw_frozen(task, n_features=n_features, density=density))
    task.teach(net, net.parameters, rates=rates)
    net.store_statistics(next(task.inputs("train", n_samples=_CHUNK, size=_CHUNK)))
    return net


def constructed(
    left: Float[Tensor, "repeats width feat"],
    right: Float[Tensor, "repeats feat width"],
    gamma: Float[Tensor, "repeats feat"],
) -> Predict:
    """The frozen network with the solved gamma and shifts that make every feature active on a ball.

    beta1 = radius |gamma| |right row|, and beta2 = -left beta1 cancels it. A Gaussian input leaves the ball
    of radius sqrt(width) + 7 with probability below exp(-49/2).

    Theory: giannou2023:thm-1
    """
    radius = math.sqrt(left.shape[1]) + 7
    beta1 = radius * gamma.abs() * torch.linalg.vector_norm(right, dim=-1)
    beta2 = -(left @ beta1[..., None]).mT

    def predict(x: Tensor) -> Tensor:
        hidden = torch.relu(gamma[:, None] * (x.to(gamma.dtype) @ right.mT) + beta1[:, None])
        return torch.relu(hidden @ left.mT + beta2).sum(-1)

    return predict


def _moments(x: Float[Tensor, "repeats samples channels"]) -> Moments:
    variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    return mean, torch.sqrt(variance + _EPS)


def _projected_moments(
    right: Float[Tensor, "repeats feat width"], x: Float[Tensor, "repeats samples width"]
) -> Moments:
    """The moments of right x from those of x: cheaper, since there are more features than inputs."""
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    covariance = centred.mT @ centred / x.shape[1]
    variance = ((right @ covariance) * right).sum(-1)[:, None]
    return mean @ right.mT, torch.sqrt(variance.clamp_min(0.0) + _EPS)
