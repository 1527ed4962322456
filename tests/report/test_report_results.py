"""Results as they are on disk: whole, half-written, changed, and what runs are called."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hand_runs import client, line, make_run

from tailorfl.errors import UserError
from tailorfl.report.page import page_data
from tailorfl.report.results import find_runs, read_results, shown
from tailorfl.report.runs import natural, number, read_rounds, read_run

APPENDED = ("rounds.jsonl", "measures.csv", "notes.csv")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run with every file there can be."""
    return make_run(
        tmp_path / "whole",
        lines=[line(1, bytes_up=1), line(2, 0.75, group_accuracies={"a": 0.5})],
        served=[client("ä, b", 0.5, 0.25), client("c", "", new=1)],
        classes=[("ä, b", "7", 3), ("ä, b", "cat", 2), ("c", "7", 1)],
        measures=[{"round": 2, "client": "ä, b", "beta": 0.5}, {"round": 2, "client": "c", "beta": ""}],
        notes=[(1, "ä, b", "down_1", 0.25), (1, "ä, b", "mu_down", ""), (2, "c\nd", "down_1", 1)],
        summary={"personalized_accuracy": 0.75},
        rounds=2,
    )


def test_of_many_runs_one_that_cannot_be_read_is_left_out_and_said(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "other")
    (tmp_path / "other" / "summary.json").write_text("{")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("colour: red")
    assert [run.folder for run in read_results([tmp_path]).runs] == [whole]
    assert [text.partition(":")[0] for text in caplog.messages] == ["left out", "left out"]
    with pytest.raises(UserError, match="names no method"):
        read_results([tmp_path / "foreign"])
    with pytest.raises(UserError, match="names no method"):
        read_results([whole, tmp_path / "foreign"])


def test_every_file_of_a_run_is_read(whole: Path) -> None:
    run = read_run(whole)
    assert (run.method, run.seed, run.finished, run.planned) == ("fedavg", 0, True, 2)
    assert [one["round"] for one in run.evaluated] == [2]
    first, second = run.clients
    assert (first.name, first.accuracy, first.global_accuracy, first.train, first.test) == ("ä, b", 0.5, 0.25, 30, 10)
    assert (second.accuracy, second.new, [one.name for one in run.served]) == (None, True, ["ä, b"])
    assert run.classes is not None
    assert (run.classes.clients, run.classes.classes) == (("ä, b", "c"), ("7", "cat"))
    assert run.classes.train == ((3, 2), (1, 0))
    assert run.notes == {1: {"ä, b": {"down_1": 0.25}}, 2: {"c\nd": {"down_1": 1.0}}}
    assert run.summary == run.figures == {"personalized_accuracy": 0.75}


def test_a_run_that_trains_has_figures_so_far(tmp_path: Path) -> None:
    lines = [line(1, 0.5, seconds=2.0, seconds_evaluation=1), line(2, seconds=3.0), line(3, 0.25, seconds=None)]
    run = read_run(make_run(tmp_path / "run", lines=lines, rounds=9))
    assert (run.finished, run.planned, run.served, run.federation) == (False, 9, [], ())
    assert run.figures["personalized_accuracy"] == 0.25
    assert {key: run.figures[key] for key in ("rounds", "bytes_up", "bytes_down", "seconds_training")} == {
        "rounds": 3,
        "bytes_up": 300,
        "bytes_down": 600,
        "seconds_training": 5.0,
    }


def test_a_run_that_has_just_begun_has_nothing_but_its_configuration(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=5)
    (folder / "rounds.jsonl").unlink()
    run = read_run(folder)
    assert (run.rounds, run.clients, run.classes, run.summary, run.planned) == ([], [], None, None, 5)
    data = page_data(read_results([folder]))
    assert data["progress"] == ["fedavg: no round has ended yet"]
    assert data["panels"][0]["plots"] == []


@pytest.mark.parametrize("name", APPENDED)
def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_line(whole: Path, name: str) -> None:
    def rows(folder: Path) -> list[Any]:
        run = read_run(folder)
        noted = [
            (at, who, key, value) for at, c in run.notes.items() for who, n in c.items() for key, value in n.items()
        ]
        return {"rounds.jsonl": run.rounds, "measures.csv": run.measures, "notes.csv": noted}[name]

    content, complete = (whole / name).read_bytes(), rows(whole)
    seen = set()
    for length in range(len(content)):
        (whole / name).write_bytes(content[:length])
        found = rows(whole)
        assert found == complete[: len(found)]
        seen.add(len(found))
    assert seen == set(range(len(complete)))  # the last one is whole with its very last byte


def test_a_page_can_be_made_of_every_moment_of_a_run(whole: Path) -> None:
    """Also where files were cut that are renamed into place when they are whole, as by a copy that was stopped."""
    for name in (*APPENDED, "clients.csv", "classes.csv"):
        content = (whole / name).read_bytes()
        for length in range(0, len(content), 7):
            (whole / name).write_bytes(content[:length])
            page_data(read_results([whole]))
        (whole / name).write_bytes(content)


@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "clients.csv", "classes.csv", "measures.csv", "notes.csv", "summary.json"]
)
def test_a_missing_file_is_no_error(whole: Path, name: str) -> None:
    (whole / name).unlink()
    page_data(read_results([whole]))


WRONG = {
    "config.yaml": [
        ("a: b", "names no method"),
        ("[1, 2]", "names no method"),
        ("method: [x]", "names no method"),
        ("method: {", "is not YAML"),
        ("method: x\nwhen: 2024-13-45", "is not YAML"),
        (b"method: \xff\xfe x", "is not text"),
    ],
    "rounds.jsonl": [
        ("{}\n", "line 1: no round"),
        ('{"round": 1}\n[2]\n', "line 2: no round"),
        ('{"round": 1}\n{"round": 2\n', "line 2: not JSON"),
        (b"\xff\xff\n", "line 1: not JSON"),
    ],
    "clients.csv": [("a,b\n1,2\n", "has no column client"), (b"\xff\xff client\n", "is not text")],
    "classes.csv": [("client,train\n1,2\n", "has no column class")],
    "measures.csv": [("client,beta\n1,2\n", "has no column round")],
    "notes.csv": [("round,client,name\n1,2,3\n", "has no column value"), ("round," + "x" * 200_000 + "\n", "line 1")],
    "summary.json": [("{", "is not JSON"), ("[1]", "holds no figures")],
}


@pytest.mark.parametrize(("name", "content", "said"), [(name, *one) for name, some in WRONG.items() for one in some])
def test_a_foreign_file_is_named_in_one_line(whole: Path, name: str, content: str | bytes, said: str) -> None:
    (whole / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said) as error:
        read_run(whole)
    assert str(whole / name) in str(error.value)
    assert "\n" not in str(error.value)


ODD = (None, "words", -1, 1e300, True, [], {}, ["a"], {"a": "b"}, 10**400, float("nan"), float("inf"))


def test_values_that_make_no_sense_give_a_page_or_one_line(whole: Path) -> None:
    """A file that somebody edited: whatever one value is replaced by, nobody sees a traceback."""
    rows = [{"stage": 1, "stage_accuracy": 0.5, "shared_parameters": 3}]
    networks = [{"group": "a", "clients": 2, "layers": {"base": 0.5}, "parameters": 10, "shared_parameters": 5}]
    summary = {"personalized_accuracy": 0.5, "bytes_up": 1, "stages": rows, "group_networks": networks}
    summary |= {"group_accuracies": {"a": 0.5}, "seconds_training": 1.0, "rounds": 2}
    tested = line(1, 0.5, accuracy_p10=0.1, accuracy_p90=0.9, stage=1, group_accuracies={"a": 0.5}, seconds=1.0)
    config = {"method": "fedavg", "data": "digits", "seed": 0, "rounds": 2, "groups": [], "clients": None}
    files = {"summary.json": (summary, json.dumps), "rounds.jsonl": (tested, lambda one: json.dumps(one) + "\n")}
    files |= {"config.yaml": (config, yaml.safe_dump)}
    for name, (content, write) in files.items():
        (whole / name).write_text(write(content))
    for name, (content, write) in files.items():
        for key in content:
            for odd in ODD:
                (whole / name).write_text(write({**content, key: odd}))
                assert "\n" not in refusal(whole), f"{name}: {key}={odd}"
            (whole / name).write_text(write({other: content[other] for other in content if other != key}))
            assert bool(refusal(whole)) == (key in {"method", "round"}), f"{name} without {key}"
        (whole / name).write_text(write(content))


def refusal(folder: Path) -> str:
    """What is said instead of a page, if anything is."""
    try:
        json.dumps(page_data(read_results([folder])), allow_nan=False)
    except UserError as error:
        return str(error)
    return ""


def test_a_file_that_cannot_be_read_is_named(whole: Path) -> None:
    (whole / "summary.json").unlink()
    (whole / "config.yaml").unlink()
    (whole / "config.yaml").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        read_results([whole])


@pytest.mark.parametrize("value", ["", "nan", "inf", "-inf", "x", None, True, [1], {}, 10**400, "1e999"])
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    assert number(value) is None


def test_numbers_are_read_from_json_and_csv() -> None:
    assert [number(value) for value in (3, 0.5, "0.25", "1e-5", 0)] == [3.0, 0.5, 0.25, 1e-5, 0.0]


# Folders.


def test_runs_are_found_at_any_depth_in_the_order_people_expect(tmp_path: Path) -> None:
    for name in ("lr=0.1/seed-10", "lr=0.1/seed-2", "lr=0.03/seed-0", "lr=0.01/seed-0", "b", "a/b/c/d"):
        make_run(tmp_path / name)
    make_run(tmp_path / "a/b/c/d/inner")  # within a run
    make_run(tmp_path / "b/checkpoints/1")
    make_run(tmp_path / ".hidden")
    make_run(tmp_path / "1/2/3/4/too-deep")
    (tmp_path / "empty").mkdir()
    names = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert names == ["a/b/c/d", "b", "lr=0.01/seed-0", "lr=0.03/seed-0", "lr=0.1/seed-2", "lr=0.1/seed-10"]


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere/run")
    make_run(tmp_path / "runs/mine")
    os.symlink(tmp_path / "elsewhere", tmp_path / "runs/link")
    os.symlink(tmp_path / "elsewhere/run", tmp_path / "runs/other")
    os.symlink(tmp_path / "runs", tmp_path / "runs/loop")
    assert find_runs(tmp_path / "runs") == [tmp_path / "runs/mine"]


def test_the_files_of_a_run_that_is_named_may_be_links(tmp_path: Path) -> None:
    make_run(tmp_path / "mine", lines=[line(1, 0.5), line(2, 0.75)])
    (tmp_path / "mine/rounds.jsonl").rename(tmp_path / "kept-elsewhere")
    os.symlink(tmp_path / "kept-elsewhere", tmp_path / "mine/rounds.jsonl")
    [run] = read_results([tmp_path / "mine"]).runs
    assert [one["personalized_accuracy"] for one in run.rounds] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("name", "said"), [("none", "is not there"), ("file", "is not a folder"), ("empty", "holds no run")]
)
def test_a_folder_without_runs_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said):
        read_results([tmp_path / name])


def test_no_folder_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="no run is named"):
        read_results([])


def test_names_with_numbers_sort_as_people_sort_them() -> None:
    names = ["10", "2", "a10", "a2", "0.1", "0.03", "lr=1e-05", "lr=0.001", "", "²", "a", "02"]
    wanted = ["", "0.03", "0.1", "02", "2", "10", "a", "a2", "a10", "lr=1e-05", "lr=0.001", "²"]
    assert sorted(names, key=natural) == wanted
    assert natural("9" * 5000) > natural("1")


# What runs are called.


def labels(*folders: Path) -> list[str]:
    return [entry.label for entry in read_results(folders).entries]


def test_one_run_is_called_by_its_method_and_data(tmp_path: Path) -> None:
    results = read_results([make_run(tmp_path / "x", "ditto", seed=3, data="csv:/data/mine/sites.csv")])
    assert (results.title, results.kind, results.folder) == ("ditto on csv:sites.csv, seed 3", "run", tmp_path / "x")
    assert [(entry.label, len(entry.runs)) for entry in results.entries] == [("ditto", 1)]
    assert read_results([tmp_path / "x"], "mine").title == "mine"


def test_runs_that_differ_in_the_seed_alone_are_one_entry(tmp_path: Path) -> None:
    for seed in (10, 2):
        make_run(tmp_path / f"fedavg/seed-{seed}", seed=seed, device="cpu" if seed == 2 else "cuda")
    make_run(tmp_path / "local/seed-2", "local", seed=2)
    results = read_results([tmp_path])
    assert results.kind == "comparison"
    assert results.title == "fedavg, local on digits"
    found = [(entry.label, [run.seed for run in entry.runs]) for entry in results.entries]
    assert found == [("fedavg", [2, 10]), ("local", [2])]


def test_runs_of_one_method_are_told_apart_by_the_key_in_which_they_differ(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            make_run(tmp_path / f"{lr}/seed-{seed}", lr=lr, seed=seed, network_options={"hidden": [8]})
    make_run(tmp_path / "other", "ditto", lr=0.5)
    assert labels(tmp_path) == ["fedavg, lr=0.01", "fedavg, lr=0.1", "ditto"]


def test_every_key_is_named_as_it_is_typed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", network_options={"hidden": [8]}, clients=None)
    make_run(tmp_path / "b", network_options={"hidden": [8, 4]}, clients=3)
    assert labels(tmp_path) == [
        "fedavg, network_options={hidden: [8]}, clients=null",
        "fedavg, network_options={hidden: [8, 4]}, clients=3",
    ]


def test_runs_that_differ_in_many_keys_are_called_by_their_folder_with_seeds_together(tmp_path: Path) -> None:
    for name, value in (("small", 1), ("large", 2)):
        for seed in (0, 1):
            folder = tmp_path / name / f"fedavg/seed-{seed}"
            make_run(folder, seed=seed, rounds=value, clients=value, lr=value, batch_size=value)
    assert labels(tmp_path) == ["fedavg (large/fedavg)", "fedavg (small/fedavg)"]
    assert labels(tmp_path / "small", tmp_path / "large") == ["fedavg (small/fedavg)", "fedavg (large/fedavg)"]
    assert [len(entry.runs) for entry in read_results([tmp_path]).entries] == [2, 2]


def test_the_same_run_in_two_folders_is_told_apart_by_them(tmp_path: Path) -> None:
    for name, seeds in (("a", (0, 1)), ("b", (1, 2))):
        for seed in seeds:
            make_run(tmp_path / name / f"seed-{seed}", seed=seed)
    results = read_results([tmp_path])
    found = [(entry.label, [run.seed for run in entry.runs]) for entry in results.entries]
    assert found == [("fedavg (a)", [0, 1]), ("fedavg (b)", [1, 2])]
    make_run(tmp_path / "x/demo/fedavg")
    make_run(tmp_path / "y/demo/fedavg")
    assert labels(tmp_path / "x/demo", tmp_path / "y/demo") == ["fedavg (x/demo/fedavg)", "fedavg (y/demo/fedavg)"]
    assert labels(tmp_path / "a/seed-1", tmp_path / "b/seed-1") == ["fedavg (a)", "fedavg (b)"]
    make_run(tmp_path / "a/d", seed=1)
    assert labels(tmp_path / "a/seed-1", tmp_path / "a/d") == ["fedavg (a)", "fedavg (a/d)"]


def test_the_same_run_in_two_folders_has_the_name_of_its_own_beside_others_that_differ_in_many_keys(
    tmp_path: Path,
) -> None:
    for name in "ab":
        make_run(tmp_path / name, rounds=1, clients=1, lr=1, batch_size=1)
    make_run(tmp_path / "c", rounds=2, clients=2, lr=2, batch_size=2)
    assert labels(tmp_path) == ["fedavg (a)", "fedavg (b)", "fedavg (c)"]


def test_a_run_that_is_named_twice_is_there_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a/fedavg")
    make_run(tmp_path / "a/local", "local")
    results = read_results([tmp_path / "a/local", tmp_path / "a", tmp_path / "a/local"])
    assert (results.kind, results.title, results.folder) == ("several", "local, fedavg on digits", None)
    assert [entry.label for entry in results.entries] == ["local", "fedavg"]


def test_methods_are_in_the_order_of_the_command(tmp_path: Path) -> None:
    for method in ("apfl", "ditto", "fedavg", "local"):
        make_run(tmp_path / method, method)
    (tmp_path / "results.csv").write_text("method,seed\nlocal,0\nfedavg,0\nlocal,1\nditto,")  # the last is not whole
    assert labels(tmp_path) == ["local", "fedavg", "apfl", "ditto"]
    make_run(tmp_path.parent / f"{tmp_path.name}-other", "fedper")
    assert labels(tmp_path.parent / f"{tmp_path.name}-other", tmp_path) == [
        "fedper", "local", "fedavg", "apfl", "ditto"
    ]  # fmt: skip


def test_a_title_of_many_methods_counts_them(tmp_path: Path) -> None:
    for method in ("apfl", "ditto", "fedavg", "local"):
        make_run(tmp_path / method, method, data=f"{method}-data")
    assert read_results([tmp_path]).title == "4 methods on 4 datasets"


@pytest.mark.parametrize(
    "value",
    [0.1, 1e-05, None, True, "yes", "a, b", 'it\'s "x"', "a: b", [1, [2]], {"a": [1], "b": None}, "", "a\nb", "ü$"],
)
def test_a_setting_is_shown_as_it_can_be_typed(value: Any) -> None:
    assert yaml.safe_load(shown(value)) == value
    assert yaml.safe_load(f"[{shown(value)},{shown(value)}]") == [value, value]


# Studies.


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for column in ("wide", "narrow", "extra-10", "extra-2"):
        for row in ("ppfe", "fedavg", "local"):
            for seed in (1, 0):
                make_run(tmp_path / column / row / f"seed-{seed}", "fedavg" if row == "ppfe" else row, seed=seed)
    options = {"study": "mine/table", "column": ["wide", "narrow"], "methods": ["local", "ppfe"]}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
    return tmp_path


def test_a_study_has_a_panel_a_column_and_its_rows_in_the_order_of_its_options(study: Path) -> None:
    results = read_results([study])
    assert (results.kind, results.title) == ("study", "mine/table")
    assert results.panels == ("wide", "narrow", "extra-2", "extra-10")
    for panel in results.panels:
        entries = results.of(panel)
        assert [entry.label for entry in entries] == ["local", "ppfe", "fedavg"]  # by its row, not by its method
        assert [[run.seed for run in entry.runs] for entry in entries] == [[0, 1]] * 3
    assert results.labels == ("local", "ppfe", "fedavg")


def test_a_folder_of_another_shape_is_no_study(study: Path) -> None:
    make_run(study / "mine", "ditto")
    assert read_results([study]).kind == "comparison"


def test_options_that_are_none_are_not_heeded(study: Path) -> None:
    for text in ("study: [", "- a", "study: 3"):
        (study / "options.yaml").write_text(text)
        assert read_results([study]).kind == "comparison"


def test_only_whole_lines_are_rounds(tmp_path: Path) -> None:
    assert read_rounds(tmp_path / "rounds.jsonl") == []
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}')
    assert read_rounds(tmp_path / "rounds.jsonl") == [{"round": 1}]
