"""The structure of networks in files: what is compared, what is not, and how much rounding is allowed."""

from __future__ import annotations

import dataclasses
import enum
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onlynorm.errors import FormatError
from onlynorm.identity import Memorizer
from onlynorm.modules.structure import describe, differences
from onlynorm.storage import from_plain


class Mode(enum.Enum):
    FAST, SLOW = 1, 2


@dataclasses.dataclass
class Options:
    scale: float
    names: tuple[str, ...] = ()


class Net(nn.Module):
    """A network with one attribute, and one non-persistent buffer if it is a tensor in a list."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.option = value


def compared(stored: nn.Module, own: nn.Module, **options: Any) -> list[str]:
    return differences(from_plain(describe(stored)), own, **options)


PAIRS = {
    "a float": (2.0, 3.0), "an int and a bool": (2, False), "a string": ("zeros", "reflect"),
    "a list": ([1, 2], [1, 3]), "a dict": ({"a": 1}, {"a": 2}), "another key": ({"a": 1}, {"b": 1}),
    "a dict with a tensor": ({"a": torch.ones(2)}, {"a": torch.zeros(2)}),
    "a list of dicts": ([{"a": 1.0}], [{"a": 1.5}]), "a dataclass": (Options(2.0), Options(3.0)),
    "a nested dataclass": ({"x": Options(2.0, ("a",))}, {"x": Options(2.0, ("b",))}),
    "an enum": (Mode.FAST, Mode.SLOW), "a dtype": (torch.float32, torch.float64), "a set": ({1, 2}, {1, 3}),
    "a slice": (slice(0, 4, 2), slice(0, 4, 1)), "an array": (np.arange(3.0), np.arange(3.0) + 1),
    "an array of integers": (np.arange(3), np.arange(3) + 1),
    "a partial function": (functools.partial(torch.clamp, min=0.0), functools.partial(torch.clamp, min=1.0)),
    "a function": (torch.relu, torch.tanh), "a tensor": (torch.ones(3), torch.full((3,), 2.0)),
    "a shape": (torch.ones(3), torch.ones(3, 1)), "a complex tensor": (torch.ones(2) * 1j, torch.ones(2) * 2j),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_attributes_that_differ_are_found_and_equal_ones_are_not(name: str) -> None:
    one, other = PAIRS[name]
    assert compared(Net(one), Net(one)) == []
    found = compared(Net(one), Net(other))
    assert len(found) == 1
    assert "option of ''" in found[0]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_non_persistent_buffers_are_compared_and_may_be_rounded(factor: float) -> None:
    networks = [Net(0), Net(0)]
    values = torch.linspace(0.1, 3.0, 40)
    networks[0].register_buffer("shift", values.bfloat16(), persistent=False)
    networks[1].register_buffer("shift", factor * values, persistent=False)
    assert len(compared(*networks)) == (factor != 1.0)
    del networks[1].shift
    assert compared(*networks) == []  # like a tensor that the last forward pass left


def test_a_tensor_of_the_last_forward_pass_and_objects_of_other_classes_are_not_compared() -> None:
    stored, own = Net(SimpleNamespace(a=1)), Net(SimpleNamespace(a=2))
    stored.seen = torch.ones(3)
    stored._cache = 5
    assert compared(stored, own) == []
    stored.seen, own.seen = torch.ones(3), torch.zeros(3)
    assert compared(stored, own) == ["seen of '' has other values in the network than in the file"]


def test_files_without_details_are_compared_by_what_they_have() -> None:
    document = from_plain(describe(Net({"a": 1})))
    del document["details"]
    assert differences(document, Net({"a": 2})) == []
    assert differences({}, Net(0)) == []
    assert differences(document, Net(5)) == ["option of '' is 5 in the network and 'not set' in the file"]


def test_replaced_places_and_modules_inside_opaque_ones_are_left_out() -> None:
    stored, own = nn.Sequential(nn.Linear(2, 2), Net(1.0)), nn.Sequential(nn.ReLU(), Net(1.0))
    assert compared(stored, own) != []
    assert compared(stored, own, replaced=["0"]) == []
    assert list(describe(stored, opaque=(Net,))["structure"]) == ["", "0"]


def test_hooks_are_counted() -> None:
    stored, own = Net(1), Net(1)
    stored.linear.register_forward_hook(lambda *_: None)
    assert compared(stored, own) == ["[pre-hooks, hooks] at 'linear' are [0, 0] in the network and [0, 1] in the file"]


@pytest.mark.parametrize("key", ["structure", "details", "hooks"])
@pytest.mark.parametrize("value", [3, [1], {"linear": 3}, {"linear": "x"}])
def test_forged_structures_are_refused(key: str, value: object) -> None:
    with pytest.raises(FormatError, match="hyperparameters and hooks of its modules"):
        differences({key: value}, Net(1))


@pytest.mark.parametrize(
    "forged", [{"$tensor": [3], "eps": "x", "values": []}, {"$tensor": [3], "eps": 0.1, "values": [1]}, [], None, 3]
)
def test_forged_details_differ(forged: object) -> None:
    assert len(differences({"details": {"": {"option": forged}}}, Net(torch.ones(3)))) == 1


def test_a_class_renamed_since_a_file_was_written_is_the_same_class() -> None:
    network = Memorizer(2, 2, width=3, n_blocks=1, n_cues=2)
    written = from_plain(describe(network))
    place = "blocks.0"
    assert written["structure"][place]["class"] == "MemorizerBlock"
    written["structure"][place]["class"] = "Block"
    assert differences(written, network) == []
    written["structure"][place]["class"] = "BasicBlock"
    (found,) = differences(written, network)
    assert "'MemorizerBlock'" in found
    assert "'BasicBlock'" in found
