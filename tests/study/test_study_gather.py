"""Figures of many studies on one page: what is kept, what is replaced, and what is said of claims."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from study_runs import Tailor, pairs

from tailorfl.errors import UserError
from tailorfl.study.gather import GATHERED, Figure, gather, markdown, merge, read_figures, scores_of, write_figures
from tailorfl.study.recipe_files import recipes

ROOT = Path(__file__).parents[2]
ONE = Figure("ppfe/table1", "ppfe", "cifar10-s2", 0, "", 90.0, "last", "", "some GPU", 60.0)
CURVE = Figure("pfps-lwc/figure5", "pfps-lwc", "cifar10-b0.5-p0.3", 0, "", 70.0, "last", "", "some GPU", 90.0)


def rows(name: str, column: str) -> list[str]:
    return [row for row in recipes()[name].rows if column in recipes()[name].columns]


def section(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_table_has_mean_interval_published_figure_and_difference() -> None:
    figures = [ONE, replace(ONE, seed=1, value=88.0), replace(ONE, row="local", value=81.66)]
    page = markdown(merge(figures), "all.csv")
    found = section(page, "ppfe/table1")
    assert "| local | 81.66 (81.66, +0.00) |" in found
    assert "| ppfe | 89.00 ± 12.71 (89.17, -0.17) |" in found  # 1 deviation of 2 ** 0.5, t of one degree 12.706
    assert "| fedavg |" not in found, "what was not measured has no row"
    assert "3 runs, 3 minutes one after the other on some GPU." in found
    assert "| [ppfe/table1](#ppfetable1) | 2 of " in page


def test_a_claim_holds_only_by_figures_that_are_there() -> None:
    others = [name for name in rows("pfps-lwc/figure5", CURVE.column) if not name.startswith("pfps")]
    at_the_end = [CURVE, *(replace(CURVE, row=name, value=60.0) for name in others)]
    early = [replace(one, round="5", value=50.0) for one in at_the_end]
    early[0] = replace(early[0], value=49.0)
    found = section(markdown(merge([*at_the_end, *early]), "all.csv"), CURVE.study)
    claims = [line for line in found.splitlines() if line.startswith("- ") and "pfps-lwc above" in line]
    assert [line.partition(":")[0] for line in claims] == [
        "- does not hold",
        "- cannot be judged",
        f"- holds in {len(others) - 1} of {4 * (len(others) - 1)} comparisons, the others are missing",
    ]
    assert "-1.00" in claims[0]
    assert "+10.00" in claims[2]


def test_a_newer_figure_replaces_the_one_of_the_same_cell_and_seed() -> None:
    other = replace(ONE, column="cifar10-s5", settings="rounds=2")
    figures = merge([ONE, replace(ONE, seed=1), replace(ONE, value=50.0), other])
    assert scores_of(figures)(("ppfe", "cifar10-s2"), None) == {0: 50.0, 1: 90.0}
    assert "With settings other than the recipe's: `rounds=2` in cifar10-s5." in markdown(figures, "all.csv")


def test_other_settings_are_named_with_the_cells_that_have_them() -> None:
    figures = [replace(ONE, row=row, settings="rounds=2") for row in ("local", "fedavg")]
    assert "recipe's: `rounds=2`." in markdown(merge(figures), "all.csv"), "all cells have them"
    figures += [replace(ONE, column="cifar10-s5", row="local", settings="rounds=2"), ONE]
    page = markdown(merge([*figures, replace(ONE, column="cifar10-s5", row="ditto", settings="lr=1")]), "all.csv")
    wanted = "`lr=1` in cifar10-s5 (ditto); `rounds=2` in cifar10-s2 (local, fedavg), cifar10-s5 (local)."
    assert f"With settings other than the recipe's: {wanted}" in page


def test_another_page_is_not_overwritten_and_an_ending_is_no_part_of_the_name(tmp_path: Path) -> None:
    write_figures([ONE], tmp_path / "figures.csv")
    (tmp_path / "notes.md").write_text("my notes\n")
    with pytest.raises(UserError, match=r"notes.md is another page; allowed: another --to"):
        gather([tmp_path], tmp_path / "notes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.csv", "notes.md"]
    for name in ("all.csv", "all.md", "all"):
        assert gather([tmp_path], tmp_path / name) == (tmp_path / "all.csv", tmp_path / "all.md")
    assert "](reproduce.md)" not in (tmp_path / "all.md").read_text(), "the guide is not beside it"


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(UserError, match=r"measured with the recipe's settings and 'rounds=2'; allowed: the same"):
        merge([ONE, replace(ONE, seed=1, settings="rounds=2")])
    with pytest.raises(UserError, match="figure=last and with figure=best"):
        merge([ONE, replace(ONE, column="cifar10-s5", moment="best")])
    with pytest.raises(UserError, match="mine/table is a study of your own"):
        merge([replace(ONE, study="mine/table")])


def test_figures_are_in_the_order_of_the_recipes_whatever_came_first() -> None:
    figures = [ONE, CURVE, replace(ONE, row="local"), replace(ONE, seed=3), replace(ONE, column="cifar10-s5")]
    wanted = [CURVE, replace(ONE, row="local"), ONE, replace(ONE, seed=3), replace(ONE, column="cifar10-s5")]
    assert merge(figures) == merge(reversed(figures)) == wanted


def test_what_is_not_gathered_is_listed_with_the_data_it_needs() -> None:
    found = section(markdown([ONE], "all.csv"), "Not gathered yet")
    assert "`scalablefl/table3`: ScalableFL, HeteroFL" in found
    assert "(coco:coco, voc:VOCdevkit)" in found  # of its columns' groups
    assert "over a (cifar10, cifar100)" in found  # of its rows
    assert "`ppfe/table1`" not in found
    assert found.count("\n- ") == len(recipes()) - 1


def test_figures_are_read_as_they_are_written(tmp_path: Path) -> None:
    figures = [ONE, replace(CURVE, round="5", settings="a=b, c='d'", value=1 / 3)]
    write_figures(figures, tmp_path / "all.csv")
    assert read_figures(tmp_path / "all.csv") == figures


STUDY = ("ppfe/table1", "column=cifar10-s2", "methods=local,fedavg", "augment=none", "network=mlp", "-q", "--no-page")


def test_studies_are_gathered_one_after_the_other(tailor: Tailor, study: Tailor, tmp_path: Path) -> None:
    assert tailor(*STUDY, *pairs(), "seeds=1", "--out", "one")[0] == 0
    assert tailor(*STUDY, *pairs(), "seeds=[1]", "--out", "two")[0] == 0
    status, said, _ = study("gather", "one", "--to", "all")
    assert (status, said) == (0, "figures: all.csv\npage: all.md\n")
    assert study("gather", "two", "--to", "all")[0] == 0
    with (tmp_path / "one/table.csv").open() as file:
        measured = [float(row["mean"]) for row in csv.DictReader(file)]
    assert [one.value for one in read_figures(tmp_path / "all.csv") if one.seed == 0] == pytest.approx(measured)
    assert {one.seed for one in read_figures(tmp_path / "all.csv")} == {0, 1}
    page = (tmp_path / "all.md").read_text()
    assert study("gather", "--to", "all")[0] == 0
    assert (tmp_path / "all.md").read_text() == page, "of the figures alone"


def test_two_studies_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        write_figures([replace(ONE, value=value)], tmp_path / name / GATHERED)
    with pytest.raises(UserError, match=r"a and .*b both have .*, seed 0, and differ; allowed: one of the two"):
        gather([tmp_path / "a", tmp_path / "b"], tmp_path / "page")
    gather([tmp_path / "a", tmp_path / "a"], tmp_path / "page")
    gather([tmp_path / "b"], tmp_path / "page")
    assert [one.value for one in read_figures(tmp_path / "page.csv")] == [2.0]


def test_bad_input_is_one_line_and_nothing_is_written(study: Tailor, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "nothing.csv").write_bytes(b"")
    write_figures([replace(ONE, row="nobody")], tmp_path / "unknown.csv")
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, said in (
        (("empty",), "empty holds no figures (empty/figures.csv is not there)"),
        (("none",), "none holds no figures"),
        ((), "no study is named, and all.csv is not there"),
        (("other.csv",), "other.csv has no column study; allowed: a first line with study,row,column"),
        (("unknown.csv",), "ppfe/table1 has no cell nobody, cifar10-s2"),
        (("bytes.csv",), "bytes.csv is no table"),
        (("nothing.csv",), "nothing.csv has no column study"),
    ):
        status, _, err = study("gather", *arguments, "--to", "all")
        assert (status, err.count("\n")) == (2, 1)
        assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_published_page_is_what_the_command_makes_of_the_published_figures(tmp_path: Path) -> None:
    for name in ("reproduction.csv", "reproduce.md"):
        (tmp_path / name).write_bytes((ROOT / "docs" / name).read_bytes())
    gather([], tmp_path / "reproduction")
    assert (tmp_path / "reproduction.md").read_text() == (ROOT / "docs/reproduction.md").read_text()
