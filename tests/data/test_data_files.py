"""The readers of public datasets, on tiny files made here and on the real ones where TAILOR_DATA has them."""

import csv
import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tailorfl.data import Source, SourceOptions, load_source
from tailorfl.data.sources.idx import read_idx
from tailorfl.errors import UserError


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_idx_set(folder: Path, prefix: str, test: str, suffix: str, labels: list[int]) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 4)).astype(np.uint8)
    for split in ("train", test):
        write_idx(folder / f"{prefix}{split}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{prefix}{split}-labels-idx1-ubyte{suffix}", np.array(labels, np.uint8))
    return images


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_packed_and_unpacked(tmp_path: Path, suffix: str) -> None:
    images = write_idx_set(tmp_path / "MNIST/raw", "", "t10k", suffix, [3, 1, 9])
    source = load_source("mnist", tmp_path)
    assert source.train_size == source.test_size == 3
    assert source.targets.tolist() == [3, 1, 9, 3, 1, 9]
    assert torch.equal(source.inputs[:3, 0], torch.from_numpy(images))


def test_emnist_letters_are_turned_upright_and_numbered_from_0(tmp_path: Path) -> None:
    raw = tmp_path / "EMNIST/raw"
    images = write_idx_set(raw, "emnist-letters-", "test", ".gz", [1, 26])
    (raw / "emnist-letters-mapping.txt").write_text("".join(f"{i} {64 + i} {96 + i}\n" for i in range(1, 27)))
    source = load_source("emnist", tmp_path)
    assert source.targets[:2].tolist() == [0, 25]
    assert source.classes[:2] == ("A", "B")
    assert torch.equal(source.inputs[0, 0], torch.from_numpy(images[0].T.copy()))


def test_emnist_byclass_has_62_classes_without_a_mapping_file(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "EMNIST/raw", "emnist-byclass-", "test", ".gz", [0, 61])
    assert len(load_source("emnist-byclass", tmp_path).classes) == 62


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"\0\0\x08\x01\0\0\0\x05abc", r"announces an array of shape \(5,\) but has 3 bytes"),
        (b"\x89PNG....", "not an idx file of unsigned bytes: it starts with 89504e47"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, raw: bytes, line: str) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(UserError, match=line):
        read_idx(tmp_path / "x")


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes(1000))[:-9])
    with pytest.raises(UserError, match="not a whole gzip file"):
        read_idx(tmp_path / "x.gz")


def test_missing_files_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "MNIST/raw", "", "t10k", ".gz", [0])
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError) as caught:
        load_source("mnist", tmp_path)
    line = str(caught.value)
    assert "MNIST/raw/t10k-labels-idx1-ubyte" in line
    assert "train-images" not in line
    assert f"`tailor data prepare mnist --data-dir {tmp_path}`" in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "omniglot", "sent140"])
def test_without_a_data_folder_the_line_says_how_to_name_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_DATA", raising=False)
    with pytest.raises(UserError, match=f"--data-dir or TAILOR_DATA.*tailor data prepare {name} --data-dir FOLDER"):
        load_source(name)


def test_the_data_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(tmp_path / "MNIST/raw", "", "t10k", ".gz", [0])
    monkeypatch.setenv("TAILOR_DATA", str(tmp_path))
    assert load_source("mnist").train_size == 1


def write_cifar(path: Path, labels: list[list[int]]) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(1).integers(0, 256, (len(labels), 3072)).astype(np.uint8)
    path.write_bytes(np.concatenate([np.array(labels, np.uint8), images], axis=1).tobytes())
    return images.reshape(-1, 3, 32, 32)


def test_cifar10_batches_come_in_order_and_stay_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    for i in range(1, 6):
        write_cifar(folder / f"data_batch_{i}.bin", [[i]])
    images = write_cifar(folder / "test_batch.bin", [[9], [0]])
    source = load_source("cifar10", tmp_path)
    assert source.targets.tolist() == [1, 2, 3, 4, 5, 9, 0]
    assert source.train_size == 5
    assert source.inputs.dtype == torch.uint8
    assert torch.equal(source.inputs[5:], torch.from_numpy(images))


def test_some_of_the_cifar10_batches_are_used_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    for i in (4, 2):
        write_cifar(folder / f"data_batch_{i}.bin", [[i]])
    write_cifar(folder / "test_batch.bin", [[0]])
    with pytest.raises(UserError, match=r"2 of its 5 training batches, .*data_batch_1.bin.*allow_partial=true"):
        load_source("cifar10", tmp_path)
    source = load_source("cifar10", tmp_path, SourceOptions(allow_partial=True))
    assert source.targets.tolist() == [2, 4, 0]


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder / "train.bin", [[7, 99], [3, 5]])
    write_cifar(folder / "test.bin", [[1, 50]])
    assert load_source("cifar100", tmp_path).targets.tolist() == [99, 5, 50]


def test_a_cut_cifar_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder / "train.bin", [[0, 0]])
    (folder / "test.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match="has 100 bytes, allowed: a multiple of 3074"):
        load_source("cifar100", tmp_path)


def write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_omniglot_clients_are_alphabets_and_ink_is_bright(tmp_path: Path) -> None:
    drawing = np.ones((105, 105), bool)
    drawing[:, :15] = False
    for part, alphabet in (("background", "Greek"), ("background", "Arcadian"), ("evaluation", "Tengwar")):
        for character in ("character01", "character02"):
            write_png(tmp_path / f"omniglot-py/images_{part}/{alphabet}/{character}/0001_01.png", drawing)
    source = load_source("omniglot", tmp_path)
    assert source.owners == ("Arcadian", "Greek", "Tengwar")
    assert source.owner is not None
    assert source.owner.tolist() == [0, 0, 1, 1, 2, 2]
    assert source.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert source.inputs.shape == (6, 1, 28, 28)
    # 15 of 105 columns are ink: four whole columns of 28
    assert (source.inputs[0, 0, 0, :6].tolist()) == [255, 255, 255, 255, 0, 0]
    assert source.reading.inverted


def write_sent140(path: Path, rows: list[list[str]], header: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])


TWEETS = [["ann", "1", "Good good day, @bob http://x.y"], ["bob", "0", "bad day"], ["ann", "0", ""]]


def test_tweets_become_word_ids_with_users_as_clients(tmp_path: Path) -> None:
    write_sent140(tmp_path / "sent140/some.csv.gz", TWEETS, ["user", "label", "text"])
    source = load_source("sent140", tmp_path, SourceOptions(max_length=6))
    assert source.vocabulary == ("<padding>", "<unknown>", "day", "good", ",", "<url>", "<user>", "bad")
    assert source.inputs.tolist() == [[3, 3, 2, 4, 6, 5], [7, 2, 0, 0, 0, 0], [0] * 6]
    assert source.targets.tolist() == [1, 0, 0]
    assert source.owners == ("ann", "bob")


def test_rare_words_are_unknown(tmp_path: Path) -> None:
    write_sent140(tmp_path / "sent140/some.csv.gz", TWEETS, ["user", "label", "text"])
    source = load_source("sent140", tmp_path, SourceOptions(max_length=3, vocabulary_size=3))
    assert source.inputs.tolist() == [[1, 1, 2], [1, 2, 0], [0, 0, 0]]


def test_the_original_file_of_tweets_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sent140/training.1600000.processed.noemoticon.csv"
    path.parent.mkdir()
    path.write_bytes('"0","1","Mon","NO_QUERY","zoë","sad"\n"4","2","Tue","NO_QUERY","ann","glad"\n'.encode("latin-1"))
    source = load_source("sent140", tmp_path)
    assert source.targets.tolist() == [0, 1]
    assert source.owners == ("ann", "zoë")


def test_word_vectors_are_read_and_missing_ones_made_up(tmp_path: Path) -> None:
    write_sent140(tmp_path / "sent140/some.csv.gz", TWEETS, ["user", "label", "text"])
    glove = tmp_path / "glove.txt"
    glove.write_text("day 1 2 3\nother 4 5 6\nbad of all 7 8 9\ngood -1 0 1.5\n")
    first, again = (load_source("sent140", tmp_path, SourceOptions(glove=glove)).vectors for _ in range(2))
    assert first is not None
    assert again is not None
    assert first[[0, 2, 3]].tolist() == [[0, 0, 0], [1, 2, 3], [-1, 0, 1.5]]
    assert 0 < first[4].abs().max() < 1
    assert torch.equal(first, again)


@pytest.mark.parametrize("text", ["day 1 x 3\n", "day 1 2\ngood 1\n", "nothing 1 2\n"])
def test_a_bad_word_vector_file_is_refused(tmp_path: Path, text: str) -> None:
    write_sent140(tmp_path / "sent140/some.csv.gz", TWEETS, ["user", "label", "text"])
    glove = tmp_path / "glove.txt"
    glove.write_text(text)
    with pytest.raises(UserError, match=r"glove=.*allowed"):
        load_source("sent140", tmp_path, SourceOptions(glove=glove))


def test_bad_tweets_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sent140/some.csv.gz"
    write_sent140(path, [["ann", "7", "hm"]], ["user", "label", "text"])
    with pytest.raises(UserError, match="allowed: a user, a label of 0, 1, 4"):
        load_source("sent140", tmp_path)
    write_sent140(path, TWEETS, ["who", "label", "text"])
    with pytest.raises(UserError, match="has the columns who,label,text, allowed: user,label,text"):
        load_source("sent140", tmp_path)


def real(name: str) -> Source:
    folder = os.environ.get("TAILOR_DATA")
    if not folder:
        pytest.skip("TAILOR_DATA does not name a folder with the real data")
    try:
        return load_source(name, Path(folder))
    except UserError as error:
        pytest.skip(f"not all there: {error}")


def test_the_real_mnist_has_its_counts() -> None:
    source = real("mnist")
    train = source.targets[: source.train_size].bincount().tolist()
    test = source.targets[source.train_size :].bincount().tolist()
    assert train == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_real_fashion_mnist_has_its_counts() -> None:
    source = real("fashion-mnist")
    assert source.targets[: source.train_size].bincount().tolist() == [6000] * 10
    assert source.targets[source.train_size :].bincount().tolist() == [1000] * 10


def test_the_real_emnist_letters_are_upright() -> None:
    source = real("emnist")
    assert source.targets[source.train_size :].bincount().tolist() == [800] * 26
    assert source.classes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    letter = source.inputs[source.targets == source.classes.index("T")].float().mean(0)[0]
    assert letter[:14].sum() > letter[14:].sum()  # the bar of a T is above
    across = (letter[:, :14].sum() - letter[:, 14:].sum()).abs()
    assert across < (letter[:14].sum() - letter[14:].sum()).abs()


def test_the_real_cifar10_has_its_published_statistics() -> None:
    source = real("cifar10")
    assert source.targets[: source.train_size].bincount().tolist() == [5000] * 10
    assert source.targets[source.train_size :].bincount().tolist() == [1000] * 10
    assert source.inputs.dtype == torch.uint8
    assert source.inputs.numel() * source.inputs.element_size() == 60_000 * 3072


@pytest.mark.slow
def test_the_real_omniglot_has_its_counts() -> None:
    source = real("omniglot")
    assert source.inputs.shape == (32_460, 1, 28, 28)
    assert len(source.owners) == 50
    assert source.classes == tuple(map(str, range(55)))
    assert source.owner is not None
    assert torch.unique(source.owner * 55 + source.targets).numel() == 1623


def test_the_real_tweets_have_their_counts() -> None:
    source = real("sent140")
    if len(source.targets) > 100_000:
        pytest.skip("the whole of Sentiment140 is there, not the sample")
    assert source.targets.bincount().tolist() == [5002, 4996]
    assert len(source.owners) == 9694
