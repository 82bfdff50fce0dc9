"""Verdicts on made-up signals: each sign at its threshold, their order, and how a diagnosis is told and drawn."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onlynorm.errors import ValueRangeError
from onlynorm.rank import Diagnosis, HealthVerdict, Layer, Thresholds, judge


def layer(depth: int, **changes: Any) -> Layer:
    made = Layer(
        r=4.0, soft_rank=5, spread=0.7, scale=1.0, dead=0.0, n_units=8, n_columns=16, is_finite=True,
        name=f"layer{depth}", kind="Linear", call=1, depth=depth, has_weights=True, is_layer_input=True, shape=(16, 8),
        gradient=1.0, signal_gradient=1.0,
    )  # fmt: skip
    return replace(made, **changes)


def network(**changes: Any) -> list[Layer]:
    """Five sound layers; the changes are those of the third."""
    return [layer(1), layer(2), layer(3, **changes), layer(4), layer(5, is_layer_input=False)]


def verdict(layers: list[Layer], alignment: float | None = 0.3, input_cosine: float | None = 0.3) -> HealthVerdict:
    return judge(layers, alignment=alignment, input_cosine=input_cosine, thresholds=Thresholds())


def test_a_sound_network_is_healthy_and_that_is_said() -> None:
    found = verdict(network())
    assert (found.word, found.is_trainable, found.advice) == ("healthy", True, "")
    assert found.findings == ("the signal survives all 5 layers, and its rank r is at least 4",)
    assert set(found.parts) == {
        "alive", "growing", "shrinking", "rank", "alignment", "input", "vanishing", "exploding",
    }  # fmt: skip


def test_a_healthy_verdict_says_how_much_it_did_not_see() -> None:
    judged = {"alignment": 0.3, "input_cosine": 0.3, "thresholds": Thresholds()}
    assert len(judge(network(), unobserved=0.05, **judged).findings) == 1
    assert "78.0% of the parameters" in judge(network(), unobserved=0.78, **judged).findings[1]


T = Thresholds()
SIGNS = {
    "rank": network(r=1.0 + T.rank),
    "alive": network(dead=1.0 - T.alive),
    "growing": network(scale=T.growing),
    "shrinking": network(scale=T.shrinking),
    "vanishing": [layer(1, gradient=T.vanishing), layer(2), layer(3)],
    "exploding": [layer(1, gradient=T.exploding), layer(2), layer(3)],
}


@pytest.mark.parametrize("name", SIGNS)
def test_each_sign_is_worth_a_half_at_its_threshold(name: str) -> None:
    found = verdict(SIGNS[name])
    assert found.parts[name] == pytest.approx(0.5, abs=1e-9)
    assert found.score == min(found.parts.values())
    assert found.word != "healthy"
    assert len(found.findings) == 1


def test_cosines_are_worth_a_half_at_their_thresholds() -> None:
    assert verdict(network(), alignment=1.0 - T.alignment).parts["alignment"] == pytest.approx(0.5)
    assert verdict(network(), input_cosine=1.0 - T.input).parts["input"] == pytest.approx(0.5)


def differences(
    layers: list[Layer], *, contrast: float = 1.0, directions: float = 3.0, explained: float = 0.2
) -> HealthVerdict:
    """A verdict where it was measured what becomes of the samples' differences."""
    return judge(
        layers,
        alignment=1.0,
        input_cosine=0.3,
        contrast=contrast,
        directions=directions,
        explained_variance=explained,
        thresholds=T,
    )


def test_contrast_and_directions_are_worth_a_half_at_their_thresholds() -> None:
    assert differences(network(), contrast=T.contrast / 0.3, explained=0.2).parts["contrast"] == pytest.approx(0.5)
    for explained in (0.0, 0.1):
        found = differences(network(), directions=1.0 + math.sqrt(T.directions) - explained, explained=explained)
        assert found.parts["directions"] == pytest.approx(0.5)
        assert any(f"the targets explain {explained:.0%}" in words for words in found.findings)


def test_a_loss_far_above_that_of_no_outputs_is_told() -> None:
    def parts(start: float) -> HealthVerdict:
        return judge(network(), alignment=None, input_cosine=None, initial_loss_ratio=start, thresholds=T)

    assert parts(1.0 + T.initial_loss).parts["initial_loss"] == pytest.approx(0.5)
    assert parts(0.1).parts["initial_loss"] == parts(1.0).parts["initial_loss"] == 1.0
    assert parts(100.0).findings == ("the initial loss is 100 times that of zero outputs",)
    assert parts(3e25).findings == ("the initial loss is 3e+25 times that of zero outputs",)
    assert "Draw smaller weights" in parts(100.0).advice


def test_rank_alignment_and_vanishing_explain_lost_differences_and_are_not_judged_themselves() -> None:
    layers = network(r=1.0)
    layers[0] = layer(1, gradient=T.vanishing / 10)
    well = differences(layers)
    assert well.word == "healthy"
    assert set(well.parts) == {"alive", "growing", "shrinking", "contrast", "directions", "input", "exploding"}
    ill = differences(layers, contrast=T.contrast)
    assert [words.split(" ")[1] for words in ill.findings] == ["signal", "gradient", "of", "gradient"]
    assert ill.advice == ("Plain SGD is unlikely to train this network; Adam may. Add batch norms or run repair.")
    grown = [*layers[:3], layer(4, scale=10 * T.growing)]
    assert len(differences(grown).findings) == 1  # a sign that stands for itself needs no reasons


def test_a_sign_beyond_its_threshold_is_fatal_and_one_before_it_is_suspect() -> None:
    assert verdict(network(r=1.0 + T.rank / 2)).word == "unhealthy"
    assert verdict(network(r=1.0 + 3 * T.rank)).word == "suspect"
    assert verdict(network(r=1.0 + 10 * T.rank)).word == "healthy"
    assert "Plain SGD" not in verdict(network(r=1.0 + 3 * T.rank)).advice


def test_norms_bear_larger_gradients() -> None:
    layers = [layer(1, gradient=10 * T.exploding), layer(2), layer(3)]
    assert verdict(layers).word == "unhealthy"
    normed = [layers[0], layer(1, kind="batch norm", has_weights=False), *layers[1:]]
    assert verdict(normed).word == "healthy"


def test_where_the_signal_collapses_is_told_by_the_first_layer_of_rank_one() -> None:
    layers = [layer(1), layer(2, r=1.0006), layer(3, r=1.0), layer(4)]
    assert verdict(layers).findings == ("the signal collapses to rank 1.001 at layer 2 of 4 (layer2)",)


def test_outputs_that_no_layer_takes_in_and_single_units_do_not_count_as_collapsed() -> None:
    assert verdict([layer(1), layer(2, r=1.0, is_layer_input=False), layer(3)]).word == "healthy"
    assert verdict([layer(1), layer(2, r=1.0, n_units=1), layer(3)]).word == "healthy"
    assert verdict([layer(0, r=1.0, kind="input", has_weights=False), *network()]).word == "healthy"


def test_causes_are_told_before_what_follows_from_them_and_suspicions_not_beside_them() -> None:
    found = verdict(network(dead=1.0, r=1.0, scale=0.5), alignment=1.0 - 3 * T.alignment)
    assert [words.split()[0] for words in found.findings] == ["100%", "the"]
    assert "leaky activation" in found.advice


def test_advice_differs_with_norms() -> None:
    ill = network(r=1.0)
    assert "Add batch norms" in verdict(ill).advice
    assert "symmetric around zero" in verdict([*ill, layer(4, kind="layer norm", has_weights=False)]).advice


def test_what_was_not_measured_is_not_judged() -> None:
    bare = [replace(item, gradient=None) for item in network()]
    assert set(verdict(bare, None, None).parts) == {"alive", "growing", "shrinking", "rank"}
    assert verdict(bare, math.nan, math.nan).parts == verdict(bare, None, None).parts


@pytest.mark.parametrize(
    ("gradients", "words"),
    [((1.0, 0.0), "last layer is zero"), ((math.inf, 1.0), "are NaN or infinite")],
)
def test_gradients_that_are_none_are_fatal(gradients: tuple[float, float], words: str) -> None:
    found = verdict([layer(1, gradient=gradients[0]), layer(2, gradient=gradients[1])])
    assert found.score == 0.0
    assert words in found.findings[0]


def test_numbers_that_are_none_are_all_that_is_told() -> None:
    odd = layer(3, is_finite=False, r=math.nan, scale=math.nan, dead=math.nan, call=2)
    found = verdict([layer(1), layer(2), odd, layer(4)])
    assert found.score == 0.0
    assert found.findings == ("first NaN or infinity at layer3 (call 2) (Linear), layer 3 of 4",)


def test_thresholds_can_be_chosen() -> None:
    strict = judge(network(r=1.5), alignment=None, input_cosine=None, thresholds=Thresholds(rank=2.0))
    assert strict.word == "unhealthy"
    assert strict.as_dict()["thresholds"]["rank"] == 2.0


# ------------------------------------------------------------------------------- how it is told and drawn


def diagnosis(layers: list[Layer], **changes: Any) -> Diagnosis:
    made = Diagnosis(
        layers=tuple(layers), verdict=verdict(layers), loss=2.3, alignment=0.3, sample_cosine=0.0, input_cosine=0.3,
        contrast=0.1, directions=3.0, explained_variance=0.2, initial_loss_ratio=1.0, last_layer="layer5", skipped=(),
        n_samples=16, mode="train", seconds=0.1,
    )  # fmt: skip
    return replace(made, **changes)


def test_a_diagnosis_reads_as_a_verdict_and_a_table() -> None:
    text = str(diagnosis(network(r=1.0), skipped=("the comparison with random inputs, because ...",)))
    lines = text.splitlines()
    assert lines[0].startswith("unhealthy (score 0.00): the signal collapses to rank 1.000 at layer 3 of 5 (layer3).")
    assert lines[2].split() == ["depth", "signal", "kind", "units", "r", "soft", "rank", "spread", "scale", "dead",
                                "gradient", "of", "signal"]  # fmt: skip
    assert lines[5].split() == ["3", "layer3", "Linear", "8", "1", "5", "0.7", "1", "0%", "1", "1"]
    assert lines[-1] == "not measured: the comparison with random inputs, because ..."
    assert "mean |cosine| of two samples' gradients, one neuron of layer5 0.300000" in lines


def test_long_tables_are_thinned_and_say_so() -> None:
    text = str(diagnosis([layer(depth) for depth in range(1, 201)]))
    assert "40 of 200 signals are shown" in text
    assert "layer1 " in text
    assert "layer200" in text


def test_as_dict_is_plain_data() -> None:
    facts = json.loads(json.dumps(diagnosis(network()).as_dict()))
    assert facts["verdict"] == "healthy"
    assert facts["layers"][2]["name"] == "layer3"
    assert facts["layers"][2]["shape"] == [16, 8]
    assert set(facts["thresholds"]) == set(vars(T))


def test_the_figure_has_a_panel_for_each_quantity(tmp_path: Path) -> None:
    text = diagnosis(network()).plot().to_bytes().decode()
    ElementTree.fromstring(text)
    for title in (
        "Directions of the signal",
        "differs between samples",
        "Scale of the signal",
        "Gradients",
        "Dead units",
    ):
        assert title in text
    assert diagnosis(network()).plot().save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueRangeError, match="a figure needs svg, png or pdf; got 'gif'"):
        diagnosis(network()).plot().save(tmp_path / "a.gif")


def test_what_has_no_logarithm_is_left_out_of_the_figure() -> None:
    nothing = [replace(item, r=math.nan, spread=math.nan, scale=0.0, gradient=None) for item in network()]
    text = diagnosis(nothing).plot().to_bytes().decode()
    assert "Gradients" in text  # of the signal
    assert "Scale of the signal" not in text


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    odd = [layer(1, name="<script>alert(1)</script>"), *network()[1:]]
    page = diagnosis(odd).to_html(tmp_path / "page.html", title="<b>net</b>").read_text()
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "&lt;b&gt;net&lt;/b&gt;" in page
    assert "healthy" in page
