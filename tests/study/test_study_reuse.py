"""Finished runs are taken over where their settings are the same, and only there."""

import json
from pathlib import Path

import pytest
from study_runs import Tailor, execute, identical, pairs, rounds, small

from tailorfl.study.cells import Cell, Failure, Result, Way, run_cells
from tailorfl.study.reuse import take_over


def settings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Watching:
    def __init__(self) -> None:
        self.trained: list[str] = []

    def begun(self, cell: Cell) -> None:
        self.trained.append(cell.title)

    def round(self, cell: Cell, line: dict[str, object]) -> None: ...

    def ended(self, cell: Cell, result: Result) -> None: ...


def test_a_run_with_the_same_settings_is_copied_and_the_others_train(tmp_path: Path) -> None:
    execute(tmp_path / "old" / "deep" / "one", "fedper", seed=3)
    (tmp_path / "old" / "deep" / "one" / "report.html").write_text("a page of its own")
    cells = [
        Cell(f"{method} {seed}", small(method, seed=seed, workers=1), tmp_path / "new" / method / f"seed-{seed}")
        for method, seed in (("fedper", 3), ("fedper", 4), ("fedavg", 3))
    ]
    watch, found = Watching(), dict[str, Result]()
    way = Way(reuse=(tmp_path / "old",))
    assert run_cells(cells, way, watch, lambda cell, result: found.update({cell.title: result}))
    assert watch.trained == ["fedper 4", "fedavg 3"]
    assert not [result for result in found.values() if isinstance(result, Failure)]
    assert set(found) == {"fedper 3", "fedper 4", "fedavg 3"}
    assert identical(tmp_path / "old" / "deep" / "one", cells[0].folder)
    assert settings(cells[0].folder.parent) == ["seed-3", "seed-4"], "nothing is left of the copying"
    assert not (cells[0].folder / "report.html").exists()


def test_a_run_that_has_not_ended_or_is_broken_is_none(tmp_path: Path) -> None:
    for name in ("stopped", "broken"):
        execute(tmp_path / "old" / name)
    (tmp_path / "old" / "stopped" / "summary.json").unlink()
    (tmp_path / "old" / "broken" / "config.yaml").write_text("method: nobody\n")
    cell = Cell("one", small(), tmp_path / "new")
    take_over([cell], [tmp_path / "old"])
    assert not cell.folder.exists()


def test_a_run_that_is_there_is_kept(tmp_path: Path) -> None:
    execute(tmp_path / "old")
    execute(tmp_path / "new")
    before = rounds(tmp_path / "new")
    take_over([Cell("one", small(), tmp_path / "new")], [tmp_path / "old"])
    assert rounds(tmp_path / "new") == before


def test_a_study_takes_runs_from_another_one(tmp_path: Path, study: Tailor) -> None:
    assert study("compare", "fedavg", "fedper", *pairs(), "--out", str(tmp_path / "a"), "--no-page")[0] == 0
    for seed_folder in (tmp_path / "a").glob("*/seed-0"):  # so that it is seen which are copies
        line = json.loads((seed_folder / "summary.json").read_text())
        (seed_folder / "summary.json").write_text(json.dumps({**line, "seconds_training": 1234.5}))
    places = ["--reuse", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    code, _, said = study("compare", "local", "fedper", *pairs(), *places, "--no-page")
    assert code == 0
    assert "fedper" in said
    assert "taken over from" in said
    seconds = {
        path.parent.parent.name: json.loads(path.read_text())["seconds_training"]
        for path in (tmp_path / "b").glob("*/seed-0/summary.json")
    }
    assert seconds["fedper"] == 1234.5
    assert seconds["local"] < 1234.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--reuse", "nowhere"], "--reuse nowhere: no such folder; allowed: one with finished runs below it"),
        (["--reuse", ".", "--force"], "--reuse takes runs over where none are, --force replaces those"),
    ],
)
def test_what_cannot_be_reused_is_refused(
    given: list[str], said: str, study: Tailor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = study("compare", "fedavg", *pairs(), *given, "--out", "new")
    assert (code, "new" in {path.name for path in tmp_path.iterdir()}) == (2, False)
    assert said in " ".join(error.split())
