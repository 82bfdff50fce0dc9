"""Figures and tables of daneshmand2020 that need no training: chains of random layers with and without norms."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.rank import Chain, ChainAverages, simulate, top_eigenvalues, unit_rows, walk


def rank_over_depth(
    *, width: int, gamma: float, norm: str, depths: Sequence[int], n_chains: int, threshold: float, seed: int
) -> list[float]:
    """The mean of ln rank at every depth; singular values below `threshold` of the normalised matrix count as zero.

    The matrix is divided by its largest singular value. Computed in float64, whose rounding is far below the threshold.
    """
    chain = Chain(width, gamma, norm=norm, n_chains=n_chains, seed=seed, dtype="float64")
    found = []
    for _, H in walk(chain, depths):
        sigma = torch.linalg.svdvals(H)
        ranks = (sigma > threshold * sigma[:, :1]).sum(1)
        found.append(float(ranks.double().log().mean()))
    return found


def averages_over_depth(
    *,
    width: int,
    gamma: float,
    n_layers: int,
    n_chains: int,
    every: int,
    seed: int,
    activation: str = "linear",
    norm: str = "batch",
    weights: str = "uniform",
    burn_in: int = 0,
    quantities: Sequence[str] = ("r", "soft_rank 0.5"),
) -> dict[str, Any]:
    """Averages over the layers of chains with errors and deviations; chains start from Gaussian inputs."""
    chain = Chain(width, gamma, activation=activation, norm=norm, weights=weights, n_chains=n_chains, seed=seed)
    return _plain(simulate(chain, n_layers, quantities=tuple(quantities), every=every, burn_in=burn_in))


def growing_averages(
    *, width: int, gamma: float, activation: str, lengths: Sequence[int], n_chains: int, every: int, seed: int
) -> list[dict[str, Any]]:
    """The same averages over the first L layers of one run, for every L."""
    chain = Chain(width, gamma, activation=activation, n_chains=n_chains, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        resume = Path(folder) / "chain"
        return [_plain(simulate(chain, n, every=every, quantities=("r",), checkpoint=resume)) for n in sorted(lengths)]


def eigenvalues_over_depth(
    *, width: int, gamma: float, spread: float, depths: Sequence[int], n_chains: int, k: int, seed: int
) -> dict[str, Any]:
    """The k largest eigenvalues of M at every depth, averaged over chains, from inputs whose rows are almost equal.

    Rows are one Gaussian row plus `spread` times Gaussian ones; `cosine` is the smallest between two rows of an input.
    """
    chain = Chain(width, gamma, n_chains=n_chains, seed=seed, dtype="float64")
    noise = chain.draw_inputs()
    X = unit_rows(noise[:, :1] + spread * noise.roll(1, 1))
    cosine = float((X @ X.mT / width).min())
    found = [top_eigenvalues(H, k).mean(0).tolist() for _, H in walk(chain, depths, inputs=X)]
    return {"cosine": cosine, "eigenvalues": found}


def _plain(made: ChainAverages) -> dict[str, Any]:
    numbers = {
        name: {"value": estimate.value, "error": estimate.error, "deviation": estimate.deviation}
        for name, estimate in made.estimates.items()
    }
    return {**numbers, "layers": made.n_steps, "dead": made.n_dead}


SOFT = "soft_rank 0.5"
Averages = Mapping[str, Any]


def figure_1(run: Run) -> Outcome:
    """ln rank against depth, with and without norms, for two gammas. Theory: daneshmand2020:lemma-4"""
    sizes, depths = run.sizes, run.sizes["depths"]
    names = {"batch": "batch norms", "none": "no norms"}
    run.announce(len(names) * len(sizes["gammas"]))
    curves, last, least = [], {}, {}
    for gamma in sizes["gammas"]:
        for norm, word in names.items():
            found = run.piece(
                f"{norm} gamma={gamma:g}", rank_over_depth, width=sizes["width"], gamma=gamma, norm=norm, depths=depths,
                n_chains=sizes["n_chains"], threshold=sizes["threshold"], seed=run.seeds[0],
            )  # fmt: skip
            curves.append(Curve(f"{word}, gamma = {gamma:g}", depths, found, kind="line+points"))
            last[norm, gamma], least[norm, gamma] = math.exp(found[-1]), math.exp(min(found))
    values = {
        "rank without norms at the largest depth, largest": max(v for (n, _), v in last.items() if n == "none"),
        "rank with norms, smallest over depth and gamma": min(v for (n, _), v in least.items() if n == "batch"),
        "rank with norms over sqrt(d), smallest": min(v for (n, _), v in least.items() if n == "batch")
        / math.sqrt(sizes["width"]),
    }
    panel = Panel("", f"width {sizes['width']}", "depth", "ln rank", x_log=True)
    return Outcome(values=values, curves=curves, panels=(panel,))


def figure_2(run: Run) -> Outcome:
    """Average of rank_1/2 over depth against the width, for several gammas. Theory: daneshmand2020:thm-3"""
    found = _linear_averages(run)
    widths = run.sizes["widths"]
    slopes = {gamma: _slope(widths, [found[d, gamma][SOFT]["value"] for d in widths]) for gamma in run.sizes["gammas"]}
    fractions = [made[SOFT]["value"] / math.sqrt(d) for (d, _), made in found.items()]
    order = [made[SOFT]["value"] / (0.25 * made["r"]["value"]) for made in found.values()]
    values = {
        "exponent of rank_1/2 in d, smallest over gamma": min(slopes.values()),
        "exponent of rank_1/2 in d, largest over gamma": max(slopes.values()),
        "rank_1/2 over sqrt(d), smallest": min(fractions),
        "rank_1/2 over a quarter of r, smallest": min(order),
        "relative error of an average, largest": max(m[SOFT]["error"] / m[SOFT]["value"] for m in found.values()),
    }
    return Outcome(
        values=values,
        curves=[
            *_over_widths(run, found, SOFT),
            Curve("sqrt(d)", _log2(widths), [0.5 * math.log2(d) for d in widths], style="law"),
        ],
        panels=(Panel("", "", "log2 of the width d", "log2 of the average of rank_1/2 over depth"),),
        table=_table(found, (SOFT, "r")),
    )


def figure_3(run: Run) -> Outcome:
    """The ten largest eigenvalues of M at growing depth, for inputs with almost equal rows.

    Theory: daneshmand2020:example-14
    """
    sizes, depths = run.sizes, run.sizes["depths"]
    run.announce(1)
    settings = {name: sizes[name] for name in ("width", "gamma", "spread", "n_chains", "k")}
    made = run.piece("eigenvalues", eigenvalues_over_depth, depths=depths, seed=run.seeds[0], **settings)
    found: Sequence[Sequence[float]] = made["eigenvalues"]
    first, last = found[0], found[-1]
    values = {
        "smallest cosine of two rows of the input": made["cosine"],
        "largest eigenvalue over d, input": first[0] / sizes["width"],
        "largest eigenvalue over d, largest depth": last[0] / sizes["width"],
        "second eigenvalue, growth": last[1] / first[1],
        "fifth eigenvalue, growth": last[4] / first[4],
        "gap from first to second, largest depth over input": (last[0] / last[1]) / (first[0] / first[1]),
    }
    places = list(range(1, sizes["k"] + 1))
    curves = [Curve(f"depth {n}", places, row, kind="line+points") for n, row in zip(depths, found, strict=True)]
    panel = Panel("", f"width {sizes['width']}, gamma {sizes['gamma']:g}", "index", "eigenvalue of M", y_log=True)
    return Outcome(values=values, curves=curves, panels=(panel,))


def figure_4(run: Run) -> Outcome:
    """Average of r over the first L layers with tanh, against L. Theory: daneshmand2020:thm-5"""
    sizes, lengths = run.sizes, run.sizes["lengths"]
    run.announce(len(sizes["widths"]) * len(sizes["gammas"]))
    curves, last = [], {}
    for gamma in sizes["gammas"]:
        for width in sizes["widths"]:
            made = run.piece(
                f"tanh d={width} gamma={gamma:g}", growing_averages, width=width, gamma=gamma, activation="tanh",
                lengths=lengths, n_chains=max(1, sizes["n_numbers"] // width), every=sizes["every"], seed=run.seeds[0],
            )  # fmt: skip
            heights = _log2([row["r"]["value"] for row in made])
            curves.append(Curve(f"d = {width}", _log2(lengths), heights, panel=f"gamma {gamma:g}"))
            last[width, gamma] = made[-1]["r"]["value"]
    slopes = [_slope(sizes["widths"], [last[d, gamma] for d in sizes["widths"]]) for gamma in sizes["gammas"]]
    values = {
        "average of r at the largest depth, smallest": min(last.values()),
        "exponent of the average in d, smallest over gamma": min(slopes),
        "average of r over sqrt(d), smallest": min(r / math.sqrt(d) for (d, _), r in last.items()),
    }
    panels = [
        Panel(
            f"gamma {gamma:g}", f"tanh, gamma = {gamma:g}", "log2 of the number of layers", "log2 of the average of r"
        )
        for gamma in sizes["gammas"]
    ]
    return Outcome(values=values, curves=curves, panels=panels)


def figure_9(run: Run) -> Outcome:
    """The regularity constant alpha against the width. Theory: daneshmand2020:lemma-15"""
    found = _linear_averages(run, quantities=("cube", "squares"))
    gammas, widths = run.sizes["gammas"], run.sizes["widths"]
    alphas = {key: made["alpha"]["value"] for key, made in found.items()}
    values = {
        "alpha for d > 10, largest": max(alpha for (d, _), alpha in alphas.items() if d > 10),
        "alpha over all widths, largest": max(alphas.values()),
        "alpha of the widest over that of the narrowest, largest": max(
            alphas[widths[-1], gamma] / alphas[widths[0], gamma] for gamma in gammas
        ),
    }
    return Outcome(
        values=values,
        curves=_over_widths(run, found, "alpha", in_logs=False),
        panels=(Panel("", "", "log2 of the width d", "regularity constant alpha"),),
        table=_table(found, ("alpha",)),
    )


def figure_10(run: Run) -> Outcome:
    """The average of |M|_F^2 against the width. Theory: daneshmand2020:lemma-18"""
    found = _linear_averages(run, quantities=("frobenius", "cube", "squares"))
    widths = run.sizes["widths"]
    slopes = [_slope(widths, [found[d, gamma]["frobenius"]["value"] for d in widths]) for gamma in run.sizes["gammas"]]
    ratios = {(d, g): made["frobenius"]["value"] / d**1.5 for (d, g), made in found.items()}
    bounds = [
        made["frobenius"]["value"] * math.sqrt(1 - made["alpha"]["value"]) / d**1.5 for (d, _), made in found.items()
    ]
    values = {
        "exponent of |M|_F^2 in d, largest over gamma": max(slopes),
        "exponent of |M|_F^2 in d, smallest over gamma": min(slopes),
        "|M|_F^2 over d^1.5, largest": max(ratios.values()),
        "|M|_F^2 over the bound of lemma 18, largest": max(bounds),
    }
    return Outcome(
        values=values,
        curves=[
            *_over_widths(run, found, "frobenius"),
            Curve("d^1.5", _log2(widths), [1.5 * math.log2(d) for d in widths], style="law"),
        ],
        panels=(Panel("", "", "log2 of the width d", "log2 of the average of |M|_F^2 over depth"),),
        table=_table(found, ("frobenius",)),
    )


def figure_11_chain(run: Run) -> Outcome:
    """r with and without mean subtraction, in chains instead of a trained network. Theory: daneshmand2020:thm-3"""
    sizes = run.sizes
    run.announce(2 * len(sizes["activations"]) * len(sizes["widths"]))
    curves, ratios = [], {}
    for activation in sizes["activations"]:
        heights: dict[str, list[float]] = {"batch": [], "centred": []}
        for norm, of_norm in heights.items():
            for width in sizes["widths"]:
                made = _piece(run, width, sizes["gamma"], activation=activation, norm=norm, burn_in=sizes["burn_in"])
                of_norm.append(made["r"]["value"])
            word = "mean subtracted" if norm == "centred" else "mean not subtracted"
            curves.append(Curve(word, _log2(sizes["widths"]), of_norm, kind="line+points", panel=activation))
        ratios[activation] = [b / a for a, b in zip(heights["batch"], heights["centred"], strict=True)]
    values = {
        f"{activation}: r with mean subtraction over r without, farthest from one": max(
            of, key=lambda x: abs(math.log(x))
        )
        for activation, of in ratios.items()
    }
    panels = [Panel(name, name, "log2 of the width d", "average of r") for name in sizes["activations"]]
    return Outcome(values=values, curves=curves, panels=panels)


def table_1(run: Run) -> Outcome:
    """Soft rank with and without norms, linear and tanh, and its growth with the width.

    Theory: daneshmand2020:thm-3, daneshmand2020:lemma-4, daneshmand2020:thm-5
    """
    sizes, widths = run.sizes, run.sizes["widths"]
    run.announce(4 * len(widths))
    rows: list[list[float | str]] = []
    values: dict[str, float] = {}
    for norm, word in (("none", "no norms"), ("batch", "batch norms")):
        for activation in ("linear", "tanh"):
            made = [
                _piece(run, d, sizes["gamma"], activation=activation, norm=norm, burn_in=sizes["burn_in"])
                for d in widths
            ]
            ranks = [one[SOFT]["value"] for one in made]
            slope = _slope(widths, ranks)
            rows.append([word, activation, *ranks, *(one["r"]["value"] for one in made), slope])
            if norm == "none":
                values[f"{word}, {activation}: rank_1/2, largest"] = max(ranks)
            else:
                values[f"{word}, {activation}: exponent of rank_1/2 in d, two widest"] = _slope(widths[-2:], ranks[-2:])
                values[f"{word}, {activation}: rank_1/2 over sqrt(d), smallest"] = min(
                    rank / math.sqrt(d) for d, rank in zip(widths, ranks, strict=True)
                )
    columns = ["", "F", *(f"rank_1/2, d = {d}" for d in widths), *(f"r, d = {d}" for d in widths), "exponent"]
    return Outcome(values=values, table=Table(columns, rows))


def _piece(run: Run, width: int, gamma: float, **more: Any) -> Averages:
    """Averages of chains of one width; the number of chains is chosen for tensors of equal size at every width."""
    sizes = run.sizes
    words = [f"d={width}", f"gamma={gamma:g}", *(more[key] for key in ("activation", "norm") if key in more)]
    made: Averages = run.piece(
        " ".join(words), averages_over_depth, width=width, gamma=gamma, n_layers=sizes["n_layers"],
        n_chains=max(1, sizes["n_numbers"] // width), every=sizes["every"], seed=run.seeds[0], **more,
    )  # fmt: skip
    return made


def _linear_averages(run: Run, **more: Any) -> dict[tuple[int, float], Averages]:
    widths, gammas = run.sizes["widths"], run.sizes["gammas"]
    run.announce(len(widths) * len(gammas))
    return {(d, gamma): _piece(run, d, gamma, **more) for gamma in gammas for d in widths}


def _over_widths(
    run: Run, found: Mapping[tuple[int, float], Averages], name: str, *, in_logs: bool = True
) -> list[Curve]:
    widths, curves = run.sizes["widths"], []
    for gamma in run.sizes["gammas"]:
        heights = [found[d, gamma][name]["value"] for d in widths]
        curves.append(Curve(_word(gamma), _log2(widths), _log2(heights) if in_logs else heights, kind="line+points"))
    return curves


def _log2(numbers: Sequence[float]) -> list[float]:
    return [math.log2(number) for number in numbers]


def _word(gamma: float) -> str:
    return "no skips" if math.isinf(gamma) else f"gamma = {gamma:g}"


def _table(found: Mapping[tuple[int, float], Averages], names: Sequence[str]) -> Table:
    """Averages with errors and deviations over depth; a quotient of averages has no deviation."""
    words = {"value": "", "error": ", error", "deviation": ", deviation over depth"}
    cells = [(name, part) for name in names for part in words if (name, part) != ("alpha", "deviation")]
    columns = ["width", "gamma", "layers", *(f"{name}{words[part]}" for name, part in cells)]
    rows = [
        [d, _word(gamma), made["layers"], *(made[name][part] for name, part in cells)]
        for (d, gamma), made in found.items()
    ]
    return Table(columns, rows)


def _slope(widths: Sequence[float], heights: Sequence[float]) -> float:
    """The exponent b of heights = c widths^b, by a least-squares fit of logarithms."""
    return float(np.polyfit(np.log(widths), np.log(heights), 1)[0])
