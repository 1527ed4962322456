"""Downloads the public datasets from their official places into the data folder."""

import hashlib
import os
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from tailorfl.data.reason import reason
from tailorfl.errors import UserError

Progress = Callable[[str, int, int | None], None]  # the file's name, bytes so far, bytes in all if known
BLOCK = 1 << 18
TIMEOUT = 60  # seconds without a byte
FAILURES = (OSError, HTTPException, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Download:
    """A file or an archive: where it is, what it must hash to, and what comes of it."""

    url: str
    md5: str | None  # None: the publisher names none
    folder: str  # below the data folder
    provides: tuple[str, ...]  # in that folder; all there: nothing to do
    members: str = "*"  # of an archive, those to keep
    strip: int = 0  # leading folders to drop from members' names

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


def _idx(base: str, folder: str, md5s: tuple[str, str, str, str]) -> tuple[Download, ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Download(f"{base}/{part}-ubyte.gz", md5, f"{folder}/raw", (f"{part}-ubyte.gz",))
        for part, md5 in zip(parts, md5s, strict=True)
    )


def _emnist(split: str) -> tuple[Download, ...]:
    """One archive has all splits; only the files of one are kept."""
    parts = (f"{part}-idx{n}-ubyte.gz" for part, n in (("images", 3), ("labels", 1)))
    files = tuple(f"emnist-{split}-{half}-{part}" for part in parts for half in ("train", "test"))
    url, md5 = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"
    return (Download(url, md5, "EMNIST/raw", files, members=f"gzip/emnist-{split}-*", strip=1),)


def _omniglot(part: str, md5: str) -> Download:
    url = f"https://raw.githubusercontent.com/brendenlake/omniglot/master/python/{part}.zip"
    return Download(url, md5, "omniglot-py", (part,), members=f"{part}/*")


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "MNIST",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "FashionMNIST",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "emnist": _emnist("letters"),
    "emnist-balanced": _emnist("balanced"),
    "emnist-byclass": _emnist("byclass"),
    "cifar10": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            ".",
            tuple(
                f"cifar-10-batches-bin/{name}.bin" for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))
            ),
        ),
    ),
    "cifar100": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            ".",
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ),
    ),
    "omniglot": (
        _omniglot("images_background", "68d2efa1b9178cc56df9314c21c6e718"),
        _omniglot("images_evaluation", "6b91aef0f799c5bb55b94e3f2daec811"),
    ),
    "sent140": (
        Download(
            "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
            None,
            "sent140",
            ("training.1600000.processed.noemoticon.csv",),
            members="training.*.csv",
        ),
    ),
}


def download(name: str, data_dir: Path, progress: Progress | None = None) -> None:
    """Get what is missing of a dataset. All of an archive arrives in the data folder or nothing does."""
    if name not in DOWNLOADS:
        raise UserError(f"data={name} cannot be downloaded; allowed: {', '.join(DOWNLOADS)}")
    for item in DOWNLOADS[name]:
        folder = data_dir / item.folder
        if not all((folder / file).exists() for file in item.provides):
            _get(item, data_dir, progress)


def _get(item: Download, data_dir: Path, progress: Progress | None) -> None:
    """Fetch and unpack beside the destination, then move: a rename within one disk cannot stop half-way in a file."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as name:
            packed, unpacked = Path(name) / item.name, Path(name) / "unpacked"
            unpacked.mkdir()
            _fetch(item, packed, progress)
            _unpack(item, packed, unpacked)
            _move(unpacked, data_dir / item.folder)
    except FAILURES as error:
        raise UserError(
            f"{item.url} could not be downloaded to {data_dir}: {reason(error)}; nothing was written"
        ) from error


def _fetch(item: Download, path: Path, progress: Progress | None) -> None:
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with urllib.request.urlopen(item.url, timeout=TIMEOUT) as answer, path.open("wb") as file:
        length = answer.headers.get("Content-Length")
        total = int(length) if length else None
        while block := answer.read(BLOCK):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress:
                progress(item.name, done, total)
    if item.md5 and digest.hexdigest() != item.md5:
        raise UserError(f"{item.url} has md5 {digest.hexdigest()}, expected {item.md5}; nothing was written")
    if total is not None and done != total:
        raise UserError(f"{item.url} ended after {done} of {total} bytes; nothing was written")


def _unpack(item: Download, packed: Path, folder: Path) -> None:
    """Unpack an archive, refusing members that would lie outside the folder; a plain file is its own content."""
    if item.name.endswith(".zip"):
        with zipfile.ZipFile(packed) as archive:
            for member in archive.infolist():
                _refuse_escape(item, member.filename)
                if fnmatch(member.filename, item.members) and not member.is_dir():
                    archive.extract(member, folder)
    elif item.name.endswith((".tar", ".tar.gz", ".tgz")):
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
    else:
        os.replace(packed, folder / item.name)
    for _ in range(item.strip):
        _drop_leading_folder(folder)


def _refuse_escape(item: Download, member: str) -> None:
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{item.url} has a member {member} outside its folder; nothing was written")


def _drop_leading_folder(folder: Path) -> None:
    for outer in [path for path in folder.iterdir() if path.is_dir()]:
        for inner in list(outer.iterdir()):
            os.replace(inner, folder / inner.name)
        outer.rmdir()


def _move(unpacked: Path, folder: Path) -> None:
    for path in sorted(unpacked.rglob("*")):
        target = folder / path.relative_to(unpacked)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
