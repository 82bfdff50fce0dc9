"""What models return, the model inside wrappers, the one rule for targets, and checks of arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, UnknownNameError, ValueRangeError, shown
from onlynorm.modules import default_loss, find_output, is_class_labels, need_model, tensors_in, unwrap
from onlynorm.validate import (
    as_real,
    as_tensor,
    need_callable,
    need_flag,
    need_free_memory,
    need_integer,
    need_items,
    need_path,
    need_seed,
    need_sizes,
    need_text,
)

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]])
LABELS = torch.tensor([0, 2])


# ------------------------------------------------------------------------------- targets and losses


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_booleans_are_class_labels(dtype: torch.dtype) -> None:
    assert is_class_labels(torch.ones(3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_floating_point_targets_are_real_values(dtype: torch.dtype) -> None:
    assert not is_class_labels(torch.ones(3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_class_labels_of_any_integer_type_give_the_cross_entropy(dtype: torch.dtype) -> None:
    assert default_loss(LOGITS, LABELS.to(dtype)) == functional.cross_entropy(LOGITS, LABELS)


def test_label_smoothing_reaches_the_cross_entropy() -> None:
    wanted = functional.cross_entropy(LOGITS, LABELS, label_smoothing=0.3)
    assert default_loss(LOGITS, LABELS, label_smoothing=0.3) == wanted != functional.cross_entropy(LOGITS, LABELS)


def test_classes_may_be_on_the_last_axis() -> None:
    logits, labels = torch.randn(4, 7, 5), torch.randint(5, (4, 7))
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(default_loss(logits, labels), wanted)
    torch.testing.assert_close(default_loss(logits.movedim(-1, 1), labels), wanted)


def test_real_targets_give_the_mean_squared_error() -> None:
    targets = torch.randn(2, 3, dtype=torch.float64)
    assert default_loss(LOGITS, targets) == functional.mse_loss(LOGITS, targets.float())


def test_targets_that_fit_no_loss_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\); got \(2,\)"):
        default_loss(LOGITS, LABELS.float())
    with pytest.raises(ShapeError, match=r"\(2, 3\) and targets \(3,\)"):
        default_loss(LOGITS, torch.tensor([0, 1, 2]))
    with pytest.raises(ConversionError, match="Tensor and list"):
        default_loss(LOGITS, [0, 2])


# ------------------------------------------------------------------------------- what models return


@pytest.mark.parametrize(
    "returned",
    [
        LOGITS,
        {"loss": torch.tensor(1.0), "logits": LOGITS},
        SimpleNamespace(logits=LOGITS),
        (LOGITS, torch.zeros(1)),
        [[torch.tensor([1])], {"states": LOGITS}],
    ],
)
def test_the_output_is_the_logits_or_the_first_floating_point_tensor(returned: Any) -> None:
    assert find_output(returned) is LOGITS


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(ConversionError, match="got dict without one"):
        find_output({"tokens": torch.tensor([1, 2])})
    assert list(tensors_in({"tokens": torch.tensor([1, 2]), "name": "x"})) == []


# ------------------------------------------------------------------------------- wrappers


def test_unwrap_finds_the_model_inside_nested_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = torch.compile(model, backend="eager")
    fabric = Fabric(accelerator="cpu", devices=1)
    for wrapped in (model, compiled, nn.DataParallel(model), nn.DataParallel(compiled), fabric.setup_module(model)):
        assert unwrap(wrapped) is model


def test_a_model_with_a_layer_called_module_is_no_wrapper() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = Own()
    assert unwrap(model) is model


# ------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.arange(6).astype(">f8"),
        np.broadcast_to(np.ones(1), (3,)),
        np.arange(3, dtype="u4"),
        [1, 2],
    ],
)
def test_arrays_of_any_layout_become_tensors(array: Any) -> None:
    assert as_tensor("x", array).tolist() == np.asarray(array).tolist()


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.eye(2, device="meta"), r"shape \(2, 2\) on the meta device"),
        ("nope", "'nope'"),
        (None, "None"),
        (True, "True"),
        ([[1.0], [2.0, 3.0]], "setting an array element"),
        (np.array(["a"]), "ndarray of shape"),
    ],
)
def test_what_is_no_dense_tensor_is_refused(value: Any, got: str) -> None:
    with pytest.raises(ConversionError, match=rf"x .*{got}"):
        as_tensor("x", value)


def test_real_tensors_are_checked_for_axes_and_numbers() -> None:
    assert as_real("x", torch.tensor([1, 2])).dtype == torch.float64
    with pytest.raises(ValueRangeError, match=r"x .*real; got torch.complex64"):
        as_real("x", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ShapeError, match=r"x .*2 dimensions; got 1 in shape \(2,\)"):
        as_real("x", torch.ones(2), ndim=2)
    with pytest.raises(ValueRangeError, match=r"got 1 NaN or infinite.*, the first at \(1,\)"):
        as_real("x", torch.tensor([1.0, torch.nan]), is_finite=True)


@pytest.mark.parametrize("value", [3, np.int64(3), np.float32(3.0), 3.0])
def test_whole_numbers_of_any_type_are_integers(value: Any) -> None:
    assert need_integer("n", value, low=1, cure="Try 3.") == 3
    assert type(need_integer("n", value, low=1, cure="Try 3.")) is int


@pytest.mark.parametrize(
    ("value", "got"),
    [(True, "True"), (1.5, "1.5"), (torch.nan, "nan"), (-1, "-1"), (10**400, "an integer of 1329 bits")],
)
def test_what_is_no_whole_number_in_its_bounds_is_refused(value: Any, got: str) -> None:
    with pytest.raises(ValueRangeError, match=rf"n .* from 0 to 9; got {got}\. Try 3\."):
        need_integer("n", value, low=0, high=9, cure="Try 3.")


def test_a_seed_is_a_whole_number_of_64_bits() -> None:
    assert need_seed(np.uint64(2**64 - 1)) == 2**64 - 1
    for seed in (-1, 2**64, 1.0, None, True, "0"):
        with pytest.raises(ValueRangeError, match=r"seed .* integer in \[0, 2\^64\); got"):
            need_seed(seed)


def test_a_result_stands_for_the_network_in_it() -> None:
    model = nn.Linear(2, 2)
    assert need_model("verify", SimpleNamespace(network=model)) is model
    for given, got in (
        (SimpleNamespace(network=3), "namespace"),
        (nn.LazyLinear(2), "a lazy layer in LazyLinear"),
        (nn.Linear(2, 2, device="meta"), "a Linear on the meta device"),
        (nn.Linear, "the class Linear"),
    ):
        with pytest.raises(ConversionError, match=f"verify needs .*got .*{got}"):
            need_model("verify", given)


@pytest.mark.parametrize("path", ["", "a\0b", b"x", None, 3, "\udc80"])
def test_what_names_no_file_is_refused(path: Any) -> None:
    with pytest.raises(ConversionError, match=r"path .*; got"):
        need_path("path", path)
    assert need_path("path", "a/b") == Path("a/b")


def test_flags_lists_functions_and_texts_are_what_they_say() -> None:
    assert need_flag("strict", np.True_) is True
    assert need_items("ks", (k for k in (1, 2)), cure="List them.") == [1, 2]
    assert need_sizes("ks", np.array([1, 2]), cure="List them.") == (1, 2)
    for call, got in (
        (lambda: need_flag("strict", 1), "strict .*True or False; got 1"),
        (lambda: need_items("ks", "ab", cure="List them."), "ks .*list or tuple; got 'ab'"),
        (lambda: need_items("ks", torch.tensor(1), cure="List them."), "ks .*list or tuple; got"),
        (lambda: need_sizes("ks", [1], n_least=2, cure="List them."), r"ks .*2 entries; got \[1\]"),
        (lambda: need_callable("step", 3, cure="Pass one."), "step .*callable; got 3"),
        (lambda: need_text("name", "", cure="Pass one."), "name .*string; got ''"),
        (lambda: need_free_memory("a table", 1e30, cure="Make it smaller."), r"a table needs 1e\+21 GB; got"),
    ):
        with pytest.raises(OnlynormError, match=got):
            call()


def test_values_in_messages_are_short() -> None:
    class Long:
        def __repr__(self) -> str:
            return "x" * 5000

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown(Long()) == "a Long"
    assert shown(Broken()) == "a Broken"
    assert shown(torch.zeros(2, 3)) == "a Tensor of shape (2, 3) and float32"
    assert shown(nn.Linear(2, 2)) == "a Linear module"
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown("a\x1b[31mb") == repr("a\x1b[31mb")
    assert len(str(UnknownNameError("method", "y" * 10**6, [f"name{i}" for i in range(999)]))) < 500


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_become_int64(dtype: torch.dtype) -> None:
    made = as_tensor("labels", torch.tensor([0, 2, 1]).to(dtype))
    assert made.dtype == torch.int64
    assert made.tolist() == [0, 2, 1]


def test_complex_outputs_and_targets_have_no_default_loss() -> None:
    with pytest.raises(ValueRangeError, match="complex64"):
        default_loss(LOGITS, LOGITS + 1j)
    with pytest.raises(ValueRangeError, match="complex64"):
        default_loss(LOGITS + 1j, LOGITS)


def test_a_list_of_tensors_is_stacked_in_any_precision_with_gradients() -> None:
    parts = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
    made = as_tensor("layers", parts)
    assert made.dtype == torch.bfloat16
    assert made.shape == (3, 2)
    assert made.requires_grad
    with pytest.raises(ConversionError, match=r"layers .*numeric.*equal size"):
        as_tensor("layers", [torch.ones(2), torch.ones(3)])
