"""Every statement of giannou2023 and burkholz2024 has a check that comes to the verdict we state, and that can fail."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from checks import defect_test, verdict_test
from torch import Tensor, nn

import onlynorm  # noqa: F401, the rooms register their checks on import
from onlynorm.evidence import registry
from onlynorm.evidence.papers.burkholz2024 import activations, sources
from onlynorm.evidence.papers.giannou2023 import depth, linear_systems, low_rank, sparse, wide_networks
from onlynorm.evidence.registry import Verdict
from onlynorm.modules.affine import Affine
from onlynorm.reconstruction import Construction, LowRank, Ranges

HOLDS = """
    giannou2023:remark-1 giannou2023:thm-1 giannou2023:cor-1 giannou2023:remark-2 giannou2023:thm-3 giannou2023:remark-3
    giannou2023:thm-7 giannou2023:lemma-5 giannou2023:prop-1 giannou2023:lemma-7 giannou2023:remark-7
    giannou2023:remark-8 giannou2023:remark-9 giannou2023:lemma-10 burkholz2024:composition"""
CORRECTED = """
    giannou2023:thm-2 giannou2023:thm-4 giannou2023:remark-11 burkholz2024:eq-3 burkholz2024:thm-2.4
    burkholz2024:activations burkholz2024:thm-2.5"""
VERDICTS = dict.fromkeys(HOLDS.split(), Verdict.HOLDS) | dict.fromkeys(CORRECTED.split(), Verdict.CORRECTED)
SLOW = {
    *("giannou2023:thm-2", "giannou2023:thm-3", "giannou2023:remark-3", "giannou2023:thm-4", "giannou2023:lemma-10"),
    "burkholz2024:thm-2.5",
}


def test_every_statement_of_both_papers_has_a_check() -> None:
    own = [s.key for paper in ("giannou2023", "burkholz2024") for s in registry.statements(paper)]
    assert [key for key in own if not registry.has_check(key)] == []
    elsewhere = ("products", "widths")
    files = {key: registry.where(key).partition(":")[0].rpartition(".")[2] for key in own}
    here = [key for key in own if files[key] not in elsewhere and not registry.statement(key).restates]
    assert sorted(here) == sorted(VERDICTS)


test_a_check_comes_to_the_verdict_we_state = verdict_test(VERDICTS, slow=SLOW)


# Defects that the checks must notice, one each: wrong constants, wrong formulas, constructions that do not deliver.


def with_excess(patch: pytest.MonkeyPatch, excess: float) -> None:
    rebuild = wide_networks.rebuild

    def wrong(target: nn.Sequential, construction: Construction, **settings: Any) -> Any:
        return rebuild(target, dataclasses.replace(construction, excess=excess), **settings)

    patch.setattr(wide_networks, "rebuild", wrong)


def one_feature_in_fifty_fewer(patch: pytest.MonkeyPatch) -> None:
    with_excess(patch, 0.98)


def shifts_that_only_serve_the_sample(patch: pytest.MonkeyPatch) -> None:
    rebuild = wide_networks.rebuild

    def wrong(target: nn.Sequential, construction: Construction, *, seed: int, ranges: Ranges | None = None) -> Any:
        return rebuild(target, construction, seed=seed, ranges=Ranges(margin=0.0))

    patch.setattr(wide_networks, "rebuild", wrong)


def twice_the_features(patch: pytest.MonkeyPatch) -> None:
    with_excess(patch, 2.0)


def padding_that_is_not_zero(patch: pytest.MonkeyPatch) -> None:
    pad = wide_networks.pad_equal

    def pad_with_ones(network: nn.Sequential) -> nn.Sequential:
        padded = pad(network)
        padded[1].weight.data[-1] = 1.0
        padded[4].weight.data[:, -1] = 1.0
        padded[2].weight.data[-1] = 1.0
        return padded

    patch.setattr(wide_networks, "pad_equal", pad_with_ones)


def half_the_density(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparse, "ENOUGH", 0.75)


def a_threshold_of_the_order_of_theorem_3(patch: pytest.MonkeyPatch) -> None:
    def density(shape: tuple[int, int], *, seed: int) -> float:
        return math.sqrt(math.log(shape[0]) / shape[0])

    patch.setattr(sparse, "density_alive", density)
    patch.setattr(sparse, "density_full", density)
    patch.setattr(sparse, "is_full", lambda features: True)


def half_of_p(patch: pytest.MonkeyPatch) -> None:
    covers = sparse._covers
    patch.setattr(sparse, "_covers", lambda *args, two_q_d, factor: covers(*args, two_q_d=two_q_d, factor=factor / 2))


def a_bound_ten_times_as_large(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparse, "CONSTANTS", (5.0, 0.1, 0.5))


def a_threshold_of_log_n(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparse, "lambertw", lambda n: complex(math.log(n)))


def a_polynomial_that_is_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear_systems, "_polynomial", lambda seed, *, is_square: (2, torch.zeros(3, 3).numpy()))


def a_fold_without_the_mean(patch: pytest.MonkeyPatch) -> None:
    fold = linear_systems.to_affine

    def wrong(norm: nn.BatchNorm1d) -> Affine:
        made = fold(norm)
        made.bias.data = norm.bias.data
        return made

    patch.setattr(linear_systems, "to_affine", wrong)


def a_third_of_the_shift(patch: pytest.MonkeyPatch) -> None:
    shift = linear_systems.activating_shift
    patch.setattr(linear_systems, "activating_shift", lambda *args: shift(*args) / 3)


def one_rank_less(patch: pytest.MonkeyPatch) -> None:
    rebuild = low_rank.rebuild

    def wrong(target: nn.Sequential, construction: Construction, *, seed: int) -> Any:
        if isinstance(construction, LowRank):
            rank = 3 if construction.rank is None else construction.rank
            construction = dataclasses.replace(construction, rank=max(1, rank - 1))
        return rebuild(target, construction, seed=seed)

    patch.setattr(low_rank, "rebuild", wrong)


def the_printed_right_hand_side(patch: pytest.MonkeyPatch) -> None:
    solve = sources._solve_outside
    patch.setattr(sources, "_solve_outside", lambda *args, as_printed: solve(*args, as_printed=True))


def a_gamma_that_is_off(patch: pytest.MonkeyPatch) -> None:
    solve = depth._solve

    def wrong(*args: Any) -> list[Fraction] | None:
        found = solve(*args)
        return found and [found[0] + Fraction(1, 10**12), *found[1:]]

    patch.setattr(depth, "_solve", wrong)


def a_last_relu(patch: pytest.MonkeyPatch) -> None:
    rebuild = depth.rebuild

    def with_relu(target: nn.Sequential, construction: Construction, *, seed: int) -> Any:
        made, _ = rebuild(target, construction, seed=seed)
        network = nn.Sequential(made.network, nn.ReLU())
        x = wide_networks.unit_ball(64, 5, seed=seed)
        with torch.no_grad():
            error = float((network(x) - target(x)).norm() / target(x).norm())
        return dataclasses.replace(made, network=network), error

    patch.setattr(depth, "rebuild", with_relu)


def layers_that_do_not_fit_together(patch: pytest.MonkeyPatch) -> None:
    rank = sources.jacobian_rank
    patch.setattr(sources, "jacobian_rank", lambda weights, *, seed: rank([*weights[:-1], 0 * weights[-1]], seed=seed))


def the_printed_sum_of_the_second_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations.SourceConvolutions, "q2", property(lambda source: source.printed_q2))


def the_printed_shift(patch: pytest.MonkeyPatch) -> None:
    own = activations.SourceConvolutions.with_activation

    def wrong(source: Any, x: Tensor, activation: Any, line: Any, *, as_printed: bool = False) -> Tensor:
        return own(source, x, activation, line, as_printed=True)

    patch.setattr(activations.SourceConvolutions, "with_activation", wrong)


def a_cubic_constant_twice_as_good(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(activations.CUBIC, "tanh", (1.0, 0.0, 6.0))


def layers_a_thousand_times_worse(patch: pytest.MonkeyPatch) -> None:
    find = activations._find_line
    patch.setattr(activations, "_find_line", lambda phi, reach, tolerance: find(phi, reach, 1000 * tolerance))


test_a_defect_turns_the_verdict = defect_test(
    [
        ("giannou2023:thm-1", one_feature_in_fifty_fewer),
        ("giannou2023:thm-1", shifts_that_only_serve_the_sample),
        ("giannou2023:remark-1", twice_the_features),
        ("giannou2023:remark-8", padding_that_is_not_zero),
        ("giannou2023:thm-3", half_the_density),
        ("giannou2023:remark-3", a_threshold_of_the_order_of_theorem_3),
        ("giannou2023:lemma-10", half_of_p),
        ("giannou2023:thm-4", a_bound_ten_times_as_large),
        ("giannou2023:remark-11", a_threshold_of_log_n),
        ("giannou2023:lemma-5", a_polynomial_that_is_zero),
        ("giannou2023:prop-1", a_fold_without_the_mean),
        ("giannou2023:lemma-7", a_third_of_the_shift),
        ("giannou2023:cor-1", one_rank_less),
        ("giannou2023:remark-7", one_rank_less),
        ("giannou2023:thm-2", a_gamma_that_is_off),
        ("giannou2023:remark-9", a_last_relu),
        ("burkholz2024:eq-3", the_printed_right_hand_side),
        ("burkholz2024:thm-2.5", layers_that_do_not_fit_together),
        ("burkholz2024:thm-2.4", the_printed_sum_of_the_second_layer),
        ("burkholz2024:thm-2.4", the_printed_shift),
        ("burkholz2024:activations", a_cubic_constant_twice_as_good),
        ("burkholz2024:composition", layers_a_thousand_times_worse),
    ],
    slow=SLOW,
)
