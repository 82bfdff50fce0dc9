"""Haar-distributed orthogonal matrices, bit-reproducible; any columns can be computed independently.

Stewart's recursion: an n x n Haar matrix is Q_n = H_n diag(d_n, Q_{n-1}), where H_n is the Householder reflection of a
Gaussian vector x of length n. The sign d_n = -sign(x_1) makes the first column x/|x|, uniform on the sphere;
Q_1 = sign(x_1). Column c of Q_n starts as d e_1 at size n - c and is then multiplied by the larger reflections only, so
that columns can be computed independently.

LAPACK's QR differs in the last bits between machines. Here every operation is an elementwise numpy ufunc and every sum
uses a fixed binary tree.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from onlynorm.features.streams import Stream

Array = npt.NDArray[np.float64]
_PANEL = 2**16  # entries of a panel: it fits into the cache of a core with its scratch copy
_COLUMNS_PER_THREAD = 128  # fewer do not pay off, since each thread draws the reflections again


def haar_columns(stream: Stream, n: int, start: int, stop: int) -> Array:
    """Columns [start, stop) of the infinite sequence Q^(0), Q^(1), ... of n x n Haar matrices, one per result row.

    Result row f - start is column f mod n of matrix f // n. Matrix b uses the normals [b m, (b + 1) m) of the stream,
    m = n (n + 1)/2: n for the largest reflection, then n - 1, down to one.
    """
    columns = np.empty((stop - start, n))
    first, last = start // n, -(-stop // n)
    per_step = max(1, _PANEL // (n * n))
    for b in range(first, last, per_step):
        n_matrices = min(per_step, last - b)
        low, high = max(start, b * n), min(stop, (b + n_matrices) * n)
        # Small matrices are computed together and completely; of a large one only the requested columns.
        left, right = (0, n) if n_matrices > 1 else (low - b * n, high - b * n)
        made = _columns_of_matrices(stream, n, b, n_matrices, left, right).reshape(-1, n)
        skipped = low - b * n - left
        columns[low - start : high - start] = made[skipped : skipped + high - low]
    return columns


def haar_matrix(stream: Stream, n: int) -> Array:
    """The first n x n Haar matrix of the stream, computed in parallel."""
    n_threads = min(torch.get_num_threads(), max(1, n // _COLUMNS_PER_THREAD))
    edges = [n * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads) as pool:
        parts = pool.map(lambda low, high: haar_columns(stream, n, low, high), edges[:-1], edges[1:])
        return np.ascontiguousarray(np.concatenate(list(parts)).T)


def pairwise_sum(values: Array) -> Array:
    """Sum over the first axis: entry i + ceil(m/2) is added to entry i repeatedly until one is left.

    Overwrites `values`. The order of additions depends only on the length.
    """
    m = len(values)
    while m > 1:
        half = (m + 1) // 2
        values[: m - half] += values[half:m]
        m = half
    total: Array = values[0]
    return total


def _columns_of_matrices(stream: Stream, n: int, b: int, n_matrices: int, low: int, high: int) -> Array:
    """Columns [low, high) of matrices b, ..., b + n_matrices - 1 as an array (matrix, column, entry)."""
    vectors, signs = _reflections(stream, n, b, n_matrices)
    width = max(1, min(high - low, _PANEL // (n * n_matrices)))
    result = np.empty((n_matrices, high - low, n))
    scratch = np.empty(n * width * n_matrices)
    for c in range(low, high, width):
        panel = np.zeros((n, min(width, high - c), n_matrices))
        _reflect_panel(panel, c, vectors, signs, scratch)
        result[:, c - low : c - low + width] = panel.transpose(2, 1, 0)
    return result


def _reflections(stream: Stream, n: int, b: int, n_matrices: int) -> tuple[list[Array], Array]:
    """Householder vectors u with H = I - u u^T, largest first, each (entry, matrix), and the signs d."""
    count = n * (n + 1) // 2
    normals = stream.normals(b * count, (b + n_matrices) * count).reshape(n_matrices, count)
    normals = np.ascontiguousarray(normals.T)
    vectors = []
    signs = np.empty((n, n_matrices))
    end = 0
    for offset in range(n):
        begin, end = end, end + n - offset
        u = normals[begin:end]
        squared = pairwise_sum(u * u)
        norm = np.sqrt(squared)
        signs[offset] = np.copysign(1.0, -u[0])
        half_square = np.sqrt(squared + np.abs(u[0]) * norm)  # half of |v|^2 for v = x + sign(x_1) |x| e_1
        u[0] += np.copysign(norm, u[0])
        u /= half_square
        vectors.append(u)
    return vectors, signs


def _reflect_panel(panel: Array, c: int, vectors: list[Array], signs: Array, scratch: Array) -> None:
    """Fills a zero `panel` (entry, column, matrix) with columns c, c + 1, ... of the matrices."""
    n, width = panel.shape[:2]
    if c + width == n:
        panel[n - 1, width - 1] = -signs[n - 1]  # Q_1 = sign(x_1), exactly
    for offset in range(min(c + width, n - 1) - 1, -1, -1):
        u = vectors[offset][:, None, :]
        entered = max(offset - c, 0)  # columns before this one start at a larger reflection
        if offset >= c:
            panel[offset, entered] = signs[offset]
        active = panel[offset:, entered:]
        work = scratch[: active.size].reshape(active.shape)
        np.multiply(active, u, out=work)
        w = pairwise_sum(work).copy()
        np.multiply(u, w, out=work)
        np.subtract(active, work, out=active)
