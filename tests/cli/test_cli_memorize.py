"""`onlynorm memorize`: what it builds, tells, writes and draws, files of one's own, and wrong use in one line."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import RunCli, runner
from safetensors.torch import save_file

import onlynorm as on
from onlynorm.data import digits
from onlynorm.identity.memorization.memorizer import Memorizer


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `onlynorm memorize` in this process, in an empty folder."""
    return runner(monkeypatch, capsys, tmp_path, "memorize")


def test_digits_are_memorized_and_the_table_says_what_that_is_worth(run: RunCli) -> None:
    ran = run("digits", "--points", 300)
    assert ran.code == 0
    for word in ("300", "wrong training points", "held-out samples", "silent %", "parameters over n log n + r^2"):
        assert word in ran.stdout
    assert re.search(r"all training points correct\s+yes", ran.stdout)


def test_json_is_one_document_and_nothing_else(run: RunCli) -> None:
    ran = run("digits", "--points", 200, "--noise", 0.0, "--noise", 0.5, "--json", "--seed", 4)
    facts = ran.json()
    assert ran.code == 0
    assert ran.stderr == ""
    assert facts["n_points"] == 200
    assert facts["n_wrong"] == 0
    assert facts["seed"] == 4
    off = facts["off_sample"]
    assert [row[0] for row in off["noise"]] == [0.0, 0.5]
    assert off["noise"][0][1] == {"right": 1.0, "silent": 0.0, "wrong": 0.0}
    assert off["n_held_out"] == len(digits().test_labels)


def test_the_file_holds_the_network_and_the_figure_is_a_picture(run: RunCli, tmp_path: Path) -> None:
    ran = run("digits", "--points", 150, "--projection", "principal", "--width", 40, "--out", "deep/net.safetensors",
              "--figure", "noise.png", "--json")  # fmt: skip
    assert ran.code == 0
    network = on.load(tmp_path / "deep" / "net.safetensors")
    split = digits()
    assert torch.equal(network.classify(split.train_inputs[:150]), split.train_labels[:150])
    assert network.width == 40
    assert network.facts is not None
    assert network.facts.projection == "principal"
    assert ran.json()["bytes"] == (tmp_path / "deep" / "net.safetensors").stat().st_size
    picture = (tmp_path / "noise.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


@pytest.mark.parametrize(("name", "start"), [("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG")])
def test_the_figure_has_the_format_of_its_ending(run: RunCli, tmp_path: Path, name: str, start: bytes) -> None:
    ran = run("digits", "--points", 60, "--noise", 0.01, "--figure", name)
    assert ran.code == 0, ran.err
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_a_figure_of_another_kind_is_refused_before_any_work(run: RunCli, tmp_path: Path, name: str) -> None:
    ran = run("digits", "--points", 60, "--figure", name)
    assert ran.code == 2
    assert "ending of a figure needs a known name" in ran.err
    assert not (tmp_path / name).exists()


def test_outliers_are_memorized_and_the_check_is_that_of_the_outputs(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    inputs = np.concatenate([generator.normal(size=(500, 4)), np.full((1, 4), 1e5), np.full((1, 4), -1e5)])
    np.savez(tmp_path / "own.npz", inputs=inputs, targets=generator.normal(size=502))
    facts = run("own.npz", "--json").json()
    assert facts["max_error"] <= 1e-9
    assert facts["is_fitted"] is True
    forward = Memorizer.forward
    monkeypatch.setattr(Memorizer, "forward", lambda self, x: 1.001 * forward(self, x))
    ran = run("own.npz", "--json")
    assert ran.code == 1
    assert json.loads(ran.stdout)["is_fitted"] is False


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64", "int16", "bool"])
def test_labels_of_every_integer_dtype_are_classes(run: RunCli, tmp_path: Path, kind: str) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 30).astype(kind)
    np.savez(tmp_path / "own.NPZ", inputs=generator.normal(size=(30, 4)), labels=labels)
    (tmp_path / "own.NPZ.npz").rename(tmp_path / "own.NPZ")
    facts = run("own.NPZ", "--noise", 0.01, "--json").json()
    assert facts["n_wrong"] == 0


def test_an_empty_test_set_is_none(run: RunCli, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    np.savez(tmp_path / "own.npz", inputs=x, labels=np.arange(30), test_inputs=x[:0], test_labels=np.arange(0))
    facts = run("own.npz", "--noise", 0.01, "--json").json()
    assert facts["off_sample"]["held_out"] is None


def test_an_array_that_claims_more_than_its_file_is_refused_before_it_is_allocated(run: RunCli, tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)})
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("inputs.npy", header.getvalue())
    ran = run("own.npz")
    assert ran.code == 2
    assert "0 bytes for float64 of shape (1000000, 1000000)" in ran.err


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_a_file_of_ones_own_is_read_with_its_held_out_samples(run: RunCli, tmp_path: Path, ending: str) -> None:
    split = digits()
    tensors = {
        "inputs": split.train_inputs[:90].clone(), "labels": split.train_labels[:90].clone(),
        "test_inputs": split.test_inputs[:20].clone(), "test_labels": split.test_labels[:20].clone(),
    }  # fmt: skip
    path = tmp_path / f"own{ending}"
    if ending == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, path)
    facts = run(path.name, "--noise", 0.01, "--json").json()
    assert facts["n_points"] == 90
    assert facts["off_sample"]["n_held_out"] == 20


def test_real_targets_are_memorized_up_to_rounding(run: RunCli, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", inputs=generator.normal(size=(50, 6)), targets=generator.normal(size=(50, 3)))
    ran = run("own.npz", "--json")
    facts = ran.json()
    assert ran.code == 0
    assert facts["n_outputs"] == 3
    assert facts["max_error"] <= facts["rounding"] < 1e-9
    assert "off the sample" not in facts
    assert "real targets" in run("own.npz", "--noise", 0.1).err


def test_a_file_with_objects_is_never_unpickled(run: RunCli, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", inputs=np.array([{"a": 1}], dtype=object), labels=np.zeros(1, dtype=np.int64))
    ran = run("own.npz")
    assert ran.code == 2
    assert ".npz file" in ran.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"x": np.zeros((2, 2))}, "needs inputs"),
        ({"inputs": np.zeros((2, 2)), "labels": np.zeros(2, int), "targets": np.zeros(2)}, "inputs, labels, targets"),
        ({"inputs": np.eye(2), "labels": np.zeros(2)}, "integer labels"),
        ({"inputs": np.ones((2, 2)), "labels": np.arange(2)}, "equal points with different targets at 0 and 1"),
        ({"inputs": np.eye(3), "labels": np.arange(2)}, "one label per point, 3 "),
        ({"inputs": np.full((2, 2), np.nan), "labels": np.arange(2)}, "finite points"),
        ({"inputs": np.zeros((0, 2)), "labels": np.zeros(0, int)}, "at least one point"),
        ({"inputs": np.eye(2), "labels": np.arange(2) * 1j}, "complex128 instead of real"),
        (
            {"inputs": np.eye(2), "labels": np.arange(2), "test_inputs": np.eye(2), "test_labels": np.arange(3)},
            "as many test_labels",
        ),
        (
            {"inputs": np.eye(2), "labels": np.arange(2), "test_inputs": np.eye(2), "test_labels": np.full(2, np.nan)},
            "as many test_labels",
        ),
        (
            {"inputs": np.eye(2), "labels": np.arange(2), "test_inputs": np.eye(3), "test_labels": np.arange(3)},
            "test_inputs like its inputs, (n, 2)",
        ),
        ({"inputs": np.float64(1.0), "labels": np.zeros(1, int)}, "needs inputs"),
    ],
)
def test_files_that_cannot_be_memorized_say_why(
    run: RunCli, tmp_path: Path, unchecked: None, content: dict[str, Any], words: str
) -> None:
    np.savez(tmp_path / "own.npz", **content)
    ran = run("own.npz")
    assert ran.code == 2
    assert words in ran.err


IRIS = "length,species,width\n5.1,setosa,3.5\n7.0,versicolor,3.2\n6.3,setosa,3.3\n5.8,virginica,2.7\n"


@pytest.mark.parametrize("options", [("--labels", "species"), ()])
def test_a_csv_is_read_with_its_label_column_by_name_or_last(run: RunCli, tmp_path: Path, options: tuple[str]) -> None:
    text = IRIS if options else "\n".join(f"{a},{b},{c}" for a, c, b in (row.split(",") for row in IRIS.splitlines()))
    (tmp_path / "iris.csv").write_text("\ufeff" + text)
    facts = run("iris.csv", *options, "--out", "net.safetensors", "--json").json()
    assert (facts["n_points"], facts["n_inputs"], facts["n_outputs"], facts["n_wrong"]) == (4, 2, 3, 0)
    network = on.load(tmp_path / "net.safetensors")
    points = torch.tensor([[5.1, 3.5], [7.0, 3.2], [6.3, 3.3], [5.8, 2.7]], dtype=torch.float64)
    assert network.classify(points).tolist() == [0, 1, 0, 2]  # names in sorted order


@pytest.mark.parametrize(
    ("text", "n_outputs", "is_real"),
    [
        ("1,2,0\n3,4,1\n5,6,0\n", 2, False),  # no header
        ("1;a,2\n".replace(";", ",") + "3,b,4\n", None, None),  # a name among the inputs is a header
        ("a,b,y\n1,2,0.5\n3,4,-1\n", 1, True),
        ("1,2,cat\n3,4,dog\n", 2, False),
    ],
)
def test_labels_of_a_csv_are_classes_or_real_targets(
    run: RunCli, tmp_path: Path, text: str, n_outputs: int | None, is_real: bool | None
) -> None:
    (tmp_path / "own.csv").write_text(text)
    ran = run("own.csv", "--json")
    if n_outputs is None:
        assert ran.code == 2
        assert "got 'b' in row 2" in ran.err
        return
    facts = ran.json()
    assert ran.code == 0
    assert facts["n_outputs"] == n_outputs
    assert ("relative_error" in facts) == is_real


def test_inputs_and_labels_are_two_npy_files(run: RunCli, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", generator.normal(size=(30, 2, 3)))
    np.save(tmp_path / "y.npy", generator.integers(0, 4, 30).astype("uint16"))
    np.save(tmp_path / "t.npy", generator.normal(size=(30, 2)))
    assert run("x.npy", "--labels", "y.npy", "--json").json()["n_wrong"] == 0
    facts = run("x.npy", "--labels", "t.npy", "--json").json()
    assert facts["n_outputs"] == 2
    assert facts["relative_error"] < 1e-9


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", (), "got 0 rows with 0 columns"),
        ("a,b\n", (), "got 0 rows with 2 columns"),
        ("1\n2\n", (), "got 2 rows with 1 columns"),
        ("1,2,0\n3,1\n", (), "got 2 cells, not 3, in row 2"),
        ("x,y\n1,0\n\n,1\n", (), "got an empty cell in row 3"),
        ("x,y\n1,0\n2,\n", (), "got an empty cell in row 3"),
        ("x,y\n1,0\n2,n/a\n", (), "'n/a' among 1 numbers"),
        ("x,y\n1,0\n2,1\n", ("--labels", "z"), "label column of own.csv needs a known name"),
        ("x,y\nnan,0\n2,1\n", (), "finite points"),
        ("x,y\n1,-1\n2,1\n", (), "integers from 0"),
    ],
)
def test_a_csv_that_cannot_be_memorized_says_why(
    run: RunCli, tmp_path: Path, unchecked: None, text: str, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "own.csv").write_text(text)
    ran = run("own.csv", *options)
    assert ran.code == 2
    assert words in ran.err


def test_files_of_labels_fit_the_kind_of_data(run: RunCli, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.eye(3))
    np.save(tmp_path / "one.npy", np.float64(1.0))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe1,2")
    for arguments, words in (
        (("x.npy",), "got none. Pass --labels labels.npy"),
        (("x.npy", "--labels", "y.csv"), "needs a .npy file; got y.csv"),
        (("x.npy", "--labels", "y.npy"), "there is none at y.npy".replace("there is", "got")),
        (("x.npy", "--labels", "one.npy"), "one.npy needs one row per point"),
        (("digits", "--labels", "y.npy"), "got digits, which has its own labels"),
        (("bytes.csv",), "comma-separated text in UTF-8"),
    ):
        ran = run(*arguments)
        assert ran.code == 2, arguments
        assert words in ran.err, (arguments, ran.err)


def test_wrong_use_is_one_line(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 no more")
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    for arguments, words in (
        (("digit",), "Did you mean 'digits'?"),
        (("none.npz",), "there is none at none.npz"),
        (("cut.npz",), ".npz file"),
        (("cut.safetensors",), "safetensors file"),
        (("digits", "--points", 10**6), "got 1438"),
        (("digits", "--points", 20, "--width", 1), "an integer from 3"),
        (("digits", "--points", 20, "--projection", "best"), "projection needs a known name"),
        (("digits", "--points", 20, "--noise", -1), "a number in [0, inf)"),
        (("digits", "--out", "."), "is a folder"),
        (("digits", "--points", 20, "--noise", 0, "--figure", "a.png"), "above zero"),
    ):
        ran = run(*arguments)
        assert ran.code == 2, arguments
        assert words in ran.err, arguments


def test_help_has_examples(run: RunCli) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert "onlynorm memorize fashion_mnist" in " ".join(ran.stdout.split())
