"""Turns text into word ids: the vocabulary, the encoding, the GloVe vectors; reads Sentiment140."""

import csv
import gzip
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.ragged import Ragged
from tailorfl.data.reason import reason
from tailorfl.data.source import PADDING, UNKNOWN, Column, Reading, Source, SourceOptions
from tailorfl.data.sources import files
from tailorfl.errors import UserError
from tailorfl.seeding import generator

ORIGINAL = "training.1600000.processed.noemoticon.csv"
SENT140_EXPECTED = (f"sent140/{ORIGINAL} or sent140/*.csv.gz (user,label,text)",)
SENTIMENTS = ("negative", "positive")
LABELS = {"0": 0, "1": 1, "4": 1}  # the original has 0 and 4
TOKEN = re.compile(r"https?://\S+|www\.\S+|@\w+|\w+(?:'\w+)?|[^\w\s]")
MISSING_VECTOR_SCALE = 0.1


@dataclass(frozen=True)
class EncodedText:
    ids: Tensor  # int64 [M, max_length]
    vocabulary: tuple[str, ...]
    vectors: Tensor | None


def encode(texts: Sequence[str], train_size: int, options: SourceOptions) -> EncodedText:
    """Ids of each text's first words, with the most frequent words of the training rows as vocabulary."""
    length = options.max_length
    if length < 1 or options.vocabulary_size < 3:
        raise UserError(
            f"max_length={length} and vocabulary_size={options.vocabulary_size}, "
            "allowed: at least 1 word a row and 3 words in the vocabulary (padding and unknown are two of them)"
        )
    rows, names = _tokens(texts, length)
    in_training = torch.bincount(rows.index[: rows.offsets[train_size]], minlength=len(names))
    vocabulary = build_vocabulary(dict(zip(names, in_training.tolist(), strict=True)), options.vocabulary_size)
    vectors = read_glove(options.glove, vocabulary, options.seed) if options.glove else None
    return EncodedText(_word_ids(rows, names, vocabulary, length), vocabulary, vectors)


def with_vocabulary(texts: Sequence[str], vocabulary: Sequence[str], length: int) -> Tensor:
    """Ids of each text's first words in a vocabulary that is there already: int64 [texts, length]."""
    return _word_ids(*_tokens(texts, length), vocabulary, length)


def _tokens(texts: Sequence[str], length: int) -> tuple[Ragged, list[str]]:
    """The first tokens of each text as numbers, and the token of each number.

    Numbers at once, not lists of strings: of a million texts those would fill the memory.
    """
    number: dict[str, int] = {}
    index, lengths = array("q"), array("q")
    for text in texts:
        row = [number.setdefault(token, len(number)) for token in TOKEN.findall(text.lower())[:length]]
        index.extend(row)
        lengths.append(len(row))
    return Ragged.from_lengths(np.array(index), np.array(lengths)), list(number)


def build_vocabulary(counts: Mapping[str, int], size: int) -> tuple[str, ...]:
    """Padding, unknown, then words by falling frequency; equally frequent ones by the alphabet."""
    words: Counter[str] = Counter()
    for token, count in counts.items():
        words[word_of(token)] += count
    ranked = sorted((word for word in words if words[word]), key=lambda word: (-words[word], word))
    return ("<padding>", "<unknown>", *ranked[: size - 2])


def word_of(token: str) -> str:
    """All users are one word and all addresses another: those of the GloVe vectors made from tweets."""
    if token.startswith(("http://", "https://", "www.")):
        return "<url>"
    return "<user>" if len(token) > 1 and token[0] == "@" else token


def _word_ids(rows: Ragged, tokens: list[str], vocabulary: Sequence[str], length: int) -> Tensor:
    """int64 [rows, length]: the words of every row, then padding."""
    number = {word: i for i, word in enumerate(vocabulary)}
    word = torch.tensor([number.get(word_of(token), UNKNOWN) for token in tokens], dtype=torch.int64)
    ids = torch.full((len(rows), length), PADDING)
    ids[torch.arange(length) < rows.counts[:, None]] = word[rows.index]
    return ids


def read_glove(path: Path, vocabulary: Sequence[str], seed: int) -> Tensor:
    """A vector a word from a GloVe text file; words missing there get small random numbers, padding zeros."""
    wanted = {word: i for i, word in enumerate(vocabulary)}
    found: dict[int, np.ndarray] = {}
    length = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                word, *numbers = line.rstrip().split(" ")
                length = length or len(numbers)
                # More numbers than in the first line: the word has spaces in it, as some of the largest file have.
                if word in wanted and len(numbers) <= length:
                    found[wanted[word]] = np.array(numbers, np.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"glove={path} cannot be read: {reason(error)}; allowed: lines of a word and its numbers"
        ) from error
    lengths = {len(vector) for vector in found.values()}
    if len(lengths) != 1:
        raise UserError(
            f"glove={path} has vectors of lengths {sorted(lengths)} for the vocabulary, allowed: one length for all"
        )
    noise = generator(seed, "glove").normal(0, MISSING_VECTOR_SCALE, (len(vocabulary), lengths.pop()))
    vectors = noise.astype(np.float32)
    vectors[PADDING] = 0
    for i, vector in found.items():
        vectors[i] = vector
    return torch.from_numpy(vectors)


def load_sent140(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """Tweets; a user is a natural client."""
    rows = _tweets(name, folder)
    users = sorted({user for user, _, _ in rows})
    number = {user: i for i, user in enumerate(users)}
    text = encode([tweet for _, _, tweet in rows], len(rows), options)
    return Source(
        name=name,
        kind="text",
        inputs=text.ids,
        targets=torch.tensor([label for _, label, _ in rows]),
        train_size=len(rows),
        classes=SENTIMENTS,
        owner=torch.tensor([number[user] for user, _, _ in rows]),
        owners=tuple(users),
        vectors=text.vectors,
        vocabulary=text.vocabulary,
        reading=Reading((Column("text"),)),
    )


def _tweets(name: str, folder: Path | None) -> list[tuple[str, int, str]]:
    """User, label and text of every tweet: of the original file if it is there, else of the smaller ones."""
    original = files.present(folder, f"sent140/{ORIGINAL}")
    if original:
        return [_tweet(original, row, user=4, label=0, text=5) for row in _rows(original, "latin-1")]
    smaller = sorted((folder / "sent140").glob("*.csv.gz")) if folder else []
    if not smaller:
        raise files.missing(name, folder, SENT140_EXPECTED)
    return [tweet for path in smaller for tweet in _with_header(path)]


def _with_header(path: Path) -> list[tuple[str, int, str]]:
    rows = _rows(path, "utf-8")
    header = next(rows, [])
    if not {"user", "label", "text"} <= set(header):
        raise UserError(f"{path} has the columns {','.join(header)}, allowed: user,label,text")
    user, label, text = (header.index(column) for column in ("user", "label", "text"))
    return [_tweet(path, row, user, label, text) for row in rows]


def _rows(path: Path, encoding: str) -> Iterator[list[str]]:
    try:
        with (
            gzip.open(path, "rt", encoding=encoding, newline="")
            if path.suffix == ".gz"
            else path.open(encoding=encoding, newline="") as file
        ):
            yield from csv.reader(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def _tweet(path: Path, row: list[str], user: int, label: int, text: int) -> tuple[str, int, str]:
    if len(row) <= max(user, label, text) or row[label] not in LABELS:
        raise UserError(f"{path} has a row {row!r:.80}; allowed: a user, a label of {', '.join(LABELS)} and a text")
    return row[user], LABELS[row[label]], row[text]
