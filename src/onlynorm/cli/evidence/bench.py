"""`onlynorm bench`: everything that is promised, measured beside its competitors and judged by code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from onlynorm.cli.app import AsJson, app, kept_in
from onlynorm.cli.terminal import bench_markdown, errors, print_bench, print_json, spinner
from onlynorm.data import CORRUPTIONS
from onlynorm.errors import UnknownNameError
from onlynorm.evidence.bench.races.align import bench_align
from onlynorm.evidence.bench.races.chain import bench_chain
from onlynorm.evidence.bench.races.diagnose import bench_diagnose
from onlynorm.evidence.bench.races.norm_only import bench_layers
from onlynorm.evidence.bench.races.reconstruct import RECIPES, Sizes, bench_reconstruct
from onlynorm.evidence.bench.races.solve import FAMILIES, bench_solve
from onlynorm.evidence.bench.races.tune import bench_tune
from onlynorm.evidence.bench.sweeps.adapt import AdaptSizes, bench_adapt
from onlynorm.evidence.bench.sweeps.frozen import FrozenSizes, bench_frozen
from onlynorm.evidence.bench.sweeps.predict import FIRST_SEEDS, PredictSizes, bench_predict
from onlynorm.evidence.bench.sweeps.repair import RepairSizes, bench_repair
from onlynorm.evidence.bench.sweeps.scaled import ScaledSizes, bench_scaled
from onlynorm.evidence.bench.sweeps.scratch import bench_scratch
from onlynorm.evidence.bench.sweeps.text import TextSizes, bench_text
from onlynorm.evidence.goals import Measured, is_met

benches = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Examples: `onlynorm bench solve --quick`, `onlynorm bench tune --markdown`. Exit code 1: a goal is missed.",
)
app.add_typer(benches, name="bench")
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables for a README.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run: what takes long is left out or shrunk.")]
Out = Annotated[Path, typer.Option(help="Folder for records and what was made.")]
Force = Annotated[bool, typer.Option("--force", help="Make finished rows again.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of training; its own number if left out.", min=1)]
Images = Annotated[int | None, typer.Option(help="Training images; its own number if left out.", min=1)]
OUT = Path("onlynorm-out/bench")


@benches.callback()
def describe() -> None:
    """Measure onlynorm beside its competitors, in the same run."""


def show(result: Measured, *, markdown: bool, as_json: bool) -> None:
    """Prints what a benchmark measured; ends with 1 where a goal was missed."""
    if as_json:
        print_json(result.as_dict())
    elif markdown:
        print(bench_markdown(result))
    else:
        print_bench(result)
    if not is_met(result):
        raise typer.Exit(1)


@benches.command("solve", epilog="Example: `onlynorm bench solve --quick --families flat`")
def measure_solve(
    quick: Quick = False,
    families: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FAMILIES)}; may be repeated, all if left out.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Best of how many turns; slow methods have fewer.", min=1)] = 20,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """The solver beside LU, Cholesky, QR, lstsq and LSMR, on one thread."""
    with spinner("bench solve", hidden=False) as say:
        result = bench_solve(
            quick=quick, families=families or FAMILIES, repeats=repeats, progress=say,
            on_duel=lambda duel: errors.print(str(duel), highlight=False, markup=False),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("reconstruct", epilog="Example: `onlynorm bench reconstruct --features he_normal --images 100`")
def measure_reconstruct(
    quick: Quick = False,
    features: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(RECIPES)}; may be repeated, all six if left out.")
    ] = None,
    images: Annotated[int | None, typer.Option(help=f"Test images in float32 ({Sizes().images}).", min=1)] = None,
    calibration: Annotated[
        int | None, typer.Option(help=f"Training images for the ranges ({Sizes().calibration}).", min=1)
    ] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A trained ResNet-20 from six kinds of frozen features; resumes after a kill."""
    usual = Sizes.quick() if quick else Sizes()
    sizes = dataclasses.replace(usual, images=images or usual.images, calibration=calibration or usual.calibration)
    with kept_in(out), spinner("bench reconstruct", hidden=False) as say:
        result = bench_reconstruct(
            features=features or tuple(RECIPES), sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(f"{row.features}: {row.goal.measured}", highlight=False),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("tune", epilog="Example: `onlynorm bench tune --repeats 50`")
def measure_tune(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 20,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A step of norm-only tuning beside full tuning, head only and PEFT."""
    with spinner("bench tune", hidden=False) as say:
        result = bench_tune(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("adapt", epilog="Example: `onlynorm bench adapt --corruptions blur --seeds 3`")
def measure_adapt(
    quick: Quick = False,
    corruptions: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(CORRUPTIONS)}; may be repeated, all four if left out.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each way; 5, and 3 if quick.", min=1)] = None,
    severity: Annotated[float, typer.Option(help="Severity of the corruptions, from 0 to 5.")] = 3.0,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A trained ResNet-20 adapted to corrupted images in six ways; resumes after a kill."""
    usual = AdaptSizes.quick() if quick else AdaptSizes()
    sizes = dataclasses.replace(usual, epochs=epochs or usual.epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench adapt", hidden=False) as say:
        result = bench_adapt(
            corruptions=corruptions or CORRUPTIONS, n_seeds=seeds or (3 if quick else 5), severity=severity,
            sizes=sizes, out=out, force=force, progress=say,
            on_row=lambda run: _tell(f"{run.images}, {run.way}, seed {run.seed}", run.accuracy),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("frozen", epilog="Example: `onlynorm bench frozen --epochs 40 --images 20000`")
def measure_frozen(
    quick: Quick = False,
    seeds: Annotated[int, typer.Option(help="Runs of each way.", min=1)] = 3,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Frozen random ResNets that learn by their norms alone; resumes after a kill."""
    usual = FrozenSizes.quick() if quick else FrozenSizes()
    sizes = dataclasses.replace(usual, epochs=epochs or usual.epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench frozen", hidden=False) as say:
        result = bench_frozen(
            n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: _tell(
                f"ResNet-{run.depth}, width {run.width}, {run.way}, seed {run.seed}", run.accuracy
            ),
        )  # fmt: skip
    errors.print(f"the histogram of the scales: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)


def _tell(what: str, share: float) -> None:
    errors.print(f"{what}: {100 * share:.1f} %", highlight=False)


@benches.command("chain", epilog="Example: `onlynorm bench chain --quick`")
def measure_chain(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 40,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Random networks as batched chains beside the obvious loop with singular values."""
    with spinner("bench chain", hidden=False) as say:
        result = bench_chain(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("align", epilog="Example: `onlynorm bench align --markdown`")
def measure_align(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 5,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Rows of a target aligned with too few features, beside the described greedy."""
    with spinner("bench align", hidden=False) as say:
        result = bench_align(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("diagnose", epilog="Example: `onlynorm bench diagnose --quick`")
def measure_diagnose(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 3,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A diagnosis of ResNet-18 and ResNet-50 in passes forward and backward, beside delve."""
    with spinner("bench diagnose", hidden=False) as say:
        result = bench_diagnose(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("layers", epilog="Example: `onlynorm bench layers --quick`")
def measure_layers(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 15,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Norm-only layers beside ordinary ones, preconditioned steps, and features in blocks."""
    with spinner("bench layers", hidden=False) as say:
        result = bench_layers(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("predict", epilog="Example: `onlynorm bench predict --networks calibration --markdown`")
def measure_predict(
    networks: Annotated[
        str, typer.Option(help="test, or calibration: the networks on which thresholds were set.")
    ] = "test",
    quick: Quick = False,
    steps: Annotated[int | None, typer.Option(help="Steps of each training; 250, and 20 if quick.", min=5)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Networks of many kinds: the verdict at the start against what training made of them; resumes after a kill."""
    if networks not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", networks, FIRST_SEEDS)
    usual = PredictSizes.quick() if quick else PredictSizes()
    sizes = dataclasses.replace(usual, n_steps=steps or usual.n_steps)
    with kept_in(out), spinner("bench predict", hidden=False) as say:
        result = bench_predict(
            networks, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(
                f"{row.name}: score {row.score:.3g}, best loss {row.loss:.3f}", highlight=False
            ),
        )  # fmt: skip
    errors.print(f"the curve: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("repair", epilog="Example: `onlynorm bench repair --seeds 5 --markdown`")
def measure_repair(
    quick: Quick = False,
    seeds: Annotated[int | None, typer.Option(help="Networks of each kind; 5, and 3 if quick.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training; 1000, and 120 if quick.", min=1)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Deep networks on Fashion-MNIST after every repair, beside batch norms; resumes after a kill."""
    usual = RepairSizes.quick() if quick else RepairSizes()
    sizes = dataclasses.replace(usual, n_steps=steps or usual.n_steps)
    with kept_in(out), spinner("bench repair", hidden=False) as say:
        result = bench_repair(
            n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: errors.print(
                f"depth {run.depth}, {run.activation}, {run.way}, seed {run.seed}: {100 * run.test_accuracy:.1f} %",
                highlight=False,
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("scaled", epilog="Example: `onlynorm bench scaled --data fashion_mnist --seeds 3 --markdown`")
def measure_scaled(
    quick: Quick = False,
    data: Annotated[
        list[str] | None, typer.Option(help="cifar10 or fashion_mnist, may be repeated; both if left out.")
    ] = None,
    law: Annotated[
        list[str] | None, typer.Option(help="semi-circle or geometric, may be repeated; both if left out.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Networks of each kind; 3 and 10 by data, 2 if quick.", min=1)
    ] = None,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Networks with features of growing condition number, trained from scratch; resumes after a kill."""
    usual = ScaledSizes.quick() if quick else ScaledSizes()
    sizes = dataclasses.replace(usual, n_epochs=epochs or usual.n_epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench scaled", hidden=False) as say:
        result = bench_scaled(
            data=data, laws=law, n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: errors.print(
                f"{run.data}, {run.scale}, rate {run.rate:g}, seed {run.seed}: {100 * run.accuracy:.1f} %",
                highlight=False,
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("scratch", epilog="Example: `onlynorm bench scratch --data cifar10 --seeds 5`")
def measure_scratch(
    quick: Quick = False,
    data: Annotated[
        list[str] | None, typer.Option(help="fashion_mnist or cifar10, may be repeated; both if left out.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Networks of each way.", min=1)] = 5,
    trials: Annotated[int, typer.Option(help="Other networks by which the rate of a way is chosen.", min=1)] = 3,
    epochs: Epochs = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Norms trained from scratch, on gamma and on weights, beside the ordinary network; resumes after a kill."""
    with kept_in(out), spinner("bench scratch", hidden=False) as say:
        result = bench_scratch(
            data=data, n_seeds=seeds, n_trials=trials, epochs=epochs, quick=quick, out=out, force=force,
            progress=say,
            on_row=lambda run: errors.print(
                f"{run.data}, {run.way}, seed {run.seed}: {100 * run.accuracy:.1f} %", highlight=False
            ),
        )  # fmt: skip
    errors.print(f"accuracy against the share of features: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("text", epilog="Example: `onlynorm bench text --seeds 5 --markdown`")
def measure_text(
    quick: Quick = False,
    seeds: Annotated[
        int | None, typer.Option(help="Trainings that are judged, for each way; 3, and 2 if quick.", min=2)
    ] = None,
    texts: Annotated[int | None, typer.Option(help="Texts to train on; 1024, and 64 if quick.", min=1)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """MiniLM on film reviews by its norms, its head, all of it, and PEFT; resumes after a kill."""
    usual = TextSizes.quick() if quick else TextSizes()
    sizes = dataclasses.replace(usual, seeds=seeds or usual.seeds, train=texts or usual.train)
    with kept_in(out), spinner("bench text", hidden=False) as say:
        result = bench_text(
            sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(
                f"{row.way}: {100 * row.accuracy:.2f} ± {100 * row.interval:.2f} %", highlight=False
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)
