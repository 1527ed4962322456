"""The command: what it prints, what it refuses, and with which exit status."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailorfl import __version__
from tailorfl.cli import main

QUICK = ("clients=4", "clients_per_round=2", "samples_per_client=20", "rounds=2", "local_epochs=1", "device=cpu")


@dataclass
class Said:
    """What a command said, and its exit status."""

    status: int
    out: str
    err: str


Tailor = Callable[..., Said]


@pytest.fixture
def tailor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tailor]:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAILOR_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    root, package = logging.getLogger(), logging.getLogger("tailorfl")
    handlers, levels = list(root.handlers), (root.level, package.level)

    def command(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["tailor", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code, said = ended.value.code, capsys.readouterr()
        return Said(0 if code is None else int(code), said.out, said.err)

    yield command
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    package.setLevel(levels[1])


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("run nope", "unknown method 'nope'; allowed: apfl"),
        ("run", "no method is named"),
        ("run rounds=3", "no method is named"),
        ("run nowhere:X", "method nowhere:X"),
        ("run fedper lrr=3", "unknown key 'lrr' for fedper; did you mean lr?"),
        ("run fedper word", "'word' is not a setting"),
        ("run fedper lr=abc rounds=-1", "rounds=-1"),
        ("run fedper data=nope", "data=nope"),
        ("run fedper data=csv", "data=csv is not known"),
        ("run fedper data=csv:none.csv", "none.csv"),
        ("run fedper data=file:none.safetensors", "none.safetensors"),
        ("run fedper data=mnist", "data=mnist needs MNIST/raw/train-images"),
        ("run fedper data=mnist --data-dir .", "MNIST/raw/train-images"),
        ("run fedper partition=odd", "partition=odd"),
        ("run fedper classes_per_client=11", "classes_per_client=11"),
        ("run fedper clients=5000", "clients=5000"),
        ("run fedper clients=0", "clients=0"),
        ("run fedper clients_per_round=21", "clients_per_round=21"),
        ("run fedper new_clients=20", "new_clients=20"),
        ("run fedper network=odd", "unknown network 'odd'"),
        ("run fedper network=my_model:Missing", "my_model has no class 'Missing'"),
        ("run fedper network=my_model:Net", "my_model"),
        ("run fedper network_options={hiden:3}", "network 'mlp' has no option 'hiden:3'"),
        ("run fedper augment=spin", "augment=spin"),
        ("run fedper data=synthetic-regression partition=iid augment=flip", "augment=flip"),
        ("run fedper data=synthetic-regression partition=iid pixels=unit", "pixels=unit"),
        ("run fedper pixels=none", "pixels"),
        ("run fedper device=cuda:99", "device=cuda:99"),
        ("run fedper selection=per-class", "selection=per-class"),
        ("run fedper --config none.yaml", "none.yaml"),
        ("run fedper --out my_model.py/run", "my_model.py is not a folder"),
        ("run fedper --out .", "exists"),
        ("run --resume", "--resume needs --out"),
        ("run --resume --out none", "none holds no run to resume"),
        ("run fedper --resume --out .", "holds no run to resume"),
        ("run fedper --bogus", "--bogus"),
        ("compare", "no method is named"),
        ("compare fedavg fedavg", "method fedavg is named twice"),
        ("compare fedavg nope", "unknown method 'nope'"),
        ("compare fedavg fedper odd=1", "unknown key 'odd'"),
        ("compare fedavg fedper clients=5000", "clients=5000"),
        ("compare fedavg fedper --out my_model.py/runs", "my_model.py is not a folder"),
        ("methods nope", "unknown method 'nope'"),
        ("nope", "nope"),
        ("data nope", "nope"),
        ("data inspect partition=odd", "partition=odd"),
        ("data inspect alpha=0 partition=dirichlet", "alpha=0"),
        ("data inspect --picture my_model.py/a.png clients=3", "my_model.py"),
        ("data prepare", "name"),
        ("data prepare nope", "data=nope"),
        ("data prepare mnist", "no data folder to put mnist into"),
        ("data prepare digits --to my_model.py/f.safetensors", "my_model.py"),
        ("data prepare digits --limit 0", "--limit"),
        ("run fedper --out=", "--out is empty; allowed: the name of a file or folder"),
        ("data prepare digits --to=", "--to is empty"),
        ("flower app fedavg --to=", "--to is empty"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_nothing_is_written(
    tailor: Tailor, tmp_path: Path, arguments: str, named: str
) -> None:
    (tmp_path / "my_model.py").write_text("raise RuntimeError('broken')\n" if ":Net" in arguments else "x = 1\n")
    sys.modules.pop("my_model", None)
    before = everything_below(tmp_path)
    said = tailor(*arguments.split())
    assert said.status == 2
    assert named.lower() in said.err.lower()  # versions of typer differ in how they write an argument
    assert said.err.startswith("tailor: ")
    assert said.err.count("\n") == 1, said.err
    assert [path for path in everything_below(tmp_path) if "__pycache__" not in path] == before


def test_an_empty_name_among_others_is_refused(tailor: Tailor, tmp_path: Path) -> None:
    said = tailor("report", "run", "")
    assert (said.status, said.err) == (2, "tailor: RUN is empty; allowed: the name of a file or folder\n")
    assert everything_below(tmp_path) == []


def test_a_run_writes_its_results_where_it_says(tailor: Tailor, tmp_path: Path) -> None:
    said = tailor("run", "fedper", *QUICK)
    assert said.status == 0
    assert "results: runs/fedper-digits-seed0" in said.out
    assert "fedper: round 2 of 2" in said.err
    summary = json.loads((tmp_path / "runs/fedper-digits-seed0/summary.json").read_text())
    assert f"{100 * summary['personalized_accuracy']:.2f}" in said.out


def test_every_run_without_a_folder_gets_its_own(tailor: Tailor, tmp_path: Path) -> None:
    for _ in range(2):
        assert tailor("run", "local", *QUICK).status == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["local-digits-seed0", "local-digits-seed0-2"]


def test_a_quiet_run_prints_only_its_result(tailor: Tailor) -> None:
    said = tailor("run", "local", *QUICK, "-q")
    assert said.err == ""
    assert "local" in said.out


def test_settings_come_from_a_file_and_from_the_command(tailor: Tailor, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("method: fedper\nrounds: 5\nseed: 3\n")
    quick = [pair for pair in QUICK if not pair.startswith("rounds")]
    assert tailor("run", *quick, "--config", "study.yaml", "rounds=1", "--out", "run").status == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary["seed"]) == ("fedper", 1, 3)


def test_a_finished_run_is_shown_again_when_it_is_resumed(tailor: Tailor) -> None:
    first = tailor("run", "fedper", *QUICK, "--out", "run")
    again = tailor("run", "--resume", "--out", "run")
    assert (again.status, again.out) == (0, first.out)
    assert tailor("run", "fedper", "--resume", "--out", "run", "workers=1").out == first.out


@pytest.mark.parametrize(
    ("arguments", "named"), [("rounds=9", "rounds: 2 -> 9"), ("local", "method: fedper -> local"), ("odd=1", "'odd'")]
)
def test_a_run_is_not_resumed_with_other_settings(tailor: Tailor, arguments: str, named: str) -> None:
    tailor("run", "fedper", *QUICK, "--out", "run")
    said = tailor("run", arguments, "--resume", "--out", "run")
    assert said.status == 2
    assert named in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_is_there_needs_force(tailor: Tailor) -> None:
    assert tailor("run", "fedper", *QUICK, "--out", "run").status == 0
    assert "run exists" in tailor("run", "fedper", *QUICK, "--out", "run").err
    assert tailor("run", "fedper", *QUICK, "--out", "run", "--force").status == 0


def test_a_damaged_checkpoint_is_one_line(tailor: Tailor, tmp_path: Path) -> None:
    tailor("run", "fedper", *QUICK, "--out", "run")
    (tmp_path / "run/summary.json").unlink()
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    (checkpoint / "server.safetensors").write_bytes(b"rot")
    said = tailor("run", "--resume", "--out", "run")
    assert said.status == 2
    assert "run/checkpoints/round-000002 is damaged" in said.err
    assert said.err.count("\n") == 1


def test_a_full_disk_is_one_line(tailor: Tailor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = tailor("run", "local", *QUICK, "-q")
    assert (said.status, said.err) == (2, "tailor: [Errno 28] No space left on device\n")


def test_a_comparison_sets_methods_side_by_side(tailor: Tailor, tmp_path: Path) -> None:
    said = tailor("compare", "fedavg", "fedper", *QUICK, "personal_layers=2", "--out", "both")
    assert said.status == 0
    assert "results: both/comparison.csv" in said.out
    assert "picture: both/comparison.png" in said.out
    assert (tmp_path / "both/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "both/fedper/seed-0/summary.json").is_file()
    refused = tailor("compare", "fedavg", "local", *QUICK, "--out", "both")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "both holds results; allowed: another --out" in refused.err


def test_a_comparison_takes_in_a_method_when_it_is_resumed(tailor: Tailor, tmp_path: Path) -> None:
    tailor("compare", "fedavg", *QUICK, "--out", "both")
    said = tailor("compare", "fedavg", "local", *QUICK, "--out", "both", "--resume")
    assert said.status == 0
    assert len((tmp_path / "both/comparison.csv").read_text().splitlines()) == 3


def test_methods_are_listed_with_their_papers(tailor: Tailor) -> None:
    said = tailor("methods")
    assert said.status == 0
    for part in ("fedavg", "fedavg-ft", "fedper", "local", "McMahan et al. 2017", "Arivazhagan et al. 2019"):
        assert part in said.out


def test_the_options_of_a_method_are_listed_with_their_defaults(tailor: Tailor) -> None:
    said = tailor("methods", "fedper")
    assert "Share the body, keep the head" in said.out
    for key in ("personal_layers", "local_epochs", "clients_per_round", "heterogeneity"):
        assert key in said.out


def test_data_are_listed_with_what_is_missing(tailor: Tailor, tmp_path: Path) -> None:
    from tailorfl.data.sources.cifar import CIFAR100_FILES

    for name in CIFAR100_FILES:
        path = tmp_path / "datasets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    said = tailor("data", "list", "--data-dir", "datasets")
    assert said.status == 0
    assert "cifar-100-binary: present" in " ".join(said.out.split())
    assert "MNIST: missing" in said.out
    assert "csv:PATH" in said.out


def test_a_partition_is_shown_and_drawn(tailor: Tailor, tmp_path: Path) -> None:
    said = tailor("data", "inspect", "clients=3", "classes_per_client=4", "--picture", "split.png")
    assert said.status == 0
    assert "picture: split.png" in said.out
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    assert "3 clients" in said.out
    assert ["classes", "a", "client", "10", "4", "4", "4"] in [
        line.replace("│", " ").split() for line in said.out.splitlines()
    ]


def test_a_prepared_file_can_be_trained_on(tailor: Tailor, tmp_path: Path) -> None:
    said = tailor("data", "prepare", "digits", "--to", "small.safetensors", "--limit", "300")
    assert said.status == 0
    assert "data=file:small.safetensors" in said.out
    assert tailor("run", "fedavg", *QUICK, "data=file:small.safetensors", "--out", "run").status == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["data"] == "file:small.safetensors"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("report run --out run/config.yaml", "--out run/config.yaml is there and is not HTML by its name"),
        ("report run --out table.csv", "allowed: a new name, or a .html file to replace"),
        ("data prepare digits --to table.csv", "--to table.csv is there and is not safetensors"),
        ("data prepare file:small.safetensors --to small.safetensors", "--to small.safetensors is an input"),
        ("data inspect clients=3 --picture table.csv", "--picture table.csv is there and is not PNG"),
        ("data inspect data=folder:images --picture images/a/1.png", "--picture images/a/1.png is an input"),
        ("data inspect --picture images", "--picture images is a folder"),
        ("draw run --client 0 --out table.csv", "--out table.csv is there and is not PNG"),
    ],
)
def test_a_file_of_another_kind_or_an_input_is_not_replaced(
    tailor: Tailor, tmp_path: Path, arguments: str, named: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "images/a").mkdir(parents=True)
    files = {"run/config.yaml": "method: fedavg\n", "run/rounds.jsonl": '{"round": 1, "selected": []}\n'}
    files |= dict.fromkeys(("table.csv", "small.safetensors", "images/a/1.png"), "mine")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    said = tailor(*arguments.split())
    assert (said.status, said.err.count("\n")) == (2, 1), said.err
    assert named in said.err
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_what_a_command_wrote_before_is_replaced(tailor: Tailor, tmp_path: Path) -> None:
    for name in ("split.png", "small.safetensors"):
        (tmp_path / name).write_text("old")
    assert tailor("data", "inspect", "clients=3", "--picture", "split.png").status == 0
    assert tailor("data", "prepare", "digits", "--to", "small.safetensors", "--limit", "300").status == 0
    assert all((tmp_path / name).read_bytes() != b"old" for name in ("split.png", "small.safetensors"))


def test_the_version_is_printed(tailor: Tailor) -> None:
    said = tailor("--version")
    assert (said.status, said.out) == (0, f"tailorfl {__version__}\n")


def test_without_a_command_the_help_is_shown(tailor: Tailor) -> None:
    said = tailor()
    assert said.err == ""
    for name in ("run", "compare", "methods", "data"):
        assert name in said.out


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [(["--version"], 0, ""), (["run", "nope"], 2, "tailor: unknown method 'nope'")],
)
def test_the_module_runs_as_a_program_with_its_exit_status(
    arguments: list[str], status: int, line: str, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-m", "tailorfl", *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == (1 if line else 0)
