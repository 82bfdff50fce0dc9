"""Files of networks: a clear error for every one that is forged or does not fit, and folders of partial runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disks import fill_disk
from rebuilding import rebuilt
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError, ShapeError, StorageError, UnknownNameError, ValueRangeError
from onlynorm.features import Features
from onlynorm.frozen import checkpoint
from onlynorm.models import mlp
from onlynorm.storage import read_tensors, write_tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a tiny network."""
    path = tmp_path_factory.mktemp("small") / "net.safetensors"
    on.save(rebuilt(mlp((3, 2, 2)).double(), normal(9, 3), activation=nn.ReLU()), path)
    return path


def fresh() -> nn.Sequential:
    return mlp((3, 2, 2), seed=5)


# ------------------------------------------------------------------------------- forged files


def forge(small: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Path:
    """A file with another content and a checksum that holds."""
    document, tensors = read_tensors(small, kind=checkpoint.KIND, format=1, cure="")
    for name in ("sha256", "onlynorm", "format", "kind"):
        del document[name]
    change(document, tensors)
    path = small.with_name("forged")
    write_tensors(path, tensors, kind=checkpoint.KIND, format=1, document=document)
    return path


def source(document: dict[str, Any]) -> dict[str, Any]:
    return document["blocks"][0]["settings"]["features"][0]


def test_features_that_changed_are_noticed_by_their_digest(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match=r"frozen weights with the digest .* its seed gives .*onlynorm that wrote it"):
        on.load(forge(small, lambda document, _: source(document).update(seed=1)), like=fresh())
    monkeypatch.setattr(Features, "weights_digest", lambda self: "another generator")
    with pytest.raises(FormatError, match=r"layer at '0' needs frozen weights with the digest"):
        on.load(small, like=fresh())


FIELDS = ("n_features", "shape", "seed", "name", "layer", "kernel", "density", "shared_column")
ABSURD = (10**30, 10**12, -1, 0.5, "x", None, True, [], [10**9, 10**9], {}, [1] * 9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value) for key in FIELDS for value in ABSURD if (key, value) != ("density", None)
    ],  # dense features have none
)
def test_absurd_features_are_refused_before_anything_is_allocated(small: Path, key: str, value: object) -> None:
    path = forge(small, lambda document, _: source(document).update({key: value}))
    with pytest.raises(FormatError, match=r"the layer at '0' needs|needs a layer at '0'"):
        on.load(path, like=fresh())


@pytest.mark.parametrize(
    "name", ["he_normal", "id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal", "orthogonal", "sparse_he_normal"]
)
def test_huge_weights_are_refused_whatever_the_features(small: Path, name: str) -> None:
    density = 0.5 if name == "id_cond" else None
    shape = [10**6, 10**6]
    path = forge(small, lambda document, _: source(document).update(name=name, shape=shape, density=density))
    with pytest.raises(FormatError, match=r"features for \[1000000, 1000000\] with \d+ entries in the norms"):
        on.load(path, like=fresh())


@pytest.mark.parametrize("key", ["blocks", "folded", "aliases", "dtype"])
@pytest.mark.parametrize("value", [None, 3, "x", [1], {"a": 1}, {"a": [1]}, [[]], [{}]])
def test_wrong_types_in_the_document_are_refused(small: Path, key: str, value: object) -> None:
    with pytest.raises(FormatError, match=r"needs"):
        on.load(forge(small, lambda document, _: document.update({key: value})), like=fresh())


@pytest.mark.parametrize("key", ["places", "kind", "settings", "activation", "weights"])
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [3], {"name": "ReLU"}, {"name": "eval", "arguments": {}}])
def test_wrong_types_in_a_block_are_refused(small: Path, key: str, value: object) -> None:
    def change(document: dict[str, Any], _: object) -> None:
        document["blocks"][0][key] = value

    if (key, value) == ("activation", None):
        # Another activation is another function, but nothing a reader could notice.
        assert isinstance(on.load(forge(small, change), like=fresh()), nn.Module)
        return
    kinds = (FormatError, ValueRangeError) if key == "activation" else FormatError
    with pytest.raises(kinds, match=r"needs"):
        on.load(forge(small, change), like=fresh())


@pytest.mark.parametrize(
    "options", [{"x": 1}, {"kernel_size": 3}, {"kernel_size": [1], "dilation": [1], "padding": "x"}]
)
def test_forged_options_of_a_block_are_refused(small: Path, options: object) -> None:
    def change(document: dict[str, Any], _: object) -> None:
        document["blocks"][0]["settings"]["options"] = options

    with pytest.raises(FormatError, match=r"the layer at '0' needs"):
        on.load(forge(small, change), like=fresh())


@pytest.mark.parametrize("approximate", ["other", {}, 3])
def test_an_activation_that_cannot_be_called_is_refused(small: Path, approximate: object) -> None:
    def change(document: dict[str, Any], _: object) -> None:
        document["blocks"][0]["activation"] = {"name": "GELU", "arguments": {"approximate": approximate}}

    with pytest.raises(FormatError, match=r"layer at '0' needs .*settings"):
        on.load(forge(small, change), like=fresh())


@pytest.mark.parametrize("name", ["first_norm.weight", "first_norm.running_var", "second_norm.bias"])
def test_norms_that_are_not_finite_are_refused(small: Path, name: str) -> None:
    path = forge(small, lambda _, tensors: tensors[f"0.{name}"].fill_(torch.nan))
    with pytest.raises(FormatError, match=f"{name} .*finite"):
        on.load(path, like=fresh())


def test_missing_added_and_misshapen_tensors_are_refused(small: Path) -> None:
    with pytest.raises(FormatError, match=r"first_norm.weight has shape None"):
        on.load(forge(small, lambda _, tensors: tensors.pop("0.first_norm.weight")), like=fresh())
    with pytest.raises(FormatError, match=r"odd has shape \(1,\).* None"):
        on.load(forge(small, lambda _, tensors: tensors.update({"0.odd": torch.ones(1)})), like=fresh())
    with pytest.raises(FormatError, match=r"low has shape \(1, 1\)"):
        on.load(forge(small, lambda _, tensors: tensors.update({"0.low": torch.ones(1, 1)})), like=fresh())
    with pytest.raises(FormatError, match=r"'odd' is missing in the network and \(1,\) in the file"):
        on.load(forge(small, lambda _, tensors: tensors.update(odd=torch.ones(1))), like=fresh())


# ------------------------------------------------------------------------------- networks that do not fit


@pytest.mark.parametrize(
    ("like", "says"),
    [
        (mlp((3, 4, 2)), r"layer at '0' .*out_features=4.* weights of \(2, 3\).* gives \(1, 2\)"),
        (mlp((4, 2, 2)), r"layer at '0' .*in_features=4.*3\); got \(1, 4\)"),
        (mlp((2, 2, 2)), r"layer at '0' .*in_features=2"),
        (mlp((3, 2, 2, 2)), r"'4.bias' is \(2,\) in the network and missing in the file"),
        (mlp((3, 2)), r"'2' is nothing instead of Linear or Conv"),
        (nn.Sequential(nn.Conv1d(3, 2, 1), nn.ReLU(), nn.Linear(2, 2)), r"layer at '0' .*Conv1d"),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), r"'1.bias' is \(2,\) .* missing in the"),
        (nn.Sequential(nn.LayerNorm(3), nn.ReLU(), nn.Linear(2, 2)), r"'0' is LayerNorm instead of Linear or Conv"),
    ],
)
def test_another_architecture_is_refused_with_what_differs(small: Path, like: nn.Module, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        on.load(small, like=like)


def test_a_rebuilt_network_and_one_without_numbers_are_no_fresh_networks(small: Path) -> None:
    with pytest.raises(FormatError, match=r"'0' is NormOnlyBlock instead of Linear or Conv"):
        on.load(small, like=on.load(small, like=fresh()))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(
        ConversionError, match=r"load needs a model whose weights have values; got .* on the meta device"
    ):
        on.load(small, like=empty)
    with pytest.raises(UnknownNameError, match=r"storage needs a known name; got 'disk'"):
        on.load(small, like=fresh(), storage="disk")


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Keeper(nn.Sequential):
        def get_extra_state(self) -> str:
            return "words"

        def set_extra_state(self, state: object) -> None:
            pass

    network = rebuilt(Keeper(nn.Linear(3, 2)).double(), normal(9, 3)).network
    with pytest.raises(ConversionError, match=r"dense tensors; got str at '_extra_state'"):
        on.save(network, tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- disks and partial folders


def test_a_partial_folder_stays_until_the_file_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net"
    result = rebuilt(mlp((3, 2, 2)).double(), normal(9, 3), partial=tmp_path / "net.partial")
    with monkeypatch.context() as patch:
        fill_disk(tmp_path, patch)
        with pytest.raises(StorageError, match=r"got No space left on device"):
            on.save(result, path)
    assert {found.name for found in tmp_path.iterdir()} == {"net.partial"}
    on.save(result, path)
    assert {found.name for found in tmp_path.iterdir()} == {"net"}


def test_only_our_own_files_leave_a_partial_folder(tmp_path: Path) -> None:
    result = rebuilt(mlp((3, 2, 2)).double(), normal(9, 3), partial=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".layer-0001.safetensors.123.tmp").write_text("left by a kill")
    on.save(dataclasses.replace(result), tmp_path / "net")
    assert {found.name for found in tmp_path.iterdir()} == {"net", "notes.txt"}


# ------------------------------------------------------------------------------- networks with other hyperparameters


def pinned(**changes: Any) -> nn.Module:
    """A network with every kind of hyperparameter that no tensor shows."""

    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    given: dict[str, Any] = {
        "conv": {}, "slope": 0.1, "norm": {}, "groups": 2, "pool": 2, "act": nn.GELU(), "factor": 0.5, "inplace": False,
        "dropout": 0.1,
    } | changes  # fmt: skip
    conv = {"padding": 1, "padding_mode": "reflect", "stride": 2, "dilation": 1} | given["conv"]
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, **conv), nn.BatchNorm2d(4, **given["norm"]),
        nn.LeakyReLU(given["slope"], inplace=given["inplace"]), nn.GroupNorm(given["groups"], 4),
        nn.MaxPool2d(given["pool"]), given["act"], Scaled(given["factor"]), nn.Dropout(given["dropout"]),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double().eval()  # fmt: skip


@pytest.fixture(scope="module")
def file_of_pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pinned") / "net.safetensors"
    on.save(rebuilt(pinned(), normal(9, 2, 16, 16)), path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv": {"padding_mode": "zeros"}}, r"padding_mode of Conv2d.*zeros.*; the file has reflect"),
        ({"conv": {"padding_mode": "circular"}}, r"padding_mode of Conv2d.*circular; the file has reflect"),
        ({"conv": {"padding": 2}}, r"padding of Conv2d.* \(2, 2, 2, 2\); the file has \(1, 1, 1, 1\)"),
        ({"conv": {"stride": 1}}, r"stride of Conv2d.* \(1, 1\); the file has \(2, 2\)"),
        ({"conv": {"stride": (2, 1)}}, r"stride of Conv2d.* \(2, 1\); the file has \(2, 2\)"),
        ({"conv": {"padding": 2, "dilation": 2}}, r"(padding|dilation) of Conv2d.*; the file has \(1, 1"),
        ({"slope": 0.2}, r"negative_slope of '2' is 0.2 in the network and 0.1 in the file"),
        ({"norm": {"eps": 1e-3}}, r"eps of '1' is 0.001 in the network and 1e-05 in the file"),
        ({"norm": {"momentum": 0.5}}, r"momentum of '1' is 0.5 in the network and 0.1 in the file"),
        ({"groups": 4}, r"num_groups of '3' is 4 in the network and 2 in the file"),
        ({"pool": 3}, r"kernel_size of '4' is 3 in the network and 2 in the file"),
        ({"pool": (2, 1)}, r"kernel_size of '4' is \[2, 1\] in the network and 2 in the file"),
        ({"act": nn.GELU("tanh")}, r"approximate of '5' is 'tanh' in the network and 'none' in the file"),
        ({"act": nn.SiLU()}, r"approximate of '5' is 'not set' in the network.*class of '5' is 'SiLU' in the network"),
        ({"factor": 0.25}, r"factor of '6' is 0.25 in the network and 0.5 in the file"),
        ({"factor": float("nan")}, r"factor of '6' is .*nan.* in the network and 0.5 in the file"),
        ({"act": nn.Sequential(nn.GELU())}, r"class of '5' is 'Sequential' in the network and 'GELU' in the file"),
    ],
)
def test_a_network_with_other_hyperparameters_is_refused(
    changes: dict[str, Any], says: str, file_of_pinned: Path
) -> None:
    with pytest.raises(FormatError, match=says):
        on.load(file_of_pinned, like=pinned(**changes))


def test_hyperparameters_without_an_effect_are_free(file_of_pinned: Path) -> None:
    x = normal(9, 2, 16, 16)
    loaded = on.load(file_of_pinned, like=pinned(inplace=True, conv={"padding": (1, 1)}))
    assert on.verify(pinned(), on.load(file_of_pinned, like=pinned()), x).n_samples == 9
    assert on.verify(on.load(file_of_pinned, like=pinned()), loaded, x).max_error == 0.0
    same = nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")).double().eval()
    path = file_of_pinned.with_name("same")
    on.save(rebuilt(same, x), path)
    on.load(path, like=nn.Sequential(nn.Conv2d(2, 2, 3, padding=1)).double())
    valid = nn.Sequential(nn.Conv2d(2, 2, 3, padding=0, padding_mode="circular")).double().eval()
    on.save(rebuilt(valid, x), path)
    on.load(path, like=nn.Sequential(nn.Conv2d(2, 2, 3, padding="valid")).double())


def test_heads_and_activations_of_transformers_are_pinned(tmp_path: Path) -> None:
    def make(n_heads: int = 2, **options: Any) -> nn.Module:
        return nn.TransformerEncoderLayer(8, n_heads, dim_feedforward=6, batch_first=True, **options).double().eval()

    on.save(rebuilt(make(), normal(9, 5, 8)), tmp_path / "net")
    with pytest.raises(FormatError, match=r"num_heads of 'self_attn' is 4 in the network and 2 in the file"):
        on.load(tmp_path / "net", like=make(4))
    with pytest.raises(FormatError, match=r"norm_first of '' is True in the network and False in the file"):
        on.load(tmp_path / "net", like=make(norm_first=True))
    with pytest.raises(FormatError, match=r"activation of '' is 'gelu' in the network and 'relu' in the file"):
        on.load(tmp_path / "net", like=make(activation="gelu"))


def test_a_norm_folded_into_a_linear_keeps_its_axes_in_a_file(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with torch.no_grad():
        network(normal(20, 4))
    result = on.reconstruct(network.eval(), normal(20, 4), fold_norms=True)
    assert result.folded == ("1",)
    on.save(result, tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    for made in (result.network, loaded):
        with pytest.raises(ShapeError, match=r"inputs with 2 dimensions; got \(20, 3, 3\)"):
            made(normal(20, 3, 4))


def test_files_without_hyperparameters_are_still_read(file_of_pinned: Path) -> None:
    document, tensors = read_tensors(file_of_pinned, kind=checkpoint.KIND, format=checkpoint.FORMAT, cure="")
    old = {n: document[n] for n in ("blocks", "folded", "aliases", "dtype")}
    path = file_of_pinned.with_name("old")
    write_tensors(path, tensors, kind=checkpoint.KIND, format=1, document=old)
    x = normal(9, 2, 16, 16)
    assert on.verify(on.load(path, like=pinned()), on.load(file_of_pinned, like=pinned()), x).max_error == 0.0
    for name in ("structure", "hooks", "folded_axes"):
        for value in ([], 3, "x", {"": 3}, {"0": [1]}):
            forged = {**document, name: value}
            write_tensors(path, tensors, kind=checkpoint.KIND, format=1, document=forged)
            with contextlib.suppress(FormatError):
                on.load(path, like=pinned())
