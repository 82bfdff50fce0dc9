"""Files that claim more than they hold, expand without end, or are built to hang their reader: refused, and at once."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.data import cifar10, fashion_mnist, load_data
from onlynorm.data.plain_pickle import MAX_OPERATIONS, read_plain
from onlynorm.data.tensor_files import (
    INFLATED_BYTES,
    INFLATED_RATIO,
    inflate,
    inflated_limit,
    read_npy,
    read_npz,
    read_safetensors,
    read_torch,
)
from onlynorm.errors import FormatError, MissingDataError, StorageError
from onlynorm.evidence.records import read_record
from onlynorm.models import load_weights
from onlynorm.storage import MAX_NESTING, parse_json, read_file, read_tensors, write_tensors
from onlynorm.tuning import read_peft
from onlynorm.tuning.batches import MAX_PIXELS, ImageFolder


def npy(shape: str, data: bytes = b"", descr: str = "'<f8'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


# ------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", "|u1", "<i8", "|b1"])
def test_arrays_come_back_as_numpy_saved_them(tmp_path: Path, dtype: str, order: str) -> None:
    array = np.asarray(np.arange(6).reshape(2, 3), dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", x=array, empty=array[:0])
    for found in (read_npy(tmp_path / "a.npy"), read_npz(tmp_path / "a.npz")["x"]):
        np.testing.assert_array_equal(found, array)
        assert found.dtype.isnative
        torch.from_numpy(found).zero_()  # it is memory of its own
    assert read_npz(tmp_path / "a.npz")["empty"].shape == (0, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy("(1000000000000,)", bytes(8)), r"8 bytes for float64 of shape \(1000000000000,\)"),
        (npy("(2,)", bytes(24)), r"24 bytes for float64 of shape \(2,\)"),
        (npy("(4611686018427387904, 4)"), r"0 bytes for float64"),
        (npy("(-1, -1)", bytes(8)), r"8 bytes for float64 of shape \(-1, -1\)"),
        (npy("(" * 200 + ")" * 200), r"got \w+"),
        (npy("-" * 5000 + "1"), r"got \w+"),
        (npy("(1,"), r"got \w+"),
        (npy("()", descr="'|O'"), r"object instead of real"),
        (npy("(1,)", bytes(16), descr="'<c16'"), r"complex128 instead of real"),
        (npy("(1,)", bytes(80), descr="('<f8', (10,))"), r"instead of real"),
        (b"\x93NUMPY\x03\x00" + bytes(8), r"format \(3, 0\)"),
        (b"", r"got ValueError"),
    ],
)
def test_headers_that_claim_what_is_not_there_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(FormatError, match=rf"a\.npy needs .*\.npy file.*{message}"):
        read_npy(tmp_path / "a.npy")


def archive(path: Path, members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit, so that the tests stay small."""
    monkeypatch.setattr("onlynorm.data.tensor_files.INFLATED_BYTES", 2**16)


def test_the_limit_of_expanding_is_stated() -> None:
    assert inflated_limit(1) == INFLATED_BYTES == 2**28
    assert inflated_limit(2**28) == INFLATED_RATIO * 2**28 == 20 * 2**28


@pytest.mark.usefixtures("few_bytes")
def test_archives_expand_to_the_limit_and_no_further(tmp_path: Path) -> None:
    fine, large = npy("(8000,)", bytes(64_000)), npy("(8300,)", bytes(66_400))
    assert read_npz(archive(tmp_path / "a.npz", {"x.npy": fine}))["x"].shape == (8000,)
    with pytest.raises(FormatError, match=r"expand to at most 65,536 bytes .* 20 times its size\); got 66,"):
        read_npz(archive(tmp_path / "b.npz", {"x.npy": large}))
    with pytest.raises(FormatError, match=r"expand to at most 65,536 bytes"):  # together
        read_npz(archive(tmp_path / "c.npz", {"x.npy": fine, "y.npy": fine}))
    found = read_npz(archive(tmp_path / "d.npz", {"x.npy": large}, zipfile.ZIP_STORED))  # nothing expands here
    assert found["x"].shape == (8300,)


def test_archives_of_other_compressions_doubled_names_or_wrong_sizes_are_refused(tmp_path: Path) -> None:
    data = npy("(2,)", bytes(16))
    with pytest.raises(FormatError, match=r"another compression than deflate"):
        read_npz(archive(tmp_path / "a.npz", {"x.npy": data}, zipfile.ZIP_LZMA))
    with pytest.raises(FormatError, match=r"two arrays named 'x'"):
        read_npz(archive(tmp_path / "b.npz", {"x.npy": data, "x": data}))
    raw = bytearray(archive(tmp_path / "c.npz", {"x.npy": data}).read_bytes())
    place = raw.index(b"PK\x01\x02")
    raw[place + 24 : place + 28] = struct.pack("<I", 2**31)  # the size in the directory
    (tmp_path / "c.npz").write_bytes(raw)
    with pytest.raises(FormatError, match=r"got 2,147,483,648"):
        read_npz(tmp_path / "c.npz")


@pytest.mark.usefixtures("few_bytes")
def test_gzip_expands_to_the_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(2**16)))
    assert inflate(path) == bytes(2**16)
    assert inflate(path, 5) == bytes(5)
    for data, wanted in ((bytes(2**16 + 1), None), (b"x", 2**40)):
        path.write_bytes(gzip.compress(data))
        with pytest.raises(FormatError, match=r"expand to at most 65,536 bytes"):
            inflate(path, wanted)


def test_images_that_claim_terabytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    head = struct.pack(">IIII", 0x803, 2**32 - 1, 28, 28)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head))
    with pytest.raises(FormatError, match=r"expand to at most 268,435,456 bytes"):
        on.data.fashion_mnist()


# ------------------------------------------------------------------------------- PyTorch files


@pytest.mark.parametrize("is_new", [True, False])
def test_weights_of_both_formats_are_read(tmp_path: Path, is_new: bool) -> None:
    state = {
        "a": torch.arange(6.0).reshape(2, 3).mT, "b": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "c": torch.tensor(True), "d": torch.zeros(0, 2), "e": torch.arange(3, dtype=torch.uint8),
    }  # fmt: skip
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=is_new)
    load_weights(nn.Linear(3, 2), tmp_path / "a.pth")
    whole = {"state_dict": state, "epoch": 3, "optimizer": {"state": {0: {"step": 1.5}}, "names": ["x", None]}}
    torch.save(whole, tmp_path / "b.pth", _use_new_zipfile_serialization=is_new)
    found = read_torch(tmp_path / "b.pth")
    assert found["optimizer"] == whole["optimizer"]
    assert all(torch.equal(found["state_dict"][name], value) for name, value in state.items())


def with_pickle(path: Path, data: bytes) -> Path:
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as old:
        members = {m.filename: data if m.filename.endswith("data.pkl") else old.read(m) for m in old.infolist()}
    return archive(path, members, zipfile.ZIP_STORED)


@pytest.mark.usefixtures("few_bytes")
def test_a_pytorch_file_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2**18)}, tmp_path / "a.pth")
    read_torch(tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "a.pth") as old:
        members = {m.filename: old.read(m) for m in old.infolist()}
    with pytest.raises(FormatError, match=r"expand to at most 65,536 bytes .*got 1,0\d\d,\d\d\d"):
        read_torch(archive(tmp_path / "b.pth", members))


def nested_key(levels: int) -> bytes:
    """A pickle of a dict with one key, a tuple of two tuples of two tuples and so on: its hash takes 2^levels steps."""
    pairs = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))
    return b"\x80\x02}" + b")" + pairs + b"K\x01s."


def test_keys_whose_hash_takes_exponential_time_are_refused(tmp_path: Path) -> None:
    raw = nested_key(60)
    assert len(raw) < 400
    assert isinstance(next(iter(pickle.loads(nested_key(3)))), tuple)
    with pytest.raises(FormatError, match=r"dict key"):
        read_plain(raw, name="train")
    with pytest.raises(FormatError, match=r"dict key"):
        read_torch(with_pickle(tmp_path / "a.pth", raw))
    (tmp_path / "b.pth").write_bytes(raw)
    with pytest.raises(FormatError, match=r"dict key"):
        read_torch(tmp_path / "b.pth")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02}" + b"(" * 3 + b")K\x01u.",
        b"\x80\x02}(" + b")q\x00h\x00\x86K\x01u.",
        b"\x80\x02()q\x00h\x00\x86K\x01d.",
        b"\x80\x02}\x8a\x09" + bytes(9) + b"K\x01s.",  # whole numbers can be chosen to have one hash
        b"\x80\x02}G" + bytes(8) + b"K\x01s.",
    ],
)
def test_other_ways_to_such_keys_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"dict key|empty stack|without its mark|pickle of plain"):
        read_plain(raw, name="train")


def test_plain_keys_of_every_protocol_are_read() -> None:
    content = {"a": 1, b"b": [2], 3: None, None: 4, True: 5}
    for protocol in (3, 4, 5):
        assert read_plain(pickle.dumps(content, protocol=protocol), name="x") == content


def test_pickles_of_too_many_operations_and_deep_ones_end_quickly() -> None:
    with pytest.raises(FormatError, match=rf"more than {MAX_OPERATIONS} operations"):
        read_plain(b"\x80\x02](" + b"N" * MAX_OPERATIONS + b"e.", name="x")
    found = read_plain(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", name="x")
    assert isinstance(found, list)


def test_a_pickle_that_names_anything_but_tensors_is_refused_before_torch_sees_it(tmp_path: Path) -> None:
    for names in (b"cos\nsystem\n", b"ctorch\nload\n", b"ccollections\nCounter\n", b"cbuiltins\ngetattr\n"):
        with pytest.raises(FormatError, match=r"got UnpicklingError: the name \w+ \w+"):
            read_torch(with_pickle(tmp_path / "a.pth", b"\x80\x02" + names + b")R."))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3, dtype=torch.complex64), r"complex64"),
        (torch.ones(2, 3, dtype=torch.int64), r"weight as .*torch.float32.*int64"),
        (torch.ones(2, 4), r"weight of shape \(2, 3\); got \(2, 4\)"),
    ],
)
def test_weights_of_another_type_are_refused_unused(tmp_path: Path, value: Tensor, message: str) -> None:
    network = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    safetensors.torch.save_file({"bias": torch.ones(2), "weight": value}, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match=message):
        load_weights(network, tmp_path / "a.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_names_with_and_without_the_prefix_of_data_parallel_are_refused_together(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    torch.save({**state, "module.bias": torch.zeros(2)}, tmp_path / "a.pth")
    with pytest.raises(FormatError, match=r"one tensor per name"):
        load_weights(nn.Linear(3, 2), tmp_path / "a.pth")


# ------------------------------------------------------------------------------- images


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(8193, 8192), (2**31 - 1, 2**31 - 1), (2**14, 2**14)])
def test_images_of_too_many_pixels_are_refused_unread(tmp_path: Path, size: tuple[int, int]) -> None:
    assert size[0] * size[1] > MAX_PIXELS
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.png").write_bytes(png(*size))
    with pytest.raises(FormatError, match=r"pixels|decompression bomb|[Tt]runcated|decompress"):
        ImageFolder(tmp_path)


def test_the_content_of_an_image_has_to_be_of_a_known_format(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EOF\n")
    with pytest.raises(FormatError, match=r"cannot identify image file"):
        ImageFolder(tmp_path)


# ------------------------------------------------------------------------------- sealed files and JSON


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_blocks", 2**31), ("n_blocks", -1), ("n_blocks", "3"), ("width", 8000), ("width", 0), ("n_inputs", 2**40),
     ("n_outputs", True), ("n_cues", None), ("facts", {"n_points": "many"}), ("facts", [])],
)  # fmt: skip
def test_a_forged_memorizer_is_refused_before_its_sizes_are_used(tmp_path: Path, field: str, value: object) -> None:
    points = torch.linspace(-1.0, 1.0, 10, dtype=torch.float64).reshape(5, 2)
    path = tmp_path / "a"
    on.save(on.memorize(points, torch.tensor([0, 1, 1, 0, 1])), path)
    document, tensors = read_tensors(path, kind="onlynorm-memorizer", format=1, cure="")
    rest = {name: item for name, item in document.items() if name not in ("sha256", "onlynorm", "kind", "format")}
    write_tensors(path, tensors, kind="onlynorm-memorizer", format=1, document={**rest, field: value})
    with pytest.raises(FormatError, match=r"sizes that fit its parameters; a has others"):
        on.load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 500 + "]" * 500, "{" * 9, "NaN", "[Infinity]", '"\\ud800', ""])
def test_json_that_is_nested_damaged_or_without_numbers_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"adapter_config.json needs to be JSON"):
        read_peft(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), tmp_path)


def test_json_may_be_nested_as_deep_as_stated() -> None:
    parse_json("[" * MAX_NESTING + "]" * MAX_NESTING)
    parse_json("[" * MAX_NESTING + "1, 2" + "]" * MAX_NESTING)
    with pytest.raises(ValueError, match=f"nested more than {MAX_NESTING} deep"):
        parse_json("[" * (MAX_NESTING + 2) + "]" * (MAX_NESTING + 2))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero, a file without end")
def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"not a regular file for /dev/zero"):
        read_file(Path("/dev/zero"), what="a test")
    for read in (read_torch, read_safetensors):
        with pytest.raises(FormatError, match=r"not a regular file"):
            read(Path("/dev/zero"))
    for path in (tmp_path, tmp_path / "a\0b"):
        with pytest.raises(StorageError, match=r"a test needs a readable file"):
            read_file(path, what="a test")
    with pytest.raises(MissingDataError, match=r"none at"):
        read_npy(tmp_path / "none.npy")
    (tmp_path / "a").write_bytes(bytes(5))
    with pytest.raises(FormatError, match=r"at most 4 bytes; a has 5"):
        read_file(tmp_path / "a", what="a test", limit=4)


def test_data_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy("(1000000000000, 2)"))
    with pytest.raises(FormatError, match=r"0 bytes for float64"):
        load_data(str(tmp_path / "a.npy"))
    header = b'{"inputs":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FormatError, match=r"safetensors file"):
        load_data(str(tmp_path / "a.safetensors"))
    file = io.BytesIO()
    np.save(file, np.ones((2, 2)))
    os.truncate(tmp_path / "a.npy", 0)
    (tmp_path / "a.npy").write_bytes(file.getvalue()[:-1])
    with pytest.raises(FormatError, match=r"31 bytes for float64 of shape \(2, 2\)"):
        load_data(str(tmp_path / "a.npy"))


# ------------------------------------------------------------------------------- two directories in one archive


def nested_pickle(levels: int) -> bytes:
    """A dict whose key is nested tuples: its hash takes a time that doubles per level."""
    nested = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))
    return b"\x80\x02}" + nested + b"K\x01s."


def archive_with(content: bytes | None, name: str = "archive/data.pkl") -> tuple[bytes, bytes, int]:
    """(members, directory, number of members) of a PyTorch file, with another pickle if one is given."""
    saved, out = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.ones(2)}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            is_pickle = member.filename.endswith("data.pkl")
            if is_pickle and name != "archive/data.pkl":
                new.writestr(name, content or b"")
                content = None
            new.writestr(member.filename, content if is_pickle and content else old.read(member))
    data = out.getvalue()
    n, size, offset = struct.unpack("<HII", data[-12:-2])
    return data[:offset], data[offset : offset + size], n


def test_an_archive_in_which_pytorch_would_read_other_members_is_refused(tmp_path: Path) -> None:
    first, first_directory, n = archive_with(nested_pickle(3))
    first += bytes(2000)
    second, second_directory, _ = archive_with(None)
    before, moved = len(first) + len(first_directory), bytearray(second_directory)
    place = 0
    while place < len(moved):  # Python adds to each offset how much further back the directory is than declared
        sizes = struct.unpack("<HHH", moved[place + 28 : place + 34])
        (offset,) = struct.unpack("<I", moved[place + 42 : place + 46])
        moved[place + 42 : place + 46] = struct.pack("<I", offset + before - (before + len(second) - len(first)))
        place += 46 + sum(sizes)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, n, n, len(moved), len(first), 0)
    path = tmp_path / "two.pth"
    path.write_bytes(first + first_directory + second + moved + end)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data.pkl") != nested_pickle(3)
    assert torch.load(path, weights_only=True) == {((((), ()), ((), ())), (((), ()), ((), ()))): 1}
    with pytest.raises(FormatError, match=r"directory is not .*before its end"):
        read_torch(path)


def test_an_archive_with_a_pickle_in_capital_letters_is_refused(tmp_path: Path) -> None:
    members, directory, n = archive_with(nested_pickle(3), "archive/DATA.PKL")
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, n, n, len(directory), len(members), 0)
    (tmp_path / "two.pth").write_bytes(members + directory + end)
    with pytest.raises(FormatError, match=r"2 members named data\.pkl"):
        read_torch(tmp_path / "two.pth")


@pytest.mark.parametrize("tail", [b"\0", b"a comment"])
def test_an_archive_with_something_after_its_end_is_refused(tmp_path: Path, tail: bytes) -> None:
    saved = io.BytesIO()
    torch.save({"a": torch.ones(2)}, saved)
    (tmp_path / "a.pth").write_bytes(saved.getvalue()[:-2] + len(tail).to_bytes(2, "little") + tail)
    with pytest.raises(FormatError, match=r"a\.pth needs to be .*file of tensors"):
        read_torch(tmp_path / "a.pth")


def test_archives_with_and_without_sizes_of_64_bits_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    members, directory, n = archive_with(None)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, n, n, len(directory), len(members), 0)
    (tmp_path / "b.pth").write_bytes(members + directory + end)
    for name in ("a.pth", "b.pth"):
        assert torch.equal(read_torch(tmp_path / name)["a"], torch.ones(2))


# ------------------------------------------------------------------------------- pipes in place of files


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
@pytest.mark.parametrize("read", [read_npy, read_npz, read_safetensors, read_torch, inflate, on.load, read_record])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises((FormatError, StorageError), match=r"not a regular file"):
        read(tmp_path / "file")


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_in_place_of_an_image_or_a_data_set_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "classes/a/x.png",
        "fashion-mnist/train-images-idx3-ubyte.gz",
        "cifar-10-batches-bin/data_batch_1.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    for read in (lambda: ImageFolder(tmp_path / "classes"), fashion_mnist, cifar10):
        with pytest.raises((FormatError, StorageError), match=r"not a regular file"):
            read()


def test_what_is_appended_to_a_file_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "file", os.fstat
    path.write_bytes(b"whole")

    def grow(handle: int) -> os.stat_result:
        found = real(handle)
        with path.open("ab") as file:
            file.write(b" and more")
        return found

    monkeypatch.setattr(os, "fstat", grow)
    assert read_file(path, what="it", limit=40).startswith(b"whole")
    assert len(read_file(path, what="it", limit=40)) <= 40
