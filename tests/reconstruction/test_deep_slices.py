"""The slices of deep blocks: the solution nearest to passing on what came, and the law of its error."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import normal

from onlynorm.evidence.papers.giannou2023.depth import deep_table, unique_solution
from onlynorm.frozen.sequence import whole_map
from onlynorm.reconstruction.constructions import slices as slices_module
from onlynorm.reconstruction.constructions.deep import EXCESSES, SliceLaw
from onlynorm.reconstruction.constructions.slices import draw_layers, draw_weights, solve_slices

EXACT = 1e-9
"""What the default must reach; the law aims the default excess at 1e-11."""


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_targets_of_any_size_are_solved_alike(size: float) -> None:
    layers = draw_layers("orthogonal", (8, 8), inputs_per_slice=1, n_features=16)
    target = normal(8, 8)
    plain, scaled = solve_slices(layers, target), solve_slices(layers, size * target)
    # Only rounding differs between the two.
    assert scaled.residual <= 30 * max(plain.residual, 1e-15)
    assert torch.allclose(scaled.gammas[1:-1], plain.gammas[1:-1], rtol=1e-6)


def test_the_nearest_solution_beats_the_unique_one() -> None:
    target = normal(12, 12) / 12**0.5
    unique = unique_solution(target, inputs_per_slice=1)
    layers = draw_layers("orthogonal", (12, 12), inputs_per_slice=1, n_features=24)
    least, nearest = solve_slices(layers, target, is_near=False), solve_slices(layers, target)
    assert nearest.residual <= EXACT < unique.residual
    assert nearest.condition < least.condition < unique.condition


def test_solving_near_the_signs_keeps_what_layers_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = normal(16, 16) / 16**0.5
    layers = draw_layers("orthogonal", (16, 16), inputs_per_slice=1, n_features=24)
    signed = solve_slices(layers, target)
    monkeypatch.setattr(slices_module, "SIGN_ROUNDS", 0)
    ones = solve_slices(layers, target)
    assert signed.condition < ones.condition / 10
    assert signed.residual < ones.residual


def test_the_residual_is_that_of_the_layers_multiplied_out() -> None:
    target = normal(5, 7)
    layers = draw_layers("he_normal", (5, 7), inputs_per_slice=3, n_features=30)
    found = solve_slices(layers, target)
    columns = []
    for start in range(0, 7, 3):
        first = start // 3
        made = layers[first].right() if first == 0 else layers[first].left() @ layers[first].right()
        made = found.gammas[first][:, None] * made
        for i in range(first + 1, 3):
            made = found.gammas[i][:, None] * (layers[i].left() @ made)
        columns.append(layers[0].left() @ made)
    assert torch.allclose(torch.cat(columns, 1), target, rtol=0, atol=1e-12)
    made = whole_map(draw_weights(layers), found.gammas, torch.eye(7, dtype=torch.float64))
    error = float(torch.linalg.norm(made - target) / torch.linalg.norm(target))
    assert error == pytest.approx(found.residual)
    assert "3 layers of 30 features" in str(found)


def test_a_table_holds_what_is_reached_beside_the_unique_solution() -> None:
    rows = deep_table([4, 6], [1, 2, 6], excesses=[1.5, 2.0])
    assert [(r.width, r.narrow, r.excess) for r in rows] == [
        (d, k, e) for d, k in ((4, 1), (4, 2), (6, 1), (6, 2), (6, 6)) for e in (1.5, 2.0)
    ]
    for row in rows:
        assert row.n_layers * row.narrow == row.width
        assert row.n_features == math.ceil(row.width * row.narrow * row.excess)
        assert row.error <= EXACT
        assert row.condition <= row.unique_condition or row.n_layers == 1
    assert "unique solution" in str(rows[0])


@pytest.mark.parametrize("features", ["orthogonal", "he_normal"])
def test_as_many_digits_are_lost_as_predicted(features: str) -> None:
    for row in deep_table([12], [1], excesses=[1.25, 2.0], features=features):
        lost, predicted = (math.log10(error / 1e-16) for error in (row.error, row.predicted_error))
        # The spread of the rates that the law was read from, and a digit for the constant.
        assert 0.5 * predicted - 1.0 <= lost <= 1.4 * predicted + 1.0


def test_the_law_falls_with_excess_and_k_and_picks_the_least_that_will_do() -> None:
    law = SliceLaw((64, 64), 1)
    errors = [law.error(excess) for excess in (0.5, 1.0, *EXCESSES)]
    assert errors[0] == pytest.approx(0.5**0.5)
    assert errors[1] == 1.0
    assert errors[2:] == sorted(errors[2:], reverse=True)
    chosen = law.choose_excess()
    assert law.error(chosen) <= 1e-11 < law.error(EXCESSES[EXCESSES.index(chosen) - 1])
    assert SliceLaw((64, 64), 64).error(1.0) <= 1e-13
    assert SliceLaw((64, 64), law.choose_inputs_per_slice(1.25)).error(1.25) <= 1e-11
    assert SliceLaw((64, 64), 1, is_orthogonal=False).choose_excess() > chosen
    assert SliceLaw((9, 4000), 1).cure(0.5, error=1e-10) == "cure: inputs_per_slice=4000 and excess=1.25"
