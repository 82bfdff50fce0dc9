"""Sealed JSON files: what was put in comes back, and a full disk leaves the old file."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from onlynorm.errors import FormatError, StorageError
from onlynorm.storage import from_plain, read_sealed, seal_json, to_plain, write_sealed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_a_clear_error_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_sealed(path, {"n": 1}, kind="k")
    real = os.write
    device = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda _, data: real(device, data))
        with pytest.raises(StorageError, match="No space left on device"):
            write_sealed(path, {"n": 2}, kind="k")
    os.close(device)
    assert read_sealed(path, kind="k") == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_every_altered_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_sealed(path, {"n": [1.0, 2], "word": "a b"}, kind="k")
    whole = path.read_bytes()
    for position, byte in enumerate(whole):
        for altered in (
            whole[:position] + bytes([byte ^ 0x01]) + whole[position + 1 :],
            whole[:position] + b" " + whole[position:],
        ):
            path.write_bytes(altered)
            with pytest.raises(FormatError, match=r"damaged|checksum|kind|format"):
                read_sealed(path, kind="k")
    path.write_bytes(seal_json({"$float": "nan"}, kind="k"))
    with pytest.raises(FormatError, match=r"checksum"):
        read_sealed(path, kind="k")


def test_a_sealed_file_returns_what_was_put_in(tmp_path: Path) -> None:
    import numpy as np
    import torch

    body = {
        "array": np.arange(3.0),
        "tensor": torch.ones(2, 2),
        "number": np.float64(0.1),
        "odd": [math.inf, -math.inf],
    }
    write_sealed(tmp_path / "a.json", body, kind="k")
    assert read_sealed(tmp_path / "a.json", kind="k") == {
        "array": [0.0, 1.0, 2.0],
        "tensor": [[1.0, 1.0], [1.0, 1.0]],
        "number": 0.1,
        "odd": [math.inf, -math.inf],
    }
    assert math.isnan(from_plain(to_plain(math.nan)))


def test_a_result_that_is_not_plain_is_refused() -> None:
    with pytest.raises(FormatError, match="got object"):
        to_plain({"a": object()})
    with pytest.raises(FormatError, match="string keys"):
        to_plain({1: 2})
