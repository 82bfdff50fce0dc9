"""`onlynorm factorize`: files that are read and refused, one JSON document, exit codes, and a sealed file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import onlynorm as on
from onlynorm.cli import app
from onlynorm.cli.terminal import screen
from onlynorm.data.matrices import read_matrix
from onlynorm.errors import FormatError, MissingDataError, UnknownNameError
from onlynorm.identity import random_matrix

RunCli = Callable[..., tuple[int, str, str]]
MATRIX = np.array([[2.0, 1.0], [0.5, 3.0]])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `main` in this process, in a folder of its own: (exit code, output, errors), folded lines joined."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "width", 300)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onlynorm", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app.main()
        seen = capsys.readouterr()
        assert "Traceback" not in seen.out + seen.err
        return int(stopped.value.code or 0), seen.out, " ".join(re.sub("[│╭╮╰╯─]", " ", seen.err).split())

    return call


def written(path: Path) -> Path:
    """MATRIX in a file of the kind that its name says."""
    if path.suffix == ".npy":
        np.save(path, MATRIX.astype(np.float32))
    elif path.suffix == ".csv":
        np.savetxt(path, MATRIX, delimiter=",")
    else:
        save_file({"weight": torch.from_numpy(MATRIX)}, path)
    return path


# ------------------------------------------------------------------------------- the command


def test_a_random_matrix_is_factored_and_shown(run: RunCli) -> None:
    code, out, _ = run("factorize", "--random", 6, "--depth", 20)
    assert code == 0
    words = " ".join(out.split())
    assert "a random matrix, 6 x 6 as 20 layers I + A" in words
    for fact in ("largest |A|", "the paper's bound", "lower bound", "relative error of the product"):
        assert fact in words
    assert "has the smallest maximum norm" in words


@pytest.mark.parametrize("ending", ["npy", "csv", "safetensors"])
def test_a_file_gives_one_json_document_and_sealed_factors(run: RunCli, tmp_path: Path, ending: str) -> None:
    written(tmp_path / f"matrix.{ending}")
    code, out, err = run("factorize", f"matrix.{ending}", "--depth", 12, "--json", "--out", "made/factors.safetensors")
    assert (code, err) == (0, "")
    said: dict[str, Any] = json.loads(out)
    assert (said["dim"], said["depth"], said["n_extra"], said["out"]) == (2, 12, 0, "made/factors.safetensors")
    assert said["product_error"] <= 1e-12
    assert said["least_norm"] <= said["max_norm"] <= said["bound"]
    back = on.load(tmp_path / "made" / "factors.safetensors")
    assert np.allclose(back.product().numpy(), MATRIX, atol=1e-6)
    assert back.max_norm == said["max_norm"]


def test_a_negative_determinant_says_how_to_use_the_factors(run: RunCli, tmp_path: Path) -> None:
    np.save(tmp_path / "flip.npy", np.diag([1.0, -2.0]))
    code, out, _ = run("factorize", "flip.npy", "--method", "svd")
    assert code == 0
    assert "Append a zero to x and drop the last output" in " ".join(out.split())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "got neither"),
        (("a.npy", "--random", 4), 2, "got both"),
        (("absent.npy",), 2, "none at absent.npy"),
        (("net.pt",), 2, "ending of a matrix file needs a known name; got '.pt'"),
        (("--random", 4, "--method", "polr"), 2, "Did you mean 'polar'"),
        (("--random", 4, "--depth", 0), 2, "Invalid value for '--depth'"),
        (("--random", 4, "--method", "root"), 2, "needs a symmetric matrix"),
        (("--random", 4, "--tolerance", 1e-30), 1, "needs a product error of 1.0e-30"),
        (("--random", 4, "--out", "taken/factors.safetensors"), 2, "factors need a writable folder"),
        (("singular.npy",), 2, "at a distance of 2e-06"),
        (("wide.npy",), 2, "needs a 2 x 3 matrix of full rank"),
    ],
)
def test_wrong_use_ends_with_one_line_and_its_cure(
    run: RunCli, tmp_path: Path, args: tuple[object, ...], code: int, message: str
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    np.save(tmp_path / "singular.npy", np.ones((2, 2)))
    np.save(tmp_path / "wide.npy", np.ones((2, 3)))
    ended, out, err = run("factorize", *args)
    assert ended == code, err
    assert out == ""
    assert message in err


def test_the_help_has_examples(run: RunCli) -> None:
    code, out, _ = run("factorize", "--help")
    assert code == 0
    assert "onlynorm factorize --random 64 --depth 32" in " ".join(out.split())


# ------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("ending", ["npy", "csv", "safetensors"])
def test_a_matrix_comes_in_double_from_every_kind_of_file(tmp_path: Path, ending: str) -> None:
    found = read_matrix(written(tmp_path / f"matrix.{ending}"))
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), MATRIX)


@pytest.mark.parametrize("ending", ["NPY", "CSV", "SafeTensors"])
def test_the_case_of_an_ending_does_not_matter(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"matrix.{ending.lower()}").rename(tmp_path / f"MATRIX.{ending}")
    assert np.array_equal(read_matrix(path).numpy(), MATRIX)


def test_text_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "matrix.csv").write_bytes(b"\xef\xbb\xbf2,1\r\n0.5,3\r\n")
    assert np.array_equal(read_matrix(tmp_path / "matrix.csv").numpy(), MATRIX)


def test_a_matrix_that_claims_more_than_its_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "matrix.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)})
    with pytest.raises(FormatError, match=r"needs .*\.npy file"):
        read_matrix(tmp_path / "matrix.npy")
    save_file({"a": torch.eye(2) * 1j}, tmp_path / "matrix.safetensors")
    with pytest.raises(FormatError, match="complex64 instead of real"):
        read_matrix(tmp_path / "matrix.safetensors")


def test_a_tensor_is_picked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({"a": torch.eye(2), "b": random_matrix(3)}, path)
    assert read_matrix(path, name="b").shape == (3, 3)
    with pytest.raises(FormatError, match=r"needs one tensor, or --name; got 2: a, b"):
        read_matrix(path)
    with pytest.raises(UnknownNameError, match=r"tensor of net\.safetensors needs a known name; got 'c'"):
        read_matrix(path, name="c")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"not an array", ".npy file"),
        ("a.csv", b"one,two\n3,4\n", ".csv file of .*; got ValueError"),
        ("a.csv", b"1,2\n3\n", ".csv file of .*; got ValueError"),
        ("a.csv", b"", "got ValueError: no values"),
        ("a.safetensors", b"\x08\x00", "safetensors file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_matrix(tmp_path / name)


def test_nothing_is_unpickled_and_only_real_matrices_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "object.npy", np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="; got ValueError"):
        read_matrix(tmp_path / "object.npy")
    np.save(tmp_path / "complex.npy", np.eye(2) * 1j)
    with pytest.raises(FormatError, match="complex128 instead of real"):
        read_matrix(tmp_path / "complex.npy")
    np.save(tmp_path / "vector.npy", np.ones(3))
    with pytest.raises(FormatError, match=r"needs a matrix \(rows, columns\); got shape \(3,\)"):
        read_matrix(tmp_path / "vector.npy")
    with pytest.raises(MissingDataError, match="none at"):
        read_matrix(tmp_path / "absent.csv")
    with pytest.raises(FormatError, match=r"--name needs a \.safetensors file"):
        read_matrix(written(tmp_path / "matrix.csv"), name="weight")
