"""One small valid call of every public function, method and class."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensors import normal
from torch import nn

import onlynorm as on
from onlynorm import (
    alignment,
    data,
    display,
    features,
    frozen,
    identity,
    intervals,
    models,
    modules,
    rank,
    reconstruction,
    seeds,
    solvers,
    tuning,
)
from onlynorm.evidence import records, registry
from onlynorm.evidence.papers.burkholz2024 import depth as width_depth
from onlynorm.evidence.papers.daneshmand2020 import eigenvalues
from onlynorm.evidence.papers.giannou2023 import depth, equal_size
from onlynorm.evidence.report import page
from onlynorm.features.distributions import _REGISTRY, STRUCTURED
from onlynorm.solvers import spectrum


@dataclass(frozen=True)
class Fresh:
    """An argument that is made again for every call, since calls may change it."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """A valid call: `make` returns the function, or the method of a new object.

    `also` names keywords that the signature does not show. `legal` holds (argument, label) of values that ask for a
    long run and not for a mistake. `untried` names arguments that are not replaced.
    """

    make: Callable[[], Callable[..., Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    legal: tuple[tuple[str, str], ...] = ()
    untried: tuple[str, ...] = ()


FOLDER = Path(tempfile.gettempdir())
"""Where calls write; the test sets it to a folder of its own."""
_numbers = itertools.count()


def out(name: str) -> Fresh:
    """A path in a folder that exists, not yet taken."""
    return Fresh(lambda: FOLDER / f"{next(_numbers)}-{name}")


X = normal(8, 3)
LABELS = torch.arange(8) % 2
LEFT, RIGHT, TARGET = normal(2, 7), normal(7, 3, seed=1), normal(2, 3, seed=2)
LEFT_FEW, RIGHT_FEW = normal(2, 4), normal(4, 3, seed=1)
IMAGES = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@functools.cache
def _cached(make: Callable[[], Any]) -> Any:
    return make()


def copied(make: Callable[[], Any]) -> Fresh:
    """A copy of what `make` returns, which is made once."""
    return Fresh(lambda: copy.deepcopy(_cached(make)))


def once(make: Callable[[], Any]) -> Fresh:
    """What `make` returns, made once: for arguments that calls leave alone."""
    return Fresh(lambda: _cached(make))


def _net() -> nn.Sequential:
    return models.mlp((3, 4, 2)).double().eval()


def _normed() -> nn.Sequential:
    return models.mlp((3, 4, 2), norm="batch").double().eval()


def _folded_normed() -> Any:
    return modules.fold(_normed(), X)


def _rebuilt() -> on.reconstruction.Reconstruction:
    return on.reconstruct(_net(), X, on.Wide(features="id_cond"))


def _rebuilt_network() -> nn.Module:
    return _rebuilt().network


def _norm_only() -> nn.Module:
    return on.to_norm_only(_net())


def _norm_only_random() -> nn.Module:
    return on.to_norm_only(_net(), features="he_normal")


def _verification() -> on.reconstruction.Verification:
    return on.verify(_net(), _rebuilt_network(), X)


def _box() -> on.Box:
    return on.Box(X.amin(0) - 0.1, X.amax(0) + 0.1)


def _memorizer() -> on.identity.Memorizer:
    return on.memorize(X, LABELS)


def _norm_memorizer() -> Any:
    return on.memorize_norms(X, LABELS)


def _repaired() -> on.rank.Repaired:
    return on.repair(_net(), X, LABELS, method="lsuv")


def _factorization() -> on.identity.Factorization:
    return on.factorize(normal(2, 2), 4)


def _diagnosis() -> on.rank.Diagnosis:
    return on.diagnose(_net(), X, LABELS)


def _drawn() -> on.features.Features:
    return on.draw("he_normal", (2, 3))


def _spectrum() -> Any:
    return spectrum.measure_spectrum(_drawn())


def _blocks() -> Any:
    return features.draw_blocks("he_normal", (2, 3), n_blocks=2)


def _directions() -> Any:
    return alignment.find_directions(LEFT_FEW, RIGHT_FEW)


def _objective() -> Any:
    return alignment.objective_for(TARGET, _directions())


def _per_output() -> Any:
    drawn = on.draw("id_cond", (2, 3), density=0.5)
    return alignment.find_directions(drawn.left(), drawn.right())


def _operator() -> on.solvers.KhatriRao:
    return on.solvers.KhatriRao(LEFT, RIGHT)


def _landscape() -> Any:
    return identity.Landscape(torch.eye(2, dtype=torch.float64) * 1.5)


def _chain() -> on.Chain:
    return on.Chain(width=3, n_chains=1)


def _conv_net() -> nn.Module:
    return identity.all_convolutional(7, width=2, n_classes=2)


def _handle() -> Any:
    return on.only_norms(_normed())


def _adapter() -> Any:
    return tuning.take_adapter(_normed())


def _adapters() -> on.Adapters:
    model = _normed()
    adapters = on.Adapters(model)
    on.only_norms(model)
    adapters.capture("a")
    adapters.capture("b")
    return adapters


def _resnet20() -> str:
    """The name of weights that are in the data folder, so that nothing is downloaded."""
    path = FOLDER / "weights/resnet20_cifar10.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"weights")
    return "resnet20"


def _split() -> Any:
    images, labels = torch.rand(6, 3, 4, 4), torch.arange(6) % 2
    return data.Split("images", images, labels, images, labels)


@functools.cache
def _file(kind: str) -> Path:
    """A file of this kind, written once."""
    path = FOLDER / f"written-{kind}.safetensors"
    saved = {
        "network": _rebuilt, "norm_only": _norm_only, "adapter": _adapter, "factors": _factorization,
        "memorizer": _memorizer, "norm_memorizer": _norm_memorizer, "repaired": _repaired,
    }  # fmt: skip
    if kind in saved:
        on.save(saved[kind](), path)
    elif kind == "weights":
        from safetensors.torch import save_file

        save_file(_net().state_dict(), path)
    elif kind == "peft":
        path = FOLDER / "written-peft"
        tuning.write_peft(_adapter(), path)
    elif kind == "inputs":
        path = FOLDER / "written-inputs.npy"
        np.save(path, X.numpy())
    elif kind == "records":
        path = FOLDER / "written-records"
        path.mkdir(exist_ok=True)
        records.write_record(path / "a.json", _record())
    return path


def written(kind: str) -> Fresh:
    return Fresh(lambda: _file(kind))


def record_file() -> Path:
    return _file("records") / "a.json"


def _figure() -> Any:
    return display.Figure([display.Curve("a", (1.0, 2.0), (1.0, 2.0))])


def _record() -> Any:
    return records.Record(
        artifact="giannou2023:fig-1", title="t", claim="c", kind="figure", scale="quick",
        verdict=next(iter(records.RecordVerdict)), reasons=(), checks=(), values={"a": 1.0}, sizes={"n": 1}, seeds=(0,),
    )  # fmt: skip


def _registered() -> Callable[..., Any]:
    name = "tried by a test"
    _REGISTRY.pop(name, None)

    def add(fill: Any) -> Any:
        try:
            return features.register(name)(fill)
        finally:
            _REGISTRY.pop(name, None)

    return add


def _all_numbers(**options: Any) -> None:
    drawn = on.draw(**options)
    drawn.left(), drawn.right(), drawn.mask_left(), drawn.mask_right(), drawn.weights_digest()


def _run_interval_rule(function: Any) -> Any:
    from onlynorm.intervals.rules import RULES

    before = dict(RULES)
    try:
        return intervals.interval_rule(function)
    finally:
        RULES.clear()
        RULES.update(before)


def _random_block(seed: Any) -> None:
    with seeds.own_randomness(seed):
        pass


def _walked(chain: Any, depths: Any, inputs: Any = None) -> Any:
    return list(rank.walk(chain, depths, inputs=inputs))


def _signals() -> Any:
    return _diagnosis().layers


def _judged() -> Callable[..., Any]:
    return rank.judge


def _plain_linear() -> nn.Linear:
    return nn.Linear(3, 2).double()


def fn(function: Callable[..., Any], /, *, also: tuple[str, ...] = (), legal: tuple[tuple[str, str], ...] = (),
       untried: tuple[str, ...] = (), **arguments: Any) -> Call:  # fmt: skip
    """A call of a function or class."""
    return Call(lambda: function, arguments, also, legal, untried)


def method(make: Callable[[], Any], called: str, /, **arguments: Any) -> Call:
    """A call of a method of a copy of what `make` returns."""
    return Call(lambda: getattr(copy.deepcopy(_cached(make)), called), arguments)


def _with_options(verb: Callable[..., Any], kind: type[reconstruction.Construction]) -> Call:
    """A call of `plan` or `reconstruct` whose arguments are the options of a construction."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    return fn(lambda **options: verb(_net(), X, kind(**options)), also=names)


KINDS = {kind.__name__: kind for kind in (on.Wide, on.LowRank, on.Residual, on.Deep, on.Multilayer)}
net, normed, rebuilt_network = copied(_net), copied(_normed), copied(_rebuilt_network)
H = normal(3, 4)

CALLS: dict[str, Call] = {
    # ---------------------------------------------------------------------------------------------------- features
    "features.check_shape": fn(features.check_shape, shape=(2, 3)),
    "features.draw": fn(on.draw, name="er_normal", shape=(2, 3), excess=1.5, seed=1, layer="a", density=0.5),
    **{
        f"features.draw({name})": fn(
            _all_numbers, name=name, shape=(2, 3), excess=None, n_features=None, seed=1, layer="a", kernel="first",
            density=None, shared_column=0, untried=("name", "dtype", "device", "layer", "seed"),
        )
        for name in ("he_normal", "orthogonal", "er_sign", *STRUCTURED)
    },
    "features.register": fn(features.register, name="never added", density=0.5),
    "features.register()": Call(_registered, {"fill": _drawn}),
    "features.structural_rank": fn(features.structural_rank, left_mask=LEFT > 0, right_mask=RIGHT > 0),
    "features.is_generically_invertible": fn(
        features.is_generically_invertible, left_mask=LEFT > 0, right_mask=RIGHT > 0
    ),
    "features.Features.left": method(_drawn, "left", start=1, stop=3),
    "features.Features.right": method(_drawn, "right", start=1, stop=3),
    "features.Features.mask_left": method(_drawn, "mask_left", start=1, stop=3),
    "features.Features.mask_right": method(_drawn, "mask_right", start=1, stop=3),
    "features.Features.as_matrix": method(_drawn, "as_matrix", weight=TARGET),
    "features.Features.as_weight": method(_drawn, "as_weight", matrix=TARGET),
    # ----------------------------------------------------------------------------------------------------- solvers
    "solvers.solve": fn(on.solve, left=LEFT, right=RIGHT, target=TARGET, tolerance=1e-6, memory=1e9),
    "solvers.solve_features": fn(on.solve_features, features=once(_drawn), target=TARGET, tolerance=1e-6, memory=1e9),
    "solvers.solve_operator": fn(
        solvers.solve_operator, operator=once(_operator), target=TARGET, near=normal(7), memory=1e9
    ),
    "solvers.solve_multilayer": fn(
        solvers.solve_multilayer, weights=[normal(5, 3), normal(2, 5)], target=TARGET, max_steps=3
    ),
    "solvers.need_tolerance": fn(solvers.need_tolerance, tolerance=1e-6),
    "solvers.widths_for": fn(solvers.widths_for, shape=(2, 3), n_layers=3, excess=1.1),
    "solvers.choose": fn(
        on.solvers.choose, n_outputs=2, n_inputs=3, n_features=7, memory=10**9, tolerance=1e-10, condition=10.0, block=4
    ),
    "solvers.KhatriRao": fn(on.solvers.KhatriRao, left=LEFT, right=RIGHT, block=4),
    "solvers.KhatriRao.regenerating": fn(on.solvers.KhatriRao.regenerating, source=once(_drawn), block=4),
    "solvers.KhatriRao.apply": method(_operator, "apply", gamma=normal(7)),
    "solvers.KhatriRao.transpose": method(_operator, "transpose", residual=TARGET),
    "solvers.KhatriRao.gram": method(_operator, "gram", is_whole=True),
    "solvers.KhatriRao.gram_apply": method(_operator, "gram_apply", gamma=normal(7)),
    "solvers.KhatriRao.row_gram_apply": method(_operator, "row_gram_apply", residual=TARGET),
    "solvers.KhatriRao.materialise": method(_operator, "materialise", dtype=torch.float32),
    "solvers.KhatriRao.to": method(_operator, "to", dtype=torch.float32),
    "solvers.KhatriRao.empty_factors": method(_operator, "empty_factors", dtype=torch.float32),
    "solvers.KhatriRao.cast": method(_operator, "cast", dtype=torch.float32),
    "solvers.KhatriRao.borrow": method(_operator, "borrow", dtype=torch.float32),
    "solvers.KhatriRao.restrict": method(
        _operator, "restrict", outputs=torch.tensor([True, False]), inputs=torch.tensor([True, False, True])
    ),
    "solvers.KhatriRao.scaled": method(_operator, "scaled", left_power=1, right_power=-2),
    "solvers.KhatriRao.sample": method(_operator, "sample", step=2),
    "spectrum.edges": fn(spectrum.edges, n_equations=4, n_features=6),
    "spectrum.density": fn(spectrum.density, x=np.linspace(0.0, 2.0, 3), n_equations=4, n_features=6),
    "spectrum.cumulative": fn(spectrum.cumulative, x=np.linspace(0.0, 2.0, 3), n_equations=4, n_features=6),
    "spectrum.condition_number": fn(spectrum.condition_number, n_equations=4, n_features=6),
    "spectrum.predict_condition": fn(
        spectrum.predict_condition, n_outputs=4, n_inputs=5, n_features=30, density=0.5, is_orthogonal=True
    ),
    "spectrum.predict_iterations": fn(spectrum.predict_iterations, prediction=10.0, tolerance=1e-6),
    "spectrum.condition_of_rows": fn(spectrum.condition_of_rows, operator=on.solvers.KhatriRao(LEFT, RIGHT)),
    "spectrum.estimate_condition": fn(
        spectrum.estimate_condition, operator=on.solvers.KhatriRao(LEFT, RIGHT), n_products=5
    ),
    "spectrum.iterations_for": fn(spectrum.iterations_for, condition=10.0, tolerance=1e-6),
    "spectrum.condition_for": fn(spectrum.condition_for, iterations=10, tolerance=1e-6),
    "spectrum.features_for_condition": fn(spectrum.features_for_condition, n_equations=4, condition=10.0),
    "spectrum.measure_spectrum": fn(spectrum.measure_spectrum, features=once(_drawn), unit_length=True),
    "spectrum.predict_features": fn(spectrum.predict_features, features=once(_drawn)),
    "spectrum.sweep_excess": fn(spectrum.sweep_excess, name="he_normal", shape=(2, 3), excesses=(1.5,), seeds=(1,)),
    "spectrum.Spectrum.histogram": method(_spectrum, "histogram", n_bins=4),
    "spectrum.Spectrum.law_cumulative": method(_spectrum, "law_cumulative", x=np.linspace(0.0, 3.0, 4)),
    "spectrum.Spectrum.law_curve": method(_spectrum, "law_curve", n_points=4),
    "spectrum.empirical_spectrum": fn(spectrum.empirical_spectrum, left=LEFT, right=RIGHT, unit_length=True),
    # --------------------------------------------------------------------------------------------------- alignment
    "alignment.align": fn(on.align, target=TARGET, left=LEFT_FEW, right=RIGHT_FEW, method="greedy", seed=1),
    "alignment.align_within": fn(
        alignment.align_within, target=TARGET, directions=once(_directions), method="greedy", seed=1, preparation=0.5
    ),
    "alignment.find_directions": fn(alignment.find_directions, left=LEFT_FEW, right=RIGHT_FEW),
    "alignment.objective_for": fn(alignment.objective_for, target=TARGET, directions=once(_directions)),
    "alignment.PerOutput.costs": method(_per_output, "costs", target=TARGET),
    "alignment.Objective.total": method(_objective, "total", order=torch.arange(2)),
    "alignment.Objective.missed": method(_objective, "missed", order=torch.arange(2)),
    # ------------------------------------------------------------------------------------------------------ models
    "models.mlp": fn(models.mlp, widths=(3, 4, 2), activation=nn.ReLU, norm="batch", init="standard", seed=1),
    "models.vgg": fn(models.vgg, stages=((2,), (2,)), norm="batch", n_classes=2, image_size=4, seed=1),
    "models.cifar_resnet": fn(models.cifar_resnet, depth=8, n_classes=2, width=1, norm="batch", seed=1),
    "models.CifarResNet": fn(models.CifarResNet, depth=8, n_classes=2, width=1, norm="batch"),
    "models.CifarBlock": fn(models.CifarBlock, n_in=2, n_out=2, stride=1),
    "models.resnet": fn(models.resnet, depth=18, n_classes=2, width=1, seed=1),
    "models.ResNet": fn(models.ResNet, depth=18, n_classes=2, width=1),
    "models.vit": fn(models.vit, patch=2, depth=1, width=4, heads=2, image_size=4, n_classes=2, seed=1),
    "models.ViT": fn(
        models.ViT, patch=2, depth=1, width=4, heads=2, n_patches=4, in_channels=3, n_classes=2
    ),
    "seeds.own_randomness": fn(_random_block, seed=1),
    "models.make_model": fn(models.make_model, spec="mlp"),
    "models.load_model": fn(models.load_model, spec="mlp"),
    "models.load_weights": fn(models.load_weights, model=net, path=written("weights")),
    "models.run_factory": fn(models.run_factory, spec="torch.nn:ReLU", what="a model"),
    # ---------------------------------------------------------------------------------------------------- theorems
    "registry.statements": fn(registry.statements, paper="giannou2023"),
    "registry.statement": fn(registry.statement, key="giannou2023:thm-1"),
    "registry.has_check": fn(registry.has_check, key="giannou2023:thm-1"),
    "registry.where": fn(registry.where, key="giannou2023:thm-1"),
    "registry.run_check": fn(registry.run_check, key="giannou2023:thm-10", seed=0),
    "registry.run_checks": fn(registry.run_checks, keys=("giannou2023:thm-10",), seed=0, legal=(("keys", "None"),)),
    # ------------------------------------------------------------------------------------------------------- optim
    "optim.follow_weights": fn(
        on.optim.follow_weights, kind=torch.optim.SGD, model=copied(_norm_only_random), memory=1e9
    ),
    "optim.release": fn(on.optim.release, model=copied(_norm_only)),
    # ---------------------------------------------------------------------------------------------- reconstruction
    "reconstruction.plan": fn(on.plan, model=net, inputs=X, construction=on.Wide()),
    "reconstruction.reconstruct": fn(
        on.reconstruct, model=net, inputs=X, construction=on.Wide(features="id_cond"), ranges=on.Ranges(margin=0.1)
    ),
    **{f"reconstruction.plan({name})": _with_options(on.plan, kind) for name, kind in KINDS.items()},
    **{f"reconstruction.reconstruct({name})": _with_options(on.reconstruct, kind) for name, kind in KINDS.items()},
    **{f"reconstruction.{name}": fn(kind, excess=1.25) for name, kind in KINDS.items()},
    "reconstruction.Construction": fn(reconstruction.Construction, excess=1.25),
    "reconstruction.Ranges": fn(on.Ranges, window=1e-10, margin=0.1, precision="float32", box=once(_box)),
    "reconstruction.Settings": fn(reconstruction.Settings, seed=1, tolerance=1e-8, ranges=on.Ranges()),
    "reconstruction.verify": fn(
        on.verify, model=net, network=rebuilt_network, inputs=X, batch_size=4, box=once(_box)
    ),
    "reconstruction.collapse": fn(on.collapse, network=rebuilt_network),
    "intervals.Box": fn(on.Box, low=X.amin(0), high=X.amax(0)),
    "modules.Affine": fn(modules.Affine, num_features=3),
    "reconstruction.certified_price": fn(
        reconstruction.certified_price, model=net, inputs=X, box=once(_box), n_features=2, seed=1
    ),
    "evidence.deep_table": fn(depth.deep_table, widths=(4,), ks=(1,), excesses=(2.0,), seed=1),
    "modules.ModuleTree.text": method(lambda: _diagnosis().tree, "text", max_rows=3),
    "modules.find_layers": fn(modules.find_layers, model=net, keep="2", is_trained=True),
    "modules.fold_network": fn(modules.fold_network, model=normed, inputs=X),
    "intervals.interval_rule": fn(_run_interval_rule, function=torch.atan2),
    "reconstruction.linearize": fn(
        reconstruction.linearize, activation=Fresh(nn.Tanh), low=-1.0, high=1.0, tolerance=1e-6
    ),
    "evidence.pad_equal": fn(equal_size.pad_equal, network=rebuilt_network, width=20),
    "evidence.tradeoff": fn(
        width_depth.tradeoff, shape=(2, 3), n_layers=(2, 3), excess=1.5, measured=(3, 3), seed=1
    ),
    "evidence.unique_solution": fn(depth.unique_solution, target=normal(4, 4), inputs_per_slice=2, seed=1),
    "reconstruction.LayerResult.from_dict": fn(
        reconstruction.LayerResult.from_dict, written=Fresh(lambda: _layer_result())
    ),
    "reconstruction.Calibration.of": fn(
        reconstruction.Calibration.of, layers=Fresh(lambda: _cached(_rebuilt).layers), n_samples=8, margin=0.1
    ),
    "modules.to_affine": fn(modules.to_affine, norm=Fresh(lambda: nn.BatchNorm1d(3).double().eval())),
    "modules.from_affine": fn(
        modules.from_affine, map=Fresh(lambda: modules.Affine(3)), mean=normal(3), variance=normal(3).square(),
        axes=0,
    ),
    "reconstruction.Verification.is_same": method(_verification, "is_same", tolerance=1e-6),
    # ------------------------------------------------------------------------------------------------------ layers
    "frozen.NormOnlyLinear": fn(
        on.NormOnlyLinear, in_features=3, out_features=2, bias=True, features="he_normal", excess=1.5, n_blocks=2,
        seed=1, layer="a",
    ),
    "frozen.NormOnlyConv1d": fn(
        frozen.NormOnlyConv1d, in_channels=4, out_channels=2, kernel_size=2, groups=2, density=0.5, seed=1
    ),
    "frozen.NormOnlyConv3d": fn(
        frozen.NormOnlyConv3d, in_channels=3, out_channels=2, kernel_size=1, padding="same", spectrum=9.0, seed=1
    ),
    "frozen.NormOnlyConv2d": fn(
        on.NormOnlyConv2d, in_channels=3, out_channels=2, kernel_size=2, stride=1, padding=1, seed=1
    ),
    "frozen.to_norm_only": fn(on.to_norm_only, model=net, features="he_normal", excess=1.5, seed=1, keep="2"),
    "frozen.find_blocks": fn(frozen.find_blocks, network=copied(_norm_only)),
    "frozen.converted": fn(on.frozen.converted, model=copied(_norm_only)),
    "features.semicircle_spectrum": fn(on.features.semicircle_spectrum, n=4, condition=10.0, seed=1, layer="a"),
    "frozen.FrozenOptions": fn(frozen.FrozenOptions, features="he_normal", excess=1.5),
    "features.draw_blocks": fn(features.draw_blocks, name="he_normal", shape=(2, 3), n_blocks=2, excess=1.5, seed=1),
    "features.BlockFeatures.left": method(_blocks, "left", start=1, stop=3),
    "features.BlockFeatures.right": method(_blocks, "right", start=1, stop=3),
    "features.BlockFeatures.as_blocks": method(_blocks, "as_blocks", weight=TARGET),
    "frozen.wrap": fn(
        frozen.wrap, plain=copied(_plain_linear), options=Fresh(frozen.FrozenOptions), seed=1, layer="a"
    ),
    "frozen.NormOnlyLayer": fn(
        frozen.NormOnlyLayer, plain=copied(_plain_linear), options=Fresh(frozen.FrozenOptions), seed=1
    ),
    "frozen.NormOnlyLayer.from_settings": fn(
        frozen.NormOnlyLayer.from_settings, settings=Fresh(lambda: _norm_only()[0].settings()), activation=None,
        storage="seed",
    ),
    "frozen.NormOnlyLayer.needs_float32": Call(lambda: _norm_only()[0].needs_float32, {"tensor": normal(4, 3)}),
    "frozen.NormOnlyLayer.set_weight": Call(lambda: _norm_only()[0].set_weight, {"weight": normal(4, 3)}),
    # ------------------------------------------------------------------------------------------------------ tuning
    "tuning.Adapters": fn(on.Adapters, model=normed),
    "tuning.Adapters.add": method(_adapters, "add", name="c", adapter=once(_adapter)),
    "tuning.Adapters.capture": method(_adapters, "capture", name="c"),
    "tuning.Adapters.remove": method(_adapters, "remove", name="a"),
    "tuning.Adapters.switch": method(_adapters, "switch", name="a"),
    "tuning.Adapters.average": method(_adapters, "average", weights={"a": 0.5, "b": 0.5}, name="c"),
    "tuning.Schedule": fn(
        on.Schedule, epochs=1, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.1, warmup=0.1, drops=(0.5,),
        label_smoothing=0.1, patience=2, clip=1.0, seed=1,
    ),
    "tuning.Schedule.lr_at": method(lambda: on.Schedule(epochs=1), "lr_at", step=1, n_steps=4),
    "tuning.fit": fn(
        on.fit, model=Fresh(lambda: _cached_copy(_normed).float()), data=(X.float(), LABELS),
        schedule=once(lambda: on.Schedule(epochs=1, batch_size=8)), save_every=2,
        legal=(("devices", "-1"),),
    ),
    "tuning.accuracy": fn(tuning.accuracy, model=net, data=(X, LABELS), batch_size=4),
    "modules.find_norms": fn(on.modules.find_norms, model=normed),
    "modules.fold": fn(on.fold, model=normed, inputs=X),
    "modules.unfold": fn(on.unfold, model=copied(_folded_normed)),
    "tuning.only_norms": Call(lambda: on.only_norms, {"model": normed, "also": ("1",)}),
    "tuning.NormHandle.recalibrate": Call(lambda: _handle().recalibrate, {"batches": [X, X]}),
    "tuning.init_gamma": fn(tuning.init_gamma, handle=Fresh(_handle), how="uniform", seed=1),
    "tuning.take_adapter": fn(tuning.take_adapter, model=normed),
    "tuning.save_adapter": fn(on.save_adapter, model=normed, path=out("adapter")),
    "tuning.load_adapter": fn(on.load_adapter, model=normed, path=written("adapter")),
    "tuning.apply_adapter": fn(tuning.apply_adapter, model=normed, adapter=once(_adapter)),
    "tuning.read_peft": fn(tuning.read_peft, model=normed, folder=written("peft")),
    "tuning.write_peft": fn(tuning.write_peft, adapter=once(_adapter), folder=out("peft")),
    # -------------------------------------------------------------------------------------------------------- rank
    "rank.diagnose": fn(on.diagnose, model=net, inputs=X, targets=LABELS, max_columns=8, seed=1),
    "rank.diagnose of chosen layers": fn(on.diagnose, model=net, inputs=X, targets=LABELS, which=["2"]),
    "rank.repair": fn(
        on.repair, model=Fresh(lambda: models.mlp((3, 4, 4, 2)).double()), inputs=X, method="rank", targets=LABELS,
        n_steps=1, max_ratio=10.0, seed=1, legal=(("n_steps", "2**40"),),
    ),
    "rank.simulate": fn(
        on.simulate, chain=once(_chain), n_steps=3, inputs=normal(3, 3), quantities=("r",), every=1, burn_in=1,
        legal=(("n_steps", "2**40"), ("burn_in", "2**40")),
    ),
    "rank.Chain": fn(on.Chain, width=3, gamma=1.0, n_samples=4, n_chains=2, seed=1),
    "rank.Chain.ready_inputs": method(_chain, "ready_inputs", inputs=normal(1, 3, 3)),
    "rank.Chain.step": method(_chain, "step", H=normal(1, 3, 3), W=normal(1, 3, 3, seed=1), scale=1.0),
    "rank.walk": fn(_walked, chain=once(_chain), depths=(1, 2), inputs=normal(3, 3)),
    "rank.ChainAverages.__getitem__": method(lambda: on.simulate(_chain(), 2), "__getitem__", name="r"),
    "rank.soft_rank": fn(on.soft_rank, H=H, tau=0.5),
    "rank.rank_ratio": fn(on.rank_ratio, H=H),
    "rank.as_matrix": fn(rank.as_matrix, activations=normal(2, 3, 4), channels=1),
    "rank.cosines": fn(rank.cosines, H=H, between="samples"),
    "evidence.drift_of_eigenvalues": fn(
        eigenvalues.drift_of_eigenvalues, eigenvalues=torch.tensor([1.5, 1.0, 0.5]).double()
    ),
    "rank.effective_rank": fn(rank.effective_rank, H=H),
    "rank.exact_rank": fn(rank.exact_rank, H=H, tolerance=1e-6),
    "evidence.frobenius_drift": fn(eigenvalues.frobenius_drift, M=torch.eye(3, dtype=torch.float64)),
    "rank.judge": fn(
        rank.judge, layers=once(_signals), alignment=0.5, input_cosine=0.5, contrast=0.5, directions=0.5,
        thresholds=Fresh(rank.Thresholds),
    ),
    "rank.read_signal": fn(rank.read_signal, activation=H, channels=1, max_columns=8, generator=None),
    "rank.regularity": fn(rank.regularity, H=H),
    "rank.second_moments": fn(rank.second_moments, H=H),
    "rank.top_eigenvalues": fn(rank.top_eigenvalues, H=H, k=2),
    "rank.unit_rows": fn(rank.unit_rows, H=H),
    "rank.unit_scale": fn(rank.unit_scale, H=H),
    "rank.Thresholds": fn(rank.Thresholds, contrast=1e-5, rank=1e-3),
    # ---------------------------------------------------------------------------------------------------- identity
    "identity.factorize": fn(on.factorize, matrix=normal(2, 2), depth=4, tolerance=1e-6),
    "identity.factorize of a Linear": fn(on.factorize, matrix=copied(_plain_linear), depth=4),
    "identity.Factorization.apply": method(_factorization, "apply", x=normal(3, 2)),
    "identity.Factorization.to_network": method(_factorization, "to_network", dtype=torch.float32),
    "identity.memorize": fn(on.memorize, inputs=X, labels=LABELS, width=8, n_classes=2, seed=1),
    "identity.Memorizer": fn(on.identity.Memorizer, n_inputs=3, n_outputs=2, width=4, n_blocks=2, n_cues=2),
    "identity.Memorizer.forward": method(_memorizer, "forward", x=X),
    "identity.Memorizer.rows": method(_memorizer, "rows", x=X),
    "identity.Memorizer.classify": method(_memorizer, "classify", x=X),
    "identity.memorize_norms": fn(on.memorize_norms, inputs=X, labels=LABELS, excess=1.25, seed=1),
    "identity.NormMemorizer": fn(identity.NormMemorizer, features=once(_drawn), code="number"),
    "identity.NormMemorizer.forward": method(_norm_memorizer, "forward", x=X),
    "identity.NormMemorizer.classify": method(_norm_memorizer, "classify", x=X),
    "identity.activation_distances": fn(identity.activation_distances, network=copied(_memorizer), inputs=X),
    "identity.class_radii": fn(identity.class_radii, network=copied(_memorizer), inputs=X),
    "identity.measure_off_sample": fn(
        identity.measure_off_sample, network=copied(_memorizer), inputs=X, labels=LABELS, held_out=(X, LABELS),
        sizes=(0.0, 0.1), most=4, seed=1,
    ),
    "identity.all_convolutional": fn(
        identity.all_convolutional, depth=7, width=2, n_classes=2, in_channels=3, norm="batch", seed=1
    ),
    "identity.branch_bounds": fn(identity.branch_bounds, network=copied(_conv_net)),
    "identity.least_norm": fn(identity.least_norm, matrix=normal(2, 2), depth=4),
    "identity.nearest_invertible": fn(identity.nearest_invertible, matrix=normal(2, 2), smallest=0.1),
    "identity.paper_bound": fn(identity.paper_bound, stretch=1.5, depth=20),
    "identity.spiral_bound": fn(identity.spiral_bound, stretch=1.5, depth=20),
    "identity.random_matrix": fn(identity.random_matrix, dim=2, seed=1, name="a"),
    "identity.NearIdentity": fn(identity.NearIdentity, weight=normal(2, 2), bias=normal(2)),
    "identity.near_identity_": fn(
        identity.near_identity_, model=copied(_conv_net), inputs=IMAGES, zero=True, seed=1
    ),
    "identity.near_identity_ of named layers": fn(
        identity.near_identity_, model=copied(_conv_net), which=["blocks.*.conv2"], seed=1
    ),
    "identity.Landscape": fn(
        identity.Landscape, target=normal(2, 2), covariance=torch.eye(2, dtype=torch.float64), noise=0.5
    ),
    "identity.Landscape.risk": method(_landscape, "risk", layers=0.1 * normal(3, 2, 2)),
    "identity.Landscape.gradient": method(_landscape, "gradient", layers=0.1 * normal(3, 2, 2)),
    "identity.Landscape.dominance": method(_landscape, "dominance", layers=0.1 * normal(3, 2, 2)),
    "identity.Landscape.usual_rate": method(_landscape, "usual_rate", depth=3),
    "identity.Landscape.descend": Call(
        lambda: _landscape().descend, {"start": 0.1 * normal(3, 2, 2), "n_steps": 2, "rate": 0.01},
        legal=(("n_steps", "2**40"),),
    ),
    "identity.Landscape.on_plane": method(
        _landscape, "on_plane", across=0.1 * normal(3, 2, 2), up=0.1 * normal(3, 2, 2, seed=1), reach=1.0, n_places=3
    ),
    # ------------------------------------------------------------------------------------------------------- files
    "files.save": fn(on.save, obj=rebuilt_network, path=out("saved")),
    "files.save of norm-only layers": fn(on.save, obj=copied(_norm_only), path=out("saved")),
    "files.save of factors": fn(on.save, obj=once(_factorization), path=out("saved")),
    "files.save of a memorizer": fn(on.save, obj=copied(_memorizer), path=out("saved")),
    "files.save of a norm memorizer": fn(on.save, obj=copied(_norm_memorizer), path=out("saved")),
    "files.save of a repaired model": fn(on.save, obj=once(_repaired), path=out("saved")),
    "files.save of an adapter": fn(on.save, obj=once(_adapter), path=out("saved"), dtype=torch.float32),
    "files.load": fn(on.load, path=written("network"), like=net),
    "files.load of norm-only layers": fn(on.load, path=written("norm_only"), like=net),
    "files.load of factors": fn(on.load, path=written("factors")),
    "files.load of a memorizer": fn(on.load, path=written("memorizer")),
    "files.load of a norm memorizer": fn(on.load, path=written("norm_memorizer")),
    "files.load of a repaired model": fn(on.load, path=written("repaired"), like=net),
    "files.load of an adapter": fn(on.load, path=written("adapter")),
    # -------------------------------------------------------------------------------------------------------- data
    "data.Split.smaller": method(_split, "smaller", side=2),
    "data.corrupt": fn(
        data.corrupt, images=IMAGES, kind="noise", severity=3.0, seed=1, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    ),
    "data.digits": fn(data.digits, seed=1, test_share=0.2),
    "data.teacher": fn(data.teacher, widths=(3, 2), n_train=4, n_test=4, seed=1),
    "data.find_data": fn(data.find_data, name="."),
    "data.get_data": fn(
        data.get_data, name=Fresh(_resnet20), source=Fresh(lambda: FOLDER), timeout=1.0, progress=lambda *state: None
    ),
    "data.load_data": fn(data.load_data, spec=Fresh(lambda: str(_file("inputs")))),
    "seeds.seeded": fn(seeds.seeded, seed=1),
    "display.Curve": fn(display.Curve, label="a", x=(1.0, 2.0), y=(1.0, 2.0)),
    "display.Figure.save": method(_figure, "save", path=out("figure.svg")),
    "display.Figure.to_bytes": method(_figure, "to_bytes", ending="png"),
    "display.Figure.write": method(_figure, "write", folder=out("figures"), name="a"),
    "display.Panel": fn(display.Panel, name="a", x_names=("b",)),
    "display.ShownResult.to_html": method(_diagnosis, "to_html", path=out("page.html"), title="a"),
    "display.write_page": Call(
        lambda: display.write_page,
        {"path": out("results.html"), "results": once(lambda: [_diagnosis()]), "title": "a", "text": "b"},
    ),
    "display.Table": fn(display.Table, columns=("a", "b"), rows=((1.0, "c"),)),
    "records.read_record": fn(records.read_record, path=Fresh(record_file)),
    "records.read_records": fn(records.read_records, folder=written("records")),
    "page.render_page": fn(page.render_page, records=Fresh(lambda: [_record()])),
    "page.write_report": fn(page.write_report, records_dir=written("records"), out=out("report")),
}  # fmt: skip


def _layer_result() -> dict[str, Any]:
    import dataclasses

    result = dataclasses.asdict(_cached(_rebuilt).layers[0])
    return {**result, "shape": list(result["shape"])}


def _cached_copy(make: Callable[[], Any]) -> Any:
    return copy.deepcopy(_cached(make))
