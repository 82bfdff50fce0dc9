"""The examples run as they stand and print what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from onlynorm.data import digits
from onlynorm.models import load_model
from onlynorm.tuning import accuracy

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name))
    return capsys.readouterr().out


def accuracies(text: str) -> list[float]:
    """Every accuracy in percent, in the order printed."""
    return [float(found) for found in re.findall(r"([\d.]+) %(?: accuracy|$)", text, flags=re.MULTILINE)]


def test_a_rebuilt_network_has_the_outputs_of_the_trained_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("rebuild_a_network.py", capsys)
    (error,) = re.findall(r"relative error ([\d.e-]+)", text)
    assert float(error) < 1e-8


def test_norms_alone_adapt_to_another_light(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("adapt_by_norms.py", capsys)
    before, after = accuracies(text)
    assert after > before + 30
    assert "the same outputs: True" in text


def test_a_deep_network_learns_once_it_is_repaired(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("repair_a_deep_network.py", capsys)
    assert text.startswith("unhealthy")
    before, after = accuracies(text)
    assert before < 20
    assert after > 90


def test_norms_learn_from_scratch_as_the_ordinary_network_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("train_norms_from_scratch.py", capsys)
    ordinary, structured, plain, followed = (float(loss) for loss in re.findall(r"loss ([\d.]+)", text))
    assert structured == ordinary
    assert followed == pytest.approx(ordinary, rel=1e-3)  # float32, and features of condition number 18
    assert plain > ordinary + 0.1


@pytest.mark.slow
def test_the_shipped_network_is_trained_again_to_the_same_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (correct,) = accuracies(printed("train_digits_cnn.py", capsys))
    data, shipped = digits(), load_model("digits_cnn")
    assert correct == pytest.approx(100 * accuracy(shipped, (data.test_inputs, data.test_labels)), abs=1.0)  # 3 images
    again = load_model("digits_cnn", tmp_path / "digits_cnn.safetensors")
    assert 100 * accuracy(again, (data.test_inputs, data.test_labels)) == pytest.approx(correct, abs=0.05)  # as printed


def test_a_factorized_layer_has_the_outputs_of_the_trained_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("factorize_a_layer.py", capsys)
    before, after = accuracies(text)
    assert before == after > 90
    norms = [(float(norm), float(bound)) for norm, bound in re.findall(r"\|A\| ([\d.]+), .*paper ([\d.]+)", text)]
    assert len(norms) == 3
    assert all(norm < bound for norm, bound in norms)
    assert norms[2][0] < norms[0][0] / 15


def test_a_memorizer_fits_the_sample_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("memorize_a_sample.py", capsys)
    assert "0 of 500 training points wrong" in text
    assert accuracies(text)[0] < 30
    assert "the same outputs after export: True" in text


@pytest.mark.slow
def test_repaired_networks_are_ahead_of_batch_norm_in_depth(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EXAMPLES / "accuracy_over_depth.py"))
    figure = script["draw"]((8, 48), 1, (0.01,))
    found = {curve.label: curve.y[-1] for curve in figure.curves if curve.panel == "accuracy"}
    assert found["repaired"] > 80 > 2 * found["batch norm"]
    assert found["as it is"] < 20
    assert {curve.panel for curve in figure.curves} == {"accuracy", "rank"}
    assert capsys.readouterr().out.count("layers, repaired") == 2


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))
