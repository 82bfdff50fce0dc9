"""The contract of every kind of file: exact round trips, written whole or not at all, damage refused with a cure."""

from __future__ import annotations

import copy
import errno
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from broken_disks import content, fill_disk, forbid_new_files
from earlier_files import FOLDER, sines
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError, OnlynormError, StorageError, ValueRangeError
from onlynorm.files import KINDS, RESUMED
from onlynorm.frozen.checkpoint import EARLIER_KIND
from onlynorm.models import mlp
from onlynorm.rank.repairs.rescale import Skip
from onlynorm.storage import canonical, seal, tensors_digest
from onlynorm.tuning import Adapter, take_adapter

X = torch.linspace(-1.0, 1.0, 27, dtype=torch.float64).reshape(9, 3).sin()
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])


def model(seed: int = 0) -> nn.Sequential:
    return mlp((3, 3, 3, 2), seed=seed).double().eval()


def normed() -> nn.Sequential:
    return mlp((3, 4, 2), norm="batch").double().eval()


def repaired(method: str) -> on.rank.Repaired:
    return on.repair(model(), X, LABELS, method=method)


@dataclass(frozen=True)
class Case:
    """An object with a file: how it is made, the fresh model it is loaded onto, and what must come back unchanged."""

    make: Callable[[], Any]
    values: Callable[[Any], Any]
    like: Callable[[], nn.Module] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.like is None else {"like": self.like()}


def module_values(network: Any) -> Any:
    """All tensors, frozen ones too, and the outputs."""
    network = network if isinstance(network, nn.Module) else getattr(network, "network", None) or network.model
    with torch.no_grad():
        outputs = copy.deepcopy(network).eval()(X)
    return tensors_digest({**network.state_dict(), **dict(network.named_buffers()), "outputs": outputs})


def memorizer_values(network: Any) -> Any:
    return module_values(network), network.facts, str(network)


def factors_values(found: on.identity.Factorization) -> Any:
    return tensors_digest({"factors": found.factors()}), canonical(found.as_dict())


def adapter_values(found: Adapter) -> Any:
    return tensors_digest({name: found.values[name] for name in sorted(found.values)}), found.heads, found.base


def fresh() -> nn.Module:
    return model(seed=1)


CASES: dict[str, Case] = {
    "reconstruction": Case(lambda: on.reconstruct(model(), inputs=X), module_values, fresh),
    "structured": Case(lambda: on.reconstruct(model(), X, on.Wide(features="id_cond")).network, module_values, fresh),
    "norm-only": Case(lambda: on.to_norm_only(model(), features="id_cond", seed=3).eval(), module_values, fresh),
    "repaired": Case(lambda: repaired("lsuv"), module_values, fresh),
    "with norms": Case(lambda: repaired("batch_norm"), module_values, fresh),
    "with skips": Case(lambda: repaired("residual"), module_values, fresh),
    "factorization": Case(lambda: on.factorize(torch.tensor([[0.5, 0.2], [-0.9, 1.5]]).double(), 6), factors_values),
    "memorizer": Case(lambda: on.memorize(X, LABELS), memorizer_values),
    "norm memorizer": Case(lambda: on.memorize_norms(X, LABELS), memorizer_values),
    "adapter": Case(lambda: take_adapter(normed()), adapter_values),
}


NETWORKS = ("reconstruction", "structured", "norm-only")
MODULES = ("structured", "norm-only", "memorizer", "norm memorizer")
REPAIRED = ("repaired", "with norms", "with skips")
WITH_LIKE = tuple(name for name, case in CASES.items() if case.like is not None)


def only(*names: str) -> pytest.MarkDecorator:
    """Runs a test of the contract for these cases."""
    return pytest.mark.parametrize("name", names)


def all_but(*names: str) -> pytest.MarkDecorator:
    return only(*(name for name in CASES if name not in names))


@functools.cache
def made(name: str) -> Any:
    return CASES[name].make()


@functools.cache
def values(name: str) -> Any:
    return CASES[name].values(made(name))


@functools.cache
def saved(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        on.save(made(name), path)
        return path.read_bytes()


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(name: str) -> Case:
    return CASES[name]


@pytest.fixture
def whole(name: str) -> bytes:
    """The bytes of an undamaged file."""
    return saved(name)


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    written = tmp_path / "file.safetensors"
    written.write_bytes(whole)
    return written


def document_of(data: bytes) -> dict[str, Any]:
    n = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + n])["__metadata__"]["onlynorm"])
    return found


def forged(data: bytes, *, tensors: dict[str, Tensor] | None = None, **fields: Any) -> bytes:
    """The file with other fields of its document or other tensors, and a checksum that holds."""
    document = {**document_of(data), **fields, "sha256": "0" * 64}
    document = {key: value for key, value in document.items() if value is not DROPPED}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    held = safetensors.torch.load(data) if tensors is None else tensors
    return seal(safetensors.torch.save(held, metadata={"onlynorm": text}))


DROPPED = object()


def damages(data: bytes) -> Iterator[bytes]:
    """The file cut at some lengths, and with one byte altered at some positions of header, checksum and data."""
    header = 8 + int.from_bytes(data[:8], "little")
    places = {*range(12), *range(0, header, 97), header - 1, header, *range(header, len(data), 331), len(data) - 1}
    mark = data.index(b"sha256")
    for place in sorted({*places, mark, mark + 12, mark + 40} - {len(data)}):
        yield data[:place]
        altered = bytearray(data)
        altered[place] ^= (0x01, 0x20, 0x80)[place % 3]
        yield bytes(altered)
    yield data + b"\0"


def test_every_kind_of_the_table_is_tried(tmp_path: Path) -> None:
    written = set()
    for name in CASES:
        on.save(made(name), tmp_path / name)
        written.add(document_of((tmp_path / name).read_bytes())["kind"])
    assert written == set(KINDS) - {EARLIER_KIND}


class TestEveryKind:
    """What holds for every kind of file."""

    def test_what_was_saved_comes_back_exactly(self, name: str, case: Case, path: Path) -> None:
        assert case.values(on.load(path, **case.options)) == values(name)

    @only(*MODULES)
    def test_precision_is_that_of_the_file(self, name: str, case: Case, tmp_path: Path) -> None:
        single = copy.deepcopy(made(name)).float()
        on.save(single, tmp_path / "file")
        loaded = on.load(tmp_path / "file", **case.options)
        assert {p.dtype for p in loaded.parameters()} == {p.dtype for p in single.parameters()}
        with torch.no_grad():
            assert torch.equal(loaded(X.float()), single(X.float()))

    def test_equal_objects_make_equal_bytes(self, name: str, whole: bytes, tmp_path: Path) -> None:
        on.save(copy.deepcopy(made(name)), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == whole

    @all_but(*REPAIRED)  # of which the model is loaded, without the diagnoses
    def test_what_was_loaded_makes_the_same_file(
        self, name: str, case: Case, path: Path, whole: bytes, tmp_path: Path
    ) -> None:
        on.save(on.load(path, **case.options), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == whole

    def test_the_file_is_plain_safetensors(self, path: Path) -> None:
        assert safetensors.torch.load_file(path)

    def test_neither_the_object_nor_like_nor_the_global_generator_changes(
        self, name: str, case: Case, tmp_path: Path
    ) -> None:
        before, state = values(name), torch.random.get_rng_state()
        options = case.options
        own = {key: tensors_digest(value.state_dict()) for key, value in options.items()}
        on.save(made(name), tmp_path / "file")
        loaded = on.load(tmp_path / "file", **options)
        if isinstance(loaded, nn.Module):
            with torch.no_grad():
                for tensor in (*loaded.parameters(), *loaded.buffers()):
                    tensor.zero_()
        assert case.values(made(name)) == before
        assert {key: tensors_digest(value.state_dict()) for key, value in options.items()} == own
        assert torch.equal(torch.random.get_rng_state(), state)

    # --------------------------------------------------------------------------- written whole or not at all

    def test_a_full_disk_keeps_what_was_there(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_bytes(b"old")
        with monkeypatch.context() as patch:
            fill_disk(tmp_path, patch)
            with pytest.raises(StorageError, match=r"space; got No space left on device for .*file\. Free space"):
                on.save(made(name), tmp_path / "file")
        assert content(tmp_path) == {"file": b"old"}
        on.save(made(name), tmp_path / "file")
        assert list(content(tmp_path)) == ["file"]

    @pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EDQUOT])
    def test_a_folder_that_cannot_be_written_is_a_clear_error(
        self, name: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forbid_new_files(tmp_path, error, monkeypatch)
        with pytest.raises(StorageError, match=f"needs a writable folder.*{os.strerror(error)}"):
            on.save(made(name), tmp_path / "file")
        assert content(tmp_path) == {}

    def test_paths_that_are_no_place_for_a_file_are_refused(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "other").write_bytes(b"x")
        with pytest.raises(StorageError, match=r"needs a writable folder.*(File exists|Not a directory)"):
            on.save(made(name), tmp_path / "other" / "file")
        with pytest.raises(StorageError, match=r"save needs a file name; .* is a folder\. Try .*safetensors"):
            on.save(made(name), tmp_path)
        if hasattr(os, "mkfifo"):
            os.mkfifo(tmp_path / "pipe")
            with pytest.raises(StorageError, match=r"is not a regular file\. Choose another name"):
                on.save(made(name), tmp_path / "pipe")
        assert content(tmp_path) == {"other": b"x"}

    def test_temporary_files_are_not_written_through_a_link_and_links_at_the_target_stay(
        self, name: str, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "victim").write_bytes(b"untouched")
        (tmp_path / f".file.{'a' * 16}.tmp").symlink_to(tmp_path / "victim")
        (tmp_path / "link").symlink_to(tmp_path / "file")
        names = iter(["a" * 16, "b" * 16])
        monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
        on.save(made(name), tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "victim").read_bytes() == b"untouched"
        assert (tmp_path / "file").read_bytes() == whole

    # --------------------------------------------------------------------------- refused when read

    def test_a_truncated_or_altered_file_is_refused(self, case: Case, path: Path, whole: bytes) -> None:
        for data in damages(whole):
            path.write_bytes(data)
            with pytest.raises(FormatError, match=r"safetensors file .*; file\.safetensors"):
                on.load(path, **case.options)

    def test_a_newer_format_says_to_update(self, case: Case, path: Path, whole: bytes) -> None:
        newer = document_of(whole)["format"] + 1
        path.write_bytes(forged(whole, format=newer))
        with pytest.raises(FormatError, match=rf"or older; file\.safetensors has {newer}\. Update onlynorm"):
            on.load(path, **case.options)

    def test_the_header_of_another_kind_is_refused(self, path: Path, whole: bytes) -> None:
        for other in sorted(KINDS.keys() - {document_of(whole)["kind"]}):
            path.write_bytes(forged(whole, kind=other, format=1))
            with pytest.raises(FormatError, match=r"need"):
                on.load(path, **({"like": fresh()} if KINDS[other].needs_like else {}))

    def test_an_unknown_kind_names_the_known_ones(self, case: Case, path: Path, whole: bytes) -> None:
        path.write_bytes(forged(whole, kind="poem"))
        with pytest.raises(FormatError, match=r"known kind.*'factorization'.* is of kind 'poem'\. Update"):
            on.load(path, **case.options)
        path.write_bytes(forged(whole, kind=["poem"]))
        with pytest.raises(FormatError, match=r"needs a header"):
            on.load(path, **case.options)

    def test_a_document_without_one_of_its_fields_is_refused_or_means_the_same(
        self, name: str, case: Case, path: Path, whole: bytes
    ) -> None:
        own = document_of(whole).keys() - {"kind", "format", "onlynorm", "sha256"}
        n_refused = 0
        for field in sorted(own):
            path.write_bytes(forged(whole, **{field: DROPPED}))
            try:
                assert case.values(on.load(path, **case.options)) == values(name)
            except FormatError:
                n_refused += 1
        assert n_refused > 0 or isinstance(made(name), on.rank.Repaired)

    @all_but("adapter")  # whether it fits is known once there is a model: see load_adapter
    def test_a_file_without_one_of_its_tensors_is_refused(
        self, name: str, case: Case, path: Path, whole: bytes
    ) -> None:
        held = safetensors.torch.load(whole)
        for missing in held:
            path.write_bytes(forged(whole, tensors={key: value for key, value in held.items() if key != missing}))
            with pytest.raises(FormatError, match=r"need"):
                on.load(path, **case.options)

    # --------------------------------------------------------------------------- arguments

    @only(*WITH_LIKE)
    def test_like_is_asked_for_where_it_is_needed(self, name: str, path: Path) -> None:
        with pytest.raises(ConversionError, match=r"file\.safetensors holds .* needs like=; got none"):
            on.load(path)
        with pytest.raises(ConversionError, match=r"load needs a model, a torch\.nn\.Module; got 3"):
            on.load(path, like=3)  # type: ignore[call-overload]
        with pytest.raises(FormatError, match=r"architecture|needs a (Linear|layer)"):
            on.load(path, like=mlp((3, 4, 3, 2)).double())

    @all_but(*WITH_LIKE)
    def test_like_is_refused_where_it_is_not_needed(self, name: str, path: Path) -> None:
        with pytest.raises(ConversionError, match=r"like= needs a file .* model; file\.safetensors holds .*like= out"):
            on.load(path, like=fresh())

    @all_but(*NETWORKS)
    def test_options_of_networks_are_refused_by_name(self, name: str, case: Case, path: Path) -> None:
        for option in ({"storage": "seed"}, {"activation": nn.ReLU()}):
            with pytest.raises(ValueRangeError, match=rf"holds .* no {next(iter(option))}; got .*Leave it out"):
                on.load(path, **case.options, **option)

    @all_but(*NETWORKS, "adapter")
    def test_a_dtype_is_refused_where_numbers_are_stored_as_they_are(self, name: str, path: Path) -> None:
        with pytest.raises(ValueRangeError, match=r"dtype needs a network .* got torch\.float32"):
            on.save(made(name), path, dtype=torch.float32)

    @all_but("factorization", "adapter")
    def test_modules_go_to_a_device(self, name: str, case: Case, path: Path) -> None:
        assert case.values(on.load(path, device="cpu", **case.options)) == values(name)
        with pytest.raises(ValueRangeError, match=r"device .* storage; got"):
            on.load(path, device="meta", **case.options)

    @only("factorization", "adapter")
    def test_a_device_is_refused_for_what_is_no_module(self, name: str, path: Path) -> None:
        with pytest.raises(ValueRangeError, match=r"holds .* no device; got"):
            on.load(path, device="cpu")

    @only(*MODULES)
    def test_a_wrapped_module_makes_the_same_file(self, name: str, whole: bytes, tmp_path: Path) -> None:
        on.save(nn.DataParallel(made(name)), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == whole


# ------------------------------------------------------------------------------- files of earlier versions


def earlier_model() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(sines(*parameter.shape, step=0.7 + number))
    return network


def test_files_of_every_kind_that_earlier_versions_wrote_are_read() -> None:
    points, labels = sines(9, 3), torch.arange(9) % 2
    for name in ("memorizer", "norm_memorizer"):
        assert torch.equal(on.load(FOLDER / f"{name}.safetensors").classify(points), labels)
    matrix = sines(3, 3) + 2.0 * torch.eye(3, dtype=torch.float64)
    assert float((on.load(FOLDER / "factorization.safetensors").product() - matrix).abs().max()) < 1e-12
    found = on.load(FOLDER / "adapter.safetensors")
    assert found.tensors.keys() == {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")} | {
        "1.num_batches_tracked"
    }
    assert float((found.tensors["1.weight"] - earlier_model()[1].weight.detach()).abs().max()) < 1e-12
    loaded = on.load(FOLDER / "repaired.safetensors", like=earlier_model())
    stored = safetensors.torch.load_file(FOLDER / "repaired.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in loaded.state_dict().items())


# ------------------------------------------------------------------------------- files of no kind


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "pickle")
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "plain")
    (tmp_path / "empty").touch()
    (tmp_path / "json").write_text(json.dumps({"sha256": "0" * 64}))
    (tmp_path / "huge").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    for name in ("pickle", "plain", "empty", "json", "huge"):
        with pytest.raises(FormatError, match=rf"written by onlynorm; {name} .*Pass a file .*onlynorm\.save"):
            on.load(tmp_path / name)


@pytest.mark.timeout(20)
def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"readable file; got No such file.*Check the path"):
        on.load(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"readable file; got Is a directory"):
        on.load(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StorageError, match=r"not a regular file"):
            on.load(tmp_path / "pipe")


@pytest.mark.parametrize("kind", RESUMED)
def test_files_of_unfinished_runs_name_the_call_that_resumes(tmp_path: Path, kind: str) -> None:
    on.save(made("factorization"), tmp_path / "file")
    (tmp_path / "file").write_bytes(forged((tmp_path / "file").read_bytes(), kind=kind))
    with pytest.raises(FormatError, match=rf"file is a {kind}\. (reconstruct|fit|simulate)\(.*=\.\.\.\) resumes"):
        on.load(tmp_path / "file")


@pytest.mark.parametrize("obj", [None, 3, "words", {"a": 1}, torch.ones(2), nn.Linear(3, 2), model(), on.save])
def test_what_has_no_kind_of_file_is_refused(tmp_path: Path, obj: Any) -> None:
    with pytest.raises(
        ConversionError, match=r"save needs a network with frozen layers, or Recon.*Repaired; got .*\. "
    ):
        on.save(obj, tmp_path / "file")
    assert content(tmp_path) == {}


# ------------------------------------------------------------------------------- what only some kinds have


@pytest.mark.parametrize("name", NETWORKS)
def test_progress_is_called_for_every_layer(tmp_path: Path, name: str) -> None:
    calls: list[tuple[int, int, str]] = []
    progress = lambda *told: calls.append(told)  # noqa: E731
    on.save(made(name), tmp_path / "file", progress=progress)
    on.load(tmp_path / "file", like=fresh(), progress=progress)
    assert calls == 2 * [(1, 3, "0"), (2, 3, "2"), (3, 3, "4")]
    with pytest.raises(ConversionError, match=r"progress .* callable; got 3"):
        on.save(made(name), tmp_path / "file", progress=3)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"progress .* callable; got 3"):
        on.load(tmp_path / "file", like=fresh(), progress=3)  # type: ignore[call-overload]


def test_a_memorizer_with_frozen_layers_is_a_network_with_frozen_layers(tmp_path: Path) -> None:
    plain = on.memorize(X, LABELS)
    result = on.reconstruct(plain, inputs=X)
    on.save(result.network, tmp_path / "file")
    loaded = on.load(tmp_path / "file", like=plain)
    assert isinstance(loaded, on.identity.Memorizer)
    with torch.no_grad():
        assert torch.equal(loaded(X), result.network(X))


def test_an_adapter_may_be_stored_in_lower_precision_and_goes_into_a_model_by_its_own_verb(tmp_path: Path) -> None:
    on.save(made("adapter"), tmp_path / "file", dtype=torch.float16)
    assert {value.dtype for value in on.load(tmp_path / "file").tensors.values()} == {torch.float16, torch.int64}
    with pytest.raises(ConversionError, match=r"holds an adapter.*load_adapter\(model, path\)"):
        on.load(tmp_path / "file", like=normed())
    on.load_adapter(normed(), tmp_path / "file")


def test_norms_and_skips_that_a_repair_inserted_are_inserted_again(tmp_path: Path) -> None:
    for name, kind in (("with norms", nn.BatchNorm1d), ("with skips", Skip)):
        on.save(made(name), tmp_path / "file")
        loaded = on.load(tmp_path / "file", like=fresh())
        found = [place for place, module in loaded.named_modules() if isinstance(module, kind)]
        assert found == [place for place, module in made(name).model.named_modules() if isinstance(module, kind)]
        assert found
        again = on.load(tmp_path / "file", like=loaded)  # a model that has them already keeps them
        assert module_values(again) == values(name)


class Tied(nn.Module):
    """A head that shares its weight with an embedding, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU())
        self.again = self.body[0]
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.again(self.body(x)))
        return made


@pytest.mark.parametrize("method", ["lsuv", "batch_norm", "residual"])
def test_ties_of_a_repaired_model_come_back(tmp_path: Path, method: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result, like = on.repair(Tied(), X.float(), method=method), Tied()
    on.save(result, tmp_path / "file")
    loaded = on.load(tmp_path / "file", like=like)
    assert loaded.head.weight is loaded.embed.weight
    assert loaded.again is loaded.body[0]
    assert tensors_digest(loaded.state_dict()) == tensors_digest(result.model.state_dict())
    data = (tmp_path / "file").read_bytes()
    tensors = safetensors.torch.load(data)
    tensors["head.weight"] += 1.0
    (tmp_path / "file").write_bytes(forged(data, tensors=tensors))
    with pytest.raises(FormatError, match=r"equal values .*like"):
        on.load(tmp_path / "file", like=like)


@pytest.mark.parametrize(
    "inserted",
    [3, [3], [{}], [{"place": "0"}], [{"place": "9", "module": "Skip", "scale": 0.5}],
     [{"place": "1", "module": "BatchNorm1d"}], [{"place": "", "module": "Skip", "scale": 0.5}],
     [{"place": "0", "module": "Linear"}], [{"place": "0", "module": "Skip", "scale": "0.5"}],
     [{"place": "0", "module": "Skip", "scale": 1e999}], [{"place": 0, "module": "Skip", "scale": 0.5}],
     [{"place": "0", "module": "BatchNorm3d"}]],
)  # fmt: skip
def test_forged_insertions_of_a_repaired_model_are_refused(tmp_path: Path, inserted: object) -> None:
    on.save(made("repaired"), tmp_path / "file")
    text = {"$float": "inf"} if inserted == [{"place": "0", "module": "Skip", "scale": 1e999}] else None
    if text is not None:
        inserted = [{"place": "0", "module": "Skip", "scale": text}]
    (tmp_path / "file").write_bytes(forged((tmp_path / "file").read_bytes(), inserted=inserted))
    with pytest.raises(FormatError, match=r"layers of `like`|architecture"):
        on.load(tmp_path / "file", like=fresh())


def test_a_repaired_model_is_not_loaded_onto_other_hyperparameters(tmp_path: Path) -> None:
    on.save(made("repaired"), tmp_path / "file")
    other = fresh()
    other[1] = nn.Tanh()
    with pytest.raises(FormatError, match=r"class of '1' is 'Tanh' in the network and 'ReLU' in the file"):
        on.load(tmp_path / "file", like=other)


@pytest.mark.parametrize("part", ["running_mean", "2."])
def test_a_repaired_model_with_a_precision_that_its_layers_do_not_share_is_refused(tmp_path: Path, part: str) -> None:
    on.save(repaired("batch_norm"), tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    tensors = safetensors.torch.load(data)
    for name in [name for name in tensors if part in name and tensors[name].is_floating_point()]:
        tensors[name] = tensors[name].half()
    (tmp_path / "file").write_bytes(forged(data, tensors=tensors))
    with pytest.raises(FormatError, match=r"several dtypes .*float16"):
        on.load(tmp_path / "file", like=fresh())


def test_a_repaired_model_with_two_precisions_is_loaded_onto_one_with_the_same_two(tmp_path: Path) -> None:
    result = repaired("batch_norm")
    result.model[-1].half()
    on.save(result, tmp_path / "file")
    with pytest.raises(FormatError, match=r"several dtypes .*float16"):
        on.load(tmp_path / "file", like=fresh())
    like = fresh()
    like[-1].half()
    loaded = on.load(tmp_path / "file", like=like)
    assert {str(p.dtype) for p in loaded.parameters()} == {str(p.dtype) for p in result.model.parameters()}


def doubled(network: nn.Sequential) -> nn.Sequential:
    """The model with a forward hook that doubles the output of its second layer."""
    network[2].register_forward_hook(lambda module, inputs, output: 2 * output)
    return network


@pytest.mark.parametrize("method", ["lsuv", "batch_norm", "residual"])
def test_a_repaired_model_is_loaded_only_onto_its_forward_hooks(tmp_path: Path, method: str) -> None:
    result = on.repair(doubled(model()), X, LABELS, method=method)
    on.save(result, tmp_path / "file")
    with pytest.raises(FormatError, match=r"hooks\] at '2.*' are \[0, 0\] in the network and \[0, 1\] in the file"):
        on.load(tmp_path / "file", like=fresh())
    loaded = on.load(tmp_path / "file", like=doubled(model(seed=1)))
    assert torch.equal(loaded.eval()(X), result.model.eval()(X))
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(forged(data, hooks=DROPPED))  # a file of an earlier version
    assert isinstance(on.load(tmp_path / "file", like=fresh()), nn.Sequential)
    (tmp_path / "file").write_bytes(forged(data, hooks=3))
    with pytest.raises(FormatError, match="hyperparameters and hooks of its modules"):
        on.load(tmp_path / "file", like=fresh())
    on.save(repaired(method), tmp_path / "file")
    with pytest.raises(FormatError, match=r"are \[0, 1\] in the network and \[0, 0\] in the file"):
        on.load(tmp_path / "file", like=doubled(model(seed=1)))


FEATURES = {"n_features": 10**12, "shape": [10**6, 10**6], "seed": 1, "name": "poem", "layer": "x", "density": 0.5}


@pytest.mark.parametrize("field", FEATURES)
def test_a_norm_memorizer_with_other_features_is_refused(tmp_path: Path, field: str) -> None:
    on.save(made("norm memorizer"), tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    settings = {**document_of(data)["features"], field: FEATURES[field]}
    (tmp_path / "file").write_bytes(forged(data, features=settings))
    with pytest.raises(OnlynormError, match=r"needs (features|frozen weights with the digest|\d.* GB)"):
        on.load(tmp_path / "file")


def test_a_norm_memorizer_whose_frozen_weights_were_rounded_is_not_saved(tmp_path: Path) -> None:
    rounded = copy.deepcopy(made("norm memorizer")).float().double()
    with pytest.raises(ConversionError, match=r"frozen weights of its seed"):
        on.save(rounded, tmp_path / "file")
    assert content(tmp_path) == {}
