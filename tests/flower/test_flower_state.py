"""A site's state on disk: what survives, and who may write."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import UserError
from tailorfl.flower.state import SiteState, StaleError, digest


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {"head.weight": torch.full((3, 2), float(number)), "memory/count": torch.tensor(number)}


def test_a_client_goes_on_from_the_round_before(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    assert state.load(before=1) == {}
    for number in (2, 5):
        state.commit(state.begin(1, number), tensors(number))
    assert torch.equal(state.load(before=5)["head.weight"], tensors(2)["head.weight"])
    assert torch.equal(state.load(before=6)["memory/count"], torch.tensor(5))
    assert state.load(before=2) == {}


def test_experiments_and_clients_do_not_see_each_other(tmp_path: Path) -> None:
    one = SiteState.of(tmp_path, "first", "clinic")
    one.commit(one.begin(1, 1), tensors(1))
    assert SiteState.of(tmp_path, "second", "clinic").load(before=9) == {}
    assert SiteState.of(tmp_path, "first", "factory").load(before=9) == {}


def test_an_orphan_cannot_overwrite_what_came_after_it(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    orphan = state.begin(1, 3)
    state.commit(state.begin(1, 3), tensors(30))  # the node started again and was asked again
    with pytest.raises(StaleError, match="begun again"):
        state.commit(orphan, tensors(31))
    assert torch.equal(state.load(before=4)["memory/count"], torch.tensor(30))


def test_an_old_message_is_refused(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    state.begin(2, 4)
    with pytest.raises(StaleError, match="round 3"):
        state.begin(2, 3)  # of an earlier round
    with pytest.raises(StaleError, match="round 9"):
        state.begin(1, 9)  # of a server that was started again since
    state.begin(3, 3)  # a server that was started again may go back


def test_a_server_that_went_back_finds_the_state_of_that_time(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    for number in (1, 2, 3, 4):
        state.commit(state.begin(1, number), tensors(number))
    again = state.begin(2, 3)
    assert torch.equal(state.load(before=3)["memory/count"], torch.tensor(2))
    state.commit(again, tensors(300))
    assert torch.equal(state.load(before=9)["memory/count"], torch.tensor(300))  # 4 was of a time that never was


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 40), min_size=1))
def test_old_states_go_and_the_last_two_rounds_can_be_repeated(rounds: set[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        state = SiteState.of(Path(folder), "fedper-1", "clinic")
        for number in sorted(rounds):
            state.commit(state.begin(1, number), tensors(number))
        last = max(rounds)
        assert len(state.rounds()) <= 3
        for asked in (last, last - 1):
            expected = max((number for number in rounds if number < asked), default=None)
            found = state.load(before=asked)
            assert (int(found["memory/count"]) if found else None) == expected


def _write_for_ever(folder: str) -> None:
    state = SiteState.of(Path(folder), "fedper-1", "clinic")
    number = 1
    while True:
        state.commit(state.begin(1, number), {"weight": torch.full((200_000,), float(number))})
        number += 1


def test_a_killed_process_leaves_a_whole_state(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_write_for_ever, args=(str(tmp_path),))
    process.start()
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    while not state.rounds() or state.rounds()[-1] < 5:
        pass
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    found = state.load(before=10**6)["weight"]
    assert bool((found == found[0]).all())
    assert int(found[0]) == state.rounds()[-1]
    state.commit(state.begin(1, 10**5), tensors(1))  # and nothing is locked


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    state.commit(state.begin(1, 1), tensors(1))
    path = state.folder / "round-000001.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match="round-000001"):
        state.load(before=2)


@pytest.mark.parametrize("name", ["", "..", "../other", "a/b", ".hidden", "x" * 101])
def test_names_are_names_of_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allowed are letters"):
        SiteState.of(tmp_path, "fedper-1", name)


def test_a_digest_tells_tensors_apart() -> None:
    one = torch.arange(6.0)
    assert digest(one) == digest(one.clone())
    assert len({digest(one), digest(one.view(2, 3)), digest(one.double()), digest(one + 1)}) == 4
