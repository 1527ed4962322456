"""Checkpoints are whole or not there."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import UserError
from tailorfl.exchange.messages import Server
from tailorfl.federation import checkpoint as module
from tailorfl.federation.checkpoint import Checkpoint, checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def state(round: int, clients: int = 3) -> Checkpoint:
    values = {"w": torch.full((2, 3), float(round)), "b": torch.tensor(0.1, dtype=torch.float64)}
    server = Server(values, {"momentum/w": torch.ones(2, 3) / 3}, {"temperature": 0.1 + 0.2})
    kept = {f"{client}/head": torch.full((4,), client + 0.5) for client in range(clients)}
    return Checkpoint(round, server, kept, {"bytes_up": 2**60 + 1, "seconds": 0.1, "ended": False})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items()
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = state(4)
    save_checkpoint(tmp_path, saved)
    loaded = newest_checkpoint(tmp_path, CPU)
    assert loaded is not None
    assert (loaded.round, loaded.server.numbers, loaded.totals) == (4, saved.server.numbers, saved.totals)
    assert same(loaded.server.values, saved.server.values)
    assert same(loaded.server.state, saved.server.state)
    assert same(loaded.clients, saved.clients)


def archived() -> dict[str, torch.Tensor]:
    """In the order in which an archive grows, which is not the alphabet's."""
    sizes = {"9/w": 1, "10/w": 2, "10/b": 4, "11/a": 8}
    return {name: torch.full((size,), size / 3, dtype=torch.float64) for name, size in sizes.items()}


def test_the_archive_comes_back_in_its_order_and_with_who_has_how_much_of_it(tmp_path: Path) -> None:
    saved = state(4)
    saved.server.archive, saved.server.held = archived(), {12: 1, 3: 4, 0: 2}
    save_checkpoint(tmp_path, saved)
    loaded = newest_checkpoint(tmp_path, CPU)
    assert loaded is not None
    assert list(loaded.server.archive) == list(saved.server.archive)
    assert same(loaded.server.archive, saved.server.archive)
    assert loaded.server.held == {12: 1, 3: 4, 0: 2}
    assert loaded.server.round == 4
    assert same(loaded.server.values, saved.server.values)
    # A client is sent what it lacks, as if nothing had been interrupted.
    clients = (12, 3, 0, 7)
    assert [loaded.server.hand_out(client) for client in clients] == [8 * 14, 0, 8 * 12, 8 * 15]
    assert [saved.server.hand_out(client) for client in clients] == [8 * 14, 0, 8 * 12, 8 * 15]


def test_an_archive_that_holds_what_the_values_hold_is_saved(tmp_path: Path) -> None:
    saved = state(4)
    saved.server.archive = {"1/w": saved.server.values["w"].clone(), "w": torch.ones(1)}
    save_checkpoint(tmp_path, saved)
    loaded = newest_checkpoint(tmp_path, CPU)
    assert loaded is not None
    assert same(loaded.server.archive, saved.server.archive)
    assert same(loaded.server.values, saved.server.values)


def test_a_checkpoint_that_knows_of_no_archive_still_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, saved := state(4))
    [folder] = checkpoints(tmp_path)
    older = json.loads((folder / "state.json").read_text())
    for key in ("archive", "held", "digest"):
        del older[key]
    (folder / "state.json").write_text(json.dumps(older | {"digest": module._digest_of(older)}))
    loaded = load_checkpoint(folder, CPU)
    assert (loaded.server.archive, loaded.server.held, loaded.server.round) == ({}, {}, 4)
    assert same(loaded.server.values, saved.server.values)
    assert same(loaded.clients, saved.clients)


def test_a_checkpoint_without_clients_and_without_values_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, Server({}), {}))
    loaded = newest_checkpoint(tmp_path, CPU)
    assert loaded is not None
    assert (loaded.server.values, loaded.clients) == ({}, {})


def test_there_is_no_newest_checkpoint_before_the_first(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none", CPU) is None


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for round in (2, 4, 10, 100):
        save_checkpoint(tmp_path, state(round))
    assert [load_checkpoint(path, CPU).round for path in checkpoints(tmp_path)] == [10, 100]


def test_clients_are_spread_over_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 32)  # a client has 16 bytes
    save_checkpoint(tmp_path, saved := state(1, clients=7))
    [folder] = checkpoints(tmp_path)
    assert len(list(folder.glob("clients-*.safetensors"))) == 4
    assert same(load_checkpoint(folder, CPU).clients, saved.clients)


@pytest.mark.parametrize("name", ["server.safetensors", "clients-0000.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["truncated", "empty", "missing"])
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path, name: str, harm: str) -> None:
    save_checkpoint(tmp_path, state(3))
    [folder] = checkpoints(tmp_path)
    file = folder / name
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -5 if harm == "truncated" else 0])
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="round-000003 is damaged") as caught:
        newest_checkpoint(tmp_path, CPU)
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_checkpoint(folder, state(3))
    return checkpoints(folder)[0]


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(whole: Path, place: float, bit: int) -> None:
    copy = whole.parent.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    contents = snapshot(copy)
    position = int(place * sum(map(len, contents.values())))
    for name, content in contents.items():
        if position < len(content):
            harmed = bytearray(content)
            harmed[position] ^= 1 << bit
            (copy / name).write_bytes(harmed)
            break
        position -= len(content)
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(copy, CPU)


@pytest.mark.parametrize("content", ['{"format": "another"}', "[]", '"tailorfl checkpoint 1"', "{}", "no json", "\xff"])
def test_a_foreign_state_file_is_refused(tmp_path: Path, content: str) -> None:
    save_checkpoint(tmp_path, state(3))
    [folder] = checkpoints(tmp_path)
    (folder / "state.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="round-000003 is damaged"):
        load_checkpoint(folder, CPU)


def test_a_state_file_whose_numbers_were_changed_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(3))
    [folder] = checkpoints(tmp_path)
    held = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(held | {"round": 2}))
    with pytest.raises(UserError, match=r"state\.json has changed"):
        load_checkpoint(folder, CPU)


def test_a_crash_while_saving_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(2))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, state(4))
    loaded = newest_checkpoint(tmp_path, CPU)
    assert loaded is not None
    assert loaded.round == 2


def test_what_a_killed_process_left_is_cleared_away_with_the_next_checkpoint(tmp_path: Path) -> None:
    abandoned = tmp_path / ".round-000002.99999"
    abandoned.mkdir()
    (abandoned / "server.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, state(4))
    assert [path.name for path in tmp_path.iterdir()] == ["round-000004"]


def test_a_full_disk_is_said_and_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(2))

    def full(tensors: object, path: Path) -> None:
        raise module.SafetensorError("Error while serializing: I/O error: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "save_file", full)
        with pytest.raises(UserError, match=r"cannot be written.*No space left"):
            save_checkpoint(tmp_path, state(4))
    assert [load_checkpoint(path, CPU).round for path in checkpoints(tmp_path)] == [2]
