"""Frozen random networks on tiny sizes: what is trained, what is counted, rows that outlive a kill, the histogram."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onlynorm import cli
from onlynorm.cli.evidence import bench as measuring
from onlynorm.cli.terminal import screen
from onlynorm.data import Split
from onlynorm.evidence.bench.sweeps import frozen as bench_module
from onlynorm.evidence.bench.sweeps.frozen import (
    FULL,
    HEAD,
    NETWORKS,
    NORMS,
    NORMS_FROM_ONES,
    WAYS,
    FrozenBench,
    FrozenRun,
    FrozenSizes,
    bench_frozen,
    draw_histogram,
    share_below,
)
from onlynorm.evidence.goals import is_met
from onlynorm.models import cifar_resnet
from onlynorm.seeds import seeded

SIZES = FrozenSizes(n_train=24, n_test=20, epochs=1, batch_size=8)
SMALL = ((8, 2), (8, 4), (14, 2))


def data() -> Split:
    images, labels = torch.randn(60, 3, 8, 8, generator=seeded(0)), torch.arange(60) % 10
    return Split("toy", images[:40], labels[:40], images[40:], labels[40:])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cifar10", data)


def run(out: Path, *networks: tuple[int, int], **options: Any) -> FrozenBench:
    return bench_frozen(networks=networks or ((8, 2),), sizes=SIZES, out=out, **{"n_seeds": 1, **options})


# ---------------------------------------------------------------------------------------------- ways


@pytest.mark.parametrize(
    ("way", "trained"),
    [(NORMS, {"norms"}), (NORMS_FROM_ONES, {"norms"}), (HEAD, {"head"}), (FULL, {"norms", "head", "weights"})],
)
def test_a_way_trains_what_it_says_from_the_scales_it_says(way: str, trained: set[str]) -> None:
    network = cifar_resnet(8, width=8)
    bench_module.prepare(network, way, seed=3)
    assert {part_of(name) for name, p in network.named_parameters() if p.requires_grad} == trained
    scales = torch.tensor(bench_module.gammas(network))
    assert len(scales) == 8 + 2 * (8 + 16 + 32)
    if way == NORMS:
        assert 0.0 <= float(scales.min()) < 0.2 < 0.8 < float(scales.max()) <= 1.0
        other = cifar_resnet(8, width=8)
        bench_module.prepare(other, way, seed=4)
        assert bench_module.gammas(other) != scales.tolist()
    else:
        assert bool((scales == 1.0).all())


def part_of(name: str) -> str:
    return "norms" if "bn" in name else "head" if name.startswith("linear") else "weights"


def test_one_run_counts_what_it_trained_and_leaves_the_rest_alone() -> None:
    made = {way: bench_module.train(8, 2, way=way, seed=0, split=data(), sizes=SIZES) for way in WAYS}
    n_norms, n_head = 2 * (2 + 2 * (2 + 4 + 8)), 10 * 8 + 10
    assert {way: row["n_trained"] for way, row in made.items()} == {
        NORMS: n_norms, NORMS_FROM_ONES: n_norms, HEAD: n_head, FULL: made[FULL]["n_total"]
    }  # fmt: skip
    assert all(row["is_frozen"] for row in made.values())
    assert set(made[HEAD]["gammas"]) == {1.0}
    assert set(made[NORMS_FROM_ONES]["gammas"]) != {1.0}
    assert made[NORMS] | {"seconds": 0} == bench_module.train(
        8, 2, way=NORMS, seed=0, split=data(), sizes=SIZES
    ) | {"seconds": 0}  # fmt: skip
    assert made[NORMS]["gammas"] != bench_module.train(8, 2, way=NORMS, seed=1, split=data(), sizes=SIZES)["gammas"]


def test_the_networks_grow_by_one_size_at_a_time() -> None:
    assert [width for depth, width in NETWORKS if depth == 8] == [4, 8, 16, 32]
    assert [depth for depth, width in NETWORKS if width == 8] == [8, 14, 20, 32]
    assert bench_module.FROM_ONES in NETWORKS


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small")
def test_every_network_is_trained_in_every_way_and_the_scales_are_drawn(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[FrozenRun] = []
    bench = run(tmp_path, *SMALL, progress=told.append, on_row=seen.append)
    assert seen == bench.runs
    assert bench.networks == list(SMALL)
    assert [len(bench.find(net, NORMS_FROM_ONES)) for net in SMALL] == [1, 0, 0]
    assert all(len(bench.find(net, way)) == 1 for net in SMALL for way in (NORMS, HEAD, FULL))
    assert {made.note for made in bench.runs} == {""}
    assert "run 1 of 10: ResNet-8, width 2, norms only, seed 0: step 3 of 3" in told
    picture = Path(bench.figure)
    assert picture == tmp_path / "frozen" / "gammas.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = picture.with_suffix(".svg").read_text()
    assert "<svg" in text
    assert "matplotlib" in text
    plain = json.loads(json.dumps(bench.as_dict()))
    assert "gammas" not in plain["runs"][0]
    assert 0.0 <= plain["runs"][0]["below 0.05"] <= 1.0
    assert len(bench.tables()[0].rows) == 10


@pytest.mark.usefixtures("small")
def test_finished_runs_are_read_again_and_force_makes_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(made: FrozenRun) -> None:
        if made.way == HEAD:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_row=stop)
    first = run(tmp_path)
    assert [made.note for made in first.runs] == ["kept", "kept", "kept", ""]
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "train", lambda *_, **__: pytest.fail("trained again"))
        assert run(tmp_path).runs == [dataclasses.replace(made, note="kept") for made in first.runs]
    forced = run(tmp_path, force=True).runs
    assert [made.note for made in forced] == [""] * 4
    assert [made.gammas for made in forced] == [made.gammas for made in first.runs]
    longer = dataclasses.replace(SIZES, epochs=2)
    assert {made.note for made in bench_frozen(networks=((8, 2),), n_seeds=1, sizes=longer, out=tmp_path).runs} == {""}


# ---------------------------------------------------------------------------------------------- numbers and goals


def made_up(n_seeds: int = 3, **accuracies: float) -> FrozenBench:
    level = {"8,2": 0.3, "8,4": 0.4, "14,2": 0.35, **accuracies}
    scales = [0.0, -0.02, 0.5, 1.5]
    return FrozenBench([
        FrozenRun(*net, way, seed, level[f"{net[0]},{net[1]}"], 8, 80, scales, True, 1.0)
        for seed in range(n_seeds) for net in SMALL for way in (NORMS, HEAD, FULL)
    ])  # fmt: skip


def test_scales_close_to_zero_are_counted_by_magnitude() -> None:
    bench = made_up()
    assert share_below(bench.runs, 0.01).mean == 0.25
    assert share_below(bench.runs, 0.05).mean == 0.5
    rows = {(row[0], row[1], row[2]): row for row in bench.tables()[0].rows}
    assert rows["8", "2", NORMS][3:9] == ("8", "80", "30.0 ± 0.0", "25.0 ± 0.0", "50.0 ± 0.0", "3")
    assert rows["8", "2", HEAD][6:8] == ("-", "-")
    assert bench.tables()[1].rows == [
        (NORMS, "25.0 ± 0.0", "50.0 ± 0.0", "36"),
        (FULL, "25.0 ± 0.0", "50.0 ± 0.0", "36"),
        ("uniform, before training", "1.0", "5.0", "-"),
    ]


def test_goals_are_met_and_each_can_be_missed() -> None:
    assert is_met(made_up())
    assert len(made_up().goals) == 4
    assert FrozenBench().goals == []

    def missed(bench: FrozenBench) -> list[str]:
        return [goal.aim for goal in bench.goals if not goal.is_met]

    assert missed(made_up(2)) == ["every way is measured on every network with 3 seeds or more"]
    assert missed(made_up(**{"8,4": 0.3})) == ["norms only: accuracy grows with the width, 2 to 4"]
    assert missed(made_up(**{"14,2": 0.2})) == ["norms only: accuracy grows with the depth, 8 to 14"]
    moved = made_up()
    moved.runs[0] = dataclasses.replace(moved.runs[0], is_frozen=False)
    assert missed(moved) == ["what is frozen is as it was drawn, to the last bit"]


def test_a_scale_beyond_the_axis_is_counted_at_its_end() -> None:
    bench = made_up()
    bench.runs = [dataclasses.replace(made, gammas=[-7.0, 9.0]) for made in bench.runs]
    assert all(sum(curve.y) == pytest.approx(1.0) for curve in draw_histogram(bench).curves)


@pytest.mark.parametrize("how", ["", "--markdown", "--json"])
def test_the_command_hands_its_options_on_and_names_the_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def measure(*, progress: Any, on_row: Any, **options: Any) -> FrozenBench:
        asked.update(options)
        bench = made_up()
        progress("a step")
        on_row(bench.runs[0])
        bench.figure = "there.png"
        return bench

    monkeypatch.setattr(measuring, "bench_frozen", measure)
    monkeypatch.setattr(screen, "width", 300)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    words = ["bench", "frozen", "--epochs", "40", "--images", "30", "--out", str(tmp_path), *([how] if how else [])]
    monkeypatch.setattr(sys, "argv", ["onlynorm", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    sizes = FrozenSizes(epochs=40, n_train=30)
    assert asked == {"n_seeds": 3, "sizes": sizes, "quick": False, "out": tmp_path, "force": False}
    shown = capsys.readouterr()
    assert "ResNet-8, width 2, norms only, seed 0: 30.0 %" in shown.err
    assert "there.png" in shown.err
    if how == "--json":
        assert json.loads(shown.out)["figure"] == "there.png"
    else:
        assert "30.0 ± 0.0" in shown.out


def test_norms_alone_take_the_higher_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(bench_module, "fit", lambda *_, schedule, **__: rates.append(schedule.lr))
    for way in WAYS:
        bench_module.train(8, 2, way=way, seed=0, split=data(), sizes=SIZES)
    assert rates == [SIZES.norm_rate, SIZES.norm_rate, SIZES.rate, SIZES.rate]
