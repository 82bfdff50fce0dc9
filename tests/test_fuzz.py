"""A sample of the mutated files that `python -m tests.fuzzing` reads in full, and that it would notice an escape."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import fuzzing
import pytest
from fuzzing import Kind, make_input, try_input

from onlynorm.errors import FormatError, MemoryLimitError
from onlynorm.storage import seal_json

ROOT = Path(__file__).parent.parent


def test_a_sample_of_mutated_files_is_read_or_refused_and_nothing_else() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing", "--inputs", "3000", "--workers", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert "\n3,000 inputs, 0 escapes" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.returncode == 0


def test_an_input_is_a_function_of_its_number() -> None:
    data = seal_json({"a": [1, 2]}, kind="k")
    kinds = {"json": Kind(data, print, forge=lambda data, _: data, seal=lambda data: data)}
    assert [make_input(kinds, i) for i in range(50)] == [make_input(kinds, i) for i in range(50)]
    assert len({make_input(kinds, i)[2] for i in range(50)}) > 10


def refuse_seal(data: bytes) -> bytes:
    raise ValueError


def busy() -> None:
    started = time.process_time()
    while time.process_time() - started < 10.0:
        pass


def outcome(folder: Path, read: object, data: bytes = b"some bytes", **more: object) -> fuzzing.Outcome:
    """Of the first input that differs from the undamaged file."""
    kinds = {"one": Kind(data, read, **more)}  # type: ignore[arg-type]
    number = next(i for i in range(100) if make_input(kinds, i)[1:] != ("bytes", data))
    return try_input(kinds, number, folder)


def test_what_escapes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> object:
        def read(path: Path) -> None:
            raise error

        return read

    assert "KeyError" in outcome(tmp_path, raises(KeyError("x"))).escape
    assert outcome(tmp_path, raises(FormatError("x"))).escape == ""
    assert "without a new checksum" in outcome(tmp_path, lambda _: None, seal=refuse_seal).escape
    assert outcome(tmp_path, lambda _: None).escape == ""
    short = MemoryLimitError("x")
    short.__cause__ = MemoryError()
    assert "memory ran out" in outcome(tmp_path, raises(short)).escape
    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    assert "more than 0.05 s" in outcome(tmp_path, lambda _: busy()).escape


def test_documents_change_in_value_type_size_and_name() -> None:
    document = {"a": 1, "b": [1.5, "x"], "c": {"d": None}}
    made = [fuzzing.mutate_document(document, random.Random(i)) for i in range(300)]
    texts = {json.dumps(item) for item in made}
    assert document == {"a": 1, "b": [1.5, "x"], "c": {"d": None}}
    assert len(texts) > 150
    assert any("a" not in item for item in made if isinstance(item, dict))
    assert any(isinstance(item, dict) and isinstance(item.get("a"), str) for item in made)
