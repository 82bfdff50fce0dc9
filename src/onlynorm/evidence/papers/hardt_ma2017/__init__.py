"""Checks of the statements of hardt_ma2017, and its figures and tables."""

from collections.abc import Mapping

from onlynorm.evidence.artifacts import Function
from onlynorm.evidence.papers.hardt_ma2017 import (
    allconv,
    factor_norms,
    factorization,
    landscape,
    memorization,
)
from onlynorm.evidence.registry import Check

CHECKS: Mapping[str, Check] = {
    "hardt_ma2017:thm-2.1": factorization.products_of_layers_near_the_identity_reach_every_target,
    "hardt_ma2017:negative-determinant": factorization.one_extra_dimension_flips_the_determinant,
    "hardt_ma2017:positive-definite": factorization.roots_of_positive_definite_targets_are_near_the_identity,
    "hardt_ma2017:thm-2.2": landscape.critical_points_near_the_identity_are_minima,
    "hardt_ma2017:ineq-2.3": landscape.the_gradient_is_large_where_the_risk_is,
    "hardt_ma2017:claim-2.3": landscape.the_risk_is_a_distance_of_matrices,
    "hardt_ma2017:lemma-2.4": landscape.the_gradient_has_a_closed_form,
    "hardt_ma2017:thm-3.2": memorization.residual_networks_memorize_any_sample,
    "hardt_ma2017:claim-A.1": factorization.orthogonal_2_by_2_matrices_go_in_small_steps,
    "hardt_ma2017:lemma-B.1": memorization.one_block_moves_its_points_and_leaves_the_rest,
    "hardt_ma2017:lemma-B.2": memorization.blocks_move_all_points_to_their_class_vectors,
    "hardt_ma2017:claim-C.1": factorization.real_normal_matrices_are_block_diagonal,
    "hardt_ma2017:claim-C.2": factorization.products_have_the_stated_frobenius_norm,
}
"""Checks by the key of their statement."""
ARTIFACTS: Mapping[str, Function] = {
    "hardt_ma2017:factor-norms": factor_norms.factor_norms,
    "hardt_ma2017:landscape": landscape.landscape,
    "hardt_ma2017:table-1": allconv.table_1,
    "hardt_ma2017:table-2": allconv.table_2,
    "hardt_ma2017:fig-1": allconv.fig_1,
}
"""Functions by the id of their artifact."""
