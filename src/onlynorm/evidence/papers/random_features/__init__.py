"""Checks of the statements of random_features, and its figures and tables."""

from collections.abc import Mapping

from onlynorm.evidence.artifacts import Function
from onlynorm.evidence.papers.random_features import (
    alignment,
    conditioning,
    scaled,
    scratch,
    spectra,
    spectrum,
    training,
    widths,
)
from onlynorm.evidence.registry import Check

CHECKS: Mapping[str, Check] = {
    "random_features:thm-2.1": widths.as_many_features_as_weights_suffice,
    "random_features:thm-2.2": spectrum.singular_values_follow_the_law,
    "random_features:orthogonal-weights": spectrum.orthogonal_weights_are_not_well_conditioned,
    "random_features:eq-3": widths.id_cond_at_minimum_width_reads_the_target_off,
    "random_features:ortho-cond": spectrum.ortho_cond_features_are_perfectly_conditioned,
    "random_features:thm-3.1": training.id_cond_features_train_like_ordinary_weights,
    "random_features:thm-4.1": alignment.a_permutation_misses_its_energy_outside_the_column_space,
    "random_features:thm-4.2": alignment.no_target_fits_more_often_than_the_bound,
    "random_features:thm-4.3": alignment.the_outputs_that_a_random_target_needs,
    "random_features:conclusion": training.random_masks_and_random_id_cond_features_are_one_network,
}
"""Checks by the key of their statement."""
ARTIFACTS: Mapping[str, Function] = {
    "random_features:fig-3": spectra.figure_3,
    "random_features:fig-2-a": conditioning.figure_2_a,
    "random_features:fig-2-b": conditioning.figure_2_b,
    "random_features:fig-2-c": conditioning.figure_2_c,
    "random_features:fig-2-d": conditioning.figure_2_d,
    "random_features:fig-4": alignment.figure_4,
    "random_features:section-5": scratch.section_5,
    "random_features:table-1": scaled.table_1,
}
"""Functions by the id of their artifact."""
