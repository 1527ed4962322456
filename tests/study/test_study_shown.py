"""What a person sees of a run: its progress, and the table of its results."""

import io
from typing import Any

import pytest
from rich.console import Console

from tailorfl.study.progress import RunProgress
from tailorfl.study.tables import largest_unit, summary_table


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


def test_a_regression_is_told_by_its_loss_and_not_by_an_accuracy_of_zero() -> None:
    line = {"round": 3, "loss": None, "personalized_accuracy": None, "personalized_loss": 1.25}
    assert told(line) == "fedper: round 3 of 9, training loss -, test loss 1.25"
