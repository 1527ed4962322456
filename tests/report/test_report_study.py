"""A study on the page: the paper's table, claims, and what is missing."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hand_runs import line, make_run

from tailorfl.errors import UserError
from tailorfl.report.page import page_data
from tailorfl.report.results import read_results
from tailorfl.report.study import StudyPart, study_of
from tailorfl.study.plan import plan
from tailorfl.study.recipe_files import find_recipe
from tailorfl.study.reproduce import begin

RECIPE = """
paper: A. Author, A Paper, 2024
studies:
  table:
    title: Two methods on two datasets
    settings: {data: digits, clients: 4, rounds: 2}
    columns: {wide: {}, narrow: {clients: 3}}
    rows: {local: {method: local}, fedper: {method: fedper}, mine: {method: fedavg}}
    seeds: [0, 1]
    claims:
      - {row: fedper, above: local}
      - {row: fedper, above: local, columns: wide, by: 20}
      - {text: nobody knows, row: mine, above: local}
    open: [The learning rate is not said.]
"""
PUBLISHED = "study,row,column,value\ntable,local,wide,40\ntable,fedper,wide,55.5\ntable,fedper,narrow,90\n"
SCORES = {"local": {"wide": (0.4, 0.6), "narrow": (0.25, 0.25)}, "fedper": {"wide": (0.5, 0.7), "narrow": (0.5, 0.5)}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All cells of two rows, and of the third none."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "mine.csv").write_text(PUBLISHED)
    study = tmp_path / "study"
    for row, columns in SCORES.items():
        for column, scores in columns.items():
            for seed, accuracy in enumerate(scores):
                write_cell(study / column / row / f"seed-{seed}", row, seed, accuracy)
    write_options(study)
    return study


def write_cell(folder: Path, method: str, seed: int, accuracy: Any, **figures: Any) -> None:
    summary = {"personalized_accuracy": accuracy, "personalized_loss": 0.5, "diverged_updates": 0, "rounds": 2}
    make_run(folder, method, lines=[line(1), line(2, accuracy)], summary={**summary, **figures}, seed=seed)


def write_options(study: Path, **changes: Any) -> None:
    chosen = {"column": ["wide", "narrow"], "methods": ["local", "fedper", "mine"], "seeds": [0, 1], "figure": "last"}
    options = {"study": "mine/table", "file": str(study.parent / "mine.yaml"), **chosen, "settings": {}, **changes}
    (study / "options.yaml").write_text(yaml.safe_dump(options))


def shown(folder: Path) -> StudyPart:
    found = study_of(read_results([folder]))
    assert found is not None
    return found


def test_the_table_has_the_published_figure_below_the_measured_one(folder: Path) -> None:
    found = shown(folder)
    assert found.table.title == "Two methods on two datasets"
    assert [head.name for head in found.table.heads] == ["", "wide", "narrow"]
    # Of two seeds 0.2 apart: half of the interval is 12.7062 × 0.1.
    assert [[cell.text for cell in row] for row in found.table.rows] == [
        ["local", "50.00 ± 127.06\n(40.00, +10.00)", "25.00 ± 0.00"],
        ["fedper", "60.00 ± 127.06\n(55.50, +4.50)", "50.00 ± 0.00\n(90.00, -40.00)"],
        ["mine", "-", "-"],
    ]
    assert [row[1].value for row in found.table.rows] == pytest.approx([50, 60, None])
    assert found.lines[0] == "A. Author, A Paper, 2024"
    assert found.lines[-1] == "8 of 12 cells are measured."
    assert found.open == ("The learning rate is not said.",)


def test_claims_are_judged_by_what_was_measured_and_by_what_was_published(folder: Path) -> None:
    claims = shown(folder).claims
    assert [(claim.word, claim.holds) for claim in claims] == [
        ("holds", True),
        ("does not hold", False),
        ("cannot be judged", None),
    ]
    assert claims[0].text == "fedper above local in every column: wide +10.00 ± 0.00, narrow +25.00 ± 0.00" + (
        " [published figures: holds in 1 of 2 comparisons, the others are missing]"
    )
    assert claims[1].text.endswith("in wide: wide +10.00 ± 0.00 [published figures: does not hold]")
    assert claims[2].text == "nobody knows"


def test_a_run_that_diverged_is_not_measured_and_updates_that_did_are_noted(folder: Path) -> None:
    write_cell(folder / "wide/mine/seed-0", "fedavg", 0, 0.1, personalized_loss=float("nan"))
    write_cell(folder / "narrow/mine/seed-1", "fedavg", 1, 0.3, diverged_updates=3)
    found = shown(folder)
    assert found.failed == ("wide, mine (seed 0): diverged: the loss on test data is not finite",)
    assert found.notes == ("narrow, mine, seed 1: 3 updates diverged and were left out",)
    assert [cell.text for cell in found.table.rows[2]] == ["mine", "-", "30.00"]


def test_a_study_that_runs_is_shown_as_far_as_it_is(folder: Path) -> None:
    (folder / "wide/local/seed-1/summary.json").unlink()
    results = read_results([folder])
    found = study_of(results)
    assert found is not None
    assert found.table.rows[0][1].text == "40.00\n(40.00, +0.00)"
    assert found.claims[0].word == "holds"  # over the seed that both have
    assert len(page_data(results)["progress"]) == 1


def test_a_row_that_is_read_off_the_runs_of_another_is_named_with_that_one(folder: Path) -> None:
    recipe = RECIPE.replace("mine: {method: fedavg}", "mine: {of: fedper, measure: global_accuracy}")
    (folder.parent / "mine.yaml").write_text(recipe)
    assert shown(folder).lines[-2:] == (
        "8 of 12 cells are measured.",
        "Read off runs that have other names below: mine is the global accuracy of fedper.",
    )


def test_the_best_round_is_picked_where_the_study_was_told_to(folder: Path) -> None:
    write_cell(folder / "wide/local/seed-0", "local", 0, 0.4)
    make_run(folder / "wide/local/seed-0", "local", lines=[line(1, 0.9), line(2, 0.4)])
    write_options(folder, figure="best", seeds=[0], settings={"evaluate_every": 1})
    assert shown(folder).table.rows[0][1].text == "90.00\n(40.00, +50.00)"


def test_without_its_recipe_a_study_still_has_its_panels(folder: Path) -> None:
    (folder.parent / "mine.yaml").unlink()
    results = read_results([folder])
    assert study_of(results) is None
    assert results.panels == ("wide", "narrow")
    assert [panel["name"] for panel in page_data(results)["panels"]] == ["wide", "narrow"]


ODD = (None, "words", -1, 1e300, True, [], {}, ["a"], {"a": "b"}, 10**400)


def test_options_and_summaries_that_make_no_sense_give_a_page_or_one_line(folder: Path) -> None:
    def page() -> str:
        try:
            page_data(read_results([folder]))
        except UserError as error:
            return str(error)
        return ""

    for key in ("column", "methods", "seeds", "figure", "settings", "file"):
        for odd in ODD:
            write_options(folder, **{key: odd})
            assert "\n" not in page(), f"{key}={odd}"
    write_options(folder)
    for key in ("personalized_accuracy", "personalized_loss", "diverged_updates", "rounds"):
        for odd in ODD:
            write_cell(folder / "wide/local/seed-0", "local", 0, 0.5, **{key: odd})
            assert "\n" not in page(), f"{key}={odd}"


def test_a_recipe_of_the_users_own_is_found_again_by_what_the_command_stores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    begin(plan(find_recipe("mine.yaml"), {}), folder)
    monkeypatch.chdir(folder)
    found = study_of(read_results([folder]))
    assert found is not None
    assert found.table.title == "Two methods on two datasets"
