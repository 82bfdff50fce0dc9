"""Checks of the statements of giannou2023, and its figures and tables."""

from collections.abc import Mapping

from onlynorm.evidence.artifacts import Function
from onlynorm.evidence.papers.giannou2023 import (
    depth,
    linear_systems,
    low_rank,
    products,
    sgd,
    sparse,
    wide_networks,
)
from onlynorm.evidence.registry import Check

CHECKS: Mapping[str, Check] = {
    "giannou2023:remark-1": wide_networks.the_number_of_trainable_parameters_stays_of_the_same_order,
    "giannou2023:thm-1": wide_networks.a_wide_frozen_network_is_any_relu_network,
    "giannou2023:cor-1": low_rank.low_rank_needs_fewer_features,
    "giannou2023:thm-2": depth.deep_and_narrow_layers_with_skips_make_any_layer,
    "giannou2023:remark-2": low_rank.layers_may_have_unequal_widths,
    "giannou2023:thm-3": sparse.frozen_weights_may_be_sparse,
    "giannou2023:remark-3": sparse.density_of_order_log_d_over_d_suffices,
    "giannou2023:lemma-1": products.a_diagonal_between_two_matrices_is_a_linear_system,
    "giannou2023:lemma-2": products.random_khatri_rao_products_are_invertible,
    "giannou2023:lemma-3": products.no_coordinate_of_gamma_vanishes,
    "giannou2023:thm-4": sparse.smallest_singular_values_of_sparse_matrices,
    "giannou2023:fact-1": products.a_product_keeps_full_rank_unless_null_and_column_space_meet,
    "giannou2023:remark-4": products.a_product_keeps_full_rank_unless_null_and_column_space_meet,
    "giannou2023:thm-5": products.kronecker_and_khatri_rao_products_obey_their_identities,
    "giannou2023:thm-6": products.kronecker_and_khatri_rao_products_obey_their_identities,
    "giannou2023:thm-7": linear_systems.ranks_decide_how_many_solutions_a_system_has,
    "giannou2023:lemma-5": linear_systems.zeros_of_polynomials_fill_no_volume,
    "giannou2023:remark-5": products.random_khatri_rao_products_are_invertible,
    "giannou2023:prop-1": linear_systems.statistics_fold_into_gamma_and_beta,
    "giannou2023:lemma-7": linear_systems.two_layers_with_batch_norms_make_one,
    "giannou2023:remark-7": low_rank.the_rank_of_the_scaled_target_counts,
    "giannou2023:remark-8": wide_networks.layers_may_be_padded_to_equal_size,
    "giannou2023:remark-9": depth.no_activation_follows_the_last_layer,
    "giannou2023:lemma-9": products.only_the_sparsity_pattern_decides,
    "giannou2023:lemma-10": sparse.a_sparse_product_covers_no_less_than_independent_entries,
    "giannou2023:remark-11": sparse.from_the_smallest_singular_value_to_invertibility,
}
"""Checks by the key of their statement."""
ARTIFACTS: Mapping[str, Function] = {
    "giannou2023:fig-4-left": sgd.figure_4_left,
    "giannou2023:fig-4-right": sgd.figure_4_right,
    "giannou2023:fig-5a": sgd.figure_5a,
    "giannou2023:fig-5b": sgd.figure_5b,
    "giannou2023:remark-3": sparse.sparse_threshold,
    "giannou2023:thm-2-errors": depth.deep_errors,
}
"""Functions by the id of their artifact."""
