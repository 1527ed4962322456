"""A folder in which one command works at a time, and new ones that nobody else takes."""

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tailorfl.console import fresh, leave_no_empty_folders
from tailorfl.data.occupied import is_occupied, locked, occupied
from tailorfl.errors import UserError


def test_a_folder_in_use_is_refused_and_free_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not is_occupied(folder)
    with occupied(folder):
        assert is_occupied(folder)
        (folder / "result").write_text("")
        with pytest.raises(UserError, match=r"run is in use by another command"), occupied(folder):
            pass
        with occupied(tmp_path / "other"):
            pass
    assert not is_occupied(folder)
    with occupied(folder):
        assert (folder / "result").is_file()


def test_any_number_may_look_at_the_same_time(tmp_path: Path) -> None:
    looking = os.open(tmp_path, os.O_RDONLY)
    try:
        assert locked(looking, 0, 0, shared=True)
        assert not is_occupied(tmp_path)
    finally:
        os.close(looking)


def test_a_folder_above_may_be_taken_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = Path.mkdir, list[Path]()

    def mkdir(path: Path, *rest: object, **more: object) -> None:
        calls.append(path)
        if len(calls) == 1:  # as where another command has just removed it
            raise FileNotFoundError(path)
        make(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with occupied(tmp_path / "runs" / "new"):
        assert (tmp_path / "runs" / "new").is_dir()


def test_folders_into_which_nothing_came_are_taken_away(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bad"), occupied(tmp_path / "runs" / "new"):
        raise UserError("bad input")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with occupied(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir(), "it was there before"


def _hold(folder: Path, ready: Event) -> None:
    with occupied(folder):
        ready.set()
        signal.pause()


def test_a_process_that_is_killed_occupies_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    with pytest.raises(UserError, match="in use"), occupied(tmp_path):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with occupied(tmp_path):
        pass


def test_a_fresh_folder_is_claimed_at_once_and_left_if_nothing_comes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(fresh("a b")) for _ in range(3)] == ["runs/a-b", "runs/a-b-2", "runs/a-b-3"]
    (tmp_path / "runs/a-b-2/summary.json").write_text("{}")
    leave_no_empty_folders()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "runs",
        "runs/a-b-2",
        "runs/a-b-2/summary.json",
    ]
    assert fresh("a b") == Path("runs/a-b")
    (tmp_path / "runs/a-b-2/summary.json").unlink()
    (tmp_path / "runs/a-b-2").rmdir()
    leave_no_empty_folders()
    assert (tmp_path / "runs").is_dir(), "this time it was there before"
