"""The commands that repeat results: parsed again, they give the configurations that are on disk."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hand_runs import make_run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailorfl.errors import UserError
from tailorfl.report.page import page_data
from tailorfl.report.results import Results, read_results
from tailorfl.report.settings import common_settings, repeats, untold
from tailorfl.report.tables import tables_of
from tailorfl.study.compare import plan_comparison
from tailorfl.study.config import configure, read_settings
from tailorfl.study.grid import Line
from tailorfl.study.reproduce import read_options
from tailorfl.study.sweep import plan_sweep, read_values

Flat = dict[str, Any]


def write_config(folder: Path, config: Flat) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return folder


def write_configs(folder: Path, lines: Sequence[Line], seeds: Sequence[int]) -> list[Flat]:
    """The configurations of a comparison or a sweep, in the folders where its command puts them."""
    written = []
    for line in lines:
        for seed in seeds:
            config = {**line.config.flat(), "seed": seed}
            write_config(folder / line.name / f"seed-{seed}", config)
            written.append(config)
    return written


def the_command(results: Results) -> list[str]:
    """The words of the one command for all, without the first."""
    [command] = {one.command for one in repeats(results)}
    words = shlex.split(command)
    assert words[0] == "tailor"
    return words[1:]


def repeated(words: Sequence[str]) -> list[Flat]:
    """What a command would run."""
    verb, *rest = words
    pairs = [word for word in rest if "=" in word]
    names = [word for word in rest if "=" not in word]
    if verb == "run":
        return [configure(names[0], read_settings(pairs)).flat()]
    if verb == "compare":
        lines, seeds = plan_comparison(names, read_settings(pairs))
    else:
        assert verb == "sweep"
        lines, seeds = plan_sweep(names[0], read_values(pairs), {})
    return [{**line.config.flat(), "seed": seed} for line in lines for seed in seeds]


def in_order(configs: Sequence[Flat]) -> list[str]:
    return sorted(yaml.safe_dump(config) for config in configs)


METHODS = ("fedavg", "local", "fedper", "ditto", "fedavg-ft", "ppfe", "pmixfed", "pfps-lwc", "scalablefl", "heterofl")
GROUPS = [{"clients": 4, "image_size": 16, "classes": 10}, {"clients": 4, "image_size": 8, "name": "it's small"}]
SETTINGS: Mapping[str, st.SearchStrategy[Any]] = {
    "data": st.sampled_from(["digits", 'csv:/a folder/it\'s "mine".csv', "file:$HOME/`x`.st", "folder:ü\\;&|<x>=1"]),
    "clients": st.sampled_from([None, 7, 100]),
    "groups": st.sampled_from([(), GROUPS]),
    "network_options": st.sampled_from([{}, {"hidden": [64, 32]}, {"a b": None, "c": "yes", "d": "1e5"}]),
    "network": st.sampled_from(["auto", "my.package:Net"]),
    "rounds": st.integers(2, 50),
    "clients_per_round": st.sampled_from([None, 5, 0.3, 1.0]),
    "everyone_in": st.sampled_from([(), [-1], [1, -1]]),
    "evaluate_every": st.integers(0, 5),
    "validation_fraction": st.sampled_from([0.0, 0.1, 0.25]),
    "target_accuracy": st.sampled_from([None, 0.9]),
    "joining_clients": st.sampled_from([0, 2]),
    "joining_round": st.sampled_from([None, 2]),
    "lr": st.sampled_from([0.1, 1e-05, 3]),
    "preset": st.sampled_from(["best", "paper", "no-reduction"]),
    "reduction": st.sampled_from(["svd", "none"]),
    "personal_layers": st.integers(1, 3),
    "seed": st.integers(0, 3),
    "device": st.sampled_from(["auto", "cpu"]),
}


@settings(max_examples=120)
@given(st.sampled_from(METHODS), st.fixed_dictionaries({}, optional=SETTINGS))
@example("ppfe", {"preset": "no-reduction", "reduction": "svd"})  # a usual value, but not with this preset
def test_the_command_of_a_run_gives_its_configuration_again(method: str, chosen: Flat) -> None:
    known = configure(method, {}).flat()
    try:
        config = configure(method, {key: value for key, value in chosen.items() if key in known}).flat()
    except UserError:
        return  # these do not go together
    with TemporaryDirectory() as folder:
        words = the_command(read_results([write_config(Path(folder), config)]))
    assert words[:2] == ["run", method]
    assert repeated(words) == [config]
    assert len(words) <= 2 + len(chosen) + 1  # one more: options may follow from others


@pytest.mark.parametrize("seeds", [(0,), (3,), (0, 1, 2), (2, 5)])
@pytest.mark.parametrize(
    ("methods", "chosen"),
    [
        (("local", "fedavg", "ditto"), {"data": "digits", "clients": 20, "evaluate_every": 2, "lr": 0.05}),
        (("fedavg", "fedper"), {"personal_layers": 2, "network_options": {"hidden": [8, 8, 8]}}),
        (("fedper", "pmixfed"), {"rounds": 7}),  # one needs validation data, so both have it
    ],
)
def test_the_command_of_a_comparison_gives_all_its_configurations_again(
    tmp_path: Path, methods: Sequence[str], chosen: Flat, seeds: Sequence[int]
) -> None:
    lines, _ = plan_comparison(methods, chosen)
    written = write_configs(tmp_path, lines, seeds)
    words = the_command(read_results([tmp_path]))
    assert words[0] == "compare"
    assert in_order(repeated(words)) == in_order(written)


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("fedper", {"lr": [0.01, 0.1, 1e-05], "clients": [10]}),
        ("fedavg", {"network_options": [{"hidden": [8]}, {"hidden": [8, 4]}], "batch_size": [5, 10], "seeds": [2]}),
        ("fedavg", {"data": ["digits", "csv:a, b.csv"], "clients_per_round": [None, 0.3, 5]}),
        ("fedavg", {"everyone_in": [[1], [1, 2]]}),
    ],
)
def test_the_command_of_a_sweep_gives_all_its_configurations_again(tmp_path: Path, method: str, values: Flat) -> None:
    lines, seeds = plan_sweep(method, values, {})
    written = write_configs(tmp_path, lines, seeds)
    words = the_command(read_results([tmp_path]))
    assert words[:2] == ["sweep", method]
    assert in_order(repeated(words)) == in_order(written)


def test_the_command_of_a_sweep_names_what_was_tried_and_not_what_follows_from_it(tmp_path: Path) -> None:
    lines, seeds = plan_sweep("ppfe", {"stages": [1, 2], "lr": [0.003, 0.01], "rounds": [8]}, {})
    assert lines[0].config.flat()["stage_rounds"] != lines[-1].config.flat()["stage_rounds"]
    write_configs(tmp_path, lines, seeds)
    (tmp_path / "results.csv").write_text("method,stages,lr,seed\nppfe,1,0.003,0\n")
    results = read_results([tmp_path])
    assert " ".join(the_command(results)) == "sweep ppfe stages=1,2 lr=0.003,0.01 rounds=8"
    assert results.labels == ("stages=1, lr=0.003", "stages=1, lr=0.01", "stages=2, lr=0.003", "stages=2, lr=0.01")


def write_asked(folder: Path, **asked: Any) -> None:
    (folder / "asked.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))


def test_the_command_is_as_it_was_asked_for_also_where_a_method_has_no_run(tmp_path: Path) -> None:
    defaults = configure("fedavg", {}).experiment.model_dump(mode="json")  # as a file of all settings has them
    settings = {**defaults, "method": "fedavg", "clients": 5, "personal_layers": 2, "seeds": 2}
    del settings["seed"]
    lines, seeds = plan_comparison(["fedavg", "fedper"], settings)
    write_configs(tmp_path, lines[:1], seeds)
    write_asked(tmp_path, methods=["fedavg", "fedper"], settings=settings)
    assert (
        " ".join(the_command(read_results([tmp_path]))) == "compare fedavg fedper clients=5 personal_layers=2 seeds=2"
    )


def test_the_command_of_a_sweep_is_as_it_was_asked_for_also_where_a_setting_has_no_run(tmp_path: Path) -> None:
    values = {"everyone_in": [[1], [1, 2]], "lr": [0.1, 0.2], "clients": [7], "seeds": [0, 3]}
    lines, seeds = plan_sweep("fedavg", values, {"batch_size": 5})
    write_configs(tmp_path, lines[:3], seeds)
    write_asked(tmp_path, method="fedavg", values=values, settings={"batch_size": 5})
    words = the_command(read_results([tmp_path]))
    assert words == [
        "sweep",
        "fedavg",
        "everyone_in=[1],[1, 2]",
        "lr=0.1,0.2",
        "clients=7",
        "seeds=0,3",
        "batch_size=5",
    ]
    assert [one["lr"] for one in repeated(words)] == [0.1, 0.1, 0.2, 0.2] * 2


def test_a_run_that_was_not_asked_for_has_a_command_of_its_own(tmp_path: Path) -> None:
    lines, _ = plan_comparison(["fedavg", "fedper"], {})
    write_configs(tmp_path, lines, (0, 1))
    write_config(tmp_path / "mine", configure("local", {"lr": 0.25}).flat())
    write_config(tmp_path / "fedper/seed-1", configure("fedper", {"lr": 0.5, "seed": 1}).flat())
    write_asked(tmp_path, methods=["fedavg", "fedper"], settings={"seeds": 2})
    found = {one.label: one.command for one in repeats(read_results([tmp_path]))}
    assert len(found) == 4
    assert found["fedavg"] == found["fedper, lr=0.01"] == "tailor compare fedavg fedper seeds=2"
    assert found["fedper, lr=0.5"] == "tailor run fedper lr=0.5 seed=1"
    assert found["local"] == "tailor run local lr=0.25"


ODD = (None, "words", -1, True, [], {}, ["a"], [None], {"a": "b"}, {"a": ["b"]}, {1: [2]}, [[]])


def test_what_was_asked_for_and_makes_no_sense_gives_a_page_all_the_same(tmp_path: Path) -> None:
    lines, _ = plan_sweep("fedavg", {"lr": [0.1, 0.2]}, {})
    write_configs(tmp_path, lines, (0, 1))
    sound = {"values": {"lr": [0.1, 0.2]}, "settings": {"seeds": 2}}
    for whole in ({"method": "fedavg", **sound}, {"methods": ["fedavg"], **sound}):
        for key in whole:
            for odd in ODD:
                write_asked(tmp_path, **{**whole, key: odd})
                assert page_data(read_results([tmp_path]))["repeats"]
    (tmp_path / "asked.yaml").write_text("{")
    assert page_data(read_results([tmp_path]))["missing"] == []


def test_what_no_single_command_makes_has_a_command_each(tmp_path: Path) -> None:
    configs = [configure("fedavg", {"lr": lr, "rounds": rounds}).flat() for lr, rounds in ((0.1, 3), (0.2, 4))]
    configs.append(configure("ditto", {"seed": 4}).flat())
    for place, config in enumerate(configs):
        write_config(tmp_path / str(place), config)
    found = [repeated(shlex.split(one.command)[1:]) for one in repeats(read_results([tmp_path]))]
    assert found == [[config] for config in configs]


def test_complete_configurations_are_those_on_disk(tmp_path: Path) -> None:
    config = configure("fedper", {"data": "csv:ü.csv"}).flat()
    [one] = repeats(read_results([write_config(tmp_path / "a", config)]))
    assert yaml.safe_load(one.config) == config


def test_a_run_of_a_method_that_is_not_installed_or_of_another_version_has_a_command_all_the_same(
    tmp_path: Path,
) -> None:
    foreign = make_run(tmp_path / "a", "my.package:Mine", strength=3, rounds=30, clients=5)
    [one] = repeats(read_results([foreign]))
    assert set(shlex.split(one.command)[2:]) == {"my.package:Mine", "strength=3", "clients=5"}
    older = make_run(tmp_path / "b", "fedavg", forgotten=True, lr=0.5)
    [one] = repeats(read_results([older]))
    assert set(shlex.split(one.command)[3:]) == {"forgotten=true", "lr=0.5"}


def test_common_settings_are_what_all_have_alike_and_is_no_default(tmp_path: Path) -> None:
    lines, seeds = plan_comparison(["fedavg", "fedper"], {"clients": 20, "rounds": 30, "lr": 0.5, "seeds": 2})
    write_configs(tmp_path, lines, seeds)
    write_config(tmp_path / "other", configure("fedavg", {"clients": 20, "lr": 0.25}).flat())
    assert common_settings(read_results([tmp_path])) == {"clients": "20"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"column": "lr0.001", "methods": "fedavg,sigmoid", "seeds": [4, 7]},
        {"seeds": 1, "rounds": 3, "data": "file:my data.st", "clients": 20},
        {"column": "lr0.001", "figure": "best", "evaluate_every": 1},
    ],
)
def test_the_command_of_a_study_gives_the_same_cells_again(tmp_path: Path, given: Flat) -> None:
    name = "pmixfed/figure5"
    plan = read_options(name, given)
    for cell in plan.cells:
        write_config(tmp_path / cell.folder, cell.config.flat())
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(plan.options()))
    results = read_results([tmp_path])
    assert results.kind == "study"
    verb, study, *pairs = the_command(results)
    assert (verb, study) == ("reproduce", name)
    assert read_options(study, read_settings(pairs)) == plan


# What tells runs apart beside their names.


def test_methods_side_by_side_tell_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    configs = {"fedper": {"rounds": 3, "personal_layers": 2}, "local": {"rounds": 30, "lr": 0.5, "device": "cpu"}}
    for name, chosen in configs.items():
        write_config(tmp_path / name, configure(name, chosen).flat())
    usual = str(configure("fedper", {}).flat()["lr"])
    found = read_results([tmp_path / name for name in configs])
    assert untold(found.entries) == {"rounds": ["3", "30"], "lr": [usual, "0.5"]}
    [table] = [one for one in tables_of(found) if one.key == "differences"]
    assert [head.name for head in table.heads] == ["", "rounds", "lr"]
    assert [[cell.value for cell in row] for row in table.rows] == [["fedper", 3, float(usual)], ["local", 30, 0.5]]


def test_seeds_are_told_where_none_is_common(tmp_path: Path) -> None:
    for method, seeds in (("fedper", (1, 2)), ("local", (0,)), ("ditto", (0, 1))):
        for seed in seeds:
            write_config(tmp_path / method / f"seed-{seed}", configure(method, {"seed": seed}).flat())
    folders = [tmp_path / name for name in ("fedper", "local", "ditto")]
    assert untold(read_results(folders).entries) == {"seed": ["[1, 2]", "0", "[0, 1]"]}
    assert untold(read_results(folders[::2]).entries) == {}


def test_what_names_and_methods_say_is_not_said_again(tmp_path: Path) -> None:
    for number, lr in enumerate((0.1, 0.2)):
        write_config(tmp_path / "lr" / str(number), configure("fedavg", {"lr": lr}).flat())
    for method in ("fedavg", "fedavg-ft"):  # differ in what a preset sets
        write_config(tmp_path / "cmp" / method, configure(method, {}).flat())
    for name in ("lr", "cmp"):
        assert untold(read_results([tmp_path / name]).entries) == {}
        assert "differences" not in {table.key for table in tables_of(read_results([tmp_path / name]))}
