"""What a person sees of runs: their progress, and the tables of their results."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from study_runs import small

from tailorfl.study.cells import Cell, Failure
from tailorfl.study.progress import CellsProgress, RunProgress
from tailorfl.study.tables import largest_unit, lines_table, paired_table, probability, summary_table


def summary(method: str = "fedper", **figures: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": "digits",
        "clients": 20,
        "personalized_accuracy": 0.96591,
        "personalized_accuracy_std": 0.04517,
        "worst_decile_accuracy": 0.0,
        "personalized_loss": 0.180236,
        "global_accuracy": None,
        "global_loss": None,
        "new_client_accuracy": None,
        "new_client_loss": None,
        "bytes_up": 2_600_000,
        "bytes_down": 26_000_000,
        "seconds_training": 12345.6,
        "seconds_evaluation": 0.083,
        **figures,
    }


def shown(width: int, *summaries: dict[str, Any]) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(summary_table(summaries))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_has_one_line_a_method_and_no_figure_is_cut(width: int) -> None:
    new = {"new_client_accuracy": 1.0, "new_client_loss": 0.1}
    lines = shown(width, summary("fedavg-ft", **new, global_accuracy=1.0), summary("a-long-name", **new))
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    first, second = lines[-2:]
    assert first.split() == ["fedavg-ft", "96.59", "4.52", "0.00", "100.00", "100.00", "2.6", "26.0", "12346", "0.1"]
    assert second.split() == ["a-long-name", "96.59", "4.52", "0.00", "-", "100.00", "2.6", "26.0", "12346", "0.1"]


def test_new_participants_have_a_table_where_there_is_something_to_show() -> None:
    late = {"cold_start_accuracy": 0.5, "joining_accuracy": 0.925, "cold_start_loss": 1.5, "joining_loss": 0.25}
    lines = shown(80, summary("fedavg", **late), summary("local"))
    assert [line.split() for line in lines[-2:]] == [["fedavg", "50.00", "92.50"], ["local", "-", "-"]]
    assert "participants; in %" in lines
    assert "gap" not in "".join(lines)
    gaps = {"training_accuracy": 1.0, "out_of_sample_gap": 0.03409, "participation_gap": -0.01, **late}
    wide = shown(80, summary("a-long-name", **gaps))
    assert wide[-1].split() == ["a-long-name", "50.00", "92.50", "100.00", "3.41", "-1.00"]
    assert max(map(len, wide)) <= 80
    # A participation gap alone can be seen in the first table.
    only_new = {"new_client_accuracy": 0.9, "new_client_loss": 0.1, "participation_gap": 0.06}
    assert len(shown(80, summary(**only_new))) == len(shown(80, summary()))
    regression = {"personalized_accuracy": None, "personalized_accuracy_std": None, "worst_decile_accuracy": None}
    lines = shown(80, summary(**{**late, "cold_start_accuracy": None, "joining_accuracy": None}, **regression))
    assert lines[-1].split() == ["fedper", "1.5", "0.25"]


def test_a_table_of_a_regression_shows_losses() -> None:
    figures = {"personalized_accuracy": None, "personalized_accuracy_std": None, "worst_decile_accuracy": None}
    lines = shown(80, summary(**figures, personalized_loss=2.41532, global_loss=3.5))
    assert lines[-1].split() == ["fedper", "2.415", "3.5", "2.6", "26.0", "12346", "0.1"]
    assert "%" not in "".join(lines)


@pytest.mark.parametrize(
    ("sizes", "unit"), [([0], 0), ([999, 3], 0), ([1000], 1), ([999_999], 1), ([0, 10**6], 2), ([10**20], 4)]
)
def test_traffic_is_shown_in_the_unit_of_its_largest_figure(sizes: list[int], unit: int) -> None:
    assert largest_unit(sizes) == unit


def told(line: dict[str, Any]) -> str:
    file = io.StringIO()
    with RunProgress(Console(file=file, width=200), "fedper", 9) as progress:
        progress(line)
    return file.getvalue().strip()


def test_an_evaluated_round_is_told_where_there_is_no_terminal() -> None:
    line = {"round": 3, "loss": 0.5, "personalized_accuracy": 0.25, "personalized_loss": 1.0}
    assert told(line) == "fedper: round 3 of 9, training loss 0.5, accuracy 25.00 %"
    assert told({"round": 3, "loss": 0.5}) == ""


def test_a_round_is_a_line_however_narrow_a_log_is_taken_for() -> None:
    file, now = io.StringIO(), 0.0
    with RunProgress(Console(file=file, width=20), "[mine]:Method", 9, lambda: now) as progress:
        now = 100.0
        progress({"round": 1, "loss": 0.5})
    assert file.getvalue() == "[mine]:Method: round 1 of 9, training loss 0.5\n"


def test_a_run_that_is_not_evaluated_for_long_is_told_once_a_minute_and_how_long_it_takes() -> None:
    file, now = io.StringIO(), 0.0
    with RunProgress(Console(file=file, width=200), "fedper", 9, lambda: now) as progress:
        for number in range(1, 10):
            now += 40.0
            progress({"round": number, "loss": 0.5, **(TESTED if number in (5, 9) else {})})
    assert file.getvalue().splitlines() == [
        "fedper: round 2 of 9, training loss 0.5",
        "fedper: round 4 of 9, training loss 0.5; about 3 min left",
        "fedper: round 5 of 9, training loss 0.5, accuracy 25.00 %",
        "fedper: round 7 of 9, training loss 0.5, accuracy 25.00 %; about 80 s left",
        "fedper: round 9 of 9, training loss 0.5, accuracy 25.00 %",
    ]


def test_the_time_left_is_measured_from_the_first_round_on_and_does_not_grow_while_one_is_waited_for() -> None:
    now = 0.0
    progress = RunProgress(Console(file=io.StringIO(), force_terminal=True), "fedper", 300, lambda: now)

    def bar() -> str:
        file = io.StringIO()
        Console(file=file, width=200).print(progress.live)
        return file.getvalue()

    found = []
    for number, at in ((1, 50.0), (2, 51.0), (3, 52.0)):  # before the first, a process starts and programs are traced
        now = at
        progress({"round": number, "loss": 0.5})
        found.append(bar())
    assert ["-:--:--" in one for one in found] == [True, True, False]
    assert "0:04:57" in found[2]
    now = 500.0
    assert "0:04:57" in bar()


def test_a_regression_is_told_by_its_loss_and_not_by_an_accuracy_of_zero() -> None:
    line = {"round": 3, "loss": None, "personalized_accuracy": None, "personalized_loss": 1.25}
    assert told(line) == "fedper: round 3 of 9, training loss -, test loss 1.25"


# The cells of a study.


class Study:
    """Three cells of ten rounds, a clock that is set by hand, and what is said."""

    def __init__(self, jobs: int = 1, terminal: bool = False) -> None:
        self.now, self.file = 0.0, io.StringIO()
        console = Console(file=self.file, width=200, force_terminal=terminal)
        self.cells = [Cell(name, small("fedper", rounds=10), Path(name)) for name in ("one", "two", "three")]
        self.shown = CellsProgress(console, self.cells, jobs, lambda: self.now)

    def round(self, cell: int, number: int, **more: Any) -> None:
        self.shown.round(self.cells[cell], {"round": number, "loss": 0.5, **more})

    def said(self) -> list[str]:
        return self.file.getvalue().splitlines()


TESTED = {"personalized_accuracy": 0.25, "personalized_loss": 1.0}


def test_cells_are_told_with_their_number_and_the_time_that_is_left() -> None:
    study = Study()
    with study.shown as shown:
        shown.begun(study.cells[0])
        study.now = 6.0
        study.round(0, 1)
        assert shown.left() == ""  # one round, with all that was before it, says nothing of the others
        for number in (2, 3):
            study.now += 6.0
            study.round(0, number)
        study.now += 1000.0
        assert shown.left() == "; about 3 min left"  # 42 s, and 60 s for each of the others
        study.now = 60.0
        study.round(0, 10, **TESTED)
        shown.ended(study.cells[0], summary())
        shown.begun(study.cells[1])
        shown.ended(study.cells[1], Failure("no data"))
        shown.begun(study.cells[2])
        shown.ended(study.cells[2], Failure("no data"))
    assert study.said() == [
        "cell 1 of 3: one",
        "one: round 10 of 10, training loss 0.5, accuracy 25.00 %",
        "cell 2 of 3: two; about 2 min left",
        "failed: two: no data",
        "cell 3 of 3: three; about 60 s left",
        "failed: three: as before",
    ]


def test_a_cell_that_is_not_evaluated_for_long_is_told_once_a_minute() -> None:
    study = Study()
    study.shown.begun(study.cells[0])
    for number in (1, 2, 3, 4):
        study.now += 50.0
        study.round(0, number)
    assert study.said() == [
        "cell 1 of 3: one",
        "one: round 2 of 10, training loss 0.5",
        "one: round 4 of 10, training loss 0.5; about 22 min left",
    ]


def test_with_two_jobs_the_rest_takes_half_the_time() -> None:
    left = {}
    for jobs in (1, 2):
        study = Study(jobs)
        study.shown.begun(study.cells[0])
        study.now = 100.0
        study.round(0, 1)
        study.shown.ended(study.cells[0], summary())
        left[jobs] = study.shown.left()
    assert left == {1: "; about 3 min left", 2: "; about 2 min left"}


def test_a_cell_that_goes_on_is_not_taken_for_a_fast_one() -> None:
    study = Study()
    study.shown.begun(study.cells[0])
    for number in (6, 7, 8):  # five are left of it
        study.now += 10.0
        study.round(0, number)
    assert study.shown.left() == "; about 4 min left"  # 20 s, and 100 s for each of the others
    study.shown.ended(study.cells[0], summary())
    assert study.shown.left() == "; about 3 min left"


def test_a_cell_without_rounds_of_its_own_yet_is_judged_by_those_of_its_method() -> None:
    study = Study(jobs=2)
    for cell in study.cells[:2]:
        study.shown.begun(cell)
    for number in (1, 2, 3):
        study.now += 10.0
        study.round(0, number)
    # 70 s of the first, 70 s of the second (30 s are over), 100 s of the third, two at a time
    assert study.shown.left() == "; about 2 min left"


def test_the_longest_cell_is_waited_for_when_others_are_done() -> None:
    study = Study(jobs=2)
    for cell in study.cells[:2]:
        study.shown.begun(cell)
    study.shown.ended(study.cells[2], summary())
    for number in (1, 2, 3):
        study.now += 20.0
        study.round(0, number)
        study.round(1, number + 6)
    assert study.shown.left() == "; about 2 min left"  # 140 s, and 20 s of the other beside it


def test_cells_that_were_finished_before_say_nothing_of_the_time() -> None:
    study = Study()
    study.shown.ended(study.cells[0], summary())
    study.shown.begun(study.cells[1])
    assert study.said() == ["cell 2 of 3: two"]


def test_nothing_is_said_while_everything_is_refused() -> None:
    study = Study()
    with study.shown as shown:
        for cell in study.cells:
            shown.begun(cell)
            shown.ended(cell, Failure("clients=0", refused=True))
    assert study.said() == []


def test_on_a_terminal_there_is_a_bar_for_each_cell_that_runs_and_a_count() -> None:
    study = Study(jobs=2, terminal=True)
    for cell in study.cells[:2]:
        study.shown.begun(cell)
    for number in (1, 2, 3):
        study.now += 10.0
        study.round(0, number, **TESTED)
    file = io.StringIO()
    Console(file=file, width=200).print(study.shown)
    one, two, counts = file.getvalue().splitlines()
    assert one.startswith("one ")
    assert "3/10" in one
    assert "0:01:10" in one
    assert "accuracy 25.00 %" in one
    assert two.startswith("two ")
    assert counts.startswith("0 done, 0 failed, 3 left; about ")


# Tables over seeds, and of comparisons.


def lines_of(table: Any, width: int = 80) -> list[list[str]]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    assert "…" not in file.getvalue()
    return [line.split() for line in file.getvalue().splitlines()]


def test_a_table_over_seeds_has_means_and_intervals() -> None:
    runs = [summary(validation_accuracy=None, personalized_accuracy=value) for value in (0.90, 0.92)]
    table = lines_table(["method"], [(["fedper"], runs)], [0, 1])
    # The deviation is 1.414; Student's t with one degree of freedom is 12.706.
    assert lines_of(table)[-1] == ["fedper", "91.00", "±", "12.71", "4.52", "0.00", "12346"]
    alone = lines_of(lines_table(["lr", "rounds"], [(["0.1", "3"], runs[:1])], [4]))
    assert alone[-1] == ["0.1", "3", "90.00", "4.52", "0.00", "12346"]
    assert " ".join(alone[0]) == "digits, 20 clients; accuracies in %; seed 4"


def test_a_table_over_data_names_all_of_them() -> None:
    runs = [summary(validation_accuracy=0.5, data=name) for name in ("digits", "mnist")]
    found = lines_of(lines_table(["data"], [(["digits"], runs[:1]), (["mnist"], runs[1:])], [0]))
    assert "digits, mnist, 20 clients" in " ".join(found[0])
    assert found[-1][:2] == ["mnist", "50.00"]


def test_comparisons_are_shown_in_points_and_losses_as_they_are() -> None:
    row = {"method": "fedper", "reference": "local", "clients": 20, "difference": -0.0125, "median": 0.0}
    row |= {"higher": 3, "lower": 5, "p": 0.0004, "p_holm": 0.0312, "personalized_accuracy": 0.9}
    first = {"method": "local", "reference": None}
    shown = lines_of(paired_table([first, row]))
    assert shown[-1] == ["fedper", "20", "-1.25", "+0.00", "3", "5", "<", "0.001", "0.031"]
    del row["personalized_accuracy"]
    table = lines_of(paired_table([first, {**row, "personalized_loss": 1.5}]))
    assert table[-1] == ["fedper", "20", "-0.0125", "+0", "3", "5", "<", "0.001", "0.031"]
    assert " ".join(table[0]) == "against local, client by client; Wilcoxon's signed-rank test"
    assert paired_table([first]) is None
    assert probability(0.0009999) == "< 0.001"
