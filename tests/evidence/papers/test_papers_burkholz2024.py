"""Tables and numbers of burkholz2024: pieces at tiny sizes, and the printed tables they are held against."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import onlynorm as on
from onlynorm.data import find_data
from onlynorm.errors import MissingDataError
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.papers.burkholz2024 import tables
from onlynorm.evidence.papers.burkholz2024.tables import (
    DISTRIBUTIONS,
    PRINTED,
    compare_methods,
    plan_network,
    solve_layer,
)
from onlynorm.evidence.papers.burkholz2024.vgg_targets import (
    ACTIVATIONS,
    DEPTHS,
    VggTraining,
    accuracy,
    rebuild,
    trained,
)

FOUND = artifacts()
TINY: dict[str, Any] = {"data": "CIFAR-10", "width": 2, "n_train": 200, "n_epochs": 1, "rate": 0.05}


def test_the_tables_and_numbers_of_the_paper_are_artifacts() -> None:
    ids = {id.partition(":")[2] for id in FOUND if id.startswith("burkholz2024:")}
    assert ids == {"table-1", "table-2", "width-100", "reconstruction-error", "width-depth"}


def test_the_printed_tables_have_a_target_and_four_distributions_per_activation() -> None:
    for rows in PRINTED.values():
        assert list(rows) == list(ACTIVATIONS)
        assert all(len(row) == 1 + len(DISTRIBUTIONS) for row in rows.values())


def test_the_misprinted_rows_of_the_second_table_are_those_the_caveat_names() -> None:
    """A reconstruction far above its own target cannot be one; the caveat quotes these rows and no others."""
    wrong = {name for name, (target, *made) in PRINTED["CIFAR-100"].items() if max(made) - target > 1.0}
    assert wrong == {"LeakyReLU", "sigmoid"}
    (quoted,) = (caveat for caveat in FOUND["burkholz2024:table-2"].caveats if "CIFAR-100 numbers" in caveat)
    for name in wrong:
        target, *made = PRINTED["CIFAR-100"][name]
        assert f"{target:g}" in quoted
        assert ", ".join(f"{number:g}" for number in made) in quoted
    printed_once = {number for row in PRINTED["CIFAR-10"].values() for number in row}
    repeated = {number for name in wrong for number in PRINTED["CIFAR-100"][name][1:]} & printed_once
    assert repeated == {94.1, 94.12, 94.37}


def test_the_sizes_are_those_the_caveats_state() -> None:
    for name in ("table-1", "table-2"):
        one = FOUND[f"burkholz2024:{name}"]
        training = one.sizes["paper"]["training"]
        words = one.caveats[0]
        assert f"{training['width']} channels" in words
        assert f"{training['n_epochs']} epochs on {training['n_train']:,} images" in words
    assert sum(DEPTHS) == 17
    assert FOUND["burkholz2024:width-100"].sizes["paper"]["channels"] == 100


def test_a_layer_is_solved_to_what_the_solver_aims_at() -> None:
    made = solve_layer(channels=5, excess=1.5, seed=0)
    assert (made["equations"], made["features"]) == (225, 338)
    assert made["residual"] <= 1e-10


def test_the_plan_covers_all_eighteen_layers() -> None:
    planned = plan_network(channels=4, excess=1.25)
    assert len(planned) == 18
    equations = [row[0] for row in planned]
    assert equations == [3 * 4 * 9, *[4 * 4 * 9] * 16, 4 * 10]
    assert [row[1] for row in planned] == [-(-5 * count // 4) for count in equations]


def test_the_race_puts_the_float32_solve_beside_ours() -> None:
    made = compare_methods(channels=3, extra=0, seed=1, max_iterations=50, rounds=1)
    eps32 = torch.finfo(torch.float32).eps
    assert eps32 / 10 < made["papers"] < 1e-2
    assert made["ours"] < 1e-3 * made["papers"]


def test_the_race_measures_what_a_method_leaves_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(operator: on.solvers.KhatriRao, target: torch.Tensor, **_: object) -> tuple[torch.Tensor, int]:
        return target.new_zeros(operator.n_features), 1

    monkeypatch.setattr(tables, "solve_as_papers", gives_up)
    made = compare_methods(channels=2, extra=3, seed=0, max_iterations=1, rounds=1)
    assert made["papers"] == pytest.approx(1.0, abs=1e-15)


def test_neither_method_is_timed_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of torch.optim imports for seconds; it must not count for the papers' method."""
    now, calls = [0.0], {"papers": 0, "ours": 0}

    def slow_at_first(name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            now[0] += 5.0 if calls[name] == 1 else 0.25 * calls[name]
            return function(*args, **options)

        return run

    monkeypatch.setattr(tables, "race", functools.partial(tables.race, clock=lambda: now[0]))
    monkeypatch.setattr(tables, "solve_as_papers", slow_at_first("papers", tables.solve_as_papers))
    monkeypatch.setattr(on, "solve", slow_at_first("ours", on.solve))
    made = compare_methods(channels=2, extra=3, seed=0, max_iterations=5, rounds=2)
    assert calls == {"papers": 3, "ours": 3}
    assert (made["papers seconds"], made["ours seconds"]) == (0.5, 0.5)


def test_accuracy_counts_in_per_cent() -> None:
    images, labels = torch.eye(4).repeat(60, 1), torch.arange(4).repeat(60)
    labels[:60] = 3 - labels[:60]
    assert accuracy(nn.Identity(), images, labels) == pytest.approx(75.0)


def test_a_rebuilt_target_keeps_its_accuracy_and_equal_training_gives_equal_targets() -> None:
    try:
        find_data("cifar-10-batches-bin")
    except MissingDataError as error:
        pytest.skip(str(error))
    chosen = VggTraining(**TINY)
    target = trained("tanh", chosen)
    made = rebuild(
        activation="tanh", distribution="he_uniform", seed=0, excess=1.5, n_exact=2, n_test=100, training=TINY
    )
    assert made["rebuilt"] == made["target"]
    assert made["agreement through the blocks"] == 100.0
    assert made["relative error"] <= 1e-8
    assert sum(isinstance(layer, nn.Conv2d) for layer in target.modules()) == 17
    trained.cache_clear()
    again = trained("tanh", chosen)
    for one, other in zip(target.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
