"""Mutated files of every kind that onlynorm reads; `python -m tests.fuzzing --inputs 100000` runs them in processes.

A kind is a small undamaged file, a function that reads it through the public interface and checks what it accepts, and
for sealed files a function that recomputes the checksum. Input number i is a pure function of i: its kind, its mutation
and its bytes. A reader may raise the exceptions of onlynorm and nothing else, within `SECONDS` of processor time and
`BYTES` of memory.

What counts as accepted corruption:

- a sealed file with any altered byte and no new checksum: accepted at all;
- a sealed file with a new checksum: accepted, and what was read contradicts itself (shapes, types, NaN in norms, values
  that differ from those in the file) or cannot be used (called, printed, written again);
- any other file: accepted, and what was read contradicts the file or its own shapes and ranges.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import gzip
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.cli.memorize_data import find_sample
from onlynorm.data import cifar10, cifar100, fashion_mnist, load_data
from onlynorm.data.matrices import read_matrix
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import MemoryLimitError, OnlynormError
from onlynorm.evidence.bench.sweeps.frozen import FrozenOutcome
from onlynorm.evidence.cache import PIECE, Cache, read_piece
from onlynorm.evidence.records import (
    RECORD,
    Check,
    PieceNote,
    Record,
    RecordVerdict,
    parse,
    read_record,
    write_record,
)
from onlynorm.frozen import to_norm_only
from onlynorm.models import load_weights, mlp
from onlynorm.rank import Chain, simulate
from onlynorm.storage import seal, seal_json, to_plain
from onlynorm.tuning import Schedule, fit, load_adapter, only_norms, read_peft, save_adapter, take_adapter, write_peft
from onlynorm.tuning.batches import ImageFolder

SECONDS = 5.0
WAITING = 120.0
SETTING_UP = 780.0
"""Additional seconds for the first input: the files of all kinds are made before it."""
BYTES = 2**30


class CorruptionError(Exception):
    """A file was accepted that should not have been."""


@dataclass(frozen=True)
class Kind:
    """One kind of file. `read` reads and checks; `seal` repairs the checksum; `forge` edits the content itself."""

    data: bytes
    read: Callable[[Path], None]
    name: str = "file"
    seal: Callable[[bytes], bytes] | None = None
    forge: Callable[[bytes, random.Random], bytes] | None = None
    weight: int = 10


def need(is_so: object, what: str) -> None:
    if not is_so:
        raise CorruptionError(what)


# ------------------------------------------------------------------------------- mutations of bytes


def mutate(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three changes: flips, cuts, insertions, copies, numbers blown up, texts of other sizes."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(_CHANGES)(data, rng)
    return data


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        if out:
            out[_place(out, rng)] ^= 1 << rng.randrange(8)
    return bytes(out)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    place, n = _place(data, rng), rng.choice((1, 2, 4, 8))
    fill = rng.choice((b"\0", b"\xff", b"\x7f", b"9", b"(", b"[", b"{", bytes([rng.randrange(256)])))
    return data[:place] + fill * n + data[place + n :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _drop(data: bytes, rng: random.Random) -> bytes:
    place = _place(data, rng)
    return data[:place] + data[place + rng.choice((1, 2, 4, 64)) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = _place(data, rng)
    more = rng.choice(
        (rng.randbytes(rng.randrange(1, 20)), b"[" * rng.choice((10, 2000)), b"9" * 400, b"(" * 300, b"-" * 5000)
    )
    return data[:place] + more + data[place:]


def _splice(data: bytes, rng: random.Random) -> bytes:
    one, two = sorted((_place(data, rng), _place(data, rng)))
    at = _place(data, rng)
    return data[:at] + data[one:two] + data[at:]


def _number(data: bytes, rng: random.Random) -> bytes:
    """A number written in the bytes, binary or in digits, becomes a huge, zero or negative one."""
    digits = [i for i in range(len(data)) if data[i : i + 1].isdigit()]
    if digits and rng.random() < 0.6:
        start = end = rng.choice(digits)
        while end < len(data) and data[end : end + 1].isdigit():
            end += 1
        return (
            data[:start]
            + rng.choice((b"0", b"-1", b"4294967296", b"9223372036854775807", b"9" * 30, b"1e308"))
            + data[end:]
        )
    place = _place(data, rng)
    kind = rng.choice(("<I", ">I", "<Q", ">Q"))
    value = (
        rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**20))
        if kind[1] == "I"
        else rng.choice((2**63, 2**40, 2**64 - 1))
    )
    return data[:place] + struct.pack(kind, value) + data[place + struct.calcsize(kind) :]


_CHANGES = (_flip, _flip, _flip, _overwrite, _cut, _drop, _insert, _splice, _number, _number)


def _place(data: bytes | bytearray, rng: random.Random) -> int:
    """A position, more often near the beginning or the end, where headers are."""
    n = max(1, len(data))
    near = min(n, 400)
    return rng.choice((rng.randrange(n), rng.randrange(near), n - 1 - rng.randrange(near)))


# ------------------------------------------------------------------------------- mutations of documents


def deep(n: int) -> Any:
    value: Any = 0
    for _ in range(n):
        value = [value]
    return value


_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 10**25, -(2**70), 0.5, -1e308, 1e308, {"$float": "nan"},
    {"$float": "inf"}, {"$float": "1_0"}, {"$float": []}, "", "0", "nan", "x" * 2000, "\x1b[31m", "\udc80", "../../x",
    [], {}, [[]], {"a": 1}, deep(30), deep(200), [1, "a", None], "ReLU", "Softplus", "PReLU", "wide",
    "id_cond", "he_normal", "float16", "affine",
)  # fmt: skip


def mutate_document(document: Any, rng: random.Random) -> Any:
    """The JSON value with one to three places changed in value, type, size or name."""
    holder = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(holder))
        inside, key = rng.choice(places)
        value = inside[key]
        how = rng.randrange(8)
        if how == 0 and len(inside) > 1:
            del inside[key]
        elif how == 1 and type(value) in (int, float):
            inside[key] = rng.choice((value + 1, value - 1, value * 2, -value, value * 10**6, float(value), str(value)))
        elif how == 2 and isinstance(value, list):
            inside[key] = rng.choice((value * 2, value[::-1], value[:-1], value * 3000 if len(value) < 9 else value))
        elif how == 3 and isinstance(inside, dict):
            inside[rng.choice(("x", "", key + "x"))] = inside.pop(key) if rng.random() < 0.5 else copy.deepcopy(value)
        elif how == 4:
            other, place = rng.choice(places)
            with contextlib.suppress(LookupError):
                inside[key] = copy.deepcopy(other[place])
        elif how == 5 and isinstance(value, str) and value:
            inside[key] = rng.choice((value[:-1], value[::-1], value.upper(), value + "0"))
        else:
            inside[key] = copy.deepcopy(rng.choice(_VALUES))
    return holder[0]


def _places(outer: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    keys = list(outer) if isinstance(outer, dict) else range(len(outer))
    for key in keys:
        yield outer, key
        if isinstance(outer[key], dict | list) and depth < 20:
            yield from _places(outer[key], depth + 1)


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
           torch.complex64, torch.float8_e4m3fn)  # fmt: skip


def mutate_tensors(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """The tensors with one dropped, renamed, cast, reshaped, emptied, or with other numbers in it."""
    out = {name: value.clone() for name, value in tensors.items()}
    name = rng.choice(sorted(out))
    value = out[name]
    how = rng.randrange(9)
    if how == 0:
        del out[name]
    elif how == 1:
        out[rng.choice((f"{name}x", "", "core.9", "\x1b[2J", name[:-1], "blocks.9.inner.weight"))] = out.pop(name)
    elif how == 2:
        out[name] = value.to(rng.choice(_DTYPES))
    elif how == 3:
        out[name] = value.reshape(-1) if value.ndim > 1 else value.reshape(1, -1)
    elif how == 4:
        out[name] = torch.zeros(rng.choice(((0,), (0, 2**40), (), (1,), (3, 3), (1000,))), dtype=value.dtype)
    elif how == 5:
        out[name] = torch.cat([value.reshape(-1), value.reshape(-1)])
    elif how == 6 and value.numel() and value.is_floating_point():
        value.reshape(-1)[rng.randrange(value.numel())] = rng.choice((math.nan, math.inf, -math.inf, 0.0, 1e4, -1.0))
    elif how == 7 and value.numel() and value.is_floating_point():
        value.reshape(-1)[rng.randrange(value.numel())] += 1e-3
    else:
        out["extra"] = torch.ones(2)
    return out


def forge_tensors(data: bytes, rng: random.Random) -> bytes:
    """A sealed tensor file with another document or other tensors, and a right checksum."""
    n = int.from_bytes(data[:8], "little")
    document = json.loads(json.loads(data[8 : 8 + n])["__metadata__"]["onlynorm"])
    tensors = safetensors.torch.load(data)
    if rng.random() < 0.6:
        rest = {name: value for name, value in document.items() if name not in ("kind", "format", "onlynorm", "sha256")}
        document = {**document, **as_dict(mutate_document(rest, rng))}
    else:
        tensors = mutate_tensors(tensors, rng)
    text = json.dumps({**document, "sha256": "0" * 64}, sort_keys=True, separators=(",", ":"))
    return seal(safetensors.torch.save(tensors, metadata={"onlynorm": text}))


def forge_json(kind: str, data: bytes, rng: random.Random) -> bytes:
    """A sealed JSON file with another body and a right checksum."""
    return seal_json(as_dict(mutate_document(json.loads(data)["body"], rng)), kind=kind)


def reseal_json(kind: str, data: bytes) -> bytes:
    return seal_json(json.loads(data)["body"], kind=kind)


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"x": value}


# ------------------------------------------------------------------------------- sealed kinds


@dataclass
class Samples:
    """Undamaged files of every kind, made in one folder."""

    folder: Path
    kinds: dict[str, Kind] = field(default_factory=dict)

    def add_tensors(
        self, name: str, read: Callable[[Path], None], write: Callable[[Path], object], weight: int = 10
    ) -> None:
        path = self.folder / "sample"
        path.unlink(missing_ok=True)
        write(path)
        self.kinds[name] = Kind(path.read_bytes(), read, seal=seal, forge=forge_tensors, weight=weight)

    def add_json(self, name: str, kind: str, read: Callable[[Path], None], data: bytes, file: str = "file") -> None:
        forge, repair = functools.partial(forge_json, kind), functools.partial(reseal_json, kind)
        self.kinds[name] = Kind(data, read, file, seal=repair, forge=forge)


X = torch.linspace(-1.0, 1.0, 27, dtype=torch.float64).reshape(9, 3)


def tiny(seed: int = 0) -> nn.Sequential:
    return mlp((3, 2, 2), seed=seed).double().eval()


def wide(seed: int = 0) -> nn.Sequential:
    return mlp((3, 3, 3, 2), seed=seed).double().eval()


def norms_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def need_usable(
    network: nn.Module, shape: tuple[int, ...], tensors: dict[str, Tensor], *, inputs: Tensor | None = None
) -> None:
    """Raises unless the network runs and its tensors are those of the file."""
    held = network.state_dict()
    for name, value in tensors.items():
        if name in held:
            need(torch.equal(held[name], value.to(held[name].dtype)) or value.isnan().any(), f"{name} differs")
    network.eval()
    dtype = next(network.parameters()).dtype
    with torch.no_grad():
        need(tuple(network((X if inputs is None else inputs).to(dtype)).shape) == shape, "an output of another shape")


def tensors_in(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(path.read_bytes())


def sealed_kinds(samples: Samples) -> None:
    def read_network(path: Path) -> None:
        network = on.load(path, like=tiny(1))
        tensors = tensors_in(path)
        need_usable(network, (9, 2), tensors)
        for name, value in network.state_dict().items():
            norm = name.endswith(("weight", "bias", "running_mean", "running_var"))
            need(not norm or value.isfinite().all(), f"{name} is not finite")

    constructions = {
        "wide": on.Wide(activation=nn.ReLU()), "id_cond": on.Wide(features="id_cond"),
        "affine": on.Wide(norms="affine"), "low_rank": on.LowRank(), "residual": on.Residual(activation=nn.GELU()),
        "deep": on.Deep(), "multilayer": on.Multilayer(),
    }  # fmt: skip
    for name, construction in constructions.items():
        result = on.reconstruct(tiny(), X, construction)
        samples.add_tensors(
            f"reconstruction, {name}",
            read_network,
            functools.partial(on.save, result),
            weight=6 if name == "wide" else 2,
        )

    partial = samples.folder / "partial"
    on.reconstruct(tiny(), X, partial=partial)
    pieces = {path.name: path.read_bytes() for path in partial.iterdir()}

    def read_piece(path: Path) -> None:
        folder = path.parent / "resumed"
        folder.mkdir(exist_ok=True)
        for name, data in pieces.items():
            (folder / name).write_bytes(path.read_bytes() if name == "layer-0000.safetensors" else data)
        result = on.reconstruct(tiny(), X, partial=folder)
        need(len(str(result)) > 0 and result.layers[0].shape == (2, 3), "evidence of another layer")
        need_usable(result.network, (9, 2), {})

    first = pieces["layer-0000.safetensors"]
    samples.kinds["layer of a partial reconstruction"] = Kind(
        first, read_piece, seal=seal, forge=forge_tensors, weight=4
    )

    def read_norm_only(path: Path) -> None:
        model = on.load(path, like=tiny(1))
        need_usable(model, (9, 2), tensors_in(path))

    for features in ("id_cond", "he_normal"):
        model = to_norm_only(tiny(), features=features, seed=3)
        samples.add_tensors(f"norm-only model, {features}", read_norm_only, functools.partial(on.save, model), 5)

    def read_earlier(path: Path) -> None:
        like = nn.Sequential(*(nn.Linear(4, 4, bias=i != 4) for i in range(7)))
        need_usable(on.load(path, like=like), (9, 4), tensors_in(path), inputs=torch.ones(9, 4))

    earlier = Path(__file__).with_name("files") / "norm_only_linear.safetensors"
    samples.add_tensors("norm-only model, earlier", read_earlier, functools.partial(shutil.copy, earlier), 5)

    factors = on.factorize(torch.tensor([[0.5, 0.2], [-0.9, 1.5]], dtype=torch.float64), depth=6)

    def read_factors(path: Path) -> None:
        found = on.load(path)
        need(str(found) and found.product().shape == (found.dim + found.n_extra,) * 2, "a product of another shape")
        need(found.depth > 1000 or found.apply(torch.ones(1, found.dim)).isfinite().all(), "infinite outputs")

    samples.add_tensors("factorization", read_factors, functools.partial(on.save, factors))

    points = torch.linspace(-1.0, 1.0, 10, dtype=torch.float64).reshape(5, 2)
    memorizer = on.memorize(points, torch.tensor([0, 1, 1, 0, 1]))

    def read_memorizer(path: Path) -> None:
        found = on.load(path)
        need(found(torch.ones(1, found.n_inputs)).shape == (1, found.n_outputs), "an output of another shape")
        need(all(p.isfinite().all() for p in found.parameters()), "weights that are not finite")
        need(found.facts is None or str(found.facts), "facts")

    samples.add_tensors("memorizer", read_memorizer, functools.partial(on.save, memorizer))

    by_norms = on.memorize_norms(points, torch.tensor([0, 1, 1, 0, 1]))

    def read_norm_memorizer(path: Path) -> None:
        found = on.load(path)
        rows, columns = found.features.shape
        need(found(torch.ones(1, columns)).shape == (1, rows), "an output of another shape")
        need(found.code == "real" or found.classify(torch.ones(1, columns)).shape == (1,), "no class")
        need(all(p.isfinite().all() for p in found.parameters()), "norms that are not finite")
        need(all(torch.equal(p, tensors_in(path)[name]) for name, p in found.named_parameters()), "other norms")
        need(found.facts is None or str(found.facts), "facts")

    samples.add_tensors("norm memorizer", read_norm_memorizer, functools.partial(on.save, by_norms))

    def read_repaired(path: Path) -> None:
        need_usable(on.load(path, like=wide(1)), (9, 2), tensors_in(path))

    for method in ("lsuv", "batch_norm", "residual"):
        result = on.repair(wide(), X, method=method)
        samples.add_tensors(f"repaired, {method}", read_repaired, functools.partial(on.save, result), 4)


def chain_kinds(samples: Samples) -> None:
    chain = Chain(width=3, n_samples=2, n_chains=2)

    def write(path: Path) -> None:
        simulate(chain, 40, every=2, burn_in=4, checkpoint=path)

    def read(path: Path) -> None:
        found = simulate(chain, 44, every=2, burn_in=4, checkpoint=path)
        need(found.n_steps == 44 and found.n_observed == 20 and str(found), "counts that do not fit")

    samples.add_tensors("chain state", read, write, weight=5)


def tuning_kinds(samples: Samples) -> None:
    model = norms_model()
    only_norms(model, also=("3",))
    base = norms_model()

    def need_values(tuned: nn.Module, values: dict[str, Tensor]) -> None:
        held = tuned.state_dict()
        for name, value in values.items():
            need(name in held and held[name].shape == value.shape, f"{name} of another shape")
        with torch.no_grad():
            need(tuned.eval()(X.float()).shape[0] == 9, "an output of another shape")

    def read_adapter(path: Path) -> None:
        fresh = copy.deepcopy(base)
        adapter = load_adapter(fresh, path)
        need(str(adapter), "an adapter without a text")
        need_values(fresh, adapter.tensors)

    samples.add_tensors("adapter", read_adapter, functools.partial(save_adapter, model))

    def describe_adapter(path: Path) -> None:
        adapter = on.load(path)
        need(str(adapter) and adapter.values, "an adapter without a text")

    samples.add_tensors("adapter, described", describe_adapter, functools.partial(save_adapter, model), 4)

    folder = samples.folder / "peft"
    write_peft(take_adapter(model), folder)
    peft = {path.name: path.read_bytes() for path in folder.iterdir()}

    def read_folder(name: str, path: Path) -> None:
        place = path.parent / "peft"
        place.mkdir(exist_ok=True)
        for other, data in peft.items():
            (place / other).write_bytes(path.read_bytes() if other == name else data)
        adapter = read_peft(base, place)
        need(adapter.tensors and str(adapter), "an adapter without tensors")

    for name, forge in (("adapter_model.safetensors", forge_safetensors), ("adapter_config.json", forge_text)):
        read = functools.partial(read_folder, name)
        samples.kinds[f"PEFT, {name}"] = Kind(peft[name], read, forge=forge, weight=5)

    data = X.float(), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    schedule = Schedule(epochs=1, batch_size=5, optimizer="adamw", lr=1e-3)

    def write_run(path: Path) -> None:
        fit(copy.deepcopy(model), data, schedule=schedule, checkpoint=path, accelerator="cpu")

    def read_run(path: Path) -> None:
        trained = copy.deepcopy(model)
        before = copy.deepcopy(trained.state_dict())
        try:
            result = fit(trained, data, schedule=schedule, checkpoint=path, accelerator="cpu")
        except OnlynormError:
            now = trained.state_dict()
            need(all(torch.equal(now[name], before[name]) for name in before), "a model that was changed and refused")
            raise
        need(str(result) and result.n_steps >= 0, "a run without a text")

    samples.add_tensors("training run", read_run, write_run, weight=3)


def record_kinds(samples: Samples) -> None:
    record = Record(
        artifact="toy:fig-1", title="Squares", claim="Squares grow.", kind="figure", scale="quick",
        verdict=RecordVerdict.CAVEAT, reasons=("Quick.",), values={"slope": 2.0},
        sizes={"n": 4, "names": ["a"]}, seeds=(0,),
        checks=(Check("slope", 2.0, True, "2 +- 0.1", "Fig. 1", value=2.0), Check("tail", math.nan, False, "0", "law")),
        curves=(Curve("data", [0, 1, 2], [1, 4], kind="histogram", panel="left"), Curve("law", [0.5], [math.nan])),
        panels=(Panel("left", "Left", "x", "y"),), table=Table(["name", "value"], [["a", 1.5]]),
        pieces=(PieceNote("k=1", "ab" * 32, {"k": 1}, 0.25, is_reloaded=True),), versions={"torch": "2.0"},
        platform={"system": "Linux"}, code="cd" * 32, created="2024-01-02T03:04:05+00:00", seconds=1.5,
    )  # fmt: skip
    write_record(samples.folder / "record", record)

    def read_one(path: Path) -> None:
        found = read_record(path)
        again = path.with_name("again")
        write_record(again, found)
        need(repr(read_record(again)) == repr(found) and str(found), "a record that differs when it is written again")

    samples.add_json("record", RECORD, read_one, (samples.folder / "record").read_bytes())

    piece = {"key": "k", "seconds": 1.5, "made_with": {"torch": "2"}, "result": {"loss": [1.0, 2.0]}}

    def read_stored(path: Path) -> None:
        found = read_piece(path, "k")
        need(
            found is not None and "result" in found and isinstance(found["seconds"], float), "a piece without a result"
        )

    samples.add_json("piece of reproduce", PIECE, read_stored, seal_json(to_plain(piece), kind=PIECE))

    cache = Cache(samples.folder / "rows", modules=["onlynorm.evidence.bench.sweeps.frozen"])
    made_of = {"network": "a", "seed": 1}
    fresh = {"accuracy": 0.5, "n_trained": 3, "n_total": 4, "gammas": [1.0, 2.0], "is_frozen": True, "seconds": 1.0}

    def check(stored: object) -> FrozenOutcome:
        return parse(FrozenOutcome, stored, what="a run", cure="It is computed again.")

    cache.get_or_compute("row", made_of, lambda: fresh, check=check)
    (stored,) = (samples.folder / "rows").iterdir()

    def read_row(path: Path) -> None:
        cache.folder.mkdir(exist_ok=True)
        (cache.folder / stored.name).write_bytes(path.read_bytes())
        found = cache.get_or_compute("row", made_of, lambda: fresh, check=check)
        row = check(found.result)
        need(isinstance(row.accuracy, float) and all(isinstance(g, float) for g in row.gammas), "a run of other fields")
        if not found.is_reloaded:
            raise OnlynormError("measured again")

    samples.add_json("benchmark run", PIECE, read_row, stored.read_bytes())


# ------------------------------------------------------------------------------- data and weights


def forge_text(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(mutate_document(json.loads(data), rng)).encode()


def forge_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Other tensors, or the header with other fields and the same numbers."""
    if rng.random() < 0.4:
        return safetensors.torch.save(mutate_tensors(safetensors.torch.load(data), rng))
    n = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_document(json.loads(data[8 : 8 + n]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + n :]


def forge_gzip(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(mutate(gzip.decompress(data), rng), mtime=0)


def forge_zip(data: bytes, rng: random.Random) -> bytes:
    """The members mutated, dropped, doubled, compressed otherwise, or one that expands a lot; checksums are right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        members = old.infolist()
        chosen = rng.choice([m for m in members if m.file_size]).filename
        for member in members:
            content = old.read(member)
            how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
            if member.filename == chosen:
                what = rng.randrange(12)
                if what == 0:
                    continue
                if what == 1:
                    new.writestr(member.filename, content, how)
                if what == 2:
                    content, how = content + bytes(2**24), zipfile.ZIP_DEFLATED
                if what > 2:
                    content = mutate(content, rng)
            new.writestr(member.filename, content, how)
    return out.getvalue()


def forge_npy(data: bytes, rng: random.Random) -> bytes:
    """Another header: shapes, types and nesting; the length field fits."""
    array = np.load(io.BytesIO(data))
    shape = rng.choice(("(2, 3)", "(3, 2)", "(6,)", "()", "(10**12,)", "(1000000000000,)", "(2, 3, 1)", "(-1, 6)",
                        "(4611686018427387904, 4)", "[2, 3]", "(2.0, 3)", "(True, 6)", "(" * 90 + ")" * 90, "(0, 3)",
                        "-" * 4000 + "1",
                        "(2, 3), 'x': 1", "lambda: 0", "'\\ud800'"))  # fmt: skip
    descr = rng.choice(("'<f8'", "'<f8'", "'>f4'", "'|O'", "'<U8'", "'|V8'", "'<c16'", "[('a', '<f8')]", "'<f16'",
                        "'f0'",
                        "('<f8', (1000000000,))", "'<M8[s]'", "1", "'V2147483647'", "'<i8'", "'|b1'"))  # fmt: skip
    order = rng.choice(("False", "True", "0", "'x'"))
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode() + b"\n"
    version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    length = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + length + header + array.tobytes()[: rng.choice((48, 48, 24, 0))]


_OPERATIONS = [bytes([code]) for code in b"(.0K\x01Nt\x85\x86\x87R})]elusab\x94jqhrpgcJ\x8a\x8c\x8e\x93\x81i\x88\x89G"]


def forge_pickle(data: bytes, rng: random.Random) -> bytes:
    """Operations put in anywhere, or nested tuples as keys of dicts."""
    if rng.random() < 0.2:
        levels = rng.choice((5, 30, 60))
        nested = b"(t" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))
        return b"\x80\x02}" + nested + b"K\x01s."
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        place = _place(out, rng)
        new = b"".join(rng.choice(_OPERATIONS) for _ in range(rng.choice((1, 2, 5))))
        out[place : place + rng.choice((0, 1, 2))] = new
    return bytes(out)


def forge_image(data: bytes, rng: random.Random) -> bytes:
    """A PNG with other sizes or fields in its head, or other pixels, and right checksums; other formats are mutated."""
    if not data.startswith(b"\x89PNG"):
        return mutate(data, rng)
    if rng.random() < 0.4:
        start = data.index(b"IDAT")
        n = int.from_bytes(data[start - 4 : start], "big")
        chunk = b"IDAT" + zlib.compress(mutate(zlib.decompress(data[start + 4 : start + 4 + n]), rng))
        framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        return data[: start - 4] + framed + data[start + 8 + n :]
    size = rng.choice(((4, 4), (2**14, 2**14), (2**31 - 1, 1), (2**20, 2**20), (0, 4), (60000, 60000), (5, 3)))
    head = struct.pack(
        ">IIBBBBB", *size, rng.choice((8, 8, 16, 1, 7)), rng.choice((2, 2, 0, 3, 6, 9)), 0, 0, rng.choice((0, 1))
    )
    chunk = b"IHDR" + head
    return data[:8] + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]


def forge_csv(data: bytes, rng: random.Random) -> bytes:
    cells = data.decode().replace("\n", ",\n,").split(",")
    cells[rng.randrange(len(cells))] = rng.choice(
        ("", "nan", "1e999", "x", "0x10", "1_0", '"', "\0", "9" * 400, "1,2", "#")
    )
    return ",".join(cells).encode()


def need_split(split: Any, shape: tuple[int, ...], n_classes: int) -> None:
    for inputs, labels in ((split.train_inputs, split.train_labels), (split.test_inputs, split.test_labels)):
        need(inputs.shape[1:] == shape and len(inputs) == len(labels) > 0, "images and labels that do not fit")
        need(inputs.isfinite().all() and labels.min() >= 0 and labels.max() < n_classes, "values out of range")


def data_kinds(samples: Samples) -> None:
    def in_folder(name: str, files: dict[str, bytes], load: Callable[[], None]) -> Callable[[Path], None]:
        """Reads a data set of which the file under test is one; the last of the files is replaced by it."""

        def read(path: Path) -> None:
            folder = path.parent / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            for file, data in files.items():
                (folder / file).write_bytes(data)
            (folder / list(files)[-1]).write_bytes(path.read_bytes())
            before = os.environ.get("ONLYNORM_DATA")
            os.environ["ONLYNORM_DATA"] = str(folder.parent)
            try:
                load()
            finally:
                for file in files:
                    (folder / file).unlink()
                folder.rmdir()
                os.environ.pop("ONLYNORM_DATA") if before is None else os.environ.update(ONLYNORM_DATA=before)

        return read

    pixels = (np.arange(2 * 3072) * 7 % 256).astype(np.uint8).reshape(2, 3072)
    binary = np.column_stack([[3, 9], pixels]).astype(np.uint8).tobytes()
    images = {"data_batch_1.bin": binary, "test_batch.bin": binary}
    read = in_folder("cifar-10-batches-bin", images, lambda: need_split(cifar10(), (3, 32, 32), 10))
    samples.kinds["CIFAR-10, binary"] = Kind(binary, read, weight=4)
    binary = np.column_stack([[1, 19], [3, 99], pixels]).astype(np.uint8).tobytes()
    files = {"train.bin": binary, "test.bin": binary}
    read = in_folder("cifar-100-binary", files, lambda: need_split(cifar100(), (3, 32, 32), 100))
    samples.kinds["CIFAR-100, binary"] = Kind(binary, read, weight=2)
    pickled = pickle.dumps({b"data": pixels, b"labels": [3, 9]}, protocol=2)
    files = {"data_batch_1": pickled, "test_batch": pickled}
    read = in_folder("cifar-10-batches-py", files, lambda: need_split(cifar10(), (3, 32, 32), 10))
    samples.kinds["CIFAR-10, pickle"] = Kind(pickled, read, forge=forge_pickle, weight=4)
    for protocol in (2, 4):
        content = {"data": pixels, "fine_labels": [3, 99], "coarse_labels": [1, 2], "filenames": ["a", "b"]}
        pickled = pickle.dumps(content, protocol=protocol)
        files = {"train": pickled, "test": pickled}
        read = in_folder("cifar-100-python", files, lambda: need_split(cifar100(), (3, 32, 32), 100))
        samples.kinds[f"CIFAR-100, pickle {protocol}"] = Kind(pickled, read, forge=forge_pickle, weight=8)
    small = {
        f"{part}-{what}": gzip.compress(data, mtime=0)
        for part in ("train", "t10k")
        for what, data in (
            ("labels-idx1-ubyte.gz", struct.pack(">II", 0x801, 2) + b"\3\4"),
            ("images-idx3-ubyte.gz", struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 784)),
        )
    }
    for last in small:
        files = {**{name: data for name, data in small.items() if name != last}, last: small[last]}
        read = in_folder("fashion-mnist", files, lambda: need_split(fashion_mnist(), (1, 28, 28), 10))
        samples.kinds[f"idx, {last}"] = Kind(small[last], read, forge=forge_gzip, weight=3)

    file = io.BytesIO()
    np.save(file, np.arange(6.0).reshape(2, 3))

    def read_array(path: Path) -> None:
        found = load_data(str(path))
        need(found.train_inputs.is_floating_point() and len(found.train_inputs) > 0, "no samples")
        need(
            found.train_inputs.numel() * found.train_inputs.element_size() <= path.stat().st_size * 8,
            "numbers of no file",
        )
        need(read_matrix(path).ndim == 2, "no matrix")

    samples.kinds["npy"] = Kind(file.getvalue(), read_array, "file.npy", forge=forge_npy)
    samples.kinds["csv"] = Kind(
        b"1.5,2,3\n4,5,6\n",
        lambda p: need(read_matrix(p).ndim == 2, "no matrix"),
        "file.csv",
        forge=forge_csv,
        weight=5,
    )

    def read_points(path: Path) -> None:
        found = find_sample(str(path), None)
        need(found.inputs.ndim > 0 and found.targets.ndim > 0 and found.n_classes != 0, "no points")

    points = {"inputs": np.arange(6.0).reshape(2, 3), "labels": np.array([0, 1])}
    for name, save in (("stored", np.savez), ("compressed", np.savez_compressed)):
        file = io.BytesIO()
        save(file, **points)
        samples.kinds[f"npz, {name}"] = Kind(file.getvalue(), read_points, "file.npz", forge=forge_zip, weight=6)

    tensors = {"inputs": X.float(), "labels": torch.arange(9)}

    def read_tensors(path: Path) -> None:
        found = load_data(str(path))
        need(len(found.train_labels) in (0, len(found.train_inputs)), "labels that do not fit")

    samples.kinds["safetensors, data"] = Kind(
        safetensors.torch.save(tensors), read_tensors, "file.safetensors", forge=forge_safetensors
    )

    samples.kinds["safetensors, points"] = Kind(
        safetensors.torch.save(tensors), read_points, "file.safetensors", forge=forge_safetensors, weight=5
    )
    samples.kinds["safetensors, matrix"] = Kind(
        safetensors.torch.save({"a": X}),
        lambda p: need(read_matrix(p).ndim == 2, "no matrix"),
        "file.safetensors",
        forge=forge_safetensors,
        weight=5,
    )

    def read_weights(path: Path) -> None:
        network = load_weights(tiny(1), path)
        need_usable(network, (9, 2), {})

    state = tiny().state_dict()
    samples.kinds["safetensors, weights"] = Kind(
        safetensors.torch.save(state), read_weights, "file.safetensors", forge=forge_safetensors
    )
    for name, is_new in (("zip", True), ("legacy", False)):
        file = io.BytesIO()
        torch.save(state, file, _use_new_zipfile_serialization=is_new)
        forge = forge_torch if is_new else forge_pickle
        samples.kinds[f"PyTorch file, {name}"] = Kind(file.getvalue(), read_weights, "file.pth", forge=forge, weight=8)

    from PIL import Image

    picture = Image.fromarray((np.arange(48) * 5).astype(np.uint8).reshape(4, 4, 3))
    for ending in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        file = io.BytesIO()
        picture.save(file, {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending.upper()))
        read = functools.partial(read_image, ending)
        samples.kinds[f"image, {ending}"] = Kind(file.getvalue(), read, f"file.{ending}", forge=forge_image, weight=2)


def forge_torch(data: bytes, rng: random.Random) -> bytes:
    """The archive with another pickle in it, or forged as any archive."""
    if rng.random() < 0.5:
        return forge_zip(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            new.writestr(
                member.filename, forge_pickle(content, rng) if member.filename.endswith("data.pkl") else content
            )
    return out.getvalue()


def read_image(ending: str, path: Path) -> None:
    folder = path.parent / "images" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"a.{ending}").write_bytes(path.read_bytes())
    try:
        image, label = ImageFolder(folder.parent, size=4)[0]
        need(image.shape == (3, 4, 4) and image.min() >= 0 and image.max() <= 1 and label == 0, "no image")
    finally:
        (folder / f"a.{ending}").unlink()


# ------------------------------------------------------------------------------- running


def make_kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of file by name."""
    samples = Samples(folder)
    for add in (sealed_kinds, chain_kinds, tuning_kinds, record_kinds, data_kinds):
        add(samples)
    return samples.kinds


@dataclass
class Outcome:
    """What came of one input: refused with which error, accepted, or an escape with its reason."""

    kind: str
    mode: str
    result: str
    escape: str = ""


class Late(BaseException):
    """An input took too long; no reader catches it."""


def make_input(kinds: dict[str, Kind], number: int) -> tuple[str, str, bytes]:
    """(kind, mode, bytes) of the input with this number."""
    rng = random.Random(f"onlynorm {number}")
    name = rng.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
    kind = kinds[name]
    modes = ["bytes", "bytes", *(["repaired"] if kind.seal else []), *(["forged"] * 3 if kind.forge else [])]
    mode = rng.choice(modes)
    if mode == "forged":
        assert kind.forge is not None
        with contextlib.suppress(UnicodeEncodeError, OverflowError, ValueError, zipfile.BadZipFile):
            return name, mode, kind.forge(kind.data, rng)
        mode = "bytes"
    data = mutate(kind.data, rng)
    if mode == "repaired":
        assert kind.seal is not None
        try:
            return name, mode, kind.seal(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OnlynormError):
            return name, "bytes", data  # nothing left that a checksum could be put into
    return name, mode, data


def try_input(kinds: dict[str, Kind], number: int, folder: Path) -> Outcome:
    """Reads one input under a limit of processor time, which no load of the machine changes, and looks for escapes."""
    name, mode, data = make_input(kinds, number)
    kind = kinds[name]
    path = folder / kind.name
    path.write_bytes(data)
    is_same = data == kind.data

    def late(*_: object) -> None:
        raise Late

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    result, escape = "accepted", ""
    try:
        kind.read(path)
        if kind.seal is not None and mode == "bytes" and not is_same:
            escape = "an altered file was accepted without a new checksum"
    except OnlynormError as error:
        result = type(error).__name__
        if isinstance(error, MemoryLimitError) and isinstance(error.__cause__, MemoryError):
            escape = f"memory ran out: {error}"
        if is_same:
            escape = f"an undamaged file was refused: {error}"
    except Late:
        result, escape = "late", f"more than {SECONDS} s:\n{traceback.format_exc()}"
    except Exception as error:
        result, escape = type(error).__name__, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, old)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > BYTES:
        escape = f"{grown / 2**30:.2f} GiB of memory"
    return Outcome(name, mode, result, escape)


def warm_up(kinds: dict[str, Kind], folder: Path) -> None:
    """Reads every undamaged file once: imports and the first use of a device do not count as the time of an input."""
    for name, kind in kinds.items():
        path = folder / kind.name
        path.write_bytes(kind.data)
        try:
            kind.read(path)
        except OnlynormError as error:
            raise AssertionError(f"the undamaged {name} was refused: {error}") from error


def _work(numbers: range, current: Any, queue: Any) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        folder = Path(name)
        kinds = make_kinds(folder)
        warm_up(kinds, folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * BYTES, used + 2 * BYTES))
        for number in numbers:
            current.value = number
            outcome = try_input(kinds, number, folder)
            queue.put((number, outcome))
    queue.put(None)


def run(inputs: int, workers: int, first: int = 0) -> int:
    """Runs the inputs in so many processes, prints a table by kind and every escape; the number of escapes."""
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    parts = [range(first + place, first + inputs, workers) for place in range(workers)]
    queue = context.Queue()
    currents = [context.Value("q", -1) for _ in parts]
    processes = [context.Process(target=_work, args=(part, c, queue)) for part, c in zip(parts, currents, strict=True)]
    for process in processes:
        process.start()
    counts: Counter[tuple[str, str]] = Counter()
    escapes: list[str] = []
    n_done = n_ended = 0  # a process that dies ends the run of its part, and is an escape
    dead: set[int] = set()
    last = [(-1, time.monotonic() + SETTING_UP)] * workers
    while n_ended + len(dead) < workers:
        try:
            found = queue.get(timeout=5.0)
        except Exception:
            for place, process in enumerate(processes):
                if process.exitcode not in (None, 0) and place not in dead:
                    dead.add(place)
                    escapes.append(f"input {currents[place].value}: the process ended with {process.exitcode}")
                    print(escapes[-1], flush=True)
                if currents[place].value != last[place][0]:
                    last[place] = (currents[place].value, time.monotonic())
                elif process.exitcode is None and time.monotonic() - last[place][1] > WAITING:
                    process.kill()  # it waits for something, or loops where no signal reaches it
            continue
        if found is None:
            n_ended += 1
            continue
        number, outcome = found
        n_done += 1
        counts[outcome.kind, "accepted" if outcome.result == "accepted" else "refused"] += 1
        if outcome.escape:
            escapes.append(f"input {number} ({outcome.kind}, {outcome.mode}): {outcome.escape}")
            print(escapes[-1].encode("ascii", "backslashreplace").decode(), flush=True)
    for process in processes:
        process.join()
    for name in sorted({kind for kind, _ in counts}):
        print(f"{name:45} {counts[name, 'refused']:7,} refused {counts[name, 'accepted']:7,} accepted")
    print(f"{n_done:,} inputs, {len(escapes)} escapes in {time.perf_counter() - started:.0f} s")
    return len(escapes) + (n_done != inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to repeat one")
    chosen = parser.parse_args()
    sys.exit(1 if run(chosen.inputs, chosen.workers, chosen.first) else 0)


if __name__ == "__main__":
    main()
