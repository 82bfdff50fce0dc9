"""The training loop learns, is a function of its seed, resumes exactly, and stops where it must."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onlynorm.data import digits
from onlynorm.errors import ConversionError, ShapeError, TrainingError, UnknownNameError, ValueRangeError
from onlynorm.tuning import Schedule, accuracy, fit, only_norms

QUICK = Schedule(epochs=3, batch_size=64, lr=0.1, seed=3)


def make(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10), nn.BatchNorm1d(10)
        )


def data() -> tuple[Tensor, Tensor]:
    split = digits()
    return split.train_inputs[:300], split.train_labels[:300]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class KilledError(Exception):
    """Stands for a run that dies."""


def killer(at: int) -> object:
    def step(number: int, total: int, loss: float) -> None:
        if number == at:
            raise KilledError

    return step


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_network_learns_the_digits(optimizer: str) -> None:
    split = digits()
    model = make()
    schedule = Schedule(epochs=8, batch_size=64, optimizer=optimizer, lr=0.1 if optimizer == "sgd" else 0.01)
    test = split.test_inputs, split.test_labels
    result = fit(model, (split.train_inputs, split.train_labels), test=test, schedule=schedule)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    assert result.history[-1]["test_accuracy"] >= 0.9, "a linear classifier reaches 0.95 on the digits"
    assert accuracy(model, test) == result.history[-1]["test_accuracy"]
    assert result.n_steps == 8 * 23
    assert "8 epochs, 184 steps" in str(result)


def test_norms_only_means_norms_only() -> None:
    model = make()
    before = copy.deepcopy(model)
    only_norms(model, statistics="freeze")
    fit(model, data(), schedule=QUICK)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before.state_dict()[k])}
    assert changed == {"1.weight", "1.bias", "5.weight", "5.bias"}


def test_a_run_is_a_function_of_its_seed_and_leaves_the_global_generator_alone() -> None:
    first, second, third = make(), make(), make()
    state = torch.get_rng_state()
    fit(first, data(), schedule=QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    fit(second, data(), schedule=QUICK)
    fit(third, data(), schedule=Schedule(epochs=3, batch_size=64, lr=0.1, seed=4))
    assert same(first, second)
    assert not same(first, third)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("at", "save_every"), [(3, 2), (7, None), (7, 1), (11, 4)])
def test_a_killed_run_resumes_with_the_same_numbers(
    optimizer: str, at: int, save_every: int | None, tmp_path: Path
) -> None:
    schedule = Schedule(epochs=3, batch_size=64, lr=0.05, optimizer=optimizer, seed=1)
    whole = make()
    only_norms(whole)
    wanted = fit(whole, data(), schedule=schedule)
    broken = make()
    only_norms(broken)
    path = tmp_path / "run.safetensors"
    with pytest.raises(KilledError):
        fit(broken, data(), schedule=schedule, checkpoint=path, save_every=save_every, step=killer(at))  # type: ignore[arg-type]
    again = make()
    only_norms(again)
    result = fit(again, data(), schedule=schedule, checkpoint=path, save_every=save_every)
    assert same(whole, again)
    assert result.n_steps == wanted.n_steps
    assert [row["epoch"] for row in result.history] == [0.0, 1.0, 2.0]


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    model = make()
    path = tmp_path / "run.safetensors"
    fit(model, data(), schedule=QUICK, checkpoint=path)
    again = make()
    result = fit(again, data(), schedule=QUICK, checkpoint=path, step=killer(1))  # type: ignore[arg-type]
    assert same(model, again)
    assert result.n_steps == 15


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    fit(make(), data(), schedule=QUICK, checkpoint=path)
    with pytest.raises(ConversionError, match=r"settings of the run.*lr: 0\.1 there, 0\.2 now"):
        fit(make(), data(), schedule=Schedule(epochs=3, batch_size=64, lr=0.2, seed=3), checkpoint=path)
    other = nn.Sequential(nn.Linear(64, 10))
    with pytest.raises(ConversionError, match="model of the run"):
        fit(other, data(), schedule=QUICK, checkpoint=path)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_state(tmp_path: Path) -> None:
    model = make()
    path = tmp_path / "run.safetensors"

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(output, labels)
        loss.calls += 1  # type: ignore[attr-defined]
        return value * float("nan") if loss.calls > 6 else value  # type: ignore[attr-defined]

    loss.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"finite loss; got nan at step 6 \(the last good state is in run"):
        fit(model, data(), schedule=QUICK, checkpoint=path, loss=loss)
    kept = make()
    fit(kept, data(), schedule=QUICK, checkpoint=path)
    assert all(bool(torch.isfinite(p).all()) for p in kept.parameters())


def test_training_stops_early_when_nothing_gets_better() -> None:
    schedule = Schedule(epochs=50, batch_size=64, lr=0.0, patience=2)
    model = make()
    only_norms(model, statistics="freeze")
    result = fit(model, data(), test=data(), schedule=schedule)
    assert len(result.history) == 3
    assert "no better score for 2 epochs" in result.reason


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = Schedule(lr=2.0, warmup=0.1)
    rates = [schedule.lr_at(step, 100) for step in range(100)]
    assert rates[9] == 2.0
    assert rates[0] == pytest.approx(0.2)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(1.0)
    assert 0.0 <= rates[-1] < 1e-3


def test_the_learning_rate_falls_tenfold_at_every_drop() -> None:
    schedule = Schedule(lr=2.0, warmup=0.0, drops=(0.5, 0.75))
    assert [schedule.lr_at(step, 4) for step in range(4)] == pytest.approx([2.0, 2.0, 0.2, 0.02])
    risen = Schedule(lr=2.0, warmup=0.5, drops=(0.75,))
    assert [risen.lr_at(step, 4) for step in range(4)] == pytest.approx([1.0, 2.0, 2.0, 0.2])


def test_a_run_with_drops_resumes_and_one_with_others_is_refused(tmp_path: Path) -> None:
    schedule = Schedule(epochs=3, batch_size=64, lr=0.05, drops=(0.4, 0.8), seed=1)
    whole, broken, path = make(), make(), tmp_path / "run.safetensors"
    fit(whole, data(), schedule=schedule)
    with pytest.raises(KilledError):
        fit(broken, data(), schedule=schedule, checkpoint=path, step=killer(7))  # type: ignore[arg-type]
    again = make()
    fit(again, data(), schedule=schedule, checkpoint=path)
    assert same(whole, again)
    with pytest.raises(ConversionError, match=r"drops: \[0\.4, 0\.8\] there, None now"):
        fit(make(), data(), schedule=Schedule(epochs=3, batch_size=64, lr=0.05, seed=1), checkpoint=path)


def test_logs_are_a_table_and_events(tmp_path: Path) -> None:
    fit(make(), data(), schedule=QUICK, test=data(), logs=tmp_path)
    table = next((tmp_path / "csv").rglob("metrics.csv"))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3
    assert {"loss", "test_accuracy", "seconds"} <= rows[0].keys()
    assert list((tmp_path / "tensorboard").rglob("events.*"))


def test_bad_input_is_refused() -> None:
    model = make()
    with pytest.raises(UnknownNameError, match=r"optimizer.*'adam'.*adamw"):
        Schedule(optimizer="adam")
    bad = (("epochs", -1), ("batch_size", 0), ("lr", float("nan")), ("warmup", 1.0), ("drops", (0.5, 1.5)))
    for field, value in bad:
        with pytest.raises(ValueRangeError, match=f"{field} needs a sensible value"):
            Schedule(**{field: value})
    with pytest.raises(ShapeError, match="as many labels as inputs"):
        fit(model, (torch.zeros(3, 64), torch.zeros(2)))
    with pytest.raises(ShapeError, match="images"):
        fit(model, data(), schedule=Schedule(augmentation="flip"))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConversionError, match="parameters that require gradients; got none"):
        fit(model, data())
