"""`onlynorm tune`: what it trains, writes and tells, exact resuming, folders of images, and wrong use in one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import RunCli, runner
from PIL import Image
from safetensors.torch import load_file, save_file

import onlynorm as on
from onlynorm.cli.commands import tune as tuning
from onlynorm.data import CIFAR_MEAN, CIFAR_STD, cifar10, corrupt, digits
from onlynorm.errors import MissingDataError
from onlynorm.models import load_model, make_model
from onlynorm.tuning import accuracy, load_adapter

OWN_MODULE = """
import torch
from torch import nn
from onlynorm.data import digits
from onlynorm.models import mlp, vgg

def images(): return vgg([[4], [4]], n_classes=2, image_size=8)
def unseeded(): return nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))
def small(): return mlp((64, 16, 3), norm="batch")
def maps(): return nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).apply(zero)
def zero(m):
    for p in m.parameters(): nn.init.constant_(p, 0.5)
network = mlp((64, 16, 10), norm="batch")

def own(part): return list(zip(*part))
def split(): return digits()
def tensors(): return digits().train_inputs[:300], digits().train_labels[:300]
def judged(): return digits().test_inputs[:100], digits().test_labels[:100]
def both(): return own(tensors()), own(judged())
def words(): return [(torch.zeros(64), "cat"), (torch.zeros(64), "dog")]
def stream(): return (pair for pair in ())
def broken(): raise OSError("the disk is gone")
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `onlynorm tune` in this process, in a folder with a module and a small data set of its own."""
    monkeypatch.delitem(sys.modules, "own_module_of_tune", raising=False)
    (tmp_path / "own_module_of_tune.py").write_text(OWN_MODULE)
    split = digits()
    tensors = {"inputs": split.train_inputs[:300], "labels": split.train_labels[:300],
               "test_inputs": split.test_inputs[:100], "test_labels": split.test_labels[:100]}  # fmt: skip
    save_file({name: t.clone() for name, t in tensors.items()}, tmp_path / "small.safetensors")
    return runner(monkeypatch, capsys, tmp_path, "tune")


QUICK = ("--data", "small.safetensors", "--epochs", 3, "--batch-size", 50)


# ------------------------------------------------------------------------------- what it does


def test_an_adapter_is_written_that_gives_the_accuracy_it_tells(run: RunCli, tmp_path: Path) -> None:
    ran = run("mlp_bn", *QUICK, "--epochs", 30, "--json")
    facts = ran.json()
    assert ran.code == 0
    assert "mlp_bn has untrained random weights" in ran.err
    data = load_file(tmp_path / "small.safetensors")
    test = data["test_inputs"], data["test_labels"]
    base = make_model("mlp_bn")
    assert facts["accuracy_before"] == accuracy(base, test)
    load_adapter(base, tmp_path / "adapter.safetensors")
    assert facts["accuracy_after"] == accuracy(base, test)
    # Guessing gets 0.1 right; five standard errors of 100 samples above it.
    assert facts["accuracy_after"] >= 0.1 + 5 * (0.1 * 0.9 / 100) ** 0.5
    assert facts["n_trained"] == 2 * (128 + 128)
    assert facts["n_parameters"] == sum(p.numel() for p in base.parameters())
    assert facts["bytes"] == (tmp_path / "adapter.safetensors").stat().st_size
    assert (facts["n_norms"], facts["n_epochs"], facts["n_steps"]) == (2, 30, 180)
    assert [row["epoch"] for row in facts["history"]] == list(map(float, range(30)))
    assert not (tmp_path / "adapter.safetensors.run").exists()


def test_the_table_has_the_facts(run: RunCli) -> None:
    ran = run("mlp_bn", *QUICK, "--adapter", "task.safetensors")
    assert ran.code == 0
    for name in ("trained parameters", "accuracy before", "accuracy after", "size", "seconds", "task.safetensors"):
        assert name in ran.stdout
    assert "mlp_bn, tuned by its norms" in ran.stdout


def test_heads_patterns_statistics_and_types_reach_the_file(run: RunCli, tmp_path: Path) -> None:
    full = run("mlp_bn", *QUICK, "--also", "6", "--adapter", "full.safetensors", "--json").json()
    part = run(
        "mlp_bn", *QUICK, "--which", "4", "--statistics", "freeze", "--dtype", "float16", "--optimizer", "adamw",
        "--adapter", "part.safetensors", "--json",
    ).json()  # fmt: skip
    assert full["n_trained"] == 512 + 128 * 10 + 10
    assert part["n_trained"] == 256
    adapter = on.load(tmp_path / "full.safetensors")
    assert set(adapter.heads) == {"6.weight", "6.bias"}
    assert adapter.has_statistics
    adapter = on.load(tmp_path / "part.safetensors")
    assert set(adapter.tensors) == {"4.weight", "4.bias"}
    assert {t.dtype for t in adapter.tensors.values()} == {torch.float16}
    assert not adapter.has_statistics


def test_statistics_are_computed_anew_from_the_training_samples(run: RunCli, tmp_path: Path) -> None:
    run("mlp_bn", *QUICK, "--epochs", 0, "--statistics", "recalibrate")
    made = on.load(tmp_path / "adapter.safetensors").tensors
    base = make_model("mlp_bn")
    seen = base[0](load_file(tmp_path / "small.safetensors")["inputs"]).detach()
    # The mean over six batches of 50 is that over all 300; variances are means of batch variances.
    torch.testing.assert_close(made["1.running_mean"], seen.mean(0), rtol=0, atol=300 * 2.0**-23)
    assert not torch.equal(made["1.running_var"], base[1].running_var)
    assert torch.equal(made["1.weight"], base[1].weight.detach())


def test_logs_and_checkpoints_are_kept_where_they_were_asked_for(run: RunCli, tmp_path: Path) -> None:
    run("mlp_bn", *QUICK, "--logs", "logs", "--checkpoint", "kept.safetensors")
    assert list((tmp_path / "logs" / "csv").rglob("metrics.csv"))
    assert list((tmp_path / "logs" / "tensorboard").rglob("events.*"))
    assert (tmp_path / "kept.safetensors").exists()


def test_training_stops_early_when_the_loss_does_not_fall(run: RunCli) -> None:
    facts = run("mlp_bn", *QUICK, "--epochs", 9, "--lr", 0, "--statistics", "freeze", "--patience", 2, "--json").json()
    # Without a step the loss is the same up to the rounding of its sum, which may count as better a few times.
    assert facts["n_epochs"] < 9
    assert "2 epochs" in facts["stop_reason"]


# ------------------------------------------------------------------------------- resuming


def stopping(at: int) -> Any:
    @contextlib.contextmanager
    def counter(name: str, *, hidden: bool, shows_message: bool) -> Iterator[Callable[[int, int, str], None]]:
        def show(done: int, total: int, message: str) -> None:
            if done == at:
                raise KeyboardInterrupt

        yield show

    return counter


@pytest.mark.parametrize("statistics", ["track", "recalibrate"])
def test_an_interrupted_run_goes_on_with_the_numbers_of_one_that_was_not(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statistics: str
) -> None:
    args = ("mlp_bn", *QUICK, "--epochs", 8, "--statistics", statistics, "--optimizer", "adamw")
    run(*args, "--adapter", "whole.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "counter", stopping(32))
        stopped = run(*args)
    assert stopped.code == 130
    assert stopped.stdout == ""
    assert "The run is in adapter.safetensors.run" in stopped.err
    assert not (tmp_path / "adapter.safetensors").exists()

    save_file({name: t + 1 for name, t in make_model("mlp_bn").state_dict().items()}, tmp_path / "other.safetensors")
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "small.safetensors").read_bytes())
    for option, value, name in (
        ("--lr", 0.5, "lr"), ("--statistics", "freeze", "statistics"), ("--which", "1", "trained"),
        ("--data", "copy.safetensors", "data"), ("--weights", "other.safetensors", "base"),
    ):  # fmt: skip
        refused = run(*args, option, value)
        assert refused.code == 2
        assert f"the settings of the run in adapter.safetensors.run; got different ones ({name}: " in refused.err

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "counter", stopping(25))  # a step that was done before the interruption
        again = run(*args)
    assert again.code == 0
    assert (tmp_path / "adapter.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "adapter.safetensors.run").exists()


def test_an_interruption_before_anything_was_kept_promises_nothing(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "counter", stopping(1))
    ran = run("mlp_bn", *QUICK)
    assert ran.code == 130
    assert "The run is in" not in ran.err


def test_a_loss_that_is_no_number_exits_with_1_and_writes_no_adapter(run: RunCli, tmp_path: Path) -> None:
    data = load_file(tmp_path / "small.safetensors")
    data["inputs"][7, 3] = float("inf")
    save_file(data, tmp_path / "bad.safetensors")
    ran = run("mlp_bn", *QUICK, "--data", "bad.safetensors")
    assert ran.code == 1
    assert ran.stdout == ""
    assert "failed: training needs a finite loss; got nan at step" in ran.err
    assert not (tmp_path / "adapter.safetensors").exists()


# ------------------------------------------------------------------------------- folders of images


@pytest.fixture
def photos(tmp_path: Path) -> Callable[..., Path]:
    """Writes dark and bright images below a folder, one subfolder each."""

    def write(name: str, n: int) -> Path:
        rng = np.random.default_rng(n)
        for label, low in (("bright", 150), ("dark", 0)):
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(low, low + 100, (9, 7, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / label / f"{i}.png")
        return tmp_path / name

    return write


PHOTOS = (
    "own_module_of_tune:images", "--image-size", 8, "--epochs", 15, "--batch-size", 8, "--data", "photos", "--also", "9"
)  # fmt: skip


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_folder_of_images_is_learned_from_and_judged_by(
    run: RunCli, photos: Callable[..., Path], is_cut: bool
) -> None:
    if is_cut:
        photos("photos/train", 16)
        photos("photos/test", 5)
    else:
        photos("photos", 20)
    facts = run(*PHOTOS, "--augmentation", "crop-flip", "--json").json()
    assert facts["n_test_samples"] == (10 if is_cut else 8)
    assert facts["n_steps"] == 15 * 4
    assert facts["accuracy_after"] == 1.0, "dark and bright images differ in every pixel"
    again = run(*PHOTOS, "--augmentation", "crop-flip", "--json").json()
    assert again["history"][-1]["loss"] == facts["history"][-1]["loss"]


def test_an_image_that_cannot_be_read_stops_the_run_or_is_left_out_by_name(
    run: RunCli, photos: Callable[..., Path]
) -> None:
    (photos("photos", 10) / "dark" / "3.png").write_bytes(b"no image")
    ran = run(*PHOTOS)
    assert ran.code == 2
    assert "images;" in ran.err
    assert "3.png" in ran.err
    ran = run(*PHOTOS, "--skip-unreadable", "--json")
    assert ran.code == 0
    assert ran.json()["n_images_skipped"] == 1
    assert "cannot be read: photos/dark/3.png" in ran.err


OWN = "own_module_of_tune:"


def test_what_a_function_of_yours_makes_is_learned_from(run: RunCli) -> None:
    from_file = run("mlp_bn", *QUICK, "--json").json()
    both = run("mlp_bn", *QUICK, "--data", OWN + "both", "--json").json()
    assert [row["loss"] for row in both["history"]] == [row["loss"] for row in from_file["history"]]
    assert both["accuracy_after"] == from_file["accuracy_after"]


def test_a_trained_network_is_adapted_to_corrupted_images(run: RunCli) -> None:
    facts = run("digits_cnn", "--corrupt", "contrast", "--adapter", "contrast.safetensors", "--json").json()
    assert facts["accuracy_before"] < 0.3  # 15 % and 99 % where it was trained
    assert facts["accuracy_after"] > 0.95
    assert (facts["n_trained"], facts["n_parameters"]) == (128, 7514)
    data, network = digits(), load_model("digits_cnn")
    images = corrupt(data.test_inputs.reshape(-1, 1, 8, 8), "contrast", severity=3.0, seed=0).flatten(1)
    assert accuracy(network, (images, data.test_labels)) == facts["accuracy_before"]
    load_adapter(network, "contrast.safetensors")
    assert accuracy(network, (images, data.test_labels)) == facts["accuracy_after"]
    clean = run("digits_cnn", "--corrupt", "contrast", "--severity", 0, "--epochs", 1, "--lr", 0, "--json").json()
    assert clean["accuracy_before"] > 0.99


@pytest.mark.parametrize(("name", "n_test"), [("tensors", 60), ("both", 100), ("split", len(digits().test_labels))])
def test_one_data_set_is_cut_in_two_and_two_are_taken_as_they_are(run: RunCli, name: str, n_test: int) -> None:
    facts = run("mlp_bn", "--data", OWN + name, "--epochs", 1, "--json").json()
    assert facts["n_test_samples"] == n_test


@pytest.mark.parametrize(
    ("name", "told"),
    [("words", "integer label"), ("stream", "a length and"), ("broken", "the disk is gone"),
     ("nobody", "got nothing from"), ("zero", "needs code that imports and runs")],
)  # fmt: skip
def test_functions_that_make_no_data_are_refused(run: RunCli, name: str, told: str) -> None:
    ran = run("mlp_bn", "--data", OWN + name)
    assert ran.code == 2
    assert told in " ".join(ran.err.split())


def test_the_shape_of_the_rate_and_the_labels_is_chosen(run: RunCli) -> None:
    plain = run("mlp_bn", *QUICK, "--json").json()["history"]
    for option, value in (("--warmup", 0.5), ("--label-smoothing", 0.3), ("--weight-decay", 0.1)):
        assert run("mlp_bn", *QUICK, option, value, "--json").json()["history"][-1]["loss"] != plain[-1]["loss"]


def test_folders_that_are_no_data_are_refused(run: RunCli, photos: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    assert "got no readable image below photos" in run(*PHOTOS).err
    (photos("photos/train", 2) / "grey").mkdir()
    photos("photos/test", 2)
    ran = run(*PHOTOS)
    assert ran.code == 2
    assert "train and test need the same classes; got grey in one of them only" in ran.err


# ------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("mlp", *QUICK), "only_norms needs a model with norms to train; got none in Sequential"),
        (("mpl", *QUICK), "model needs a known name; got 'mpl'. Did you mean 'mlp'"),
        (("mlp_bn", *QUICK, "--statistics", "frozen"), "statistics needs a known name; got 'frozen'"),
        (("mlp_bn", *QUICK, "--corrupt", "noise"), "--corrupt needs a data set of images by name, digits, cifar10"),
        (("mlp_bn", "--data", OWN + "tensors", "--corrupt", "noise"), "--corrupt needs a data set of images by name"),
        (("mlp_bn", "--corrupt", "rain"), "--corrupt needs a known name; got 'rain'"),
        (("mlp_bn", *QUICK, "--optimizer", "adam"), "optimizer needs a known name; got 'adam'. Did you mean 'adamw'"),
        (("mlp_bn", *QUICK, "--augmentation", "mixup"), "augmentation needs a known name; got 'mixup'"),
        (("mlp_bn", *QUICK, "--augmentation", "flip"), "augmentation needs images"),
        (("mlp_bn", *QUICK, "--precision", "16-true"), "precision needs a known name; got '16-true'"),
        (("mlp_bn", *QUICK, "--dtype", "int8"), "dtype needs a known name; got 'int8'"),
        (("mlp_bn", *QUICK, "--also", "head"), "--also needs a known name; got 'head'"),
        (("mlp_bn", *QUICK, "--which", "layer9"), "got 'layer9', and the norms are '1', '4'"),
        (("mlp_bn", *QUICK, "--devices", "0"), "--devices needs a positive number or auto; got '0'"),
        (
            ("mlp_bn", *QUICK, "--devices", "99"),
            "devices needs 1",
        ),
        (("mlp_bn", *QUICK, "--strategy", "magic"), "--devices and --strategy need"),
        (("mlp_bn", *QUICK, "--epochs", "-1"), "--epochs must be an integer from 1; got -1"),
        (("mlp_bn", *QUICK, "--lr", "nan"), "a number in [0, inf); got nan"),
        (("mlp_bn", *QUICK, "--seed", "-1"), "Invalid value for '--seed'"),
        (("mlp_bn", *QUICK, "--patience", "0"), "Invalid value for '--patience'"),
        (("mlp_bn", *QUICK, "--adapter", "."), "--adapter needs a file name; . is a folder"),
        (("mlp_bn", *QUICK, "--adapter", "small.safetensors/a"), "a writable folder"),
        (("mlp_bn", *QUICK, "--batch-size", 299), "two samples in every batch; got one"),
        (("mlp_bn", *QUICK, "--weights", "none.pt"), "weights need a file; got none at none.pt"),
        (("mlp_bn", "--data", "digit"), "data needs a known name; got 'digit'. Did you mean 'digits'"),
        (("mlp_bn", "--data", "plain.npy"), "plain.npy has none"),
        (("vit", *QUICK), "vit needs samples of a fitting shape; got (64,)"),
        (("own_module_of_tune:small", *QUICK), "needs an output for each of 10 classes; got outputs of shape (3,)"),
        (("own_module_of_tune:unseeded", *QUICK), "own_module_of_tune:unseeded"),
        (("own_module_of_tune:network", *QUICK), "needs a function"),
        (("own_module_of_tune:small",), "own_module_of_tune:small needs data to run on; got none"),
        (("own_module_of_tune:maps", "--data", "maps.safetensors"), "got outputs of shape (2, 4, 4)"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_was_needed(
    run: RunCli, tmp_path: Path, args: tuple[object, ...], message: str
) -> None:
    np.save(tmp_path / "plain.npy", np.zeros((3, 64), np.float32))
    save_file({"inputs": torch.zeros(3, 3, 4, 4), "labels": torch.zeros(3).long()}, tmp_path / "maps.safetensors")
    ran = run(*args, "--json")
    assert ran.code == 2
    assert ran.stdout == ""
    assert message in ran.err
    assert not (tmp_path / "adapter.safetensors").exists()


# ------------------------------------------------------------------------------- the real thing


def test_the_real_network_recovers_from_lost_contrast_by_its_norms(run: RunCli, tmp_path: Path) -> None:
    try:
        data = cifar10()
        load_model("resnet20")
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    faint = {"severity": 5.0, "mean": CIFAR_MEAN, "std": CIFAR_STD}
    tensors = {
        "inputs": corrupt(data.train_inputs[:256], "contrast", **faint), "labels": data.train_labels[:256].clone(),
        "test_inputs": corrupt(data.test_inputs[:200], "contrast", **faint),
        "test_labels": data.test_labels[:200].clone(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "faint.safetensors")
    facts = run(
        "resnet20", "--data", "faint.safetensors", "--statistics", "recalibrate", "--epochs", 1, "--batch-size", 64,
        "--lr", 0.01, "--json",
    ).json()  # fmt: skip
    assert facts["n_trained"] == 1376
    # Three standard errors of the difference of two shares of 200 images.
    assert facts["accuracy_after"] >= facts["accuracy_before"] + 3 * (0.5 / 200) ** 0.5


@pytest.mark.slow
def test_two_processes_write_one_adapter_and_one_document(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "onlynorm",
        "tune",
        "mlp_bn",
        "--epochs",
        "2",
        "--devices",
        "2",
        "--strategy",
        "ddp",
    ]
    ran = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["n_steps"] == 24
    load_adapter(make_model("mlp_bn"), tmp_path / "adapter.safetensors")
