"""Real deployments on loopback, and what happens when their processes die; minutes each."""

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from tailorfl.flower.processes import marked
from tailorfl.study.folder import FEDERATION

pytestmark = pytest.mark.slow
TRIALS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "flower.py"))


def left_running(folder: Path) -> list[int]:
    return [process for place in (folder / "run" / FEDERATION, folder) for process in marked(str(place.absolute()))]


@pytest.mark.parametrize("method", ["fedper", "pmixfed"])
def test_a_deployment_with_tls_and_keys_is_the_simulation(method: str, tmp_path: Path) -> None:
    trial = TRIALS["Trial"](tmp_path, TRIALS["small"](method, rounds=2), tls=True)
    trial.execute()
    assert len(trial.rounds()) == 2
    assert trial.difference() <= 1e-6
    assert len(list((trial.run / FEDERATION / "nodes").glob("*/*/*/model/model.pt2"))) == 2
    assert not left_running(tmp_path)


def test_a_site_that_is_killed_goes_on_with_its_own_model(tmp_path: Path) -> None:
    found = TRIALS["node_killed"](tmp_path)
    assert (found["killed"], found["rounds"], found["answers missed"]) == (1, 3, 0)
    assert found["difference to the simulator"] == 0
    assert not left_running(tmp_path)


def test_a_server_that_is_killed_continues_at_the_next_round(tmp_path: Path) -> None:
    found = TRIALS["link_killed"](tmp_path)
    assert 1 <= found["rounds before"] < 3
    assert found["rounds"] == 3
    assert found["difference to the simulator"] == 0
    assert not left_running(tmp_path)


def test_a_site_that_does_not_answer_is_missed_and_its_late_answer_dropped(tmp_path: Path) -> None:
    found = TRIALS["silent"](tmp_path)
    assert found["rounds"] == 5
    assert found["answers missed"] >= 1
    assert found["answers that came late"] >= 1
    assert 5 <= found["answers that counted"] < 10
    assert not left_running(tmp_path)


def test_strangers_do_not_get_in(tmp_path: Path) -> None:
    found = TRIALS["strangers"](tmp_path)
    assert found == {"a registered key: got in": True, "an unknown key: got in": False, "no TLS: got in": False}
    assert not left_running(tmp_path)


def test_the_wire_carries_what_is_shared_and_little_else(tmp_path: Path) -> None:
    found = TRIALS["cost"](tmp_path)
    assert found["bytes up, to that"] == pytest.approx(1, abs=0.05)
    assert found["bytes down, to that"] == pytest.approx(1, abs=0.05)
    assert found["difference to the simulator"] <= 1e-6
