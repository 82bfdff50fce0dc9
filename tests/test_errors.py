"""Every exception is ours and also the built-in one a caller expects."""

from __future__ import annotations

import pickle

import pytest
import torch

from onlynorm import errors
from onlynorm.errors import FormatError, OnlynormError, StorageError, UnknownNameError, shown

OURS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, OnlynormError) and value is not OnlynormError
]


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_each_is_ours_and_the_built_in_a_caller_expects(cls: type[Exception]) -> None:
    ours, built_in = cls.__bases__
    assert ours is OnlynormError
    assert built_in.__module__ == "builtins"
    assert built_in not in (Exception, BaseException)
    assert cls.__doc__


def test_unknown_names_suggest_near_ones_and_list_all_otherwise() -> None:
    near = UnknownNameError("method", "kryloff", ["lu", "krylov"])
    assert str(near) == "method needs a known name; got 'kryloff'. Did you mean 'krylov'?"
    far = UnknownNameError("method", "zzz", iter(["lu", "krylov"]))
    assert str(far) == "method needs a known name; got 'zzz'. Known: krylov, lu."


def test_unknown_names_are_caught_as_key_errors() -> None:
    with pytest.raises(KeyError, match="needs a known name; got 'x'"):
        raise UnknownNameError("paper", "x", ["giannou2023"])


@pytest.mark.parametrize("cls", [c for c in OURS if c is not UnknownNameError], ids=lambda cls: cls.__name__)
def test_errors_travel_between_processes(cls: type[Exception]) -> None:
    error = cls("a needs b; got c. Do d.")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_unknown_names_travel_between_processes() -> None:
    error = UnknownNameError("method", "kryloff", ["lu", "krylov"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (UnknownNameError, str(error))


def test_a_message_cannot_command_the_terminal() -> None:
    name = "a\x1b[31m\x07\x9b2J\u202e.pth"
    for error in (FormatError(f"{name} is bad"), StorageError(f"{name} is bad"), UnknownNameError("data", "x", [name])):
        assert "a\\x1b[31m\\x07\\x9b2J\\u202e.pth" in str(error)
        assert str(error).isprintable()
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_value_whose_attributes_raise_is_shown_by_its_class() -> None:
    class Odd:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    assert shown(Odd()) == "a Odd"
    assert shown(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) == "a Tensor"
