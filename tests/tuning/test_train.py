"""The training loop learns, is a function of its seed, resumes exactly, and stops where it must."""

from __future__ import annotations

import copy
import csv
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm.data import digits
from onlynorm.errors import ConversionError, FormatError, ShapeError, TrainingError, UnknownNameError, ValueRangeError
from onlynorm.frozen import NormOnlyLayer, to_norm_only
from onlynorm.models import load_model
from onlynorm.optim import follow_weights
from onlynorm.rank import diagnose
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.tuning import Schedule, accuracy, fit, only_norms

QUICK = Schedule(epochs=3, batch_size=64, lr=0.1, seed=3)


def make(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10), nn.BatchNorm1d(10)
        )


def l1(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


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
        fit(broken, data(), schedule=schedule, checkpoint=path, save_every=save_every, on_step=killer(at))  # type: ignore[arg-type]
    again = make()
    only_norms(again)
    result = fit(again, data(), schedule=schedule, checkpoint=path, save_every=save_every)
    assert same(whole, again)
    assert result.n_steps == wanted.n_steps
    assert [row["epoch"] for row in result.history] == [0.0, 1.0, 2.0]
    assert [row["loss"] for row in result.history] == [row["loss"] for row in wanted.history]


class Centered(nn.Module):
    """Subtracts a running mean that is not in the state dict, and keeps a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(64), persistent=False)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.mean(0), 0.1)
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x))
        return x - self.average


def test_a_run_resumes_with_the_buffers_that_are_not_in_the_state_dict(tmp_path: Path) -> None:
    whole, broken, again = (nn.Sequential(Centered(), make()) for _ in range(3))
    path = tmp_path / "run.safetensors"
    fit(whole, data(), schedule=QUICK)
    with pytest.raises(KilledError):
        fit(broken, data(), schedule=QUICK, checkpoint=path, save_every=2, on_step=killer(7))  # type: ignore[arg-type]
    fit(again, data(), schedule=QUICK, checkpoint=path)
    assert same(whole, again)
    assert torch.equal(whole[0].average, again[0].average)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    model = make()
    path = tmp_path / "run.safetensors"
    fit(model, data(), schedule=QUICK, checkpoint=path)
    again = make()
    result = fit(again, data(), schedule=QUICK, checkpoint=path, on_step=killer(1))  # type: ignore[arg-type]
    assert same(model, again)
    assert result.n_steps == 15


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    fit(make(), data(), schedule=QUICK, checkpoint=path)
    with pytest.raises(ConversionError, match=r"settings of the run.*lr: 0\.1.*, 0\.2 now"):
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
    with pytest.raises(TrainingError, match=r"finite loss; got nan at step 6 \(the last .*state is in run"):
        fit(model, data(), schedule=QUICK, checkpoint=path, loss=loss)
    kept = make()
    loss.calls = -1000  # type: ignore[attr-defined]
    fit(kept, data(), schedule=QUICK, checkpoint=path, loss=loss)
    assert all(bool(torch.isfinite(p).all()) for p in kept.parameters())


class Kinked(nn.Module):
    """Adds nothing, with a gradient of NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (0.0 * x).sqrt()


def test_a_step_to_nan_with_a_finite_loss_is_neither_returned_nor_saved(tmp_path: Path) -> None:
    model = nn.Sequential(make(), Kinked())
    path = tmp_path / "run.safetensors"
    once = Schedule(epochs=1, batch_size=300)
    with pytest.raises(
        TrainingError, match=r"finite value of 0\.0\.weight; got nan at step 1 \(there is no checkpoint"
    ):
        fit(model, data(), schedule=once, checkpoint=path)
    assert not path.exists()
    with pytest.raises(TrainingError, match="finite norm of the gradient; got nan at step 0"):
        fit(nn.Sequential(make(), Kinked()), data(), schedule=Schedule(clip=1.0))
    with pytest.raises(TrainingError, match=r"finite value of 1\.running_var; got inf at step 1"):
        fit(make(), (1e30 * data()[0], data()[1]), schedule=once)


def test_running_statistics_that_were_infinite_before_do_not_stop_a_run() -> None:
    model = make()
    only_norms(model, also="4", statistics="freeze")
    model[1].running_var.fill_(float("inf"))
    result = fit(model, data(), schedule=QUICK)
    assert len(result.history) == QUICK.epochs
    assert bool(torch.isinf(model[1].running_var).all())


def test_a_loss_that_what_is_trained_does_not_change_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"loss .*without a gradient"):
        fit(make(), data(), schedule=QUICK, loss=lambda output, _: output.detach().mean())
    model = make()
    model.unused = nn.LayerNorm(3)
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    only_norms(model, which="unused")
    with pytest.raises(ConversionError, match="loss that depends on"):
        fit(model, data(), schedule=QUICK)


def test_label_smoothing_is_not_ignored_silently_by_a_loss_of_the_caller() -> None:
    with pytest.raises(ValueRangeError, match=r"label_smoothing needs the default loss; got 0\.1"):
        fit(make(), data(), schedule=Schedule(label_smoothing=0.1), loss=nn.functional.cross_entropy)


def test_training_stops_early_when_nothing_gets_better() -> None:
    schedule = Schedule(epochs=50, batch_size=64, lr=0.0, patience=2)
    model = make()
    only_norms(model, statistics="freeze")
    result = fit(model, data(), test=data(), schedule=schedule)
    assert len(result.history) == 3
    assert "2 epochs" in result.reason


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
        fit(broken, data(), schedule=schedule, checkpoint=path, on_step=killer(7))  # type: ignore[arg-type]
    again = make()
    fit(again, data(), schedule=schedule, checkpoint=path)
    assert same(whole, again)
    with pytest.raises(ConversionError, match=r"drops: \[0\.4, 0\.8\].*, None now"):
        fit(make(), data(), schedule=Schedule(epochs=3, batch_size=64, lr=0.05, seed=1), checkpoint=path)


# ------------------------------------------------------------------------------- gammas that follow weights


def small(**choices: Any) -> nn.Module:
    """A network with few weights, since the features of a layer are factorized."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 10))
    return to_norm_only(plain, seed=2, **choices) if choices else plain


def followed(**changes: Any) -> Schedule:
    return Schedule(**{"epochs": 3, "batch_size": 64, "lr": 0.05, "seed": 1, "follow_weights": True, **changes})


def test_gammas_that_follow_weights_train_as_the_ordinary_network_does() -> None:
    ordinary = small().double()
    mine = to_norm_only(ordinary, features="he_normal", excess=1.25, seed=2)
    inputs, labels = data()
    pair = inputs.double(), labels
    wanted = fit(ordinary, pair, schedule=followed(follow_weights=False))
    found = fit(mine, pair, schedule=followed())
    for place in (0, 4):
        gap = torch.linalg.vector_norm(mine[place].weight - ordinary[place].weight)
        # Rounding of 15 steps by a factor whose condition number is some hundreds, squared.
        assert gap <= 1e6 * torch.finfo(torch.float64).eps * torch.linalg.vector_norm(ordinary[place].weight)
    losses = [[row["loss"] for row in result.history] for result in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert accuracy(mine, pair) == accuracy(ordinary, pair)


@pytest.mark.parametrize(
    ("choices", "optimizer", "at", "save_every"),
    [
        ({"features": "he_normal", "excess": 1.25}, "sgd", 7, None),
        ({"features": "he_normal", "excess": 1.25}, "adamw", 9, 4),
        ({"features": "he_normal", "excess": 0.5}, "sgd", 9, 4),
        ({"features": "ortho_cond"}, "adamw", 7, None),
        ({"features": "id_cond_minimal"}, "adamw", 7, None),
        ({"features": "id_cond", "density": 0.3}, "sgd", 9, 4),
    ],
    ids=str,
)
def test_a_killed_run_whose_gammas_follow_weights_resumes_with_the_same_numbers(
    choices: dict[str, Any], optimizer: str, at: int, save_every: int | None, tmp_path: Path
) -> None:
    schedule = followed(optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 0.01, clip=1.0)
    whole, broken, again = (small(**choices) for _ in range(3))
    wanted = fit(whole, data(), schedule=schedule, save_every=save_every)
    path = tmp_path / "run.safetensors"
    with pytest.raises(KilledError):
        fit(broken, data(), schedule=schedule, checkpoint=path, save_every=save_every, on_step=killer(at))  # type: ignore[arg-type]
    result = fit(again, data(), schedule=schedule, checkpoint=path, save_every=save_every)
    assert same(whole, again)
    assert result.history[-1]["loss"] == wanted.history[-1]["loss"]
    assert not same(broken, again)


def test_layers_make_their_weights_themselves_when_the_run_is_over_or_killed() -> None:
    for at in (4, 99):
        model = small(features="he_normal")
        try:
            fit(model, data(), schedule=followed(epochs=1), on_step=killer(at))  # type: ignore[arg-type]
        except KilledError:
            assert at == 4
        assert all(m.held is None for m in model.modules() if isinstance(m, NormOnlyLayer))


def test_weights_that_an_optimizer_of_the_caller_holds_do_not_hide_the_gammas() -> None:
    model, wanted = small(features="ortho_cond"), small(features="ortho_cond")
    follow_weights(model, torch.optim.SGD, lr=0.1)
    fit(model, data(), schedule=followed(follow_weights=False))
    fit(wanted, data(), schedule=followed(follow_weights=False))
    assert same(model, wanted)


def test_tied_gammas_are_followed_and_resumed_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            nn.init.normal_(plain[0].weight, std=0.1)
            nn.init.zeros_(plain[0].bias)
            nn.init.zeros_(plain[2].bias)
        plain[2].weight = plain[0].weight
        return to_norm_only(plain, features="ortho_cond", seed=2)

    whole, broken, again = tied(), tied(), tied()
    fit(whole, data(), schedule=followed())
    path = tmp_path / "run.safetensors"
    with pytest.raises(KilledError):
        fit(broken, data(), schedule=followed(), checkpoint=path, on_step=killer(7))  # type: ignore[arg-type]
    fit(again, data(), schedule=followed(), checkpoint=path)
    assert same(whole, again)


def test_a_checkpoint_of_steps_on_gamma_is_not_one_of_steps_on_weights(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    fit(small(features="id_cond"), data(), schedule=followed(follow_weights=False), checkpoint=path)
    with pytest.raises(ConversionError, match=r"follow_weights: False.*, True now"):
        fit(small(features="id_cond"), data(), schedule=followed(), checkpoint=path)


def test_following_weights_needs_norm_only_layers_and_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConversionError, match="follow_weights needs norm-only layers; got none in Sequential"):
        fit(small(), data(), schedule=followed())
    monkeypatch.setattr("lightning_fabric.Fabric.world_size", 2)
    with pytest.raises(ValueRangeError, match=r"follow_weights needs one process.*got 2. Pass devices=1"):
        fit(small(features="id_cond"), data(), schedule=followed())


# ------------------------------------------------------------------------------- targets


def regression(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(96, 6, generator=generator)
    return inputs, inputs[:, :2] * torch.tensor([1.0, -2.0])


def regressor() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))


def test_real_targets_are_fitted_by_the_mean_squared_error() -> None:
    model, twin = regressor(), regressor()
    schedule = Schedule(epochs=10, batch_size=32, lr=0.05, seed=3)
    result = fit(model, regression(), test=regression(1), schedule=schedule)
    wanted = fit(twin, regression(), test=regression(1), schedule=schedule, loss=nn.functional.mse_loss)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in wanted.history]
    assert same(model, twin)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    assert "test_accuracy" not in result.history[-1]
    inputs, targets = regression(1)
    with torch.no_grad():
        by_hand = nn.functional.mse_loss(model.eval()(inputs), targets)
    # The mean over 192 numbers in another order.
    assert result.history[-1]["test_loss"] == pytest.approx(float(by_hand), rel=192 * 2.0**-23)
    assert "test loss" in str(result)


@pytest.mark.usefixtures("unchecked")
def test_targets_of_a_dataset_follow_the_same_rule() -> None:
    tensors, pairs, arrays = regressor(), regressor(), regressor()
    schedule = Schedule(epochs=1, batch_size=32, lr=0.05)
    fit(tensors, regression(), schedule=schedule)
    fit(pairs, list(zip(*regression(), strict=True)), schedule=schedule)
    fit(arrays, tuple(t.numpy() for t in regression()), schedule=schedule)  # type: ignore[arg-type]
    assert same(tensors, pairs)
    assert same(tensors, arrays)


def test_what_needs_classes_is_refused_for_real_targets() -> None:
    with pytest.raises(ValueRangeError, match=r"label_smoothing needs class labels; got 0\.1 and floating-point"):
        fit(regressor(), regression(), schedule=Schedule(label_smoothing=0.1))
    with pytest.raises(ValueRangeError, match=r"accuracy needs .*class labels"):
        accuracy(regressor(), regression())
    inputs, targets = regression()
    with pytest.raises(ShapeError, match=r"targets of the shape of the output, \(32, 2\); got \(32,\)"):
        fit(regressor(), (inputs, targets[:, 0]), schedule=Schedule(batch_size=32))


def test_accuracy_counts_positions_and_leaves_out_ignored_ones() -> None:
    logits = torch.eye(3)[torch.tensor([[0, 1, 2], [2, 1, 0]])]  # (samples, positions, classes)
    labels = torch.tensor([[0, 1, 1], [2, -100, -100]])

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return logits[x.long()]

    assert accuracy(Returns(), (torch.arange(2), labels)) == 3 / 4


# ------------------------------------------------------------------------------- modes and random numbers


@pytest.mark.parametrize("is_killed", [False, True])
def test_modes_are_left_as_they_were(is_killed: bool) -> None:
    model = make().eval()
    model[3].train()
    if is_killed:
        with pytest.raises(KilledError):
            fit(model, data(), schedule=QUICK, on_step=killer(3))  # type: ignore[arg-type]
    else:
        fit(model, data(), schedule=QUICK)
    assert [m.training for m in model] == [False, False, False, True, False, False]
    assert not model.training
    before = model[1].running_mean.clone()
    model(data()[0])
    assert torch.equal(model[1].running_mean, before)


def test_runs_in_threads_are_each_a_function_of_their_seed() -> None:
    wanted = make()
    fit(wanted, data(), schedule=QUICK)
    models = [make() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: fit(model, data(), schedule=QUICK), models))
    assert [same(model, wanted) for model in models] == [True] * 4


@pytest.mark.parametrize("other", ["a model", "a diagnosis"])
def test_what_onlynorm_draws_in_other_threads_does_not_change_a_run(other: str) -> None:
    wanted, models, drawn = make(), [make() for _ in range(3)], make()
    fit(wanted, data(), schedule=QUICK)
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            load_model("mlp_bn") if other == "a model" else diagnose(drawn, *data())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for model in models:
            fit(model, data(), schedule=QUICK)
    finally:
        is_over.set()
        thread.join()
    assert [same(model, wanted) for model in models] == [True] * 3


def test_numbers_drawn_by_callbacks_and_by_fits_inside_them_change_nothing(tmp_path: Path) -> None:
    wanted, model = make(), make()
    fit(wanted, data(), schedule=QUICK)

    def step(number: int, total: int, loss: float) -> None:
        torch.rand(number)
        if number == 2:
            fit(make(), data(), schedule=Schedule(epochs=1, seed=9))

    fit(model, data(), schedule=QUICK, on_step=step, checkpoint=tmp_path / "run.safetensors", save_every=2)
    assert same(model, wanted)


def test_numbers_drawn_by_a_data_set_are_those_of_the_seed() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return data()[0][index] + torch.randn(64), int(data()[1][index])

    models = make(), make()
    for model in models:
        torch.rand(5)
        fit(model, Noisy(), schedule=QUICK)
    assert same(*models)


# ------------------------------------------------------------------------------- checkpoints


DAMAGES = (
    "optimizer", "slot", "scalar", "type", "part", "generator", "progress", "step", "n_losses", "epoch", "batch",
    "stale", "history", "numbers", "missing",
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fit_changes_nothing(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    fit(make(), data(), schedule=QUICK, checkpoint=path)
    document, tensors = read_tensors(path, kind="training run", format=1, cure="")
    name = next(key for key in tensors if key.startswith("optimizer/"))
    if damage == "optimizer":
        tensors["optimizer/nobody/momentum_buffer"] = tensors.pop(name)
    elif damage == "slot":
        tensors[name] = torch.zeros(3)
    elif damage == "scalar":
        tensors[name] = torch.zeros(())
    elif damage in ("step", "n_losses", "epoch", "batch", "stale"):
        document["progress"][damage] = 10**400
    elif damage == "history":
        document["progress"]["history"].pop()
    elif damage == "type":
        tensors[name] = tensors[name].long()
    elif damage == "part":
        tensors[name.replace("momentum_buffer", "velocity")] = tensors.pop(name)
    elif damage == "generator":
        tensors["generator"] = torch.zeros(7, dtype=torch.uint8)
    elif damage == "progress":
        document["progress"]["epoch"] = "two"
    elif damage == "numbers":
        document["numbers"] = {"0.weight/step": "two"}
    else:
        del tensors["generator"]
    write_tensors(path, tensors, kind="training run", format=1, document=document)
    model = make()
    before = copy.deepcopy(model)
    with pytest.raises(FormatError, match=r"state of its optimizer.*run\.safetensors"):
        fit(model, data(), schedule=QUICK, checkpoint=path)
    assert same(model, before)


# ------------------------------------------------------------------------------- devices


def test_more_processes_than_cores_are_refused() -> None:
    for devices in (99, "99", " 99", 0, -1):
        with pytest.raises(ValueRangeError, match=rf"devices needs 1 to \d+ processes on a CPU .*got {devices}"):
            fit(make(), data(), schedule=QUICK, accelerator="cpu", devices=devices)
    for wrong in ({"accelerator": "abacus"}, {"strategy": "magic"}, {"precision": "3"}):
        with pytest.raises(ValueRangeError, match="on this machine"):
            fit(make(), data(), schedule=QUICK, **wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- logs and misuse


def test_logs_are_a_table_and_events(tmp_path: Path) -> None:
    fit(make(), data(), schedule=QUICK, test=data(), logs=tmp_path)
    table = next((tmp_path / "csv").rglob("metrics.csv"))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3
    assert {"loss", "test_accuracy", "seconds"} <= rows[0].keys()
    assert list((tmp_path / "tensorboard").rglob("events.*"))


def test_without_tensorboard_logs_are_the_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else there(name, *a)
    )
    fit(make(), data(), schedule=QUICK, logs=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused() -> None:
    model = make()
    with pytest.raises(UnknownNameError, match=r"optimizer.*'adam'.*adamw"):
        Schedule(optimizer="adam")
    nan = float("nan")
    bad = (
        ("epochs", -1), ("epochs", 1.5), ("batch_size", 0), ("lr", nan), ("lr", -1.0), ("lr", "0.1"), ("warmup", 1.0),
        ("drops", (0.5, 1.5)), ("drops", (nan,)), ("momentum", nan), ("momentum", 1.0), ("weight_decay", -0.1),
        ("label_smoothing", 1.0), ("patience", -1), ("patience", 0), ("clip", -1.0), ("clip", 0.0), ("clip", nan),
        ("seed", "a"), ("seed", -1), ("seed", 2**64), ("follow_weights", 1),
    )  # fmt: skip
    for field, value in bad:
        with pytest.raises(ValueRangeError, match=f"^{field} .*; got "):
            Schedule(**{field: value})
    with pytest.raises(ValueRangeError, match=r"warmup .*\[0, 1\); got 1\.5"):
        Schedule(warmup=1.5)
    with pytest.raises(UnknownNameError, match=r"augmentation.*'flop'.*flip"):
        Schedule(augmentation="flop")
    with pytest.raises(ShapeError, match="as many labels as inputs"):
        fit(model, (torch.zeros(3, 64), torch.zeros(2)))
    with pytest.raises(ValueRangeError, match=r"save_every .* from 1; got 0"):
        fit(model, data(), save_every=0)
    with pytest.raises(ShapeError, match=r"got \(64, 3\) of torch.float32, and the model failed"):
        fit(model, (torch.zeros(300, 3), data()[1]), schedule=QUICK)
    with pytest.raises(ValueRangeError, match=r"from 0 to 9, one for each output; got 12"):
        fit(model, (data()[0], data()[1] + 3), schedule=QUICK)
    with pytest.raises(ShapeError, match="scalar loss; got shape"):
        fit(model, data(), schedule=QUICK, loss=lambda output, labels: output)
    with pytest.raises(ConversionError, match="loss needs a function of 2 arguments"):
        fit(model, data(), schedule=QUICK, loss=lambda output: output)
    for test in (None, data()):
        with pytest.raises(
            ConversionError, match=r"training needs a loss .*\(64, 10\) float32 and \(64,\) int64.*l1 failed with Runt"
        ):
            fit(model, data(), test=test, schedule=QUICK, loss=l1)
    with pytest.raises(ConversionError, match=r"loss .*; got the class CrossEntropyLoss"):
        fit(model, data(), schedule=QUICK, loss=nn.CrossEntropyLoss)
    with pytest.raises(ShapeError, match="pairs"):
        fit(model, [(torch.zeros(64), "cat")], schedule=QUICK)
    with pytest.raises(ShapeError, match="images"):
        fit(model, data(), schedule=Schedule(augmentation="flip"))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConversionError, match="parameters that require gradients; got none"):
        fit(model, data())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_wide_unsigned_integers_are_learned_and_tested(dtype: torch.dtype) -> None:
    inputs, labels = data()
    plain, wide = make(), make()
    first = fit(plain, (inputs, labels), test=(inputs, labels), schedule=QUICK)
    second = fit(wide, (inputs, labels.to(dtype)), test=(inputs, labels.to(dtype)), schedule=QUICK)
    assert same(plain, wide)
    assert first.history[-1]["test_accuracy"] == second.history[-1]["test_accuracy"]
    rows = [(x, y) for x, y in zip(inputs, labels.to(dtype), strict=True)]
    assert accuracy(plain, rows) == accuracy(plain, (inputs, labels))


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    inputs, labels = data()
    fit(make(), (inputs, labels), schedule=QUICK, checkpoint=tmp_path / "run")
    with pytest.raises(ConversionError, match="other inputs or labels"):
        fit(make(), (inputs.flip(0), labels), schedule=QUICK, checkpoint=tmp_path / "run")
    with pytest.raises(ConversionError, match="other inputs or labels"):
        fit(make(), (inputs, labels.flip(0)), schedule=QUICK, checkpoint=tmp_path / "run")


def test_a_run_is_not_resumed_with_another_loss_or_precision(tmp_path: Path) -> None:
    fit(make(), data(), schedule=QUICK, checkpoint=tmp_path / "run")
    with pytest.raises(ConversionError, match=r"loss: 'default'.*, 'nll_loss' now"):
        fit(make(), data(), schedule=QUICK, checkpoint=tmp_path / "run", loss=torch.nn.functional.nll_loss)
    with pytest.raises(ConversionError, match=r"precision: '32-true'.*, 'bf16-mixed' now"):
        fit(make(), data(), schedule=QUICK, checkpoint=tmp_path / "run", precision="bf16-mixed")


def test_a_run_is_not_resumed_on_other_frozen_weights(tmp_path: Path) -> None:
    model, other = make(), make(seed=1)
    for one in (model, other):
        only_norms(one)
    fit(model, data(), schedule=QUICK, checkpoint=tmp_path / "run")
    before = copy.deepcopy(other)
    with pytest.raises(ConversionError, match="not trained"):
        fit(other, data(), schedule=QUICK, checkpoint=tmp_path / "run")
    assert same(other, before)


def test_a_run_is_the_same_inside_contexts_of_the_caller() -> None:
    models = [make() for _ in range(4)]
    fit(models[0], data(), schedule=QUICK)
    with torch.no_grad():
        fit(models[1], data(), schedule=QUICK)
    with torch.inference_mode():
        fit(models[2], data(), schedule=QUICK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit(models[3], data(), schedule=QUICK)
    assert all(same(models[0], model) for model in models[1:])


def test_a_model_made_in_inference_mode_is_not_trained() -> None:
    with torch.inference_mode():
        model = make()
    with pytest.raises(ConversionError, match="inference_mode"):
        fit(model, data(), schedule=QUICK)
