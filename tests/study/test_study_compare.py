"""Comparisons: the same federation for all methods."""

import csv
import json
import shlex
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from rich.console import Console
from scipy.stats import t
from study_runs import SMALL, Tailor, clients, identical, pairs, rounds, small, start

from tailorfl.data import load_partition
from tailorfl.data.occupied import occupied
from tailorfl.errors import UserError
from tailorfl.federation.rounds import RoundLoop
from tailorfl.methods import find_method
from tailorfl.report import figures
from tailorfl.report.page import page_data
from tailorfl.report.results import read_results
from tailorfl.study import palette
from tailorfl.study.build import build
from tailorfl.study.cells import Way
from tailorfl.study.compare import (
    configure_all,
    draw_curves,
    evaluated_rounds,
    over_runs,
    plan_comparison,
    statistics,
    write_table,
)
from tailorfl.study.grid import Grid
from tailorfl.study.palette import look
from tailorfl.study.progress import StopOnInterrupt
from tailorfl.study.run import Run
from tailorfl.study.statistics import signed_rank

METHODS = ("fedavg", "fedper", "local")


def compare(
    folder: Path,
    methods: tuple[str, ...] = METHODS,
    resume: bool = False,
    stop: Any = bool,
    force: bool = False,
    jobs: int = 1,
    together: int = 1,
    **more: Any,
) -> Grid:
    """The grid as far as it came."""
    way = Way(resume=resume, force=force, jobs=jobs, together=together)
    grid = Grid(folder, *plan_comparison(methods, {**SMALL, "evaluate_every": 1, **more}))
    grid.check(way)
    grid.run(way, Console(quiet=True), stop)
    return grid


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    grid = compare(folder)
    write_table([over_runs(list(runs.values())) for runs in grid.measured().values()], folder)
    return folder


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Two methods, three seeds."""
    return compare(tmp_path_factory.mktemp("seeded"), ("fedavg", "fedper"), seeds=3)


def test_all_methods_have_the_same_partition(compared: Path) -> None:
    first, *others = (load_partition(compared / method / "seed-0/partition.safetensors") for method in METHODS)
    for other in others:
        assert (other.names, other.new_clients) == (first.names, first.new_clients)
        for split in ("train", "validation", "test"):
            assert torch.equal(getattr(other, split).index, getattr(first, split).index)
            assert torch.equal(getattr(other, split).offsets, getattr(first, split).offsets)


def test_all_methods_select_the_same_clients_and_start_from_the_same_weights() -> None:
    built = [build(config) for config in configure_all(METHODS, SMALL)]
    for number in range(1, 4):
        assert len({tuple(one.loop.select(number)) for one in built}) == 1
    initial = [one.network.initial() for one in built]
    for name, tensor in initial[0].items():
        assert all(torch.equal(tensor, other[name]) for other in initial)


def test_a_method_does_in_a_comparison_what_it_does_alone(compared: Path, tmp_path: Path) -> None:
    assert Run(small("fedper", evaluate_every=1), tmp_path / "alone").execute() is not None
    assert identical(compared / "fedper/seed-0", tmp_path / "alone")


def test_the_table_has_a_row_a_method(compared: Path) -> None:
    with (compared / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        summary = json.loads((compared / row["method"] / "seed-0/summary.json").read_text())
        assert float(row["personalized_accuracy"]) == summary["personalized_accuracy"]
        assert row["global_accuracy"] == ("" if summary["global_accuracy"] is None else str(summary["global_accuracy"]))


def test_the_curves_are_drawn_as_a_picture(compared: Path, tmp_path: Path) -> None:
    draw_curves({method: [compared / method / "seed-0"] for method in METHODS}, tmp_path / "curves.png")
    content = (tmp_path / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_lines_of_a_picture_differ_in_more_than_colour_and_have_the_colours_of_the_page() -> None:
    looks = [look(place, 10) for place in range(len(palette.COLOURS) * len(palette.STROKES))]
    assert len({(one["color"], one["linestyle"]) for one in looks}) == len(looks)
    assert len({one["marker"] for one in looks[:7]}) == 7
    page = (Path(figures.__file__).parent / "assets/page.js").read_text()
    assert f"const COLOURS = [{', '.join(map(json.dumps, palette.COLOURS))}];" in page


REGRESSION = {"data": "synthetic-regression", "partition": "natural", "samples": 12, "samples_per_client": None}


def test_the_curves_and_comparisons_of_a_regression_are_its_losses(tmp_path: Path) -> None:
    grid = compare(tmp_path, ("fedavg", "local"), **REGRESSION)
    draw_curves({method: [tmp_path / method / "seed-0"] for method in ("fedavg", "local")}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    _, local = statistics(grid)
    folders = [tmp_path / name / "seed-0" for name in ("local", "fedavg")]
    losses = [{row["client"]: float(row["loss"]) for row in clients(folder)} for folder in folders]
    assert local["difference"] == pytest.approx(mean(losses[0][name] - losses[1][name] for name in losses[0]))
    assert local["personalized_loss"] == grid.of(grid.lines[1])[0]["personalized_loss"]


def test_only_evaluated_rounds_are_on_the_curve(tmp_path: Path) -> None:
    assert Run(small(evaluate_every=2), tmp_path / "run").execute() is not None
    assert len(rounds(tmp_path / "run")) == 3
    assert [line["round"] for line in evaluated_rounds(tmp_path / "run")] == [2, 3]


def test_a_method_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match="method fedavg is named twice"):
        configure_all(["fedavg", "fedper", "fedavg"], {})


def test_an_option_reaches_only_the_methods_that_have_it() -> None:
    fedavg, fedper = configure_all(["fedavg", "fedper"], {"personal_layers": 2, "lr": 0.5})
    assert fedper.method.personal_layers == 2
    assert (fedavg.method.lr, fedper.method.lr) == (0.5, 0.5)
    assert "personal_layers" not in fedavg.flat()


def test_an_option_that_no_method_has_is_refused() -> None:
    with pytest.raises(UserError, match="unknown key 'personal_layers'"):
        configure_all(["fedavg", "local"], {"personal_layers": 2})


def test_a_method_that_cannot_serve_groups_is_refused_before_any_other_runs(study: Tailor, tmp_path: Path) -> None:
    groups = "groups=[{clients: 2, classes: 3}, {clients: 2}]"
    status, _, err = study("compare", "local", "fedper", groups, "data=digits", "rounds=1", "-q", "--out", "out")
    assert (status, err.startswith("tailor: fedper cannot serve groups of clients with other networks")) == (2, True)
    assert not (tmp_path / "out").exists()
    for method in ("heterofl", "pmixfed"):
        status, _, err = study("compare", "local", method, groups, "data=digits", "rounds=1", "-q", "--out", "out")
        wanted = f"tailor: {method}: groups cannot share a head; allowed: personal_layers=1 or more\n"
        assert (status, err) == (2, wanted)
        assert not (tmp_path / "out").exists()


def test_a_comparison_that_was_stopped_goes_on_where_it_was(tmp_path: Path, compared: Path) -> None:
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1  # before fedavg, after two of its rounds (the last one ends it), before fedper, after a round of it
        return calls == 5

    compare(tmp_path, stop=stop)
    assert (tmp_path / "fedper/seed-0/checkpoints").is_dir()
    assert not (tmp_path / "local").exists()
    assert len(tidy(tmp_path)) == 1, "what is done is in the table"
    finished = (tmp_path / "fedavg/seed-0/summary.json").stat().st_mtime_ns
    assert len(compare(tmp_path, resume=True).summaries) == 3
    assert (tmp_path / "fedavg/seed-0/summary.json").stat().st_mtime_ns == finished
    assert all(identical(compared / method / "seed-0", tmp_path / method / "seed-0") for method in METHODS)


def test_a_wish_to_stop_in_the_last_round_of_a_method_ends_the_comparison(tmp_path: Path) -> None:
    grid = compare(tmp_path, ("fedavg", "local"), stop=lambda: (tmp_path / "fedavg/seed-0/summary.json").is_file())
    assert [line.title for line, _ in grid.summaries] == ["fedavg"]
    assert not (tmp_path / "local").exists()


def test_force_takes_away_the_runs_of_the_results_that_it_replaces_and_no_others(study: Tailor, tmp_path: Path) -> None:
    quick = [*pairs(rounds=1), "-q", "--no-page", "--out", "out"]
    assert study("compare", "fedavg", "fedper", "seeds=2", *quick)[0] == 0
    assert study("run", "local", *pairs(rounds=1), "-q", "--no-page", "--out", "out/mine")[0] == 0
    assert [row["folder"] for row in tidy(tmp_path / "out")][:2] == ["fedavg/seed-0", "fedavg/seed-1"]
    status, _, err = study("compare", "fedavg", "data=csv:nowhere.csv", "--force", "-q", "--out", "out")
    assert (status, (tmp_path / "out/fedper/seed-1/summary.json").is_file()) == (2, True), err
    assert study("compare", "fedavg", "local", "seeds=2", *quick, "--force")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["fedavg", "local", "mine"]
    assert (tmp_path / "out/mine/summary.json").is_file()


@pytest.mark.parametrize("more", [{}, {"lr": 0.02}], ids=["same settings", "other settings"])
def test_what_force_replaces_is_never_taken_for_new_where_it_is_stopped(tmp_path: Path, more: dict[str, Any]) -> None:
    compare(tmp_path)
    marked(tmp_path / "local/seed-0")
    asked = iter([False, True])  # before the first method, after a round of it
    compare(tmp_path, force=True, stop=lambda: next(asked, True), **more)
    assert (tmp_path / "fedavg/seed-0/checkpoints").is_dir()
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()} == {"fedavg"}
    made = compare(tmp_path, resume=True, **more)
    assert len(made.summaries) == 3
    assert 0.123 not in [one["personalized_accuracy"] for one in made.summaries.values()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_force_replaces_one_seed_by_several_and_several_by_one(tmp_path: Path, before: int, after: int) -> None:
    compare(tmp_path, ("fedavg", "local"), rounds=1, seeds=before)
    made = compare(tmp_path, ("fedavg", "local"), rounds=1, seeds=after, force=True)
    assert len(made.summaries) == 2 * after
    assert {path.parent for path in tmp_path.rglob("summary.json")} == {cell.folder for cell in made.cells}


def test_a_comparison_is_not_laid_into_a_run(study: Tailor, tmp_path: Path) -> None:
    assert study("run", "local", *pairs(rounds=1), "-q", "--no-page", "--out", "mine")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    status, _, err = study("compare", "local", "fedavg", *pairs(rounds=1), "-q", "--out", "mine")
    assert (status, err) == (2, "tailor: mine is the folder of a run; allowed: another --out\n")
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before


def test_tables_that_were_damaged_are_named(study: Tailor, tmp_path: Path) -> None:
    quick = ("local", *pairs(rounds=1), "-q", "--no-page", "--out", "out")
    assert study("compare", *quick)[0] == 0
    for text in (b"\xff\xfe", b"method,seed\nlocal\n"):
        (tmp_path / "out/results.csv").write_bytes(text)
        status, _, err = study("compare", *quick, "--resume")
        assert (status, err.count("\n")) == (2, 1)
        assert "out/results.csv" in err


def test_a_run_in_which_nothing_was_learned_has_no_result(study: Tailor, tmp_path: Path) -> None:
    hot = pairs(rounds=2, lr=1e30)
    status, out, err = study("compare", "fedavg", "local", *hot, "-q", "--no-page", "--out", "out")
    assert (status, "fedavg" in out) == (1, False)
    assert "no update of a client was finite, so nothing was learned" in err
    status, _, err = study("run", "fedavg", *hot, "-q", "--no-page", "--out", "alone")
    assert status == 1
    assert err.endswith("tailor: fedavg: diverged: no update of a client was finite, so nothing was learned\n")


def marked(run: Path) -> None:
    """Make a result known again."""
    path = run / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "personalized_accuracy": 0.123}))


@pytest.mark.parametrize("side_by_side", [{}, {"jobs": 2}, {"together": 2}], ids=str)
def test_what_cannot_begin_is_not_shown_with_what_it_was_before(tmp_path: Path, side_by_side: dict[str, int]) -> None:
    compare(tmp_path, ("ppfe", "fedavg"), rounds=2)
    marked(tmp_path / "ppfe/seed-0")
    deep = {"personal_depths": [0, 9], "rounds": 2}
    made = compare(tmp_path, ("ppfe", "fedavg"), force=True, **deep, **side_by_side)
    assert [line.title for line, _ in made.summaries] == ["fedavg"]
    assert [line.title for line, _ in made.failures] == ["ppfe"]
    assert not (tmp_path / "ppfe/seed-0/summary.json").exists()
    assert not (tmp_path / "fedavg/seed-0/error.txt").exists()
    assert len(read_results([tmp_path]).runs) == 1
    again = compare(tmp_path, ("ppfe", "fedavg"), resume=True, rounds=2)
    assert len(again.summaries) == 2
    assert 0.123 not in [one["personalized_accuracy"] for one in again.summaries.values()]


class _Killed(BaseException):
    """Ends all, as a kill does."""


def test_force_that_is_killed_in_its_first_round_leaves_nothing_to_be_taken_for_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: RoundLoop, done: int = 0) -> Any:
        raise _Killed

    compare(tmp_path, ("fedavg", "local"), rounds=1)
    marked(tmp_path / "local/seed-0")
    with monkeypatch.context() as patch:
        patch.setattr(RoundLoop, "run", killed)
        with pytest.raises(_Killed):
            compare(tmp_path, ("fedavg", "local"), rounds=1, force=True)
    made = compare(tmp_path, ("fedavg", "local"), rounds=1, resume=True)
    assert len(made.summaries) == 2
    assert 0.123 not in [one["personalized_accuracy"] for one in made.summaries.values()]


def test_what_failed_before_the_old_runs_went_still_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(tmp_path, ("fedper", "fedavg"), rounds=1)
    (tmp_path / "results.csv").write_bytes(b"method,seed\nfedper\n")  # and a damaged table is no obstacle

    def broken(self: Any, network: Any) -> Any:
        raise RuntimeError("a slip of the pen")

    monkeypatch.setattr(find_method("fedper"), "start", broken)
    made = compare(tmp_path, ("fedper", "fedavg"), rounds=1, force=True)
    assert [line.title for line, _ in made.summaries] == ["fedavg"]
    assert "a slip of the pen" in (tmp_path / "fedper/seed-0/error.txt").read_text()
    assert not (tmp_path / "fedper/seed-0/summary.json").exists()


def test_force_deletes_no_file_where_there_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "sweep.png").write_text("precious")
    (tmp_path / "report.html").write_text("precious")
    compare(tmp_path, ("local",), rounds=1, force=True)
    assert (tmp_path / "sweep.png").read_text() == (tmp_path / "report.html").read_text() == "precious"


def test_a_file_of_ones_own_stays_in_the_folder_of_a_run_that_is_replaced(tmp_path: Path) -> None:
    compare(tmp_path, ("fedavg", "local"), rounds=1)
    (tmp_path / "local/seed-0/notes.txt").write_text("precious")
    assert len(compare(tmp_path, ("fedavg", "local"), rounds=1, force=True).summaries) == 2
    assert (tmp_path / "local/seed-0/notes.txt").read_text() == "precious"


def test_force_loses_nothing_where_a_run_that_it_replaces_is_in_use(study: Tailor, tmp_path: Path) -> None:
    quick = [*pairs(rounds=1), "-q", "--no-page", "--out", "out"]
    assert study("compare", "fedavg", "local", *quick)[0] == 0
    with occupied(tmp_path / "out/local/seed-0"):
        status, _, err = study("compare", "fedavg", "fedper", *quick, "--force")
    assert (status, err) == (
        2, "tailor: out/local/seed-0 is in use by another command; allowed: another --out, or to wait until it ends\n"
    )  # fmt: skip
    assert all((tmp_path / f"out/{method}/seed-0/summary.json").is_file() for method in ("fedavg", "local"))


@pytest.mark.parametrize(
    "words", [("run", "fedavg"), ("compare", "fedavg"), ("sweep", "fedavg", "lr=0.1,0.2"), ("reproduce", "ppfe/table1")]
)
def test_to_go_on_and_to_replace_at_once_is_refused(words: tuple[str, ...], study: Tailor, tmp_path: Path) -> None:
    said = "tailor: --resume goes on with what is there, --force replaces it; allowed: one of the two\n"
    assert study(*words, "--resume", "--force", "--out", "out") == (2, "", said)
    assert not (tmp_path / "out").exists()


def test_a_folder_in_which_another_command_works_is_refused(study: Tailor, tmp_path: Path) -> None:
    quick = [*pairs(rounds=1), "-q", "--out"]
    with occupied(tmp_path / "out"):
        for command in (["compare", "fedavg", "local"], ["sweep", "fedavg", "lr=0.1,0.2"], ["run", "fedavg"]):
            status, _, err = study(*command, *quick, "out")
            assert (status, err) == (
                2, "tailor: out is in use by another command; allowed: another --out, or to wait until it ends\n"
            )  # fmt: skip
    with occupied(tmp_path / "out/local/seed-0"):
        status, _, err = study("compare", "fedavg", "local", *quick, "out")
        assert status == 1
        assert "not measured: local (seed 0): out/local/seed-0 is in use by another command" in err


def test_commands_that_begin_at_the_same_time_have_folders_of_their_own(tmp_path: Path) -> None:
    arguments = ["run", "fedavg", *pairs(rounds=1), "-q", "--no-page"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        both = [start(arguments) for _ in range(2)]
    for process in both:
        process.join()
        assert process.exitcode == 0
    runs = sorted((tmp_path / "runs").iterdir())
    assert [path.name for path in runs] == ["fedavg-digits-seed0", "fedavg-digits-seed0-2"]
    assert all(len(rounds(path)) == 1 for path in runs)


# Several seeds.


def tidy(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_seed_is_a_run_and_a_row_and_has_its_own_federation(seeded: Grid) -> None:
    rows = tidy(seeded.folder)
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for m in ("fedavg", "fedper") for s in "012"]
    for row in rows:
        run = seeded.folder / row["method"] / f"seed-{row['seed']}"
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["seed"], summary["personalized_accuracy"]) == (
            int(row["seed"]),
            float(row["personalized_accuracy"]),
        )
    partitions = [load_partition(path) for path in sorted(seeded.folder.rglob("partition.safetensors"))]
    assert torch.equal(partitions[0].train.index, partitions[3].train.index), "of the same seed"
    assert not torch.equal(partitions[0].train.index, partitions[1].train.index)


def test_intervals_and_tests_over_clients_are_as_by_hand(seeded: Grid) -> None:
    first, second = statistics(seeded)
    assert (first["method"], first["reference"], first["p"]) == ("fedavg", None, None)
    found = [seeded.of(seeded.lines[1])[seed]["personalized_accuracy"] for seed in (0, 1, 2)]
    low, high = t.interval(0.95, 2, mean(found), torch.tensor(found).std().item() / 3**0.5)
    assert second["personalized_accuracy"] == mean(found)
    assert low < 0, "of an accuracy there is nothing below 0"
    assert second["personalized_accuracy.low"] == 0.0
    assert second["personalized_accuracy.high"] == pytest.approx(min(high, 1.0), abs=1e-6)
    assert second["seeds"] == 3

    def served(method: str) -> dict[str, float]:
        runs = [clients(seeded.folder / method / f"seed-{seed}") for seed in (0, 1, 2)]
        return {row["client"]: mean(float(run[k]["accuracy"]) for run in runs) for k, row in enumerate(runs[0])}

    mine, theirs = served("fedper"), served("fedavg")
    differences = [mine[client] - theirs[client] for client in mine]
    assert second["difference"] == pytest.approx(mean(differences))
    assert (second["higher"], second["lower"]) == (sum(d > 0 for d in differences), sum(d < 0 for d in differences))
    assert second["p"] == second["p_holm"] == signed_rank(differences)


def test_the_table_over_seeds_has_means_and_says_over_which(seeded: Grid) -> None:
    found = over_runs(list(seeded.of(seeded.lines[0]).values()))
    assert (found["method"], found["seeds"], found["rounds"]) == ("fedavg", "0 1 2", 3)
    assert found["global_loss"] == mean(one["global_loss"] for one in seeded.of(seeded.lines[0]).values())
    assert found["new_client_accuracy"] is None
    assert "seed" not in found


# The command.

QUICK = (*pairs(evaluate_every=1), "-q")


def test_a_comparison_over_seeds_goes_on_with_more_of_them(study: Tailor, tmp_path: Path) -> None:
    status, out, _ = study("compare", "fedavg", "local", *QUICK, "seeds=[4,2]", "--out", "out")
    assert status == 0
    assert "95 % interval over seeds 4, 2" in " ".join(out.split())
    assert "against fedavg, client by client" in out
    assert "results: out/comparison.csv" in out
    before = (tmp_path / "out/local/seed-2/summary.json").stat().st_mtime_ns
    assert study("compare", "fedavg", "local", *QUICK, "seeds=[4,2,0]", "--out", "out", "--resume")[0] == 0
    assert (tmp_path / "out/local/seed-2/summary.json").stat().st_mtime_ns == before
    assert [row["seed"] for row in tidy(tmp_path / "out")] == ["4", "2", "0"] * 2
    with (tmp_path / "out/comparison.csv").open() as file:
        assert [row["seeds"] for row in csv.DictReader(file)] == ["4 2 0"] * 2
    status, _, err = study("compare", "fedavg", *QUICK, "--out", "out", "--resume")
    said = "out has method=fedavg seed=4 too; allowed: to name all that it has, another --out"
    assert (status, err) == (2, f"tailor: {said}\n")
    status, _, err = study("compare", "fedavg", *QUICK, "seeds=[4,2,0]", "lr=0.5", "--out", "out", "--resume")
    assert (status, err.count("\n")) == (2, 1)
    assert "out has method=local seed=4 too;" in err
    assert "its configuration changed: lr: " in err, "all that is wrong is said at once"


@pytest.mark.parametrize("name", ["compare fedavg local", "sweep fedavg lr=0.1,0.2"])
def test_an_interrupt_prints_the_whole_command_that_goes_on(
    name: str, study: Tailor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopOnInterrupt, "__enter__", lambda self: setattr(self, "wanted", True) or self)
    monkeypatch.setattr(StopOnInterrupt, "__exit__", lambda self, *_: None)
    (tmp_path / "more.yaml").write_text("momentum: 0.1\n")
    command = shlex.split(name)
    typed = ["network_options={hidden: [8]}", "data=digits", "clients=4", "rounds=1", "--config", "more.yaml"]
    status, _, err = study(*command, *typed, "--jobs", "2", "--force", "-q", "--out", "my runs")
    [line] = [line for line in err.splitlines() if "go on with" in line]
    assert status == 130
    again = [*command, *typed, "--resume", "--out", "my runs", "--jobs", "2"]
    assert line == f"stopped; go on with: tailor {shlex.join(again)}"


def test_a_comparison_of_one_seed_goes_on_with_several(study: Tailor, tmp_path: Path) -> None:
    assert study("compare", "fedavg", "local", *QUICK, "--out", "out")[0] == 0
    before = (tmp_path / "out/local/seed-0/summary.json").stat().st_mtime_ns
    assert study("compare", "fedavg", "local", *QUICK, "seeds=2", "--out", "out", "--resume")[0] == 0
    assert (tmp_path / "out/local/seed-0/summary.json").stat().st_mtime_ns == before
    assert [row["seed"] for row in tidy(tmp_path / "out")] == ["0", "1"] * 2


def test_a_run_in_the_place_of_a_method_is_not_mixed_with_its_seeds(study: Tailor, tmp_path: Path) -> None:
    assert study("run", "local", *QUICK, "--no-page", "--out", "out/local")[0] == 0
    status, _, err = study("compare", "fedavg", "local", *QUICK, "--out", "out")
    said = "out/local is the folder of a run; allowed: another --out, --force to replace"
    assert (status, err) == (2, f"tailor: {said}\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["local"]
    assert study("compare", "fedavg", "local", *QUICK, "--no-page", "--out", "out", "--force")[0] == 0
    assert [path.name for path in (tmp_path / "out/local").iterdir()] == ["seed-0"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("fedavg seeds=0", "seeds=0: allowed: how many"),
        ("fedavg seeds=2 seed=1", "seed=1: seeds are named too"),
        ("fedavg --jobs 0", "--jobs"),
        ("fedavg --jobs -2", "--jobs"),
        ("fedavg --jobs many", "--jobs"),
        ("fedavg --resume", "--resume needs --out, the folder of the comparison"),
        ("fedavg local clients=5000 seeds=2 --out out", "clients=5000"),
        ("fedavg local data=mnist seeds=2 --jobs 2 --out out", "data=mnist needs MNIST/raw/train-images"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: str, named: str, study: Tailor, tmp_path: Path, quick_workers: None
) -> None:
    status, _, err = study("compare", *arguments.split())
    assert (status, err.count("\n")) == (2, 1), err
    assert named in err
    assert list(tmp_path.iterdir()) == []


BROKEN = """
from tailorfl.methods.fedavg import FedAvg

class Broken(FedAvg):
    def train(self, clients, received):
        raise RuntimeError("a bug\\nin two lines")
"""


def test_a_method_that_fails_is_named_at_the_end_and_the_others_are_compared(
    study: Tailor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_method.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    methods = ("fedavg", "broken_method:Broken", "local")
    status, out, err = study("compare", *methods, *QUICK, "--out", "out")
    assert status == 1
    said = "RuntimeError: a bug in two lines (see out/broken_method.Broken/seed-0/error.txt)"
    assert err.splitlines()[-1] == f"not measured: broken_method:Broken (seed 0): {said}"
    assert "raise RuntimeError" in (tmp_path / "out/broken_method.Broken/seed-0/error.txt").read_text()
    assert [row["method"] for row in tidy(tmp_path / "out")] == ["fedavg", "local"]
    assert "results: out/comparison.csv" in out
    mended = BROKEN.partition("    def")[0] + "    pass\n"
    (tmp_path / "broken_method.py").write_text(mended)
    del sys.modules["broken_method"]
    assert study("compare", *methods, *QUICK, "--out", "out", "--resume")[0] == 0
    assert not (tmp_path / "out/broken_method.Broken/seed-0/error.txt").exists()
    assert clients(tmp_path / "out/fedavg/seed-0") == clients(tmp_path / "out/broken_method.Broken/seed-0")


def test_a_method_that_is_refused_is_on_the_page_with_the_reason_and_in_the_command_that_repeats_it(
    study: Tailor, tmp_path: Path
) -> None:
    deep = (*pairs(rounds=2), "personal_depths=[0,9]", "-q", "--no-page", "--out", "out")
    status, _, err = study("compare", "ppfe", "fedavg", *deep)
    assert status == 1
    page = page_data(read_results([tmp_path / "out"]))
    assert page["missing"] == [err.splitlines()[-1].removeprefix("not measured: ")]
    assert page["missing"][0].startswith("ppfe (seed 0): ")
    assert {one["command"].partition(" clients=")[0] for one in page["repeats"]} == {"tailor compare ppfe fedavg"}
    assert study("compare", "ppfe", "fedavg", *deep, "--resume")[0] == 1
    assert page_data(read_results([tmp_path / "out"]))["missing"] == page["missing"]
    quick = (*pairs(rounds=1), "-q", "--no-page", "--out", "out")
    assert study("compare", "local", "fedavg", *quick, "--force")[0] == 0
    assert page_data(read_results([tmp_path / "out"]))["missing"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["fedavg", "local"]


def test_what_a_comparison_has_not_begun_is_on_the_page_till_it_has(tmp_path: Path) -> None:
    asked = {"methods": ["fedavg", "local"], "settings": {**SMALL, "rounds": 1, "seeds": 2}}

    def grid() -> Grid:
        return Grid(tmp_path, *plan_comparison(asked["methods"], asked["settings"]), asked=asked)

    calls = iter([False, False, True])
    grid().run(Way(), Console(quiet=True), lambda: next(calls, True))
    page = page_data(read_results([tmp_path]))
    assert page["missing"] == ["fedavg, local (seed 1): not begun"]
    assert page["title"] == "fedavg, local on digits"
    grid().run(Way(resume=True), Console(quiet=True), bool)
    assert page_data(read_results([tmp_path]))["missing"] == []


def test_tables_of_other_results_are_not_overwritten(study: Tailor, tmp_path: Path) -> None:
    assert study("compare", "fedavg", "local", *QUICK, "--no-page", "--out", "out")[0] == 0
    recipe = ("ppfe/table1", "column=cifar10-s2", "methods=local", "seeds=1", "augment=none", "network=mlp", *pairs())
    assert study("reproduce", *recipe, "-q", "--no-page", "--out", "paper")[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    for arguments, said in (
        (("compare", "ditto", "--out", "out"), "out holds results; allowed: another --out"),
        (("compare", "fedavg", "--out", "out", "--resume"), "out has method=local seed=0 too; allowed: to name all"),
        (("compare", "fedavg", "local", "ditto", "--out", "paper"), "paper holds a study of 'tailor reproduce'"),
        (
            ("sweep", "fedavg", "lr=0.1,0.2", "--out", "out", "--resume"),
            "out has lines told by method, not by method, lr;",
        ),
    ):
        status, _, err = study(*arguments, *QUICK)
        assert (status, err.count("\n"), said in err) == (2, 1, True), err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} == before


def test_a_method_that_diverges_is_not_a_result(study: Tailor, tmp_path: Path) -> None:
    status, _, err = study("compare", "local", "fedavg-ft", *QUICK, "finetune_epochs=1", "lr=1e30", "--out", "out")
    assert status == 1
    assert "not measured: " in err
    assert "diverged: the loss on test data is not finite" in err
    page = page_data(read_results([tmp_path / "out"]))
    assert any("diverged" in line for line in page["notes"])


EXITS = """
import sys

from tailorfl.methods.fedavg import FedAvg

class Exits(FedAvg):
    def train(self, clients, received):
        sys.exit(3)
"""


def test_a_method_that_ends_the_program_ends_its_own_run_only(
    study: Tailor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = study("compare", "exits:Exits", "local", *QUICK, "--no-page", "--out", "out")
    assert (status, [row["method"] for row in tidy(tmp_path / "out")]) == (1, ["local"])
    assert "not measured: exits:Exits (seed 0): SystemExit: 3 (see out/exits.Exits/seed-0/error.txt)" in err
    page = page_data(read_results([tmp_path / "out"]))
    assert page["progress"] == ["exits:Exits: failed: SystemExit: 3"]
    status, _, err = study("run", "exits:Exits", *QUICK, "--out", "alone")
    assert (status, err) == (1, "tailor: SystemExit: 3 (see alone/error.txt)\n")
