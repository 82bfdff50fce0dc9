"""Tables and numbers of burkholz2024: trained targets rebuilt by norms, and the papers' solver compared with ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import onlynorm as on
from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.bench.papers_method import solve_as_papers
from onlynorm.evidence.papers.burkholz2024.vgg_targets import ACTIVATIONS, DEPTHS, rebuild
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.timing import race
from onlynorm.models import vgg

DISTRIBUTIONS = ("he_normal", "he_uniform", "orthogonal", "sparse_he_normal")
PRINTED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "CIFAR-10": {
        "ReLU": (94.12, 94.1, 94.0, 94.12, 94.12),
        "LeakyReLU": (94.37, 94.34, 94.1, 94.4, 94.3),
        "tanh": (93.66, 93.5, 93.6, 93.45, 93.5),
        "sigmoid": (92.9, 92.8, 92.5, 92.7, 92.8),
    },
    "CIFAR-100": {
        "ReLU": (70.46, 70.34, 70.1, 70.3, 70.2),
        "LeakyReLU": (70.22, 94.37, 93.88, 94.12, 94.12),
        "tanh": (69.65, 69.5, 69.3, 69.4, 69.6),
        "sigmoid": (67.42, 94.1, 93.88, 94.12, 94.12),
    },
}
"""Accuracies in the paper's tables: the target, then one per distribution."""


def table_1(run: Run) -> Outcome:
    """Accuracy before and after reconstruction, for every activation and distribution. Theory: burkholz2024:thm-2.4"""
    return _accuracies(run, printed="CIFAR-10")


def table_2(run: Run) -> Outcome:
    """The same on a second data set. Theory: burkholz2024:thm-2.4"""
    return _accuracies(run, printed="CIFAR-100")


def _accuracies(run: Run, *, printed: str) -> Outcome:
    sizes, training = run.sizes, dict(run.sizes["training"])
    run.announce(len(ACTIVATIONS) * len(DISTRIBUTIONS) * len(run.seeds))
    rows: list[list[float | str]] = []
    made: list[dict[str, float]] = []
    for activation in ACTIVATIONS:
        for place, distribution in enumerate(DISTRIBUTIONS):
            found = [
                run.piece(
                    f"{activation} {distribution} seed={seed}", rebuild, activation=activation,
                    distribution=distribution, seed=seed, excess=sizes["excess"], n_exact=sizes["n_exact"],
                    n_test=sizes["n_test"], training=training,
                )
                for seed in run.seeds
            ]  # fmt: skip
            made += found
            before, after = found[0]["target"], sum(one["rebuilt"] for one in found) / len(found)
            worst = {name: max(one[name] for one in found) for name in ("relative error", "residual", "seconds")}
            target, theirs = PRINTED[printed][activation][0], PRINTED[printed][activation][1 + place]
            rows.append([activation, distribution, before, after, after - before, *worst.values(), target, theirs])
    gaps = [abs(theirs - line[0]) for line in PRINTED[printed].values() for theirs in line[1:]]
    values = {
        "largest difference of accuracy, points": max(abs(one["rebuilt"] - one["target"]) for one in made),
        "largest relative error of the logits": max(one["relative error"] for one in made),
        "smallest agreement through the blocks, %": min(one["agreement through the blocks"] for one in made),
        "smallest accuracy of a target, %": min(one["target"] for one in made),
        "largest difference in the printed table, points": max(gaps),
    }
    columns = [
        "activation", "features", "target, %", "rebuilt, %", "difference", "logit error", "residual", "solving, s",
        f"paper's target, {printed}", "paper's rebuilt",
    ]  # fmt: skip
    return Outcome(values=values, table=Table(columns=columns, rows=rows))


def solve_layer(*, channels: int, excess: float, seed: int) -> dict[str, Any]:
    """Time and accuracy of the solve of one 3 x 3 layer with this many channels."""
    features = on.draw("he_normal", (channels, channels, 3, 3), excess=excess, seed=seed)
    solution = on.solve_features(features, _random_target(features, seed), storage="seed")
    return {
        "equations": features.equations,
        "features": features.n_features,
        "residual": solution.residual,
        "method": solution.method,
        "iterations": solution.iterations,
        "seconds": solution.seconds,
        "memory": solution.peak_memory,
    }


def plan_network(*, channels: int, excess: float) -> list[list[float]]:
    """Planned equations, features, norm parameters, bytes, error and seconds of all 18 layers of the target."""
    network = vgg([[channels] * depth for depth in DEPTHS]).eval()
    planned = on.plan(network, torch.zeros(1, 3, 32, 32), on.Wide(excess=excess))
    costs = [layer.costs for layer in planned.layers if layer.costs is not None and layer.is_feasible]
    return [[c.equations, c.n_features, c.n_norm_parameters, c.memory, c.error, c.seconds] for c in costs]


def width_100(run: Run) -> Outcome:
    """One layer at full size, and the plan of the whole network. Theory: burkholz2024:thm-2.3"""
    channels, excess = run.sizes["channels"], run.sizes["excess"]
    run.announce(1 + len(run.seeds))
    solved = [
        run.piece(f"layer of {channels} seed={seed}", solve_layer, channels=channels, excess=excess, seed=seed)
        for seed in run.seeds
    ]
    planned = run.piece(f"network of {channels}", plan_network, channels=channels, excess=excess)
    equations, features, parameters, memory, errors, seconds = zip(*planned, strict=True)
    values = {
        "equations of one layer": solved[0]["equations"],
        "largest relative residual": max(one["residual"] for one in solved),
        "layers of the network that fit into memory": len(planned),
        "largest planned error of a layer": max(errors),
    }
    heads = ["part", "equations", "features", "norm parameters", "GB", "error", "seconds"]
    rows: list[list[float | str]] = [
        [
            "one layer, solved",
            one["equations"],
            one["features"],
            "-",
            one["memory"] / 1e9,
            one["residual"],
            one["seconds"],
        ]
        for one in solved
    ]
    rows.append(
        [
            "network, planned",
            sum(equations),
            sum(features),
            sum(parameters),
            max(memory) / 1e9,
            max(errors),
            sum(seconds),
        ]
    )
    return Outcome(values=values, table=Table(columns=heads, rows=rows))


def compare_methods(*, channels: int, extra: int, seed: int, max_iterations: int, rounds: int) -> dict[str, float]:
    """Relative errors and seconds of the papers' method and of ours on one 3 x 3 layer with `extra` spare features.

    Both start from the same features in memory and take turns; seconds are the best of `rounds` rounds.
    """
    equations = 9 * channels**2
    features = on.draw("he_normal", (channels, channels, 3, 3), n_features=equations + extra, seed=seed)
    matrix = features.as_matrix(_random_target(features, seed))
    left, right = features.left(), features.right()
    operator = on.solvers.KhatriRao(left, right)

    def papers() -> tuple[torch.Tensor, int]:
        return solve_as_papers(operator, matrix, max_iterations=max_iterations)

    def ours() -> tuple[torch.Tensor, int]:
        solution = on.solve(left, right, matrix)
        return solution.gamma, solution.iterations

    times = race({"papers": papers, "ours": ours}, rounds=rounds)
    found: dict[str, float] = {"evaluations": times["papers"].result[1]}
    for method, timing in times.items():
        rest = operator.apply(timing.result[0].double()) - matrix
        found |= {method: float(rest.norm() / matrix.norm()), f"{method} seconds": timing.seconds}
    return found


def reconstruction_error(run: Run) -> Outcome:
    """A dense float32 solve followed by LBFGS, as in the paper, compared with our solver, against the layer size.

    Theory: burkholz2024:thm-2.3
    """
    cases = {"square": 0, "spare": run.sizes["extra"]}
    run.announce(len(cases) * len(run.sizes["channels"]))
    found = {
        (case, channels): run.piece(
            f"{case} channels={channels}", compare_methods, channels=channels, extra=extra, seed=run.seeds[0],
            max_iterations=run.sizes["max_iterations"], rounds=run.sizes["rounds"],
        )
        for case, extra in cases.items()
        for channels in run.sizes["channels"]
    }  # fmt: skip
    widest = max(run.sizes["channels"])
    values = {
        "ours, largest relative error": max(one["ours"] for one in found.values()),
        "papers' method, square, largest relative error": max(
            one["papers"] for (c, _), one in found.items() if c == "square"
        ),
        "papers' method, spare features over square, widest layer": found["spare", widest]["papers"]
        / found["square", widest]["papers"],
        "ours over the papers' method, largest ratio": max(one["ours"] / one["papers"] for one in found.values()),
    }
    rows: list[list[float | str]] = [
        [case, channels, 9 * channels**2, one["papers"], one["papers seconds"], one["ours"], one["ours seconds"]]
        for (case, channels), one in found.items()
    ]
    heads = ["features", "channels", "equations", "papers' error", "papers' seconds", "our error", "our seconds"]
    return Outcome(
        values=values,
        curves=_error_curves(found, run.sizes["channels"], cases),
        panels=[
            Panel(what, title, "equations", what, x_log=True, y_log=True)
            for what, title in (("relative error", "error of the layer's weights"), ("seconds", "time of one solve"))
        ],
        table=Table(columns=heads, rows=rows),
    )


def _error_curves(
    found: Mapping[tuple[str, int], Mapping[str, float]], channels: Sequence[int], cases: Mapping[str, int]
) -> list[Curve]:
    equations = [9 * count**2 for count in channels]
    curves = []
    for panel, suffix in (("relative error", ""), ("seconds", " seconds")):
        for method in ("papers", "ours"):
            for case, extra in cases.items():
                y = [found[case, count][f"{method}{suffix}"] for count in channels]
                label = f"{method}, {f'{extra} spare features' if extra else 'square system'}"
                curves.append(Curve(label, equations, y, kind="line+points", panel=panel))
    return curves


def _random_target(features: on.features.Features, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(features.shape, generator=generator, dtype=torch.float64) / features.cols**0.5
