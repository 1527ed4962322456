"""Downloads, from file:// addresses of archives made here."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tailorfl.data import DOWNLOADS, SOURCES, download
from tailorfl.data.download import Download
from tailorfl.errors import UserError


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def offer(monkeypatch: pytest.MonkeyPatch, *items: Download) -> None:
    monkeypatch.setitem(DOWNLOADS, "mnist", items)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_plain_file_arrives_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(b"content"))
    offer(monkeypatch, Download(packed.as_uri(), md5(packed), "MNIST/raw", ("x.gz",)))
    seen: list[tuple[str, int, int | None]] = []
    download("mnist", tmp_path / "data", lambda *step: seen.append(step))
    assert (tmp_path / "data/MNIST/raw/x.gz").read_bytes() == packed.read_bytes()
    assert seen == [("x.gz", packed.stat().st_size, packed.stat().st_size)]
    assert files_in(tmp_path / "data") == ["MNIST", "MNIST/raw", "MNIST/raw/x.gz"]


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Download((tmp_path / "gone").as_uri(), None, "d", ("x",)))
    (tmp_path / "data/d").mkdir(parents=True)
    (tmp_path / "data/d/x").write_text("here")
    download("mnist", tmp_path / "data")


def test_a_zip_is_unpacked_without_its_leading_folder_and_other_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make_zip(tmp_path / "a.zip", {"gzip/keep-1": b"1", "gzip/keep-2": b"2", "gzip/other": b"3"})
    offer(monkeypatch, Download(packed.as_uri(), None, "E/raw", ("keep-1",), members="gzip/keep-*", strip=1))
    download("mnist", tmp_path / "data")
    assert files_in(tmp_path / "data") == ["E", "E/raw", "E/raw/keep-1", "E/raw/keep-2"]


def test_a_tar_is_unpacked_beside_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_tar(tmp_path / "a.tar.gz", {"c/train.bin": b"1", "c/test.bin": b"2"})
    offer(monkeypatch, Download(packed.as_uri(), md5(packed), ".", ("c/train.bin", "c/test.bin")))
    (tmp_path / "data/c").mkdir(parents=True)
    (tmp_path / "data/c/notes").write_text("mine")
    download("mnist", tmp_path / "data")
    assert files_in(tmp_path / "data") == ["c", "c/notes", "c/test.bin", "c/train.bin"]


def refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        download("mnist", tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path / "data") == []
    assert not (tmp_path / "evil").exists()


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_zip(tmp_path / "a.zip", {"x": b"1"})
    offer(monkeypatch, Download(packed.as_uri(), "0" * 32, ".", ("x",)))
    refused(tmp_path, f"has md5 {md5(packed)}, expected {'0' * 32}; nothing was written")


def test_an_address_that_does_not_answer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Download((tmp_path / "gone.zip").as_uri(), None, ".", ("x",)))
    refused(tmp_path, "gone.zip could not be downloaded .*nothing was written")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_a_broken_archive_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    offer(monkeypatch, Download((tmp_path / name).as_uri(), None, ".", ("x",)))
    refused(tmp_path, "could not be downloaded")


@pytest.mark.parametrize("member", ["../evil", "good/../../evil", "/evil", "..\\evil"])
def test_a_zip_cannot_write_outside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    packed = make_zip(tmp_path / "a.zip", {"fine": b"1", member: b"2"})
    offer(monkeypatch, Download(packed.as_uri(), None, ".", ("x",)))
    refused(tmp_path, "outside its folder; nothing was written")


def test_a_tar_cannot_write_outside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_tar(tmp_path / "a.tar.gz", {"fine": b"1", "../../evil": b"2"})
    offer(monkeypatch, Download(packed.as_uri(), None, ".", ("x",)))
    refused(tmp_path, "could not be downloaded")


def test_a_source_of_ones_own_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data=digits cannot be downloaded; allowed: mnist, fashion-mnist"):
        download("digits", tmp_path)


def test_everything_that_promises_a_download_has_one() -> None:
    assert {name for name, entry in SOURCES.items() if "downloads" in entry.obtain} == set(DOWNLOADS)


def test_a_download_provides_the_files_that_the_source_expects() -> None:
    for name in ("mnist", "fashion-mnist", "emnist", "emnist-balanced", "emnist-byclass", "cifar10", "cifar100"):
        provided = {
            str(Path(item.folder) / file).removesuffix(".gz") for item in DOWNLOADS[name] for file in item.provides
        }
        assert provided == set(SOURCES[name].files)
