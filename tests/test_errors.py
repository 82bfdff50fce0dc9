"""Every exception is ours and also the built-in one a caller expects."""

from __future__ import annotations

import pickle

import pytest

from onlynorm import errors
from onlynorm.errors import OnlynormError, UnknownNameError

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
