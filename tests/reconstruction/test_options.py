"""The options of a reconstruction: what they refuse when they are made, how they print, and who reads them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from typing import Any

import pytest
import torch
from rebuilding import CONSTRUCTIONS, X, net
from torch import nn

import onlynorm as on
from onlynorm.errors import ConversionError, UnknownNameError, ValueRangeError
from onlynorm.reconstruction import Construction, Settings
from onlynorm.reconstruction.constructions import BUILDERS, find_builder


@pytest.mark.parametrize("kind", CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_every_construction_is_in_the_table_and_is_frozen(kind: type[Construction]) -> None:
    options = kind()
    assert find_builder(options) is BUILDERS[kind]
    assert options == kind()
    assert hash(options) == hash(kind())
    assert options != kind(excess=1.5)
    with pytest.raises(dataclasses.FrozenInstanceError, match="excess"):
        options.excess = 2.0  # type: ignore[misc]


def test_a_subclass_is_built_as_the_construction_it_extends() -> None:
    class Mine(on.Wide):
        pass

    assert find_builder(Mine()) is BUILDERS[on.Wide]
    assert on.reconstruct(net(), X, Mine(excess=1.5)).layers[0].n_features == 45


@pytest.mark.parametrize("verb", [on.plan, on.reconstruct, on.verify])
def test_every_option_has_a_name_in_the_signature(verb: Any) -> None:
    parameters = inspect.signature(verb).parameters.values()
    assert all(one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)
    assert sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters) == 3
    assert next(iter(parameters)).name == "model"


def test_options_print_as_the_call_that_makes_them() -> None:
    assert repr(on.Wide()) == "Wide()"
    wide = on.Wide(excess=1.25, activation=nn.ReLU(), source_kernel=(5, 5))
    assert str(wide) == "Wide(excess=1.25, activation=ReLU(), source_kernel=(5, 5))"
    assert str(on.Deep(inputs_per_slice=2)) == "Deep(inputs_per_slice=2)"
    assert str(on.Ranges(margin=0.5)) == "Ranges(margin=0.5)"
    assert eval(repr(on.LowRank(rank=3, features="id_cond")), vars(on)) == on.LowRank(rank=3, features="id_cond")


def test_equal_options_are_equal() -> None:
    def box(high: float) -> on.Box:
        return on.Box(torch.zeros(2), torch.full((2,), high))

    assert on.Ranges() == on.Ranges()
    assert on.Ranges(box=box(1.0)) == on.Ranges(box=box(1.0))
    assert Settings(ranges=on.Ranges(window=1e-8)) == Settings(ranges=on.Ranges(window=1e-8))
    several = [on.Ranges(), on.Ranges(), on.Ranges(margin=1.0), on.Ranges(box=box(1.0)), on.Ranges(box=box(2.0))]
    assert len(set(several)) == 4


def test_options_are_plain_data_on_demand() -> None:
    plain = json.loads(json.dumps(on.Residual(skip="outside", activation=nn.ReLU(), source_kernel=(3, 3)).as_dict()))
    assert plain["construction"] == "residual"
    assert (plain["skip"], plain["activation"], plain["source_kernel"]) == ("outside", "ReLU()", [3, 3])
    assert plain["features"] == "he_normal"
    box = on.Box(torch.zeros(2), torch.ones(2))
    assert on.Ranges(box=box).as_dict()["box"] == {"low": [0.0, 0.0], "high": [1.0, 1.0]}
    assert Settings(seed=3, ranges=on.Ranges(window=1e-8)).as_dict() == {
        "seed": 3, "tolerance": None, "storage": "dense", "window": 1e-8, "margin": None, "precision": None,
        "box": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (on.Wide, {"n_blocks": 2}, r"Wide needs the default of n_blocks.*got 2\. Leave n_blocks out"),
        (on.Wide, {"features": "id_cond", "spectrum": 10.0}, r"Wide needs the default of spectrum.*got 10.0\. Leave"),
        (on.Wide, {"features": "id_cond", "spectrum": torch.ones(4)}, r"default of spectrum.*got a Tensor of shape"),
        (on.LowRank, {"features": "id_cond_minimal", "shared_column": 1}, r"LowRank needs the default of shared"),
        (on.Wide, {"features": "id_cond", "excess": 1.5}, r"id_cond needs .*got excess=1.5\. Leave excess out"),
        (on.Wide, {"features": "id_cond", "width": "minimum"}, r"width='minimum' needs .*got id_cond.*id_cond_minimal"),
        (on.Wide, {"density": 1.5}, r"density .* number in \(0, 1\]; got 1.5"),
        (on.LowRank, {"rank": 0}, r"rank .* integer from 1; got 0"),
        (on.Residual, {"skip": "outside", "activation": nn.Tanh()}, r"skip='outside' needs an activation.*got Tanh"),
        (on.Residual, {"skip": "outside", "features": "id_cond_minimal"}, r"skip='outside' needs .*got id_cond_min"),
        (on.Deep, {"inputs_per_slice": 0}, r"inputs_per_slice .* integer from 1; got 0"),
        (on.Deep, {"features": "ortho_cond"}, r"deep construction needs random features; got 'ortho_cond'"),
        (on.Multilayer, {"features": "id_cond"}, r"multilayer construction needs random features; got 'id_cond'"),
        (on.Multilayer, {"n_layers": 1}, r"n_layers .* integer from 2; got 1"),
        (on.Ranges, {"window": 0.0}, r"window .* number in \(0, inf\); got 0.0"),
        (on.Ranges, {"margin": -1.0}, r"margin .* number in \[0, inf\); got -1.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_when_the_options_are_made(kind: Any, options: Any, says: str) -> None:
    with pytest.raises(ValueRangeError, match=says):
        kind(**options)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(on.Wide, "norms"), (on.Wide, "kernel"), (on.Wide, "width"), (on.Residual, "skip"), (on.Ranges, "precision")],
)
def test_words_are_checked_when_the_options_are_made(kind: Any, name: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"{name} needs a known name; got 'maxim'"):
        kind(**{name: "maxim"})


def test_a_result_knows_its_options_with_what_was_left_to_their_defaults() -> None:
    construction = on.Wide(activation=nn.ReLU())
    result = on.reconstruct(net(), X, construction, seed=2)
    assert result.construction is construction
    assert (result.settings.seed, result.settings.ranges.window) == (2, 1e-10)
    assert result.settings.ranges.precision == "float64"
    shared = on.reconstruct(net(), X, construction, error=1e-6).settings
    assert shared.tolerance == shared.ranges.window == 1e-6 / 8
    planned = on.plan(net(), X, construction, seed=2)
    assert planned.construction is construction
    assert planned.settings.seed == 2


@pytest.mark.parametrize("tolerance", [0.0, 1.0, 2, math.nan])
def test_a_tolerance_outside_of_0_to_1_is_refused_with_the_options(tolerance: float) -> None:
    network, x = nn.Linear(3, 3).eval(), torch.ones(4, 3)
    for verb in (on.reconstruct, on.plan):
        with pytest.raises(ValueRangeError, match=r"^tolerance needs to lie in \(0, 1\); got"):
            verb(network, x, tolerance=tolerance)


def test_a_scripted_network_is_refused_by_the_name_of_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"torch.jit"):
        scripted = torch.jit.script(nn.Linear(3, 3).eval())
    x = torch.ones(4, 3)
    for verb, name in ((on.reconstruct, "a reconstruction"), (on.plan, "a plan")):
        with pytest.raises(ConversionError, match=f"^{name} needs layers that Python calls"):
            verb(scripted, x)
    with pytest.raises(ConversionError, match=r"^to_norm_only needs layers that Python calls"):
        on.to_norm_only(scripted)
