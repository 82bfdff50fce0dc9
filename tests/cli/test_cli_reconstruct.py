"""`onlynorm plan`, `reconstruct` and `verify`: what they tell and write, their exit codes, and runs that resume."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import RunCli
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from onlynorm.cli.arguments import parse_shape
from onlynorm.cli.commands import reconstruct as rebuilding
from onlynorm.errors import ShapeError
from onlynorm.modules.layers import TargetLayer
from onlynorm.reconstruction import Wide, reconstruct

# ------------------------------------------------------------------------------- plan


def test_plan_weighs_every_method_and_names_one(run: RunCli) -> None:
    facts = run("plan", "64,64,3,3", "--excess", 1.1, "--json").json()
    assert facts["equations"] == 36864
    assert facts["n_features"] == 40551
    assert facts["n_norm_parameters"] == facts["n_features"]
    assert {option["method"] for option in facts["options"]} == {"lu", "cholesky", "krylov", "qr"}
    assert facts["method"] in {option["method"] for option in facts["options"]}
    assert not next(option for option in facts["options"] if option["method"] == facts["method"])["obstacle"]


@pytest.mark.parametrize("features", ["id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal"])
def test_plan_knows_the_closed_form_of_structured_features(run: RunCli, features: str) -> None:
    facts = run("plan", "4x5", "--features", features, "--json").json()
    assert facts["method"] == "closed form"
    assert facts["options"] == []
    assert facts["n_features"] == {"id_cond_minimal": 17, "kron_normal": 30}.get(features, 20)
    assert (facts["condition_number"] == 1.0) == (features != "kron_normal")


def test_plan_is_a_table_for_people(run: RunCli) -> None:
    ran = run("plan", "64,64")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.out.startswith("Plan for a layer of shape (64, 64) features he_normal equations 4,096")
    assert "predicted seconds" in ran.out


@pytest.mark.parametrize("args", [(), ("--data", "digits"), ("--input", "64")], ids=str)
def test_plan_of_a_network_has_a_row_per_layer(run: RunCli, args: tuple[str, ...]) -> None:
    ran = run("plan", "mlp", "--features", "ortho_cond", *args)
    assert ran.code == 0
    assert re.search(
        "Plan for mlp layer equations features .* 0 2.05k 2.05k .* 2 320 320 .* total 2.37k 2.37k", ran.out
    )
    facts = run("plan", "mlp", "--excess", 2, "--set", "norms=affine", "--json", *args).json()
    assert [row["n_features"] for row in facts["layers"]] == [4096, 640]
    assert facts["recipe"] == {"activation": "ReLU()", "excess": 2.0, "norms": "affine"}
    assert facts["total"]["n_target_parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert facts["left"] == []


def test_plan_needs_no_weights_of_a_built_in_network(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    facts = run("plan", "resnet20", "--json").json()
    assert len(facts["layers"]) == 20
    assert facts["total"]["equations"] == 268_336


@pytest.mark.usefixtures("own_code")
def test_a_plan_that_does_not_fit_exits_with_1(run: RunCli) -> None:
    ran = run("plan", "own_code_of_this_test:huge", "--input", "2000")
    assert ran.code == 1
    assert "0: solving 4000000 equations with 5000000 features needs at least" in ran.out


@given(st.lists(st.integers(-99, 10**6), min_size=1, max_size=6), st.sampled_from([",", "x"]))
def test_a_shape_is_read_as_it_is_written(shape: list[int], separator: str) -> None:
    assert parse_shape(separator.join(map(str, shape))) == tuple(shape)


@given(st.text().filter(lambda text: not re.search(r"\d", text)))
def test_text_without_numbers_is_no_shape(text: str) -> None:
    with pytest.raises(ShapeError, match="a shape needs integers"):
        parse_shape(text)


# ------------------------------------------------------------------------------- reconstruct and verify


OWN_CODE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()

def huge():
    return nn.Sequential(nn.Linear(2000, 2000))
"""
OWN = ("own_code_of_this_test:make", "--data", "own.safetensors")


@pytest.fixture
def own_code(run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and data of one's own in the current folder."""
    (tmp_path / "own_code_of_this_test.py").write_text(OWN_CODE)
    monkeypatch.delitem(sys.modules, "own_code_of_this_test", raising=False)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(80, 4, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    save_file({"inputs": inputs, "labels": labels}, tmp_path / "own.safetensors")


@pytest.mark.usefixtures("own_code")
def test_a_network_is_rebuilt_verified_and_written_whole(run: RunCli, tmp_path: Path) -> None:
    ran = run("reconstruct", *OWN, "--out", "net.safetensors", "--seed", 3, "--activation", "leaky_relu")
    assert ran.code == 0
    assert re.search("layer features method residual .* 0 25 .* 2 19 ", ran.out)
    assert "from he_normal features, seed 3" in ran.out
    assert ran.out.endswith("The network computes the same function as the target.")
    assert sorted(path.name for path in tmp_path.glob("net*")) == ["net.safetensors"]
    facts = run("reconstruct", *OWN, "--features", "id_cond", "--json").json()
    assert [layer["n_features"] for layer in facts["layers"]] == [20, 15]
    assert facts["is_same_function"] is True
    assert facts["target_accuracy"] == facts["network_accuracy"]
    assert facts["n_samples"] == 64
    assert facts["bytes"] == (tmp_path / "net.safetensors").stat().st_size


@pytest.mark.usefixtures("own_code")
def test_every_option_reaches_the_reconstruction(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def remember(model: torch.nn.Module, inputs: Tensor, construction: Wide, **options: Any) -> Any:
        seen.update(options, inputs=inputs, construction=construction)
        return reconstruct(model, inputs, construction, **options | {"error": None})

    monkeypatch.setattr(rebuilding, "reconstruct", remember)
    words = (
        "--features sparse_he_normal --density 0.8 --excess 2 --seed 7 --activation none --tolerance 1e-9 "
        "--error 1e-3 --calibration 12 --images 0 --fold-norms --set kernel=second --set margin=0.5 --threads 2 "
        "--out o.safetensors"
    )
    ran = run("reconstruct", *OWN, *words.split())
    assert ran.code == 0
    assert "same function" not in ran.out
    assert len(seen.pop("inputs")) == 12
    assert str(seen.pop("partial")) == "o.safetensors.partial"
    seen.pop("on_step")
    assert seen.pop("ranges").as_dict() == {"window": None, "margin": 0.5, "precision": None, "box": None}
    wide = Wide(features="sparse_he_normal", density=0.8, excess=2.0, kernel="second")
    assert seen == {
        "construction": wide, "seed": 7, "tolerance": 1e-9, "error": 1e-3, "storage": "dense", "fold_norms": True,
        "workers": None, "cluster": None, "threads": 2,
    }  # fmt: skip


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("args", [(), ("--json",)], ids=["table", "json"])
def test_a_reconstruction_that_is_not_the_same_function_exits_with_1(run: RunCli, args: tuple[str, ...]) -> None:
    ran = run("reconstruct", *OWN, "--excess", 0.5, *args)
    assert ran.code == 1
    assert "does NOT compute the same function" in ran.out or ran.json()["is_same_function"] is False


@pytest.mark.usefixtures("own_code")
def test_a_missed_tolerance_of_a_layer_fails_by_its_name(run: RunCli) -> None:
    ran = run("reconstruct", *OWN, "--tolerance", 1e-9, "--excess", 0.5)
    assert ran.code == 2  # too few features are wrong use, known before anything is solved
    assert "layer '0'" in ran.err


def test_an_interrupted_reconstruction_goes_on_where_it_stopped(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = sys.modules["onlynorm.reconstruction.layerwise"].rebuild

    def stop_at_the_second(target: TargetLayer, *rest: Any) -> Any:
        if target.name == "2":
            raise KeyboardInterrupt
        return build(target, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["onlynorm.reconstruction.layerwise"], "rebuild", stop_at_the_second)
        stopped = run("reconstruct", "mlp")
    assert stopped.code == 130
    assert stopped.stdout == ""
    assert "Finished layers are in net.safetensors.partial" in stopped.err
    assert not (tmp_path / "net.safetensors").exists()
    (kept,) = (tmp_path / "net.safetensors.partial").iterdir()

    refused = run("reconstruct", "mlp", "--seed", 1)
    assert refused.code == 2
    assert "resuming needs the arguments of the run" in refused.err
    assert kept.exists()

    told: list[str] = []

    @contextlib.contextmanager
    def watch(names: list[str], *, hidden: bool) -> Iterator[Callable[[str, int, float], None]]:
        yield lambda name, iterations, residual: told.append(f"{name} after {iterations}")

    monkeypatch.setattr(rebuilding, "layer_bars", watch)
    assert run("reconstruct", "mlp").code == 0
    assert [text for text in told if text.startswith("0 ")] == ["0 after 0"]  # read, not solved again
    assert not kept.exists()


VERIFY = ("verify", "net.safetensors", "--images", 70, "--model", *OWN)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("collapsed", [(), ("--collapsed",)], ids=["blocks", "collapsed"])
def test_verify_finds_the_network_of_a_file_the_same(run: RunCli, dtype: str, collapsed: tuple[str, ...]) -> None:
    run("reconstruct", *OWN)
    facts = run(*VERIFY, "--dtype", dtype, *collapsed, "--json").json()
    assert facts["is_same_function"] is True
    assert facts["n_samples"] == 70
    # One layer of 25 features after another, in float32 with shifts about the size of the features.
    assert facts["relative_error"] <= (1e-9 if dtype == "float64" else 1e-4)
    told = run(*VERIFY, "--dtype", dtype, *collapsed)
    assert told.code == 0
    assert told.out.startswith("net.safetensors compared with own_code_of_this_test:make, ")
    assert ("collapsed" in told.out) == bool(collapsed)


@pytest.mark.usefixtures("own_code")
def test_verify_exits_with_1_when_the_functions_differ(run: RunCli, tmp_path: Path) -> None:
    run("reconstruct", *OWN)
    assert run(*VERIFY, "--dtype", "float64", "--tolerance", 1e-16).code == 1
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    torch.save(other.state_dict(), tmp_path / "other.pt")
    ran = run(*VERIFY, "--weights", "other.pt")
    assert ran.code == 1
    assert "The network does NOT compute the same function as the target." in ran.out


@pytest.mark.usefixtures("own_code")
def test_verify_refuses_a_file_that_was_altered(run: RunCli, tmp_path: Path) -> None:
    run("reconstruct", *OWN)
    path = tmp_path / "net.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    ran = run(*VERIFY)
    assert (ran.code, ran.stdout) == (2, "")
    assert "net.safetensors" in ran.err


@pytest.mark.usefixtures("own_code")
def test_fewer_samples_than_usual_are_all_taken(run: RunCli, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.linspace(-1.0, 1.0, 24).reshape(6, 4))
    ran = run("reconstruct", OWN[0], "--data", "few.npy", "--set", "margin=1", "--json")
    assert ran.json()["n_samples"] == 6
    assert "accuracy of the target" not in ran.json()
    verified = run("verify", "net.safetensors", "--model", OWN[0], "--data", "few.npy", "--json")
    assert verified.json()["n_samples"] == 6


def test_a_built_in_network_without_trained_weights_is_named_as_such(run: RunCli) -> None:
    ran = run("reconstruct", "mlp", "--features", "id_cond", "--images", 0)
    assert ran.code == 0
    assert "mlp has untrained random weights" in ran.err
