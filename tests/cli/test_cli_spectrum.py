"""`onlynorm spectrum`: a table, one JSON document, a figure, and errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onlynorm import cli
from onlynorm.cli.commands import spectrum as command
from onlynorm.cli.terminal import screen
from onlynorm.features import draw
from onlynorm.solvers.spectrum import EXCESSES, measure_spectrum

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "width", 200)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onlynorm", "spectrum", *args])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        seen = capsys.readouterr()
        return int(stopped.value.code or 0), seen.out, " ".join(seen.err.split())

    return call


def test_a_table_shows_values_law_and_descent(run: Run) -> None:
    code, out, _ = run("6,6", "--excess", "1.5", "--seeds", "1")
    assert code == 0
    for word in ("law distance", "singular values", "condition number (median)", "peaks at excess"):
        assert word in out
    assert len([line for line in out.splitlines() if " to " in line]) == command.N_BINS


def test_json_is_one_document_with_the_numbers_of_the_library(run: Run) -> None:
    code, out, _ = run("6,6", "--excess", "1.5", "--seeds", "2", "--json")
    assert code == 0
    document = json.loads(out)
    found = measure_spectrum(draw("he_normal", (6, 6), excess=1.5))
    assert document["condition_number"] == pytest.approx(found.condition)
    assert document["law"]["distance"] == pytest.approx(found.distance)
    assert document["law"]["limit"] == pytest.approx(found.limit)
    assert document["law"]["level"] == 0.01
    assert document["is_unit_length"] is True
    assert document["length_spread"] == pytest.approx(found.length_spread)
    assert document["sweep"]["excess"] == [draw("he_normal", (6, 6), excess=excess).excess for excess in EXCESSES]
    assert [len(row) for row in document["sweep"]["condition_number"]] == [2] * len(EXCESSES)
    assert document["files"] == []


@pytest.mark.parametrize("name", ["id_cond", "ortho_cond", "fast_ortho_cond", "id_cond_minimal"])
def test_structured_features_have_no_sweep_and_no_law(run: Run, name: str) -> None:
    code, out, _ = run("6,6", "--features", name, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["sweep"] is None
    assert "law" not in document
    assert run("6,6", "--features", name)[0] == 0


def test_a_grid_of_random_features_has_the_law_of_products(run: Run) -> None:
    code, out, _ = run("10,12", "--features", "kron_normal", "--seeds", "2", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["law"]["follows"] is True
    assert sum(document["histogram"]["law"]) == pytest.approx(1.0, abs=1e-3)
    own = [draw("kron_normal", (10, 12), excess=excess).excess for excess in EXCESSES if excess >= 1.0]
    assert document["sweep"]["excess"] == sorted(set(own))
    assert None not in document["sweep"]["law"]
    code, out, _ = run("10,12", "--features", "kron_normal", "--seeds", "1", "--out", "figures")
    assert code == 0
    assert "law" in out


def test_features_as_drawn_have_no_predicted_condition_number(run: Run) -> None:
    code, out, _ = run("1,40", "--excess", "0.5", "--as-drawn", "--seeds", "1", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["is_unit_length"] is False
    assert document["law"]["is_known"] is False
    assert document["law"]["follows"] is False
    assert set(document["sweep"]["law"]) == {None}
    code, out, _ = run("1,40", "--excess", "0.5", "--as-drawn", "--seeds", "1", "--out", "figures")
    assert code == 0
    assert "features as drawn" in out
    assert "unknown, at least 1" in out


def test_three_weights_are_too_few_for_a_test(run: Run) -> None:
    code, out, _ = run("1,3", "--no-sweep")
    assert code == 0
    assert "too few singular values for a test" in out


def test_the_figure_has_both_panels(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("6,6", "--seeds", "1", "--out", "figures")
    assert code == 0
    assert "figure.svg" in out
    drawn = (tmp_path / "figures" / "figure.svg").read_text(encoding="utf-8")
    assert "features per equation" in drawn
    assert "singular value" in drawn
    assert (tmp_path / "figures" / "figure.png").stat().st_size > 1000


def test_a_tiny_layer_has_a_row_for_every_number_of_features(run: Run) -> None:
    for shape, n_rows in (("2,2", 8), ("2,5", 10)):  # of 12: at 10 weights 1.04 and 1.1 both come to 11 features
        code, out, _ = run(shape, "--seeds", "1", "--json")
        excesses = json.loads(out)["sweep"]["excess"]
        assert code == 0
        assert len(set(excesses)) == len(excesses) == n_rows


def test_without_sweep_only_the_spectrum_is_measured(run: Run) -> None:
    code, out, _ = run("6,6", "--no-sweep")
    assert code == 0
    assert "peaks at" not in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("6,a",), "integers"),
        (("6,6", "--features", "he_norml"), "he_normal"),
        (("6,6", "--features", "id_cond", "--excess", "2"), "needs exactly"),
        (("6,6", "--density", "0.5"), "sparse distribution"),
        (("3,3", "--features", "er_sign", "--density", "0.001"), "nonzero feature"),
        (("1000000,1000000", "--features", "id_cond"), "1e+12 features needs 8e+03 GB"),
        (("100,100", "--excess", "1000000"), "smaller excess"),
    ],
)
def test_misuse_is_one_line(run: Run, args: tuple[str, ...], message: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert message in err
