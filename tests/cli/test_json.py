"""The JSON of the commands has the keys that docs/json.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import RunCli

PAGE = (Path(__file__).parents[2] / "docs/json.md").read_text(encoding="utf-8")
MODULE = """
from torch import nn
from onlynorm.models import mlp

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.spare = mlp((64, 16, 16, 10)), nn.Linear(3, 3)
    def forward(self, x): return self.net(x)
"""
RUNS: dict[str, list[tuple[str, ...]]] = {
    "plan MODEL": [("plan", "mlp")],
    "plan SHAPE": [("plan", "4,5"), ("plan", "4,5", "--features", "id_cond")],
    "spectrum": [("spectrum", "4,4", "--out", "figures"), ("spectrum", "4,4", "--features", "id_cond", "--no-sweep")],
    "reconstruct": [("reconstruct", "mlp", "--features", "id_cond")],
    "verify": [("verify", "net.safetensors", "--model", "mlp")],
    "tune": [("tune", "mlp_bn", "--data", "digits", "--epochs", "1")],
    "diagnose": [("diagnose", "mlp_bn", "--html", "page.html", "--plot", "depth.svg")],
    "repair": [("repair", "module_of_json:Tied", "--data", "digits", "--method", "lsuv", "--out", "new.safetensors")],
    "factorize": [("factorize", "--random", "4", "--depth", "8", "--out", "factors.safetensors")],
    "memorize": [
        ("memorize", "digits", "--points", "50", "--out", "made.safetensors", "--figure", "noise.svg"),
        ("memorize", "real.npz"),
    ],
    "data list": [("data", "list")],
    "data get": [("data", "get", "resnet20")],
}


def documented(command: str) -> dict[str, bool]:
    """The keys of a command, and whether each is always there."""
    section = PAGE.split(f"\n## {command}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {key: not mark for row in rows for key, mark in re.findall(r"`([^`]+)`( \(\?\))?", row)}


def printed(value: Any, known: set[str], path: str = "") -> Iterator[str]:
    """The keys of a document; what is inside a key is told only where the page tells it too."""
    if path and not any(key.startswith((f"{path}.", f"{path}[].")) for key in known):
        yield path
    elif isinstance(value, dict):
        if path in known:
            yield path
        for key, item in value.items():
            yield from printed(item, known, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        if path in known:
            yield path
        for item in value:
            yield from printed(item, known, f"{path}[]")
    elif path in known:
        yield path


@pytest.mark.parametrize("command", RUNS)
def test_the_keys_of_a_command_are_those_of_its_page(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "module_of_json.py").write_text(MODULE)
    np.savez(tmp_path / "real.npz", inputs=np.eye(4), targets=np.arange(4.0))
    if command == "data get":
        monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights/resnet20_cifar10.safetensors").write_bytes(b"weights")
    if command == "verify":
        run(*RUNS["reconstruct"][0])
    keys = documented(command)
    documents = [run(*args, "--json").json() for args in RUNS[command]]
    found = [set(printed(document, set(keys))) for document in documents]
    assert set().union(*found) == set(keys)
    always = {key for key, is_always in keys.items() if is_always and "." not in key}
    assert all(always <= one for one in found)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", part) for key in keys for part in re.split(r"\[\]\.|\.", key))


def test_a_key_that_is_not_on_the_page_would_be_noticed() -> None:
    known = {"a", "b[].c", "d"}
    assert set(printed({"a": {"free": 1}, "b": [{"c": 1, "x": 2}], "y": 3}, known)) == {"a", "b[].c", "b[].x", "y"}
