"""Turns text into word ids: the vocabulary, the encoding, the GloVe vectors; reads Sentiment140."""

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.reason import reason
from tailorfl.data.source import PADDING, UNKNOWN, Source, SourceOptions
from tailorfl.data.sources import files
from tailorfl.errors import UserError
from tailorfl.seeding import generator

ORIGINAL = "training.1600000.processed.noemoticon.csv"
SENT140_EXPECTED = (f"sent140/{ORIGINAL} or sent140/*.csv.gz (user,label,text)",)
SENTIMENTS = ("negative", "positive")
LABELS = {"0": 0, "1": 1, "4": 1}  # the original has 0 and 4
# The words for addresses and users are those of the GloVe vectors made from tweets.
ADDRESS, MENTION = re.compile(r"https?://\S+|www\.\S+"), re.compile(r"@\w+")
WORD = re.compile(r"<url>|<user>|\w+(?:'\w+)?|[^\w\s]")
MISSING_VECTOR_SCALE = 0.1


@dataclass(frozen=True)
class EncodedText:
    ids: Tensor  # int64 [M, max_length]
    vocabulary: tuple[str, ...]
    vectors: Tensor | None


def words(text: str) -> list[str]:
    """Lower-case words and single marks."""
    return WORD.findall(MENTION.sub("<user>", ADDRESS.sub("<url>", text.lower())))


def encode(texts: Sequence[str], train_size: int, options: SourceOptions) -> EncodedText:
    """Word ids with the most frequent words of the training rows as vocabulary."""
    if options.max_length < 1 or options.vocabulary_size < 3:
        raise UserError(
            f"max_length={options.max_length} and vocabulary_size={options.vocabulary_size}: "
            "allowed: at least 1 word a row and 3 words in the vocabulary (padding and unknown are two of them)"
        )
    rows = [words(text) for text in texts]
    vocabulary = build_vocabulary(rows[:train_size], options.vocabulary_size)
    number = {word: i for i, word in enumerate(vocabulary)}
    ids = np.full((len(rows), options.max_length), PADDING, np.int64)
    for i, row in enumerate(rows):
        row = row[: options.max_length]
        ids[i, : len(row)] = [number.get(word, UNKNOWN) for word in row]
    vectors = read_glove(options.glove, vocabulary, options.seed) if options.glove else None
    return EncodedText(torch.from_numpy(ids), vocabulary, vectors)


def build_vocabulary(rows: Iterable[list[str]], size: int) -> tuple[str, ...]:
    """Padding, unknown, then words by falling frequency; equally frequent ones by the alphabet."""
    counts = Counter(word for row in rows for word in row)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return ("<padding>", "<unknown>", *ranked[: size - 2])


def read_glove(path: Path, vocabulary: Sequence[str], seed: int) -> Tensor:
    """A vector a word from a GloVe text file; words missing there get small random numbers, padding zeros."""
    wanted = {word: i for i, word in enumerate(vocabulary)}
    found: dict[int, np.ndarray] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                word, _, numbers = line.rstrip().partition(" ")
                if word in wanted:
                    found[wanted[word]] = np.array(numbers.split(" "), np.float32)
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
    header, *rows = _rows(path, "utf-8") or [[]]
    if not {"user", "label", "text"} <= set(header):
        raise UserError(f"{path} has the columns {','.join(header)}, allowed: user,label,text")
    user, label, text = (header.index(column) for column in ("user", "label", "text"))
    return [_tweet(path, row, user, label, text) for row in rows]


def _rows(path: Path, encoding: str) -> list[list[str]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return list(csv.reader(io.StringIO(raw.decode(encoding), newline="")))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def _tweet(path: Path, row: list[str], user: int, label: int, text: int) -> tuple[str, int, str]:
    if len(row) <= max(user, label, text) or row[label] not in LABELS:
        raise UserError(f"{path} has a row {row!r:.80}; allowed: a user, a label of {', '.join(LABELS)} and a text")
    return row[user], LABELS[row[label]], row[text]
