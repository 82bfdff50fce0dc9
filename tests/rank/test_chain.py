"""Chains against plain loops, their averages and error bars, and runs that are cut, killed and resumed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm.errors import (
    ConversionError,
    FormatError,
    MemoryLimitError,
    OnlynormError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.evidence.papers.daneshmand2020.eigenvalues import drift_of_eigenvalues, frobenius_drift
from onlynorm.rank import Chain, ChainAverages, rank_ratio, regularity, second_moments, simulate, soft_rank, walk
from onlynorm.rank.chains.averages import ROOM, BatchMeans
from onlynorm.rank.chains.chain import ACTIVATIONS
from onlynorm.rank.chains.quantities import PLAIN, ROWWISE, USUAL, observe
from onlynorm.rank.chains.simulate import FORMAT, KIND, ChainState
from onlynorm.rank.chains.weights import LAWS, ChainWeights
from onlynorm.storage import read_tensors, write_tensors

EPS = torch.finfo(torch.float64).eps
Z = 5.0  # standard errors that a fixed seed may be off by: chance exceeds it once in two million


def plain_step(chain: Chain, H: Tensor, W: Tensor) -> Tensor:
    """One layer of one chain, row by row."""
    F = ACTIVATIONS[chain.activation](H) if isinstance(chain.activation, str) else chain.activation(H)
    moved = W @ F if math.isinf(chain.gamma) else H + chain.gamma * W @ F
    if chain.norm == "none":
        return moved
    rows = []
    for row in moved:
        row = row - row.mean() if chain.norm == "centred" else row
        rows.append(row / row.norm() * math.sqrt(len(row)))
    return torch.stack(rows)


# ------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("norm", ["batch", "centred", "none"])
@pytest.mark.parametrize("activation", ["linear", "tanh", "relu", torch.cos])
@pytest.mark.parametrize("gamma", [0.0, 0.3, math.inf])
def test_the_batched_chain_is_the_plain_one(norm: str, activation: Any, gamma: float) -> None:
    chain = Chain(5, gamma, n_samples=7, activation=activation, norm=norm, n_chains=3, dtype="float64", seed=2)
    weights, states = chain.draw_weights(), list(chain.draw_inputs())
    for t in range(4):
        states = [plain_step(chain, H, W) for H, W in zip(states, weights.step(t), strict=True)]
    (_, found), *_ = walk(chain, [4])
    expected = torch.stack(states)
    if chain.is_rescaled:
        expected = expected * (found.norm(dim=(1, 2)) / expected.norm(dim=(1, 2)))[:, None, None]
        torch.testing.assert_close(found.norm(dim=(1, 2)), torch.full((3,), math.sqrt(35.0)).double())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_centred_chain_is_torch_batch_norm_in_training_mode() -> None:
    chain = Chain(6, math.inf, n_samples=9, norm="centred", dtype="float64")
    (_, found), *_ = walk(chain, [1])
    bn = nn.BatchNorm1d(6, eps=1e-30, dtype=torch.float64)
    product = chain.draw_weights().step(0)[0] @ chain.draw_inputs()[0]
    torch.testing.assert_close(found[0].T, bn(product.T).detach())


def test_rows_keep_their_norm_and_vanilla_linear_chains_their_scale() -> None:
    for _, H in walk(Chain(8, 0.7, n_chains=2), [1, 50]):
        torch.testing.assert_close(H.square().mean(2), torch.ones(2, 8))
    for _, H in walk(Chain(8, math.inf, norm="none", activation="leaky_relu"), [1000]):
        assert float(H.square().mean()) == pytest.approx(1.0, rel=1e-5)


def test_given_inputs_serve_one_or_all_chains_and_are_not_changed() -> None:
    chain = Chain(4, 0.5, n_samples=6, n_chains=2, dtype="float64")
    X = chain.draw_inputs()[0]
    before = X.clone()
    (_, shared), *_ = walk(chain, [3], inputs=X)
    (_, each), *_ = walk(chain, [3], inputs=torch.stack([X, X]))
    assert torch.equal(shared, each)
    assert not torch.allclose(shared[0], shared[1])
    assert torch.equal(X, before)
    (depth, start), *_ = walk(chain, [0], inputs=X)
    assert depth == 0
    assert torch.equal(start[1], X)


def test_dead_chains_are_rank_zero_and_counted() -> None:
    chain = Chain(3, math.inf, n_samples=4, activation="relu", n_chains=2)
    X = torch.stack([-torch.ones(3, 4), chain.draw_inputs()[0]])
    made = simulate(chain, 2, inputs=X, quantities=("r", "frobenius", "soft_rank 0.5"))
    assert made.n_dead == 1
    assert [made.per_chain[name][0] for name in ("r", "frobenius", "soft_rank 0.5")] == [0.0, 0.0, 0.0]
    assert made.per_chain["r"][1] >= 1.0
    assert "1 of 2 chains" in str(made)


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("law", "mean", "fourth", "low", "high"),
    [
        ("uniform", 0.0, 9 / 5, -math.sqrt(3), math.sqrt(3)),
        ("normal", 0.0, 3.0, -7.0, 7.0),
        ("asymmetric", math.sqrt(3), 9 / 5, 0.0, 2 * math.sqrt(3)),
    ],
)
def test_weights_have_the_moments_of_their_law(law: str, mean: float, fourth: float, low: float, high: float) -> None:
    weights = ChainWeights(law, seed=1, n_chains=5, width=60, dtype=torch.float64, device="cpu")
    drawn = torch.stack([numbers * weights.scale for numbers in weights.steps(0, 20)]).flatten()
    n = drawn.numel()
    centred = drawn - mean
    # Standard errors of the first and second moment are sqrt(1/n) and sqrt((fourth - 1)/n).
    assert abs(float(centred.mean())) < Z / math.sqrt(n)
    assert abs(float(centred.square().mean()) - 1.0) < Z * math.sqrt((fourth - 1) / n)
    assert float(centred.pow(4).mean()) == pytest.approx(fourth, rel=0.03)
    assert low < float(drawn.min())
    assert float(drawn.max()) < high
    neighbours = (centred[1:] * centred[:-1]).mean()
    assert abs(float(neighbours)) < Z / math.sqrt(n)


def test_the_uniform_grid_has_variance_one_exactly() -> None:
    levels = torch.arange(-32767, 32768, 2, dtype=torch.float64)
    weights = ChainWeights("uniform", seed=0, n_chains=1, width=2, dtype=torch.float64, device="cpu")
    assert float((levels * weights.scale).square().mean()) == pytest.approx(1.0, rel=1e-12)
    drawn = next(weights.steps(3, 4))
    assert torch.equal(drawn.remainder(2), torch.ones_like(drawn))


@pytest.mark.parametrize("law", LAWS)
def test_a_step_has_the_same_weights_however_they_are_asked_for(law: str) -> None:
    def make(dtype: torch.dtype = torch.float64) -> ChainWeights:
        return ChainWeights(law, seed=4, n_chains=3, width=5, dtype=dtype, device="cpu")

    whole = [numbers.clone() for numbers in make().steps(0, 40)]
    for t in (0, 7, 39):
        assert torch.equal(whole[t] * make().scale, make().step(t))
    cut = [numbers.clone() for part in ((0, 3), (3, 29), (29, 40)) for numbers in make().steps(*part)]
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    single = next(make(torch.float32).steps(7, 8))
    torch.testing.assert_close(single.double(), whole[7], rtol=1e-6, atol=0.0)
    other = ChainWeights(law, seed=5, n_chains=3, width=5, dtype=torch.float64, device="cpu")
    assert not torch.equal(whole[0] * other.scale, other.step(0))


# ------------------------------------------------------------------------------- averages


def test_quantities_are_those_of_the_measures() -> None:
    H = 3.0 * Chain(6, n_samples=8, n_chains=4, dtype="float64").draw_inputs()
    H = H / second_moments(H).diagonal(dim1=1, dim2=2).mean(1).sqrt()[:, None, None]
    M = second_moments(H)
    found = dict(zip((*PLAIN, "soft_rank 0.3"), observe(7.0 * H, (*PLAIN, "soft_rank 0.3")).T, strict=True))
    torch.testing.assert_close(found["r"], rank_ratio(H))
    torch.testing.assert_close(found["frobenius"], M.square().sum((1, 2)))
    torch.testing.assert_close(found["cube"], torch.stack([(m @ m @ m).trace() for m in M]))
    torch.testing.assert_close(found["squares"], torch.stack([(m @ m).diagonal().square().sum() for m in M]))
    off = ~torch.eye(6, dtype=torch.bool)
    torch.testing.assert_close(found["offdiagonal"], M[:, off].mean(1))
    assert torch.equal(found["soft_rank 0.3"], soft_rank(H, 0.3).double())


def test_averages_are_those_of_a_loop_over_all_layers() -> None:
    chain = Chain(5, 0.8, n_samples=6, n_chains=3, dtype="float64")
    made = simulate(chain, 40, every=3, burn_in=6)
    seen = [H for _, H in walk(chain, range(9, 41, 3))]
    assert made.n_observed == len(seen) == 11
    stacked = torch.cat(seen)
    assert made["r"].value == pytest.approx(float(rank_ratio(stacked).mean()), rel=1e-12)
    assert made["r"].deviation == pytest.approx(float(rank_ratio(stacked).std(correction=0)), rel=1e-9)
    assert made["soft_rank 0.5"].value == pytest.approx(float(soft_rank(stacked, 0.5).double().mean()), rel=1e-12)
    assert made["alpha"].value == pytest.approx(float(regularity(stacked)), rel=1e-12)
    assert made.per_chain["r"][1] == pytest.approx(float(rank_ratio(torch.stack(seen)[:, 1]).mean()), rel=1e-12)
    assert "40 steps, 11 observations" in str(made)


@pytest.mark.parametrize("norm", ["batch", "centred", "none"])
@pytest.mark.parametrize("activation", ["linear", "tanh"])
def test_alpha_is_the_regularity_of_all_layers_with_and_without_norms(norm: str, activation: str) -> None:
    chain = Chain(6, 0.8, n_samples=9, norm=norm, activation=activation, n_chains=3, dtype="float64")
    made = simulate(chain, 60)
    stacked = torch.cat([H for _, H in walk(chain, range(1, 61))])
    assert made["alpha"].value == pytest.approx(float(regularity(stacked)), rel=1e-9)
    assert made["alpha"].value <= 1.0 + 1e-9
    assert set(made.estimates) == {*USUAL, "alpha"}  # the parts of alpha stay inside


def test_zero_rows_add_nothing_to_alpha() -> None:
    H = Chain(4, n_samples=6, n_chains=1, dtype="float64").draw_inputs()
    dead = torch.cat([H, torch.zeros_like(H[:, :2])], 1)
    for one, other in zip(
        observe(H, tuple(ROWWISE.values()))[0], observe(dead, tuple(ROWWISE.values()))[0], strict=True
    ):
        assert float(one) == pytest.approx(float(other), rel=1e-12)


def test_without_a_number_of_chains_there_are_enough_to_fill_a_processor() -> None:
    numbers = {width: Chain(width).chains for width in (8, 16, 32, 64, 128, 256)}
    assert numbers == {8: 128, 16: 128, 32: 32, 64: 8, 128: 2, 256: 1}
    assert Chain(32, n_samples=512).chains == 2
    assert Chain(32, n_chains=1).shape == (1, 32, 32)
    assert Chain(32).settings() == Chain(32, n_chains=32).settings()


@pytest.mark.parametrize("cuts", [(1,) * 300, (7, 100, 193), (300,)])
def test_sums_do_not_depend_on_how_many_observations_come_at_once(cuts: tuple[int, ...]) -> None:
    values = torch.rand(300, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = BatchMeans(3, 2)
    for part in values.split(cuts):
        means.add(part)
    plain = [torch.zeros(3, 2, dtype=torch.float64) for _ in range(ROOM)]
    for place, value in enumerate(values):
        plain[place // 8] += value  # 300 observations fill batches of 8
    assert means.length == 8
    # Merged batches were summed in another order than this loop: a few roundings of a sum of eight.
    torch.testing.assert_close(means.sums, torch.stack(plain), rtol=16 * EPS, atol=0.0)
    whole = BatchMeans(3, 2)
    whole.add(values)
    assert torch.equal(means.sums, whole.sums)
    assert torch.equal(means.squares, whole.squares)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("n_chains", [1, 5, 40])
def test_batches_hold_every_observation_in_bounded_room(n: int, n_chains: int) -> None:
    numbers = torch.rand(n, n_chains, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    means = BatchMeans(n_chains, 2)
    for values in numbers:
        means.add(values[None])
    assert means.sums.shape[0] == ROOM
    torch.testing.assert_close(means.means(), numbers.mean(0))
    groups, n_groups = means.group_means()
    assert len(groups) >= n_chains
    assert len(groups) >= 32 or n < 64
    used = (n // means.length) // (len(groups) // n_chains) * (len(groups) // n_chains) * means.length
    torch.testing.assert_close(groups.mean(0), numbers[:used].mean((0, 1)))
    assert n_groups == pytest.approx(len(groups) * n / used)


@pytest.mark.parametrize("n_chains", [1, 8, 64])
def test_error_bars_are_right_for_correlated_observations(n_chains: int) -> None:
    """First-order autoregression with memory 0.9: the error is sqrt(19) times that of independent numbers."""
    n, memory = 4000, 0.9
    noise = torch.randn(n, n_chains, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    means, x = BatchMeans(n_chains, 1), torch.zeros(n_chains, 1, dtype=torch.float64)
    for e in noise:
        x = memory * x + math.sqrt(1 - memory**2) * e
        means.add(x[None])
    expected = math.sqrt((1 + memory) / (1 - memory) / (n * n_chains))
    # The spread of 32 means is known to within one part in sqrt(2 * 31); five of those.
    assert means.estimate(0).error == pytest.approx(expected, rel=Z / math.sqrt(62))
    assert abs(means.estimate(0).value) < Z * expected
    assert means.estimate(0).deviation == pytest.approx(1.0, abs=0.2)


def test_the_error_of_a_quotient_knows_that_its_parts_move_together() -> None:
    means = BatchMeans(40, 2)
    below = 1.0 + torch.rand(40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means.add(torch.cat([2.0 * below, below], 1)[None])
    quotient = means.estimate_quotient(0, 1)
    assert quotient.value == pytest.approx(2.0, rel=1e-14)
    assert quotient.error < 1e-14
    assert means.estimate(0).error > 0.01


def test_single_and_double_precision_have_the_same_averages() -> None:
    """Rounding takes chains apart, but not their law: differences stay within the error bars."""
    made = [
        simulate(Chain(16, 1.0, n_chains=64, dtype=dtype, seed=seed), 600, every=4, burn_in=60)
        for seed, dtype in enumerate(("float32", "float64"))
    ]
    for name in (*USUAL, "alpha"):
        one, other = made[0][name], made[1][name]
        assert abs(one.value - other.value) < Z * math.hypot(one.error, other.error)
        assert one.error < 0.02 * one.value


def test_every_sixteenth_layer_gives_nearly_the_error_bars_of_every_layer() -> None:
    chain = Chain(8, 0.1, n_chains=64, seed=3)
    each, some = (simulate(chain, 800, every=every, burn_in=80, quantities=("r",)) for every in (1, 16))
    assert some["r"].error < 1.25 * each["r"].error


def test_without_norms_the_rank_collapses_and_with_them_it_does_not() -> None:
    norms = {norm: simulate(Chain(16, 0.5, norm=norm, n_chains=8), 500, burn_in=400) for norm in ("batch", "none")}
    assert norms["none"]["r"].value < 1.001
    assert norms["batch"]["r"].value > 3.0


def test_asymmetric_weights_break_batch_norm() -> None:
    kinds = {law: simulate(Chain(32, math.inf, weights=law, n_chains=16), 60, burn_in=20) for law in LAWS}
    assert kinds["asymmetric"]["r"].value < 0.4 * kinds["uniform"]["r"].value
    assert kinds["normal"]["r"].value == pytest.approx(kinds["uniform"]["r"].value, rel=0.1)


# ------------------------------------------------------------------------------- resuming


def run(chain: Chain, n_steps: int, **options: Any) -> ChainAverages:
    return dataclasses.replace(simulate(chain, n_steps, every=2, **options), seconds=0.0)


@pytest.mark.parametrize("law", LAWS)
def test_a_run_that_was_cut_gives_the_same_numbers_to_the_last_bit(tmp_path: Path, law: str) -> None:
    chain = Chain(6, 0.4, n_chains=3, weights=law, activation="tanh", seed=9)
    whole = run(chain, 301, checkpoint=tmp_path / "whole")
    for n_steps in (3, 8, 150, 301):
        cut = run(chain, n_steps, checkpoint=tmp_path / "cut")
    assert cut == whole
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    assert run(chain, 301, checkpoint=tmp_path / "cut") == whole, "a finished run has nothing left to do"
    assert run(chain, 301) == whole


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlynorm.rank.chains.simulate.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("onlynorm.rank.chains.simulate._PAUSE", 32)
    chain = Chain(5, 0.4, n_chains=2)
    heard: list[int] = []

    def kill(done: int, total: int, message: str) -> None:
        heard.append(done)
        assert total == 200
        if done > 90:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chain, 200, checkpoint=tmp_path / "state", progress=kill)
    assert heard == [32, 64, 96]
    state = ChainState(chain, inputs=None, quantities=USUAL, every=2, burn_in=0)
    state.load(tmp_path / "state")
    assert state.step == 96
    assert run(chain, 200, checkpoint=tmp_path / "state") == run(chain, 200)


@pytest.mark.parametrize(
    "changes", [{"gamma": 0.5}, {"seed": 1}, {"activation": "relu"}, {"weights": "normal"}, {"dtype": "float64"}]
)
def test_the_state_of_another_chain_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    chain = Chain(5, 0.4, n_chains=2)
    run(chain, 8, checkpoint=tmp_path / "state")
    with pytest.raises(ConversionError, match=f"another \\({next(iter(changes))}: .*, .* now\\). Delete it"):
        run(dataclasses.replace(chain, **changes), 8, checkpoint=tmp_path / "state")
    with pytest.raises(ConversionError, match="inputs: 'drawn'"):
        run(chain, 8, checkpoint=tmp_path / "state", inputs=torch.eye(5))
    with pytest.raises(ConversionError, match=r"every: 2 .*, 4 now"):
        simulate(chain, 8, checkpoint=tmp_path / "state", every=4)


def test_damaged_states_and_shorter_runs_are_refused(tmp_path: Path) -> None:
    chain, path = Chain(5, 0.4), tmp_path / "state"
    run(chain, 8, checkpoint=path)
    with pytest.raises(ValueRangeError, match=r"n_steps >= 8, .*; got 4"):
        run(chain, 4, checkpoint=path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match=r"does not match its checksum"):
        run(chain, 8, checkpoint=path)


@pytest.mark.parametrize(
    "counts",
    [
        None, [], {"step": 8}, {"step": "8", "length": 1, "n_observed": 8}, {"step": 7, "length": 1, "n_observed": 8},
        {"step": 8, "length": 2, "n_observed": 8}, {"step": -1, "length": 1, "n_observed": -1},
    ],
)  # fmt: skip
def test_forged_states_are_refused(tmp_path: Path, counts: object) -> None:
    chain, path = Chain(5, 0.4), tmp_path / "state"
    run(chain, 8, checkpoint=path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure="")
    settings = {"settings": document["settings"]}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document={**settings, "counts": counts})
    with pytest.raises(FormatError, match="counts and sums of this chain"):
        run(chain, 8, checkpoint=path)
    for name, value in (
        ("H", torch.ones(3)),
        ("sums", tensors["sums"].float()),
        ("squares", tensors["squares"].flatten()),
    ):
        forged = {**tensors, name: value}
        write_tensors(path, forged, kind=KIND, format=FORMAT, document={**settings, "counts": document["counts"]})
        with pytest.raises(FormatError, match=f"counts and sums of this chain; state: {name} of"):
            run(chain, 8, checkpoint=path)


def test_averages_beyond_the_root_of_the_largest_number_are_estimated() -> None:
    means = BatchMeans(1, 1)
    means.add(torch.full((2, 1, 1), 1e200, dtype=torch.float64))
    assert means.estimate(0).value == 1e200


# ------------------------------------------------------------------------------- drift


def test_the_drift_is_its_formula_in_loops() -> None:
    M = second_moments(next(iter(walk(Chain(5, n_samples=7, n_chains=2, dtype="float64"), [1])))[1])
    for one, found in zip(M, frobenius_drift(M), strict=True):
        square = one @ one
        expected = 2 * 25 - 2 * square.trace() - 8 * (square @ one).trace() + 8 * square.diagonal().square().sum()
        assert float(found) == pytest.approx(float(expected), rel=1e-12)
    # Equal correlations: all rows of M have the same norm.
    equal = 0.6 * torch.eye(5, dtype=torch.float64) + 0.4
    found = drift_of_eigenvalues(torch.linalg.eigvalsh(equal))
    assert float(found) == pytest.approx(float(frobenius_drift(equal)), rel=1e-12)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"width": 0}, ValueRangeError, "width of a chain .* from 1; got 0"),
        ({"width": 2.5}, ValueRangeError, "got 2.5"),
        (
            {"width": 4, "n_samples": 1},
            ValueRangeError,
            "n_samples of a chain .* from 2",
        ),
        ({"width": 4, "n_chains": 0}, ValueRangeError, "n_chains"),
        (
            {"width": 4, "gamma": -1.0},
            ValueRangeError,
            r"gamma of a chain .* in \[0, inf\); got -1.0",
        ),
        ({"width": 4, "gamma": math.nan}, ValueRangeError, "got nan"),
        ({"width": 4, "norm": "layer"}, UnknownNameError, "norm needs a known name; got 'layer'"),
        ({"width": 4, "weights": "unifrom"}, UnknownNameError, "Did you mean 'uniform'"),
        ({"width": 4, "activation": "tan"}, UnknownNameError, "Did you mean 'tanh'"),
        ({"width": 4, "dtype": "float16"}, UnknownNameError, "Did you mean"),
        ({"width": 4, "seed": -1}, ValueRangeError, "seed "),
        ({"width": "4"}, ValueRangeError, "width of a chain .* from 1; got '4'"),
        ({"width": 4, "gamma": "1"}, ValueRangeError, "gamma of a chain .* number"),
        ({"width": 4, "activation": 3}, UnknownNameError, "activation needs a known name; got 3"),
        ({"width": 4, "device": "gpuu"}, ValueRangeError, "device of a chain .*device"),
    ],
)
def test_impossible_chains_are_refused(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Chain(**settings)


@pytest.mark.usefixtures("unchecked")
def test_impossible_runs_are_refused() -> None:
    chain = Chain(4, n_chains=1)
    with pytest.raises(ShapeError, match=r"inputs \(4, 4\) or \(1, 4, 4\).*got \(3, 4\)"):
        simulate(chain, 2, inputs=torch.ones(3, 4))
    with pytest.raises(ValueRangeError, match="finite inputs"):
        simulate(chain, 2, inputs=torch.full((4, 4), math.nan))
    with pytest.raises(ValueRangeError, match=r"every .* from 1; got 0"):
        simulate(chain, 2, every=0)
    with pytest.raises(ValueRangeError, match="an observation; got none in 2 steps"):
        simulate(chain, 2, every=3)
    with pytest.raises(UnknownNameError, match="Did you mean 'frobenius'"):
        simulate(chain, 2, quantities=("frobenus",))
    with pytest.raises(UnknownNameError, match=r"soft_rank 0\.5"):
        simulate(chain, 2, quantities=("soft_rank x",))
    with pytest.raises(ValueRangeError, match="quantities; got r, r"):
        simulate(chain, 2, quantities=("r", "r"))
    for depths in ([-1], [], [0.5], ["1"], 3):
        with pytest.raises(OnlynormError, match=r"walk needs depths >= 0"):
            next(walk(chain, depths))  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="simulate needs a Chain; got 32"):
        simulate(32, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"n_steps .* from 1 to 10000000000; got 0"):
        simulate(chain, 0)
    with pytest.raises(UnknownNameError, match="quantity needs a known name; got 'R'"):
        simulate(chain, 2)["R"]


def test_a_signal_that_leaves_its_range_is_said() -> None:
    chain = Chain(4, math.inf, activation=lambda x: x * x, norm="none")
    with pytest.raises(ValueRangeError, match="range of float32; got NaN or infinity before step 60"):
        simulate(chain, 60, burn_in=59)


@pytest.mark.parametrize("sizes", [{"width": 2**40}, {"width": 8, "n_samples": 2**50}, {"width": 8, "n_chains": 2**50}])
def test_a_chain_beyond_the_memory_is_refused(sizes: dict[str, int]) -> None:
    chain = Chain(**sizes)
    with pytest.raises(MemoryLimitError, match="a chain of width"):
        simulate(chain, 3)
