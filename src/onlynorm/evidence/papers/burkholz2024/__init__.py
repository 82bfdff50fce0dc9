"""Checks of the statements of burkholz2024, and its figures and tables."""

from collections.abc import Mapping

from onlynorm.evidence.artifacts import Function
from onlynorm.evidence.papers.burkholz2024 import (
    activations,
    depth,
    sources,
    tables,
    widths,
)
from onlynorm.evidence.registry import Check

CHECKS: Mapping[str, Check] = {
    "burkholz2024:lemma-2.1": widths.a_null_vector_of_the_pivoted_system_is_the_target,
    "burkholz2024:thm-2.2": widths.both_norms_save_one_feature_per_output,
    "burkholz2024:thm-2.3": widths.one_draw_of_features_serves_every_target,
    "burkholz2024:eq-3": sources.residual_blocks_serve_as_sources,
    "burkholz2024:thm-2.4": activations.almost_any_activation_serves,
    "burkholz2024:activations": activations.common_activations_have_the_windows_named,
    "burkholz2024:composition": activations.layers_within_a_fraction_of_eps_make_a_network_within_eps,
    "burkholz2024:thm-2.5": sources.deeper_sources_may_be_narrower,
}
"""Checks by the key of their statement."""
ARTIFACTS: Mapping[str, Function] = {
    "burkholz2024:table-1": tables.table_1,
    "burkholz2024:table-2": tables.table_2,
    "burkholz2024:width-100": tables.width_100,
    "burkholz2024:reconstruction-error": tables.reconstruction_error,
    "burkholz2024:width-depth": depth.width_depth,
}
"""Functions by the id of their artifact."""
