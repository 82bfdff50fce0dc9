"""Figures 4 and 5 of giannou2023: the batched pieces against plain torch, and whole artifacts at tiny sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import onlynorm as on
from onlynorm.evidence.artifacts import Artifact, artifacts
from onlynorm.evidence.papers.giannou2023.norm_training import (
    NormNet,
    TeacherTask,
    construct_norms,
    constructed,
    draw_frozen,
    train_norms,
)
from onlynorm.evidence.papers.giannou2023.sgd import ALGORITHMS, FROM_STUDENT, FROM_TEACHER, SGD, STUDENT, Trimmed
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import Record
from onlynorm.features import structural_rank

FIGURES = ("fig-4-left", "fig-4-right", "fig-5a", "fig-5b")
TRAINING = {"n_train": 3_000, "n_test": 2_000, "batch": 50, "momentum": 0.9}
TINY: dict[str, Any] = {"widths": [3, 5], "width": 5, "features": [5, 25, 30], "rates": [0.1, 0.3], **TRAINING}
EXACT = 1e-20  # squared, relative: systems of a few dozen equations solved in float64


def task(width: int = 5, seeds: tuple[int, ...] = (0, 1, 2), **changes: Any) -> TeacherTask:
    return TeacherTask(width=width, seeds=seeds, **{**TRAINING, **changes})


def as_config(one: TeacherTask) -> dict[str, Any]:
    return dataclasses.asdict(one)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """All four artifacts, each with its own density and expectations but tiny sizes."""
    known = artifacts()
    small = [shrink(known[f"giannou2023:{figure}"]) for figure in FIGURES]
    made = reproduce(small, out=tmp_path_factory.mktemp("records"))
    return {record.artifact.partition(":")[2]: record for record in made}


def shrink(one: Artifact) -> Artifact:
    sizes = {scale: {**table, **{k: v for k, v in TINY.items() if k in table}} for scale, table in one.sizes.items()}
    return dataclasses.replace(one, sizes=sizes)


# ------------------------------------------------------------------------------- artifacts


@pytest.mark.parametrize("figure", FIGURES)
def test_an_artifact_measures_every_value_its_expectations_name(records: dict[str, Record], figure: str) -> None:
    record = records[figure]
    assert not any("stopped" in reason for reason in record.reasons), str(record)
    assert all(check.ours is not None and math.isfinite(check.ours) for check in record.checks)
    assert {check.name for check in record.checks} == set(record.values)


@pytest.mark.parametrize("figure", FIGURES)
def test_every_panel_draws_the_three_algorithms_and_the_dense_student(records: dict[str, Record], figure: str) -> None:
    record = records[figure]
    assert len(record.panels) == 2
    for panel in record.panels:
        drawn = [curve for curve in record.curves if curve.panel == panel.name]
        assert [curve.label for curve in drawn] == [*ALGORITHMS, STUDENT]
        if panel.y_log:
            assert min(min(curve.y) for curve in drawn) >= 1e-6


@pytest.mark.parametrize("figure", ["fig-4-left", "fig-4-right"])
def test_dense_constructions_are_exact_from_d_squared_features_on(records: dict[str, Record], figure: str) -> None:
    rows = table(records[figure])
    exact = [row for row in rows if row["method"] == FROM_TEACHER and row["features"] >= row["teacher's width"] ** 2]
    assert exact
    assert all(row["highest"] <= EXACT for row in exact)
    student = {row["features"]: row["highest"] for row in rows if row["method"] == STUDENT}
    for row in rows:
        if row["method"] == FROM_STUDENT and row["features"] >= row["teacher's width"] ** 2:
            assert row["highest"] == pytest.approx(student[row["features"]], abs=math.sqrt(EXACT))


@pytest.mark.parametrize(("figure", "density"), [("fig-4-left", 1.0), ("fig-5a", 0.2), ("fig-5b", 0.05)])
def test_the_densities_are_the_papers_at_both_scales(figure: str, density: float) -> None:
    one = artifacts()[f"giannou2023:{figure}"]
    assert [one.sizes[scale]["density"] for scale in ("quick", "paper")] == [density, density]


@pytest.mark.parametrize("figure", FIGURES)
def test_the_paper_scale_keeps_what_the_paper_states(figure: str) -> None:
    one = artifacts()[f"giannou2023:{figure}"]
    sizes = one.sizes["paper"]
    assert len(one.seeds) == 5
    assert "n_seeds" not in sizes
    assert sizes["n_train"] == 1_000_000
    assert any("100,000 samples" in caveat for caveat in one.caveats) == (sizes["n_test"] == 100_000)
    if "features" in sizes:
        assert sizes["width"] == 25
        assert 625 in sizes["features"]
    if "widths" in sizes and "width" in sizes:
        assert sizes["width"] in sizes["widths"]


def table(record: Record) -> list[dict[str, Any]]:
    assert record.table is not None
    return [dict(zip(record.table.columns, row, strict=True)) for row in record.table.rows]


def test_the_extremes_are_dropped() -> None:
    kept = Trimmed.of([5.0, 0.1, 2.0, 3.0, 100.0])
    assert (kept.low, kept.high) == (2.0, 5.0)
    assert kept.mean == pytest.approx(10.0 / 3.0)


def test_the_table_summarises_the_kept_repeats_of_the_pieces(records: dict[str, Record]) -> None:
    record = records["fig-4-left"]
    note = next(note for note in record.pieces if note.name == "SGD d=3 features=9")
    losses = train_norms(**note.config)["losses"].tolist()
    row = next(row for row in table(record) if row["method"] == SGD and row["features"] == 9)
    assert sorted(losses)[1:-1] == pytest.approx(
        [row["lowest"], 3 * row["mean loss"] - row["lowest"] - row["highest"], row["highest"]]
    )


# ------------------------------------------------------------------------------- pieces


def test_sgd_on_the_norms_lowers_the_loss() -> None:
    taught = task()
    left, right = draw_frozen(taught, n_features=25, density=1.0)
    fresh = NormNet(left, right)
    fresh.store_statistics(next(taught.inputs("train", n_samples=5_000, size=5_000)))
    before = taught.loss(fresh)
    after = train_norms(n_features=25, density=1.0, rates=[0.1], task=as_config(taught))["losses"]
    assert bool((after < 0.5 * before).all())


def test_training_that_diverges_is_never_chosen() -> None:
    made = train_norms(n_features=25, density=1.0, rates=[1e6, 0.1], task=as_config(task()))
    assert made["rate"] == 0.1
    made = construct_norms(n_features=[], density=1.0, rates=[1e6, 0.1], task=as_config(task()))
    assert made["rate"] == 0.1


def test_the_dense_student_learns_more_than_a_linear_function_could() -> None:
    made = construct_norms(n_features=[25], density=1.0, rates=[0.3], task=as_config(task(n_train=20_000)))
    # The linear part of a sum of ReLUs leaves about 0.4 of its variance.
    assert float(made["student"].max()) < 0.2


def test_with_too_few_features_the_construction_is_the_least_squares_one() -> None:
    taught = task(seeds=(0,))
    made = construct_norms(n_features=[10], density=1.0, rates=[0.1], task=as_config(taught))
    left, right = (side[0] for side in draw_frozen(taught, n_features=10, density=1.0))
    matrix = torch.einsum("if,fj->ijf", left, right).reshape(25, 10)
    gamma = torch.linalg.lstsq(matrix, taught.teacher.reshape(25, 1)).solution[:, 0]
    reached = (left * gamma) @ right
    expected = taught.loss(lambda x: torch.relu(x.double() @ reached.mT).sum(-1))
    assert float(expected) > 0.1
    torch.testing.assert_close(made["from teacher"][0], expected, rtol=1e-9, atol=0.0)


def test_sparse_features_that_lack_rank_leave_an_error() -> None:
    taught = task(seeds=(0, 1))
    made = construct_norms(n_features=[25], density=0.2, rates=[0.1], task=as_config(taught))
    left, right = draw_frozen(taught, n_features=25, density=0.2)
    assert not any(structural_rank(one != 0, other != 0).is_full for one, other in zip(left, right, strict=True))
    assert float(made["from teacher"][0].min()) > 0.01


@pytest.mark.parametrize("density", [1.0, 0.2, 0.05])
def test_frozen_weights_have_the_stated_density(density: float) -> None:
    left, right = draw_frozen(task(width=20), n_features=400, density=density)
    for side in (left, right):
        share = float((side != 0).double().mean())
        # Five standard errors of a share out of 3 * 400 * 20 weights.
        assert share == pytest.approx(density, abs=5 * math.sqrt(density * (1 - density) / side.numel()))


def test_repeats_share_nothing() -> None:
    """A repeat's result is the same alone and among others, up to float32 sums in another order."""
    together = train_norms(n_features=25, density=1.0, rates=[0.1], task=as_config(task(seeds=(0, 1))))
    alone = train_norms(n_features=25, density=1.0, rates=[0.1], task=as_config(task(seeds=(1,))))
    torch.testing.assert_close(together["losses"][1:], alone["losses"], rtol=1e-3, atol=0.0)
    assert abs(float(together["losses"][0] / together["losses"][1]) - 1) > 1e-2


def test_equal_seeds_give_equal_teachers_and_samples_at_every_number_of_features() -> None:
    one, other = task(), task()
    assert torch.equal(one.teacher, other.teacher)
    assert not torch.equal(one.teacher, one.weights("student"))
    first, second = (torch.cat(list(x.inputs("train", n_samples=120, size=50)), 1) for x in (one, other))
    assert torch.equal(first, second)
    assert first.shape == (3, 120, 5)
    test = next(one.inputs("test", n_samples=50, size=50))
    assert not torch.equal(first[:, :50], test)


# ------------------------------------------------------------------------------- the batched network


def plain_network(left: torch.Tensor, right: torch.Tensor) -> nn.Sequential:
    """One repeat as ordinary torch modules."""
    (width, n_features), n_inputs = left.shape, right.shape[1]
    first, second = nn.Linear(n_inputs, n_features, bias=False), nn.Linear(n_features, width, bias=False)
    with torch.no_grad():
        first.weight.copy_(right)
        second.weight.copy_(left)
    layers = [first, nn.BatchNorm1d(n_features), nn.ReLU(), second, nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def test_training_follows_torch_batch_norms_step_by_step() -> None:
    taught = task(width=4, seeds=(7, 8), n_train=500)
    left, right = draw_frozen(taught, n_features=16, density=1.0)
    net = NormNet(left, right)
    taught.teach(net, net.parameters, rates=[0.05, 0.1])
    for repeat, rate in enumerate((0.05, 0.1)):
        alone = dataclasses.replace(taught, seeds=(taught.seeds[repeat],))
        plain = plain_network(left[repeat], right[repeat])
        norms = [plain[1], plain[4]]
        optimizer = torch.optim.SGD([p for norm in norms for p in norm.parameters()], lr=rate, momentum=0.9)
        teacher = alone.teacher.float()
        for x in alone.inputs("train", n_samples=500, size=taught.batch):
            wanted = torch.relu(x @ teacher.mT).sum(-1)[0]
            loss = (plain(x[0]).sum(-1) - wanted).square().mean() / taught.width
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ours = [net.gamma1, net.beta1, net.gamma2, net.beta2]
        theirs = [norms[0].weight, norms[0].bias, norms[1].weight, norms[1].bias]
        for mine, reference in zip(ours, theirs, strict=True):
            # Ten steps in float32: a thousand units in the last place of numbers of order one.
            torch.testing.assert_close(mine[repeat, 0], reference, rtol=1e-3, atol=1e-4)


def test_kept_statistics_make_outputs_independent_of_the_batch() -> None:
    taught = task()
    net = NormNet(*draw_frozen(taught, n_features=25, density=1.0))
    x = next(taught.inputs("test", n_samples=100, size=100))
    net.store_statistics(x)
    torch.testing.assert_close(net(x)[:, :10], net(x[:, :10]), rtol=1e-5, atol=1e-5)
    reference = NormNet(net.left, net.right)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-5)


def test_the_constructed_network_equals_its_collapsed_weights_on_gaussian_inputs() -> None:
    taught = task(seeds=(3,))
    left, right = draw_frozen(taught, n_features=30, density=1.0)
    gamma = on.solve(left[0], right[0], taught.teacher[0]).gamma[None]
    assert float(taught.loss(constructed(left, right, gamma))) <= EXACT


def test_loss_is_relative_to_the_best_constant() -> None:
    taught = task(n_test=20_000)
    outputs = torch.cat(
        [
            torch.relu(x.double() @ taught.teacher.mT).sum(-1)
            for x in taught.inputs("test", n_samples=20_000, size=5_000)
        ],
        1,
    )
    means = outputs.mean(1, keepdim=True)
    torch.testing.assert_close(
        taught.loss(lambda x: means.expand(-1, x.shape[1])), torch.ones(3, dtype=torch.float64), rtol=1e-4, atol=0.0
    )
