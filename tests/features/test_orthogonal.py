"""Haar matrices: orthogonal, of the right law, any columns alone, and the bits of the written format."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onlynorm.features import draw, orthogonal
from onlynorm.features.streams import Stream

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 129])
def test_orthogonal_features_are_orthogonal_in_groups(n: int) -> None:
    features = draw("orthogonal", (n, n), n_features=2 * n + n // 2, seed=n)
    for side, scale in ((features.right(), 2.0), (features.left().T, 2.0 * n / features.n_features)):
        for group in side.split(n):  # the last group is cut
            gram = group @ group.T / scale
            assert (gram - torch.eye(len(group), dtype=torch.float64)).abs().max() <= (2 * n + 8) * EPS
    assert not torch.equal(features.right(0, n), features.right(n, 2 * n))


@pytest.mark.parametrize("n", [1, 2, 5, 24])
def test_haar_columns_are_those_of_explicit_reflections(n: int) -> None:
    stream, count = Stream(3, "", "haar"), n * (n + 1) // 2
    matrices = orthogonal.haar_columns(stream, n, 0, 2 * n).reshape(2, n, n)
    for b, made in enumerate(matrices):
        normals = stream.normals(b * count, (b + 1) * count)
        Q = np.sign(normals[-1:])[:, None]
        end = count - 1
        for size in range(2, n + 1):
            x = normals[end - size : end]
            end -= size
            v = x + np.copysign(np.linalg.norm(x), x[0]) * np.eye(size)[0]
            inner = np.block([[-np.sign(x[:1])[None], np.zeros((1, size - 1))], [np.zeros((size - 1, 1)), Q]])
            Q = (np.eye(size) - 2 * np.outer(v, v) / (v @ v)) @ inner
            assert np.abs(Q[:, 0] - x / np.linalg.norm(x)).max() <= 8 * size * EPS  # uniform on the sphere
        assert np.abs(made.T - Q).max() <= 8 * n * EPS
        assert end == 0


def written_haar(normals: list[float], n: int) -> list[list[float]]:
    """The columns of one Haar matrix in plain Python floats, step by step as docs/features.md writes it."""

    def halving_sum(terms: list[float]) -> float:
        while len(terms) > 1:
            h = (len(terms) + 1) // 2
            terms = [t + terms[h + i] if h + i < len(terms) else t for i, t in enumerate(terms[:h])]
        return terms[0]

    columns = [[math.copysign(1.0, normals[-1])]]
    end = n * (n + 1) // 2 - 1
    for size in range(2, n + 1):
        x = normals[end - size : end]
        end -= size
        s = halving_sum([a * a for a in x])
        norm = math.sqrt(s)
        g = math.sqrt(s + abs(x[0]) * norm)
        u = [(x[0] + math.copysign(norm, x[0])) / g] + [a / g for a in x[1:]]
        columns = [[math.copysign(1.0, -x[0])] + [0.0] * (size - 1)] + [[0.0, *y] for y in columns]
        for y in columns:
            p = halving_sum([a * b for a, b in zip(y, u, strict=True)])
            y[:] = [a - b * p for a, b in zip(y, u, strict=True)]
    return columns


@pytest.mark.parametrize("n", [1, 2, 3, 10, 31])
def test_haar_columns_are_bit_for_bit_those_of_the_written_format(n: int) -> None:
    stream, count = Stream(9, "layer", "left"), n * (n + 1) // 2
    made = orthogonal.haar_columns(stream, n, n, 2 * n)  # the second matrix
    assert made.tolist() == written_haar(stream.normals(count, 2 * count).tolist(), n)


def test_haar_matrices_have_the_moments_of_the_haar_measure() -> None:
    n, trials = 4, 8_000
    Q = torch.from_numpy(orthogonal.haar_columns(Stream(0, "", "haar"), n, 0, n * trials)).reshape(trials, n, n)
    traces = Q.diagonal(dim1=1, dim2=2).sum(1)
    # for n >= 4 traces of O(n) have the first four moments of a standard normal: 0, 1, 0, 3
    assert abs(traces.mean()) <= 5 / math.sqrt(trials)
    assert abs((traces**2).mean() - 1) <= 5 * math.sqrt(2 / trials)
    assert abs(torch.linalg.det(Q).mean()) <= 5 / math.sqrt(trials)
    fourth = 3 / (n * (n + 2))
    assert (Q.mean(0).abs() <= 6 * math.sqrt(1 / n / trials)).all()
    assert ((Q**4).mean(0) - fourth).abs().max() <= 6 * math.sqrt(1 / trials) * fourth * 3


@given(n=st.integers(1, 70))
def test_pairwise_sum_adds_everything(n: int) -> None:
    assert orthogonal.pairwise_sum(np.arange(1.0, n + 1)[:, None])[0] == n * (n + 1) / 2


@pytest.mark.parametrize("n", [1, 5, 300])
def test_threads_do_not_change_a_bit_of_a_haar_matrix(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(0, "", "right")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert np.array_equal(orthogonal.haar_matrix(stream, n), orthogonal.haar_columns(stream, n, 0, n).T)
