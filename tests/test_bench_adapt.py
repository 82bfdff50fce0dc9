"""Adapting to corrupted images on a tiny network: what each way changes and keeps, rows that outlive a kill, goals."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm import cli
from onlynorm.cli.evidence import bench as measuring
from onlynorm.cli.terminal import screen
from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, Split
from onlynorm.errors import UnknownNameError
from onlynorm.evidence import cache as kept_module
from onlynorm.evidence.bench.sweeps import adapt as bench_module
from onlynorm.evidence.bench.sweeps.adapt import (
    BOTH,
    CLEAN,
    FULL,
    HEAD,
    NORMS,
    NOTHING,
    STATISTICS,
    TRAINED,
    WAYS,
    AdaptBench,
    AdaptRun,
    AdaptSizes,
    Trial,
    adapt,
    bench_adapt,
    keep,
    reload,
)
from onlynorm.evidence.goals import is_met
from onlynorm.models import cifar_resnet
from onlynorm.seeds import seeded
from onlynorm.tuning import Schedule

SIZES = AdaptSizes(n_train=24, n_put_aside=10, n_test=20, epochs=1, batch_size=8)
SCHEDULE = Schedule(epochs=2, batch_size=8, lr=0.1)


def data(seed: int = 0) -> Split:
    """Pixels at random, normalised as CIFAR-10's are."""
    pixels = torch.rand(80, 3, 8, 8, generator=seeded(seed))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    images, labels = (pixels - mean) / std, torch.arange(80) % 10
    return Split("toy", images[:60], labels[:60], images[60:], labels[60:])


def base() -> nn.Module:
    return cifar_resnet(8, width=2).eval()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cifar10", data)
    monkeypatch.setattr(bench_module, "make_base", base)
    monkeypatch.setattr(bench_module, "RATES", (0.01, 0.1))


def run(out: Path, *corruptions: str, **options: Any) -> AdaptBench:
    return bench_adapt(corruptions=corruptions or ("noise",), sizes=SIZES, out=out, **{"n_seeds": 1, **options})


def pairs() -> tuple[Tensor, Tensor]:
    split = data()
    return split.train_inputs, split.train_labels


# ---------------------------------------------------------------------------------------------- ways


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        (NOTHING, set()),
        (STATISTICS, {"statistics"}),
        (HEAD, {"head"}),
        (NORMS, {"statistics", "norms"}),
        (BOTH, {"statistics", "norms", "head"}),
        (FULL, {"statistics", "norms", "head", "weights"}),
    ],
)
def test_a_way_changes_what_it_says_and_keeps_that_exactly(way: str, parts: set[str], tmp_path: Path) -> None:
    network = adapt(base(), way, data=pairs(), schedule=SCHEDULE)
    before = base().state_dict()
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert {part_of(name) for name in moved} == parts
    size = keep(network, way, folder=tmp_path)
    again = reload(base(), way, folder=tmp_path)
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in again.state_dict().items())
    n_bytes = sum(v.nbytes for k, v in before.items() if part_of(k) in parts)
    assert n_bytes <= size
    assert (size == 0) == (way == NOTHING)


def part_of(name: str) -> str:
    last = name.rpartition(".")[2]
    if last in ("running_mean", "running_var", "num_batches_tracked"):
        return "statistics"
    return "norms" if "bn" in name else "head" if name.startswith("linear") else "weights"


def test_statistics_only_looks_at_no_label() -> None:
    images, labels = pairs()
    first, other = (adapt(base(), STATISTICS, data=(images, y), schedule=SCHEDULE) for y in (labels, labels.flip(0)))
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in first.state_dict().items())


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small")
def test_every_way_is_measured_on_every_corruption(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[AdaptRun] = []
    bench = run(tmp_path, "noise", "invert", n_seeds=2, progress=told.append, on_row=seen.append)
    assert seen == bench.runs
    assert len(bench.find(CLEAN, NOTHING)) == 1
    for images in ("noise", "invert"):
        assert [len(bench.find(images, way)) for way in WAYS] == [1, 2, 2, 2, 2, 2]
    assert {(t.images, t.way, t.rate) for t in bench.trials} == {
        (images, way, rate) for images in ("noise", "invert") for way in TRAINED for rate in (0.01, 0.1)
    }
    for made in bench.runs:
        assert made.is_exact
        assert made.note == ""
        assert (made.rate in (0.01, 0.1)) == (made.way in TRAINED)
        assert made.accuracy in [n / 20 for n in range(21)]
    sizes = {way: bench.find("noise", way)[0].file_size for way in WAYS}
    assert 0 == sizes[NOTHING] < sizes[HEAD] < sizes[STATISTICS] < sizes[NORMS] < sizes[BOTH] < sizes[FULL]
    assert "run 23 of 23: invert, full training, seed 1" in told
    assert json.loads(json.dumps(bench.as_dict()))["sizes"]["n_train"] == 24


@pytest.mark.usefixtures("small")
def test_images_put_aside_are_never_trained_on_and_seeds_draw_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []
    monkeypatch.setattr(
        bench_module, "adapt", lambda base, way, *, data, schedule: drawn.append(data[0]) or base  # type: ignore[func-returns-value]
    )  # fmt: skip
    lab = bench_module._Lab(
        base(),
        data(),
        SIZES,
        0.0,
        kept_module.Rows(tmp_path, kind="x", module="onlynorm.evidence.bench", force=False, say=print),
    )
    for seed in (0, 1):
        lab._adapted("blur", FULL, seed, 0.1)
    aside = {tuple(image.flatten().tolist()) for image in data().train_inputs[lab.put_aside]}
    first, second = ({tuple(image.flatten().tolist()) for image in images} for images in drawn)
    assert (len(aside), len(first), len(second)) == (10, 24, 24)
    assert not aside & (first | second)
    assert first != second


@pytest.mark.usefixtures("small")
def test_finished_runs_are_read_again_and_force_makes_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "adapt", lambda *_, **__: pytest.fail("trained again"))
        again = run(tmp_path)
        plain = [dataclasses.replace(made, note="kept", rate=0.0) for made in first.runs]
        assert [dataclasses.replace(made, rate=0.0) for made in again.runs] == plain
        patch.setattr(kept_module, "library_digest", lambda *_: "another")
        assert {made.note for made in run(tmp_path).runs} == {"kept, of older code"}
        assert "kept, of older code" in run(tmp_path).tables()[0].rows[0]
    assert {made.note for made in run(tmp_path, force=True).runs} == {""}
    (record,) = tmp_path.glob("adapt/noise-full-training-seed-0-*.json")
    record.write_text("{")
    told: list[str] = []
    notes = {made.way: made.note for made in run(tmp_path, progress=told.append).runs}
    assert [way for way, note in notes.items() if not note] == [FULL]
    assert any("is damaged, so the row is made again" in text for text in told)


@pytest.mark.usefixtures("small")
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def stop(made: AdaptRun) -> None:
        if made.way == HEAD:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_row=stop)
    notes = [made.note for made in run(tmp_path).runs]
    assert notes == ["kept"] * 4 + [""] * 3


@pytest.mark.usefixtures("small")
def test_other_sizes_seeds_or_severities_are_other_rows(tmp_path: Path) -> None:
    run(tmp_path)
    n_trials, n_runs = 2 * len(TRAINED), 2 + len(WAYS) - 1
    assert len(list(tmp_path.rglob("*.json"))) == n_trials + n_runs
    run(tmp_path, n_seeds=2)
    assert len(list(tmp_path.rglob("*.json"))) == n_trials + n_runs + len(WAYS) - 1
    run(tmp_path, severity=1.0)
    assert len(list(tmp_path.rglob("*.json"))) == 2 * (n_trials + n_runs) + len(WAYS) - 1


@pytest.mark.usefixtures("small")
def test_a_rate_at_which_training_diverges_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "RATES", (1e30, 0.01))
    bench = run(tmp_path)
    assert bench.tried(FULL, 1e30) == 0.0
    assert bench.rate(FULL) == 0.01


def test_unknown_corruptions_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"corruption needs a known name; got 'nois'\. Did you mean 'noise'"):
        run(tmp_path, "nois")


# ---------------------------------------------------------------------------------------------- numbers and goals


def made_up(**accuracies: float) -> AdaptBench:
    """Three seeds of every way on one corruption that costs 0.4; seeds differ by one percent."""
    level = {STATISTICS: 0.7, HEAD: 0.6, NORMS: 0.8, BOTH: 0.8, FULL: 0.85, **accuracies}
    runs = [AdaptRun(CLEAN, NOTHING, 0, math.nan, 0.9, 0, True, 0.0)]
    runs += [AdaptRun("blur", NOTHING, 0, math.nan, 0.5, 0, True, 0.0)]
    runs += [
        AdaptRun("blur", way, seed, math.nan if way == STATISTICS else 0.1, at + 0.01 * (seed - 1), 10, True, 1.0)
        for way, at in level.items() for seed in range(3)
    ]  # fmt: skip
    trials = [Trial("blur", way, rate, rate) for way in TRAINED for rate in (0.1, 0.01)]
    return AdaptBench(runs, trials)


def test_the_share_won_back_is_of_the_accuracy_that_was_lost() -> None:
    found = made_up().recovered("blur", NORMS)
    assert found.mean == pytest.approx(0.75)
    # t(0.975, 2) = 4.30265 from a table; the seeds' shares are 0.725, 0.75, 0.775.
    assert found.half == pytest.approx(4.30265 * 0.025 / math.sqrt(3), rel=1e-5)
    shown = {row[1]: row for row in made_up().tables()[0].rows if row[0] == "blur"}
    assert shown[NORMS][2:6] == ("80.0 ± 2.5", "75.0 ± 6.2", "10 B", "0.1")
    assert shown[NOTHING][2:7] == ("50.0", "0.0", "0 B", "-", "-")


def test_nothing_is_won_back_where_nothing_was_lost() -> None:
    bench = made_up()
    bench.runs[0] = dataclasses.replace(bench.runs[0], accuracy=0.5)
    assert bench.recovered("blur", NORMS).percent() == "-"


def test_the_rate_of_a_way_is_the_best_on_average_over_the_corruptions() -> None:
    bench = made_up()
    assert bench.rate(FULL) == 0.1
    bench.trials += [Trial("noise", FULL, 0.1, 0.0), Trial("noise", FULL, 0.01, 0.2)]
    assert bench.rate(FULL) == 0.01
    assert math.isnan(bench.rate(STATISTICS))
    assert made_up().tables()[1].rows[0] == (HEAD, "10.0", "1.0", "0.1")


def test_goals_are_met_and_each_can_be_missed() -> None:
    assert is_met(made_up())
    assert len(made_up().goals) == 4
    assert AdaptBench().goals == []

    def missed(bench: AdaptBench) -> list[str]:
        return [goal.aim for goal in bench.goals if not goal.is_met]

    assert missed(made_up(**{HEAD: 0.81})) == ["norms only wins back more than head only, on every corruption"]
    assert missed(made_up(**{STATISTICS: 0.8})) == [
        "norms only wins back more than statistics only, on every corruption"
    ]
    fewer = made_up()
    fewer.runs = [made for made in fewer.runs if made.seed < 2]
    assert missed(fewer) == ["every way is measured on every corruption with 3 seeds or more"]
    drifting = made_up()
    drifting.runs[-1] = dataclasses.replace(drifting.runs[-1], is_exact=False)
    assert len(missed(drifting)) == 1
    assert "17 of 17" in made_up().goals[1].measured
    assert drifting.goals[1].measured == "16 of 17"


@pytest.mark.parametrize("how", ["", "--markdown", "--json"])
def test_the_command_hands_its_options_on_and_shows_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def measure(*, progress: Any, on_row: Any, **options: Any) -> AdaptBench:
        asked.update(options)
        progress("a step")
        on_row(made_up().runs[2])
        return made_up(**{HEAD: 0.9})

    monkeypatch.setattr(measuring, "bench_adapt", measure)
    monkeypatch.setattr(screen, "width", 300)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    words = ["bench", "adapt", "--quick", "--epochs", "7", "--out", str(tmp_path), *([how] if how else [])]
    monkeypatch.setattr(sys, "argv", ["onlynorm", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    sizes = dataclasses.replace(AdaptSizes.quick(), epochs=7)
    assert asked == {
        "corruptions": CORRUPTIONS, "n_seeds": 3, "severity": 3.0, "sizes": sizes, "out": tmp_path, "force": False
    }  # fmt: skip
    shown = capsys.readouterr()
    assert "blur, statistics only, seed 0: 69.0 %" in shown.err
    if how == "--json":
        assert json.loads(shown.out)["recovered"]["blur"][NORMS]["n"] == 3
    else:
        assert "75.0 ± 6.2" in shown.out
        assert "head only, on every corruption" in shown.out
