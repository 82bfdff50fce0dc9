"""Figure 3 of random_features against a materialised reference, its section 5, and both verdicts at quick scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate

import onlynorm as on
from onlynorm.errors import MissingDataError
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.papers.random_features.scratch import METHODS
from onlynorm.evidence.papers.random_features.spectra import distance, printed_density, singular_values
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import Record, RecordVerdict, read_records


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    out = tmp_path_factory.mktemp("records")
    (made,) = reproduce("random_features:fig-3", scale="quick", out=out)
    assert read_records(out) == (made,)
    return made


def test_quick_scale_meets_every_hard_expectation(record: Record) -> None:
    assert record.verdict is RecordVerdict.CAVEAT, str(record)
    assert all(item.is_met for item in record.checks if not item.is_soft), str(record)
    assert any("Quick scale" in reason for reason in record.reasons)


def test_the_figure_has_both_panels_and_six_distributions(record: Record) -> None:
    assert [panel.name for panel in record.panels] == ["exact", "excess"]
    for panel in ("exact", "excess"):
        drawn = [curve for curve in record.curves if curve.panel == panel and curve.kind == "histogram"]
        assert len(drawn) == 6
        for curve in drawn:
            widths = np.diff(curve.x)
            assert float(np.dot(widths, curve.y)) == pytest.approx(1.0, abs=1e-12)


def test_the_data_prefer_the_scale_that_belongs_to_their_variance(record: Record) -> None:
    assert record.table is not None
    closest = {row[-1]: row[0] for row in record.table.rows}
    assert closest["1/N"] == "scale c1/N (ours)"
    assert closest["1/c1"] == "scale N/c1 (red in the paper)"


def test_the_paper_scale_is_the_papers_own_size() -> None:
    one = artifacts()["random_features:fig-3"]
    assert one.sizes["paper"]["channels"] == 50
    assert round(one.sizes["paper"]["excess"] * 50**2) == 3000
    assert len(one.seeds) >= 3


@pytest.mark.parametrize("name", ["he_normal", "orthogonal", "er_sign"])
@pytest.mark.parametrize("n_features", [36, 44])
def test_a_piece_agrees_with_the_svd_of_the_materialised_matrix(name: str, n_features: int) -> None:
    values = singular_values(distribution=name, n_channels=6, n_features=n_features, seed=3)
    features = on.draw(name, (6, 6), n_features=n_features, seed=3, layer=f"fig-3 {name}")
    left, right = features.left().double().numpy(), features.right().double().numpy()
    matrix = np.einsum("if,fj->ijf", left, right).reshape(36, n_features)
    matrix /= math.sqrt(36 * np.mean(matrix**2))
    expected = np.sort(np.linalg.svd(matrix, compute_uv=False))
    # The library takes roots of Gram eigenvalues: errors below sqrt(n * eps) of the largest value.
    tolerance = math.sqrt(n_features * np.finfo(np.float64).eps) * expected[-1]
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)


def test_the_distance_is_the_kolmogorov_statistic() -> None:
    from scipy import stats

    sample = np.sort(np.random.default_rng(0).uniform(0.2, 2.0, size=200))
    expected = stats.kstest(sample, lambda x: on.spectrum.cumulative(x, 100, 120)).statistic
    assert distance(sample, 100, 120) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n_rows", "n_columns"), [(100, 120), (120, 100), (100, 100)])
def test_the_law_with_swapped_counts_is_the_captions_scale(n_rows: int, n_columns: int) -> None:
    """Scale N/c1 at variance 1/c1 and scale c1/N at variance 1/N are one law, stretched by sqrt(c1/N)."""
    stretch = math.sqrt(n_columns / n_rows)
    low, high = on.spectrum.edges(n_rows, n_columns)
    x = np.linspace(low + 1e-3, high - 1e-3, 50)
    ours = on.spectrum.cumulative(x, n_rows, n_columns)
    caption = on.spectrum.cumulative(x / stretch, n_columns, n_rows)
    np.testing.assert_allclose(ours, caption, atol=1e-9)


def test_the_printed_density_of_scale_one_has_half_the_mass_of_a_law() -> None:
    """At c1 = N the printed upper edge is sqrt(2) instead of 2: sqrt(2 - x^2) / pi integrates to one half."""
    mass, error = integrate.quad(lambda x: float(printed_density(np.asarray(x), scale=1.0)), 0, math.sqrt(2))
    assert mass == pytest.approx(0.5, abs=10 * error)


# ------------------------------------------------------------------------------- section 5


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Record:
    out = tmp_path_factory.mktemp("numbers")
    try:
        (made,) = reproduce("random_features:section-5", scale="quick", out=out)
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    return made


def test_section_5_meets_every_hard_expectation_at_quick_scale(numbers: Record) -> None:
    assert numbers.verdict is RecordVerdict.CAVEAT, str(numbers)
    assert {item.name for item in numbers.checks} == {"accuracy, ordinary", "ordinary over follow_weights, points"}
    assert any("Scaled down" in caveat for caveat in numbers.caveats)


def test_section_5_holds_the_papers_numbers_beside_ours(numbers: Record) -> None:
    assert numbers.table is not None
    rows = {row[0]: row for row in numbers.table.rows}
    assert [rows[name][-1] for name in METHODS] == ["in the order of 94", "86.64 ± 0.08", "90.08 ± 0.03", "-"]
    assert [rows[name][1] for name in METHODS] == [3, 3, 5, 3], "the paper's epochs are 300 and 500"
    assert [rows[name][2] for name in METHODS] == [0.0, 0.0, 0.1, 0.0]
    for name in METHODS:
        assert rows[name][4] == pytest.approx(numbers.values[f"accuracy, {name}"])
    followed, ordinary = rows["he_normal, follow_weights"], rows["ordinary"]
    assert followed[3] == ordinary[3], "the same path has the same best rate"


def test_section_5_has_the_papers_relative_excess() -> None:
    assert METHODS["he_normal"].excess == pytest.approx((9 * 100 * 100 + 100) / (9 * 100 * 100))
    assert [way.follow_weights for way in METHODS.values()] == [False, False, False, True]


@pytest.mark.slow
def test_orthogonal_features_follow_the_law_closer_with_size() -> None:
    """Outside the theorem (their entries are dependent), yet the distance falls with the size."""
    gaps = []
    for n_channels in (12, 24, 40):
        values = singular_values(distribution="orthogonal", n_channels=n_channels, n_features=n_channels**2, seed=0)
        gaps.append(distance(np.asarray(values), n_channels**2, n_channels**2))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1 / 40
