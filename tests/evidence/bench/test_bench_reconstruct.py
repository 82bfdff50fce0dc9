"""The showcase on a narrow network: rows, records that outlive a kill, goals that can be missed, the papers' method."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onlynorm as on
from onlynorm.data import Split
from onlynorm.errors import UnknownNameError
from onlynorm.evidence import cache
from onlynorm.evidence.bench.competitors import OURS, PAPERS, SOLVERS
from onlynorm.evidence.bench.duels import race_layers
from onlynorm.evidence.bench.races import reconstruct as bench_module
from onlynorm.evidence.bench.races.reconstruct import RECIPES, RebuiltRow, race
from onlynorm.evidence.bench.races.reconstruct import ReconstructSizes as Sizes
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.race import RaceResult
from onlynorm.models import CifarResNet
from onlynorm.reconstruction import verify
from onlynorm.seeds import own_randomness

SIZES = Sizes(calibration=6, exact=2, images=3, collapsed=5)
GOOD = RebuiltRow("he_normal", 1200.0, 7e-11, 1e-8, 0.0, 0.998, 0.998, 0.9, 0.9, 1000, 2000.0, 64, 500, 5000)


def data() -> Split:
    """Noise; the images that judge are those that calibrated, so that none leaves a range."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 12, 12, generator=generator)
    labels = torch.randint(0, 10, (6,), generator=generator)
    return Split("toy", images, labels, images[:5], labels[:5])


def network(width: int = 2) -> nn.Module:
    with own_randomness(0):
        return CifarResNet(8, width=width).eval()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cifar10", data)
    monkeypatch.setattr(bench_module, "make_target", lambda *, quick: network())
    monkeypatch.setattr(bench_module, "race_layers", lambda *_, **__: [])
    monkeypatch.setattr(bench_module, "scaling_rows", lambda *_, **__: [])


def run(out: Path, *features: str, **options: Any) -> RaceResult[Sizes]:
    sizes = dataclasses.replace(SIZES, features=features or ("id_cond",))
    return race.run(sizes, out=out, **options)  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small")
def test_rows_meet_their_goals_and_are_told_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With 2 channels, a quarter of the features of density one half reach no output: more than the excess.
    monkeypatch.setattr(bench_module, "make_target", lambda *, quick: network(4))
    told: list[str] = []
    rows: list[str] = []
    features = ("he_normal", "sparse_he_normal", "id_cond")
    bench = run(tmp_path, *features, progress=told.append, on_row=rows.append)
    assert tuple(row.features for row in bench.rows) == features
    assert Sizes().features == tuple(RECIPES)
    assert rows == [f"{row.features}: {row.goal.measured}" for row in bench.rows]
    for row in bench.rows:
        assert row.error <= 1e-8
        assert row.residual <= 1e-10
        assert (row.agreement, row.collapsed_agreement) == (1.0, 1.0)
        assert row.accuracy == row.target_accuracy
        assert row.note == ""
        assert row.seconds >= row.solve_seconds > 0.0
        assert (row.n_exact, row.n_images, row.n_collapsed) == (2, 3, 5)
    assert is_met(bench)
    assert any(text.startswith("he_normal: layer3.0.conv2, residual ") for text in told)
    assert "id_cond: float32, 3 of 3 images" in told
    assert json.loads(json.dumps(bench.as_dict()))["goals"][0]["is_met"] is True


@pytest.mark.usefixtures("small")
def test_the_file_of_a_row_is_the_network_it_measured(tmp_path: Path) -> None:
    (row,) = run(tmp_path).rows
    (path,) = tmp_path.glob("reconstruct/*.safetensors")
    assert path.stat().st_size == row.file_size
    with own_randomness(1):
        made = on.load(path, like=CifarResNet(8, width=2))
    check = verify(network().double(), made, data().test_inputs[:2])
    assert check.relative_error == pytest.approx(row.error, rel=1e-6)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.usefixtures("small")
def test_structured_features_fix_their_own_number_and_sparse_ones_are_half_empty() -> None:
    assert {name: recipe.get("excess") for name, recipe in RECIPES.items()} == {
        "he_normal": 1.25,
        "he_uniform": 1.25,
        "orthogonal": 1.25,
        "sparse_he_normal": 1.25,
        "id_cond": None,
        "ortho_cond": None,
        "fast_ortho_cond": None,
        "kron_normal": 1.25,
    }
    assert RECIPES["sparse_he_normal"]["density"] == 0.5


def test_sizes_never_exceed_the_data() -> None:
    assert Sizes().within(data()) == Sizes(calibration=6, exact=5, images=5, collapsed=5)
    assert SIZES.within(data()) == SIZES


def test_the_quick_network_is_narrow_and_the_same_every_time() -> None:
    before = torch.get_rng_state()
    first, again = (bench_module.make_target(quick=True) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.linear.weight.shape == (10, 16)
    assert torch.equal(first.conv1.weight, again.conv1.weight)


def test_unknown_features_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"features needs a known name; got 'he_norml'\. Did you mean 'he_norm"):
        run(tmp_path, "he_norml")


# ---------------------------------------------------------------------------------------------- records


@pytest.mark.usefixtures("small")
def test_finished_rows_are_read_again_and_force_makes_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = run(tmp_path).rows
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "rebuild", lambda *_: pytest.fail("measured again"))
        (again,) = run(tmp_path).rows
        assert again == dataclasses.replace(first, note="cached")
        patch.setattr(cache, "library_digest", lambda *_: "another")
        assert run(tmp_path).rows[0].note == "cached, from older code"
    assert run(tmp_path, force=True).rows[0].note == ""
    (record,) = tmp_path.rglob("*.json")
    record.write_text("{")
    told: list[str] = []
    assert run(tmp_path, progress=told.append).rows[0].note == ""
    assert any("is damaged or has other fields" in text for text in told)


@pytest.mark.usefixtures("small")
def test_other_sizes_or_weights_are_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    race.run(dataclasses.replace(SIZES, features=("id_cond",), images=2), out=tmp_path)
    monkeypatch.setattr(bench_module, "make_target", lambda *, quick: CifarResNet(8, width=2).eval())
    run(tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("small")
def test_a_killed_row_keeps_its_finished_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "he_normal")
    (partial,) = tmp_path.rglob("*.partial")
    finished = {path.name: path.stat().st_mtime_ns for path in partial.iterdir()}
    assert len(finished) == 8
    assert not list(tmp_path.rglob("*.json"))

    cache: list[dict[str, int]] = []

    def look(text: str) -> None:
        if "float64" in text:
            cache.append({path.name: path.stat().st_mtime_ns for path in partial.iterdir()})

    (row,) = run(tmp_path, "he_normal", progress=look).rows
    assert row.note == "resumed"
    assert cache[0].items() >= finished.items()
    assert not partial.exists()


# ---------------------------------------------------------------------------------------------- goals


@pytest.mark.parametrize(
    ("changes", "promised"),
    [
        ({}, True),
        ({"error": 1.1e-8}, False),
        ({"error": math.nan}, False),
        ({"agreement": 0.997}, False),
        ({"agreement": math.nan}, False),
        ({"collapsed_agreement": 0.997}, False),
        ({"solve_seconds": 1201.0}, False),
        ({"outside": 0.5, "accuracy": 0.1}, True),  # told, not promised
    ],
)
def test_a_row_is_judged_by_what_was_promised(changes: dict[str, float], promised: bool) -> None:
    row = dataclasses.replace(GOOD, **changes)
    assert row.goal.is_met is promised
    assert is_met(race.result([("rows", GOOD), ("rows", row)])) is promised
    assert "500 images and, collapsed, of 5000" in row.goal.aim


# ---------------------------------------------------------------------------------------------- the papers' method


def test_the_papers_method_stands_beside_ours_on_layers_of_the_network() -> None:
    told: list[str] = []
    layers, excesses = bench_module.PAPERS_LAYERS, bench_module.PAPERS_EXCESSES
    methods = {method: SOLVERS[method] for method in (OURS, PAPERS)}
    rows = race_layers(network(), layers, excesses, methods, status=told.append)
    assert [(row.system, row.excess, row.method) for row in rows] == [
        (layer, excess, method) for layer in layers for excess in excesses for method in (OURS, PAPERS)
    ]
    assert {row.system: row.equations for row in rows} == {"layer1.0.conv1": 36, "layer2.0.conv1": 72}
    for ours, papers in zip(rows[::2], rows[1::2], strict=True):
        assert ours.residual <= 1e-10 < papers.residual
        assert papers.ratio == papers.seconds / ours.seconds
    assert len(told) == len(layers) * len(excesses)
