"""Checks of the statements of daneshmand2020, and its figures and tables."""

from collections.abc import Mapping

from onlynorm.evidence.artifacts import Function
from onlynorm.evidence.papers.daneshmand2020 import (
    chain,
    chains,
    eigenvalues,
    invariant_law,
    rank_training,
)
from onlynorm.evidence.registry import Check

CHECKS: Mapping[str, Check] = {
    "daneshmand2020:lemma-1": eigenvalues.the_ratio_bounds_the_rank,
    "daneshmand2020:lemma-2": eigenvalues.the_ratio_bounds_the_soft_rank,
    "daneshmand2020:thm-3": invariant_law.batch_norms_keep_rank_of_order_sqrt_d,
    "daneshmand2020:lemma-4": chain.products_of_random_matrices_become_rank_one,
    "daneshmand2020:thm-5": chain.odd_activations_keep_rank_two,
    "daneshmand2020:lemma-6": invariant_law.signs_of_rows_do_not_matter,
    "daneshmand2020:lemma-7": chain.rank_one_is_absorbing_for_linear_networks,
    "daneshmand2020:prop-8": eigenvalues.gradients_of_a_rank_one_layer_share_a_line,
    "daneshmand2020:example-9": eigenvalues.the_swap_keeps_the_two_axes,
    "daneshmand2020:lemma-10": chain.products_of_random_matrices_become_rank_one,
    "daneshmand2020:lemma-11": invariant_law.the_order_of_rows_does_not_matter,
    "daneshmand2020:lemma-12": chain.the_change_of_the_frobenius_norm_has_the_stated_mean,
    "daneshmand2020:prop-13": eigenvalues.the_change_follows_from_eigenvalues,
    "daneshmand2020:example-14": chain.nearly_collapsed_signals_recover,
    "daneshmand2020:lemma-15": eigenvalues.the_regularity_constant_is_at_most_one,
    "daneshmand2020:example-16": eigenvalues.regularity_one_means_equal_eigenvalues,
    "daneshmand2020:example-17": eigenvalues.one_dominant_eigenvalue_makes_the_law_regular,
    "daneshmand2020:lemma-18": invariant_law.the_frobenius_norm_is_of_order_d_to_three_halves,
    "daneshmand2020:lemma-20": eigenvalues.one_step_moves_every_entry_a_little,
}
"""Checks by the key of their statement."""
ARTIFACTS: Mapping[str, Function] = {
    "daneshmand2020:fig-1": chains.figure_1,
    "daneshmand2020:fig-2": chains.figure_2,
    "daneshmand2020:fig-3": chains.figure_3,
    "daneshmand2020:fig-4": chains.figure_4,
    "daneshmand2020:fig-9": chains.figure_9,
    "daneshmand2020:fig-10": chains.figure_10,
    "daneshmand2020:fig-11-chain": chains.figure_11_chain,
    "daneshmand2020:table-1": chains.table_1,
    "daneshmand2020:fig-5": rank_training.figure_5,
    "daneshmand2020:fig-6": rank_training.figure_6,
    "daneshmand2020:fig-7": rank_training.figure_7,
    "daneshmand2020:fig-8": rank_training.figure_8,
    "daneshmand2020:fig-11": rank_training.figure_11,
}
"""Functions by the id of their artifact."""
