"""The recipes of ScalableFL: figures of groups as columns, what the paper's tables say, and runs on made data."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from study_runs import Tailor, command

from tailorfl.errors import UserError
from tailorfl.models.scaling import depth, width_ratio
from tailorfl.study import cells
from tailorfl.study.outcome import Outcome, figure_of
from tailorfl.study.plan import plan
from tailorfl.study.recipe_files import find_recipe, read_file, recipes

# A small recipe with groups, whose columns read one run.

GROUPS = [
    {"name": "large", "clients": 2, "image_size": 16, "classes": 10},
    {"name": "small", "clients": 3, "image_size": 8, "classes": 5},
]
SMALL: dict[str, Any] = {
    "title": "Two groups",
    "kind": "curves",
    "measure": "group_mean_accuracy",
    "settings": {
        "data": "digits",
        "groups": GROUPS,
        "partition": "iid",
        "samples_per_client": 40,
        "network": "stride-cnn",
        "base_size": 4,
        "rounds": 2,
        "local_steps": 4,
        "lr": 0.1,
        "selection": "per-group",
        "clients_per_round": 0.5,
        "evaluate_every": 1,
        "device": "cpu",
    },
    "columns": {
        "average": None,
        "large": {"of": "average", "measure": "group_accuracies.large"},
        "small": {"of": "average", "measure": "group_accuracies.small"},
    },
    "rows": {"local": None, "scalablefl": None},
    "seeds": [0],
    "claims": [{"column": "small", "above": "large", "by": -200}, {"row": "local", "above": "scalablefl", "by": -200}],
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"studies": {"groups": {**SMALL, **changes}}}, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    with pytest.MonkeyPatch.context() as patch:
        assert command([str(write(folder)), "-q", "--out", str(folder / "out")], patch) == 0
    return folder / "out"


def outcome_of(folder: Path) -> Outcome:
    found = find_recipe(str(folder.parent / "mine.yaml"))
    outcome = Outcome(plan(found, {}), folder)
    for cell in outcome.plan.cells:
        outcome.add(cell, json.loads((folder / cell.folder / "summary.json").read_text()))
    return outcome


def lines_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table_of(folder: Path) -> dict[str, list[str]]:
    """The figures of each row, as they are printed."""
    lines = (folder / "table.md").read_text().partition("|---")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row: figures for row, *figures in cells}


def test_one_run_gives_the_figures_of_all_groups(measured: Path) -> None:
    runs = {path.parent.relative_to(measured).as_posix() for path in measured.rglob("summary.json")}
    assert runs == {"average/local/seed-0", "average/scalablefl/seed-0"}
    for row, figures in table_of(measured).items():
        found = json.loads((measured / f"average/{row}/seed-0/summary.json").read_text())
        large, small = (found["group_accuracies"][name] for name in ("large", "small"))
        assert figures == [f"{100 * value:.2f}" for value in ((large + small) / 2, large, small)]
    text = (measured / "table.md").read_text()
    assert "Accuracy in %" in text
    assert "holds: small above large by more than -200 in every row: local " in text
    assert (measured / "groups.png").is_file()


def test_results_have_a_line_a_run_with_the_figure_of_each_group(measured: Path) -> None:
    lines = lines_of(measured)
    assert [(line["row"], line["column"]) for line in lines] == [("local", "average"), ("scalablefl", "average")]
    for line in lines:
        found = json.loads((measured / f"average/{line['row']}/seed-0/summary.json").read_text())
        for name in ("large", "small"):
            assert float(line[f"group_accuracies.{name}"]) == found["group_accuracies"][name]


def test_curves_and_ends_of_a_group_are_read_round_by_round(measured: Path) -> None:
    text = (measured / "average/local/seed-0/rounds.jsonl").read_text()
    wanted = {line["round"]: 100 * line["group_accuracies"]["small"] for line in map(json.loads, text.splitlines())}
    outcome = outcome_of(measured)
    assert outcome.curve("local", "small", 0) == wanted
    assert list(wanted) == [1, 2]
    outcome.plan = replace(outcome.plan, recipe=outcome.plan.recipe.model_copy(update={"last": 2}))
    assert outcome.scores(("local", "small"))[0] == pytest.approx(sum(wanted.values()) / 2)


def test_a_figure_that_only_the_summary_has_is_that_of_the_last_round(measured: Path, tmp_path: Path) -> None:
    outcome = outcome_of(measured)
    path = tmp_path / "average/local/seed-0/rounds.jsonl"
    path.parent.mkdir(parents=True)
    lines = [json.loads(line) for line in (measured / "average/local/seed-0/rounds.jsonl").read_text().splitlines()]
    bare = [{key: value for key, value in line.items() if key != "group_accuracies"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in bare))
    outcome.folder = tmp_path
    assert outcome.curve("local", "small", 0) == {2: outcome.scores(("local", "small"))[0]}
    assert len(outcome.curve("local", "average", 0)) == 2


def test_a_column_can_be_asked_for_alone(tmp_path: Path, tailor: Tailor, measured: Path) -> None:
    status, _, _ = tailor(str(write(tmp_path)), "column=small", "methods=local", "-q", "--out", "out")
    assert status == 0
    assert table_of(tmp_path / "out")["local"] == table_of(measured)["local"][2:]
    assert [line["column"] for line in lines_of(tmp_path / "out")] == ["average"]
    assert (tmp_path / "out/average/local/seed-0/summary.json").is_file()


def test_the_options_say_what_reads_which_runs(tmp_path: Path, tailor: Tailor) -> None:
    status, out, _ = tailor(str(write(tmp_path)), "--options")
    assert status == 0
    assert "6 cells from 2 runs" in out
    assert "group_accuracies.small of the runs of average" in " ".join(out.replace("│", " ").split())


def test_a_run_that_fails_is_tried_once_for_all_columns(
    tmp_path: Path, tailor: Tailor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    execute = cells.execute
    monkeypatch.setattr(
        cells, "execute", lambda cell, *rest, **more: tried.append(cell.folder) or execute(cell, *rest, **more)
    )
    file = str(write(tmp_path, cells={"local": {"average": {"data": "mnist"}}}))
    status, _, err = tailor(file, "methods=local,scalablefl", "rounds=1", "-q", "--no-page", "--out", "out")
    assert status == 1
    assert tried == [Path("out/average/local/seed-0"), Path("out/average/scalablefl/seed-0")]
    for column in SMALL["columns"]:
        assert f"not measured: {column}, local (seed 0): data=mnist needs" in err


def test_a_group_that_is_not_there_leaves_its_column_out(tmp_path: Path, tailor: Tailor) -> None:
    columns = {**SMALL["columns"], "tiny": {"of": "average", "measure": "group_accuracies.tiny"}}
    status, _, err = tailor(str(write(tmp_path, columns=columns)), "methods=local", "rounds=1", "-q", "--out", "out")
    assert status == 1
    assert "not measured: tiny, local (seed 0): its summary has no group_accuracies.tiny" in err
    assert table_of(tmp_path / "out")["local"][3] == "-"
    assert table_of(tmp_path / "out")["local"][2] != "-"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"columns": {"a": {"of": "b", "measure": "group_mean_accuracy"}}},
            "of: 'b' is no column with runs of its own",
        ),
        (
            {
                "columns": {
                    "a": {},
                    "b": {"of": "a", "measure": "x_accuracy"},
                    "c": {"of": "b", "measure": "x_accuracy"},
                }
            },
            "of: 'b' is no column with runs of its own",
        ),
        (
            {"columns": {"a": {}, "b": {"of": "a", "measure": "group_mean_accuracy", "lr": 1}}},
            "lr: a column of another's runs sets nothing; allowed: of, measure",
        ),
        ({"columns": {"a": {}, "b": {"of": "a"}}}, "b: a column of another's runs needs a measure"),
        ({"cells": {"local": {"small": {"lr": 1}}}}, "cells: what reads another's runs sets nothing"),
        ({"rows": {"local": {"measure": "personalized_accuracy"}, "scalablefl": None}}, "allowed: only rows, or only"),
        ({"measure": "training_loss"}, "all accuracies, or none is"),
    ],
)
def test_a_column_that_cannot_be_read_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    changes = {"claims": [], **changes}
    with pytest.raises(UserError) as refused:
        read_file(write(tmp_path, **changes))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_measure_with_a_dot_is_that_of_a_name() -> None:
    summary = {"a": 0.5, "groups": {"x.y": 0.25, "z": None}, "several": [1]}
    assert [figure_of(summary, name) for name in ("a", "groups.x.y")] == [0.5, 0.25]
    for name in ("b", "groups", "groups.z", "groups.w", "a.b", "several", "several.0"):
        assert figure_of(summary, name) is None


# What the paper says.

PACKAGED = recipes()


@pytest.mark.parametrize(
    ("name", "stages", "widths"),
    [("table2", [5, 5, 4, 4], [1.0, 0.9, 0.77, 0.67]), ("table3", [7, 6], [1.0, 0.68])],
)
def test_the_networks_are_those_of_the_paper(name: str, stages: list[int], widths: list[float]) -> None:
    (cell,) = plan(PACKAGED[f"scalablefl/{name}"], {"methods": "scalablefl", "seeds": 1, "column": "average"}).cells
    made = cell.config.experiment
    classes = [group.classes or {"coco": 80, "voc": 20}[str(group.name)] for group in made.groups]
    assert [depth(group.image_size or 0, made.base_size) for group in made.groups] == stages
    assert [round(width_ratio(int(number), made.base_classes or 0), 2) for number in classes] == widths


@pytest.mark.parametrize(("name", "steps"), [("table2", 10), ("table3", 25)])
def test_the_individual_rows_take_the_steps_of_their_names(name: str, steps: int) -> None:
    cells = plan(PACKAGED[f"scalablefl/{name}"], {"seeds": 1, "column": "average"}).cells
    for cell in cells:
        made, method = cell.config.experiment, cell.config.method
        taken = made.rounds * (method.local_steps or 0)
        if cell.row.startswith("local-"):
            assert (f"local-{taken // 1000}k", made.clients_per_round) == (cell.row, 1.0)
        else:
            assert method.local_steps == steps
        if name == "table3":
            assert (method.lr_warmup, *method.lr_milestones) == tuple(made.rounds * k // 100 for k in (4, 70, 90))


def test_every_column_of_a_group_has_the_name_of_one() -> None:
    for name in ("table2", "table3", "cifar10-groups"):
        recipe = PACKAGED[f"scalablefl/{name}"]
        groups = [group["name"] for group in recipe.settings["groups"]]
        assert list(recipe.columns) == ["average", *groups]
        assert [recipe.columns[group].measure for group in groups] == [f"group_accuracies.{one}" for one in groups]


# Runs on made data of the form that the recipes expect.

QUICK = ("seeds=1", "rounds=1", "local_steps=1", "batch_size=4", "device=cpu", "-q", "--out", "out")
image = pytest.importorskip("PIL.Image")


def save(path: Path, side: int, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(path))).integers(0, 60, (side, side, 3))
    image.fromarray((pixels + shade).astype(np.uint8)).save(path)


def write_imagenet(folder: Path) -> None:
    for split, count in (("train", 16), ("test", 4)):
        for number, name in enumerate(("n01440764", "n01443537", "n01484850", "n01491361")):
            for which in range(count):
                save(folder / split / name / f"{which}.JPEG", 20 + which, 40 * number)


def write_coco(folder: Path) -> None:
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train2017", 8), ("val2017", 2)):
        for number in range(count):
            save(folder / split / f"{number:012}.jpg", 80, 100)
        facts = {
            "images": [{"id": number, "file_name": f"{number:012}.jpg"} for number in range(count)],
            "categories": [{"id": 3, "name": "car"}, {"id": 18, "name": "dog"}, {"id": 44, "name": "bottle"}],
            "annotations": [
                {"image_id": number, "category_id": (3, 18, 44)[number % 3], "bbox": [10, 20, 40, 30], "iscrowd": 0}
                for number in range(count)
            ],
        }
        (folder / f"annotations/instances_{split}.json").write_text(json.dumps(facts))


def write_voc(folder: Path) -> None:
    box = "<xmin>10</xmin><ymin>5</ymin><xmax>50</xmax><ymax>40</ymax>"
    for year, lists in (("VOC2007", {"trainval": "ab", "test": "cd"}), ("VOC2012", {"trainval": "efg"})):
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (folder / year / name).mkdir(parents=True)
        for split, numbers in lists.items():
            (folder / year / f"ImageSets/Main/{split}.txt").write_text("\n".join(numbers) + "\n")
            for number in numbers:
                save(folder / year / f"JPEGImages/{number}.jpg", 60, 60)
                boxed = f"<object><name>dog</name><difficult>0</difficult><bndbox>{box}</bndbox></object>"
                (folder / year / f"Annotations/{number}.xml").write_text(f"<annotation>{boxed}</annotation>")


def finished(folder: Path, name: str, said: tuple[int, str, str], rows: tuple[str, ...] = ()) -> None:
    """Every cell of the table has a figure, or of some rows of it."""
    status, _, err = said
    assert (status, err) == (0, "")
    recipe = PACKAGED[f"scalablefl/{name}"]
    table = table_of(folder / "out")
    assert list(table) == list(rows or recipe.rows)
    assert all(len(figures) == len(recipe.columns) for figures in table.values())
    assert all(figure[0].isdigit() for figures in table.values() for figure in figures), "a bare dash is no figure"


def test_table_2_runs_on_folders_of_the_form_of_imagenet(tmp_path: Path, tailor: Tailor) -> None:
    write_imagenet(tmp_path / "imagenet")
    sizes = (("1k", 32, 4), ("500", 24, 3), ("200", 16, 2), ("100", 12, 2))
    groups = [{"name": f"imagenet-{n}", "clients": 2, "image_size": size, "classes": k} for n, size, k in sizes]
    said = tailor("scalablefl/table2", f"groups={json.dumps(groups)}", *QUICK, "--data-dir", str(tmp_path))
    finished(tmp_path, "table2", said)
    assert "With settings other than the recipe's" in said[1]


def test_table_3_runs_on_folders_of_the_form_of_coco_and_voc(tmp_path: Path, tailor: Tailor) -> None:
    write_coco(tmp_path / "coco")
    write_voc(tmp_path / "VOCdevkit")
    groups = [
        {"name": "coco", "clients": 1, "data": "coco:coco", "image_size": 72},
        {"name": "voc", "clients": 1, "data": "voc:VOCdevkit", "image_size": 66},
    ]
    rows = ("local-5k", "heterofl-7", "scalablefl")  # the others differ from these in numbers alone
    chosen = (f"methods={','.join(rows)}", f"groups={json.dumps(groups)}")
    finished(tmp_path, "table3", tailor("scalablefl/table3", *chosen, *QUICK, "--data-dir", str(tmp_path)), rows)


def test_the_groups_of_cifar10_run_on_other_images(tmp_path: Path, tailor: Tailor) -> None:
    said = tailor("scalablefl/cifar10-groups", "data=digits", "network=stride-cnn", "clients_per_round=0.1", *QUICK)
    finished(tmp_path, "cifar10-groups", said)
