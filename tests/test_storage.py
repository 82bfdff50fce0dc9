"""Sealed tensor files: any altered byte is noticed, equal content gives equal bytes, and a full disk loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onlynorm.errors import FormatError, StorageError
from onlynorm.storage import read_tensors, version, write_atomically, write_tensors

TENSORS = {"a": torch.arange(3.0, dtype=torch.float64), "b": torch.tensor(7), "c": torch.zeros(0, 2)}
DOCUMENT = {"x": [1, 2.5, None, float("inf")], 'a quote " and "sha256":"': "\u00e9"}


def write(path: Path, *, kind: str = "thing", format: int = 1) -> Path:
    write_tensors(path, TENSORS, kind=kind, format=format, document=DOCUMENT)
    return path


def read(path: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    return read_tensors(path, kind="thing", format=1, cure="Make it again.")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    document, tensors = read(write(tmp_path / "file"))
    assert {name: document[name] for name in DOCUMENT} == DOCUMENT
    assert document["onlynorm"] == version()
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "one").read_bytes() == write(tmp_path / "two").read_bytes()


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    assert safetensors.torch.load_file(write(tmp_path / "file")).keys() == TENSORS.keys()


def test_every_single_altered_byte_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    whole = path.read_bytes()
    for position, byte in enumerate(whole):
        # A reader of JSON would overlook a tab for a space, and of a checksum capital letters for small ones.
        altered = bytearray(whole)
        altered[position] ^= 0x29 if byte == ord(" ") else (0x01, 0x20, 0x80)[position % 3]
        path.write_bytes(altered)
        with pytest.raises(FormatError, match=r"safetensors file.*Make it again"):
            read(path)


@given(st.data())
@settings(max_examples=100)
def test_cut_grown_or_foreign_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.getbasetemp() / "cut")
    whole = path.read_bytes()
    changed = data.draw(
        st.one_of(
            st.integers(0, len(whole) - 1).map(lambda n: whole[:n]),
            st.binary(min_size=1, max_size=20).map(lambda more: whole + more),
            st.binary(max_size=200),
        )
    )
    path.write_bytes(changed)
    with pytest.raises(FormatError, match=r"safetensors file.*Make it again"):
        read(path)


def test_a_newer_format_and_another_kind_are_told_apart_from_damage(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"format 1 or older; file has 2\. Update onlynorm"):
        read(write(tmp_path / "file", format=2))
    with pytest.raises(FormatError, match=r"kind 'thing'; file is of kind 'other'"):
        read(write(tmp_path / "file", kind="other"))
    safetensors.torch.save_file(TENSORS, tmp_path / "foreign")
    with pytest.raises(FormatError, match=r"no checksum"):
        read(tmp_path / "foreign")


@pytest.mark.parametrize("field", [{"format": "1"}, {"format": None}, {"format": 0}, {"format": True}, {"kind": []}])
def test_a_forged_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict[str, object]) -> None:
    real = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: real({**value, **field}, **options))
    with pytest.raises(FormatError, match=r"header|of kind \[\]"):
        read(write(tmp_path / "file"))


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"readable file; got No such file.*Check the path"):
        read(tmp_path / "nothing")


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file")
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"writable folder with space; got No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
