"""Tables against numbers that were calculated by hand: means, intervals, tests client by client."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hand_runs import client, line, make_run, together

from tailorfl.report.results import Results
from tailorfl.report.tables import Table, tables_of


def table(results: Results, key: str) -> Table:
    [found] = [one for one in tables_of(results) if one.key == key]
    return found


def texts(found: Table) -> list[dict[str, str]]:
    return [{head.name: cell.text for head, cell in zip(found.heads, row, strict=True)} for row in found.rows]


def served(accuracies: Iterable[Any], **columns: Any) -> list[dict[str, Any]]:
    return [client(f"c{place}", accuracy, **columns) for place, accuracy in enumerate(accuracies)]


# Figures.


def test_the_summary_has_means_over_seeds_and_an_interval_by_students_t(tmp_path: Path) -> None:
    folders = []
    for seed, accuracy in enumerate((0.4, 0.6)):
        summary = {
            "personalized_accuracy": accuracy,
            "worst_decile_accuracy": accuracy / 2,
            "bytes_up": 1_000_000 * (1 + seed),
            "bytes_down": 500_000,
            "shared_parameters": 12_345,
            "seconds_training": 2.0 * (1 + seed),
            "seconds_evaluation": None,
        }
        folders.append(make_run(tmp_path / str(seed), lines=[line(1), line(2)], summary=summary, seed=seed))
    [row] = texts(table(together(("fedavg", folders)), "summary"))
    # With one degree of freedom t is 12.7062; the deviation 0.1414 over the root of 2 is 0.1.
    assert row == {
        "": "fedavg",
        "seeds": "2",
        "rounds": "2",
        "personalized": "50.00 ± 127.06",
        "worst 10 %": "25.00",
        "up, MB": "1.5",
        "down, MB": "0.5",
        "shared, parameters": "12,345",
        "training, s": "3.0",
        "evaluation, s": "-",
    }


def test_what_has_no_figure_is_a_dash_that_sorts_last_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", summary={"personalized_accuracy": 0.5, "global_accuracy": 0.25, "bytes_up": 2000})
    other = make_run(tmp_path / "b", "local", summary={"personalized_accuracy": 0.125, "global_accuracy": None})
    found = table(together(("a", [one]), ("b", [other])), "summary")
    place = [head.name for head in found.heads].index("global")
    assert [(row[place].text, row[place].value) for row in found.rows] == [("25.00", 0.25), ("-", None)]
    assert "seeds" not in [head.name for head in found.heads]


def test_rounds_are_those_of_a_run_and_tell_how_far_it_is(tmp_path: Path) -> None:
    whole = [make_run(tmp_path / f"w{n}", lines=[line(1), line(2)], summary={}, rounds=9, seed=n) for n in (0, 1)]
    going = make_run(tmp_path / "g", lines=[line(1)], rounds=9, seed=2)
    rows = texts(table(together(("done", whole), ("going", [going]), ("both", [*whole, going])), "summary"))
    assert [row["rounds"] for row in rows] == ["2", "1 of 9", "1–2 of 2–9"]


def test_a_regression_has_losses(tmp_path: Path) -> None:
    figures = {"personalized_accuracy": None, "personalized_loss": 12.3456, "global_loss": 0.5}
    run = make_run(tmp_path / "a", served=[client("x", "", loss=0.25)], summary=figures)
    results = together(("a", [run]))
    [row] = texts(table(results, "summary"))
    assert (row["personalized loss"], row["global loss"]) == ("12.35", "0.5")
    assert texts(table(results, "clients")) == [{"client": "x", "train": "30", "test": "10", "a": "0.25"}]


# Client by client.


def test_methods_are_tested_against_the_first_and_corrected_by_holm(tmp_path: Path) -> None:
    accuracies = {
        "first": [0.1, 0.2, 0.3, 0.4, 0.5],
        "better": [0.2, 0.4, 0.6, 0.8, 1.0],  # by 0.1, 0.2, ... 0.5
        "mixed": [0.3, 0.1, 0.3, 0.4, 0.5],  # one up by 0.2, one down by 0.1
        "same": [0.1, 0.2, 0.3, 0.4, 0.5],
    }
    entries = [(name, [make_run(tmp_path / name, served=served(own))]) for name, own in accuracies.items()]
    rows = {row[""]: row for row in texts(table(together(*entries), "paired"))}
    # All five signs alike: 2 of 32 ways; of two differences: 4 of 4. Holm: 3 × 0.0625, then at least that.
    assert rows["better"] == {
        "": "better",
        "clients": "5",
        "mean, points": "+30.00",
        "median, points": "+30.00",
        "higher": "5",
        "lower": "0",
        "p": "0.062",
        "p (Holm)": "0.188",
    }
    assert list(rows["mixed"].values()) == ["mixed", "5", "+2.00", "+0.00", "1", "1", "1.000", "1.000"]
    assert list(rows["same"].values()) == ["same", "5", "+0.00", "+0.00", "0", "0", "1.000", "1.000"]


def test_only_the_same_clients_of_the_same_seed_are_paired(tmp_path: Path) -> None:
    def run(name: str, seed: int, *accuracies: Any, **columns: Any) -> Path:
        return make_run(tmp_path / name, served=served(accuracies, **columns), seed=seed)

    first = [run("f0", 0, 0.1, 0.1), run("f1", 1, 0.5, 0.5), run("f2", 2, 0.0, 0.0)]
    other = [run("o1", 1, 0.6, 0.8), run("o2", 2, 1.0, 1.0, train=31), run("o3", 3, 1.0, 1.0)]
    apart = [run("a0", 0, 0.1, 0.1, 0.1)]  # another federation
    found = texts(table(together(("first", first), ("other", other), ("apart", apart)), "paired"))
    assert [(row[""], row["clients"], row["mean, points"]) for row in found] == [("other", "2", "+20.00")]


def test_seeds_are_averaged_client_by_client_before_they_are_compared(tmp_path: Path) -> None:
    entries = []
    for name, seeds in (("first", ([0.1, 0.5], [0.3, 0.1])), ("other", ([0.5, 0.2], [0.5, 0.2]))):
        runs = [make_run(tmp_path / f"{name}{seed}", served=served(own), seed=seed) for seed, own in enumerate(seeds)]
        entries.append((name, runs))
    results = together(*entries)
    [row] = texts(table(results, "paired"))
    # Means of the first: 0.2 and 0.3; so one client is 30 points up and one 10 down.
    assert (row["clients"], row["mean, points"], row["higher"], row["lower"]) == ("2", "+10.00", "1", "1")
    rows = texts(table(results, "clients"))
    assert [(one["client"], one["first"], one["other"]) for one in rows] == [
        ("c0", "20.00", "50.00"),
        ("c1", "30.00", "20.00"),
    ]


def test_clients_that_diverged_or_are_new_are_not_compared(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", served=[*served([0.5, "nan", 0.5]), client("new", 0.9, new=1)])
    other = make_run(tmp_path / "b", served=[*served([0.25, 0.5, ""]), client("new", 0.1, new=1)])
    results = together(("a", [first]), ("b", [other]))
    [row] = texts(table(results, "paired"))
    assert (row["clients"], row["mean, points"]) == ("1", "-25.00")
    rows = [(one["a"], one["b"]) for one in texts(table(results, "clients"))]
    assert rows == [("50.00", "25.00"), ("-", "50.00"), ("50.00", "-")]


def test_clients_of_another_federation_are_not_set_beside_those_of_the_first(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", served=served([0.5, 0.25]))
    like = make_run(tmp_path / "b", served=served([0.75, 0.5]))
    other = make_run(tmp_path / "c", served=[client("c0", 0.1, train=99), client("c1", 0.2)])
    found = table(together(("a", [one]), ("b", [like]), ("c", [other])), "clients")
    assert [head.name for head in found.heads] == ["client", "train", "test", "a", "b"]
    assert "Left out, for their clients are others: c." in found.about


@pytest.mark.parametrize("count", [1000, 1001])
def test_the_table_of_clients_is_cut_at_a_thousand_and_says_so(tmp_path: Path, count: int) -> None:
    run = make_run(tmp_path / "a", served=served([0.5] * count))
    found = table(together(("a", [run])), "clients")
    assert len(found.rows) == 1000
    assert (found.rows[0][0].text, found.rows[-1][0].text) == ("c0", f"c{count - 1}")
    assert ("1,000 of 1,001 clients" in found.about) == (count == 1001)


def test_runs_that_train_have_no_table_of_clients(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lines=[line(1, 0.5)]) for name in "ab"]
    assert [one.key for one in tables_of(together(("a", runs[:1]), ("b", runs[1:])))] == ["summary"]


def test_a_run_that_trains_has_no_column_of_clients_beside_one_that_has_ended(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", served=[client("x", 0.5)])
    going = make_run(tmp_path / "going", lines=[line(1, 0.5)])
    found = table(together(("going", [going]), ("done", [done])), "clients")
    assert [head.name for head in found.heads] == ["client", "train", "test", "done"]
    assert "Not there, for they have not ended: going." in found.about
