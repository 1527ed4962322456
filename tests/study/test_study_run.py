"""What a run leaves on disk, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch
from study_runs import clients, execute, identical, rounds, small, tensors

from tailorfl.commands import again
from tailorfl.data import load_partition
from tailorfl.errors import UserError
from tailorfl.study import run as module
from tailorfl.study.build import build
from tailorfl.study.cells import Way
from tailorfl.study.config import read_config
from tailorfl.study.run import Run

SUMMARY_KEYS = {
    "method",
    "seed",
    "rounds",
    "clients",
    "personalized_accuracy",
    "personalized_accuracy_std",
    "worst_decile_accuracy",
    "global_accuracy",
    "new_client_accuracy",
    "bytes_up",
    "bytes_down",
    "parameters",
    "shared_parameters",
    "seconds_training",
    "seconds_evaluation",
}


def stopped(folder: Path, after: int, **settings: object) -> None:
    """A run that was asked to stop after some rounds."""
    seen: list[int] = []
    run = Run(small(**settings), folder, watch=lambda line: seen.append(line["round"]), stop=lambda: seen[-1] == after)
    assert run.execute() is None


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_summary_says_all_that_a_reader_needs(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedavg", new_clients=1)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    shares = [key for key in summary if "accuracy" in key and summary[key] is not None]
    assert {"personalized_accuracy", "worst_decile_accuracy", "global_accuracy", "new_client_accuracy"} <= set(shares)
    assert all(0 <= summary[key] <= 1 for key in shares)
    assert (summary["method"], summary["rounds"], summary["clients"], summary["seed"]) == ("fedavg", 3, 5, 0)
    assert summary["parameters"] == summary["shared_parameters"] == 64 * 8 + 8 + 8 * 10 + 10


def test_pixels_are_scaled_as_asked_for_after_a_resume_too(tmp_path: Path) -> None:
    found = [execute(tmp_path / pixels, pixels=pixels)["personalized_loss"] for pixels in ("standard", "unit")]
    assert found[0] != found[1]
    stopped(tmp_path / "stopped", 1, pixels="unit")
    again = Run(read_config(tmp_path / "stopped/config.yaml"), tmp_path / "stopped").execute(resume=True)
    assert again is not None
    assert again["personalized_loss"] == found[1]


def test_the_traffic_of_the_summary_is_that_of_all_rounds(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", "fedper")
    assert summary["shared_parameters"] == 64 * 8 + 8
    assert summary["bytes_up"] == summary["bytes_down"] == 3 * 3 * 4 * (64 * 8 + 8)
    assert sum(line["bytes_up"] for line in rounds(tmp_path / "run")) == summary["bytes_up"]


def test_a_method_without_a_global_model_has_no_global_accuracy(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", "local")
    assert (summary["global_accuracy"], summary["new_client_accuracy"], summary["bytes_up"]) == (None, None, 0)


def test_there_is_a_line_a_round_and_a_row_a_client(tmp_path: Path) -> None:
    execute(tmp_path / "run", evaluate_every=2, new_clients=1)
    lines, rows = rounds(tmp_path / "run"), clients(tmp_path / "run")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert ["personalized_accuracy" in line for line in lines] == [False, True, True]
    assert sorted(row["client"] for row in rows) == ["0", "1", "2", "3", "4"]
    assert [row["new"] for row in rows].count("1") == 1


def test_the_rows_of_clients_average_to_the_summary(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", partition="dirichlet", samples_per_client=None)
    rows = clients(tmp_path / "run")
    tests = [int(row["test"]) for row in rows]
    right = sum(float(row["accuracy"]) * test for row, test in zip(rows, tests, strict=True))
    assert len(set(tests)) > 1
    assert summary["personalized_accuracy"] == pytest.approx(right / sum(tests))


def test_the_partition_of_a_run_is_on_disk(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    assert torch.equal(
        load_partition(tmp_path / "run/partition.safetensors").train.index, build(small()).data.train.index
    )


def test_a_configuration_replays_to_the_same_results(tmp_path: Path) -> None:
    execute(tmp_path / "first", evaluate_every=1)
    assert Run(read_config(tmp_path / "first/config.yaml"), tmp_path / "second").execute() is not None
    assert identical(tmp_path / "first", tmp_path / "second")


def test_another_seed_gives_other_results(tmp_path: Path) -> None:
    execute(tmp_path / "first")
    execute(tmp_path / "second", seed=1)
    assert not identical(tmp_path / "first", tmp_path / "second")


def test_a_regression_has_losses_and_no_accuracies(tmp_path: Path) -> None:
    own = {"data": "synthetic-regression", "partition": "natural", "samples": 12, "samples_per_client": None}
    summary = execute(tmp_path / "run", "fedavg", **own, evaluate_every=1, new_clients=1)
    accuracies = {key: value for key, value in summary.items() if "accuracy" in key}
    assert set(accuracies.values()) == {None}
    assert summary["personalized_loss"] > 0
    assert summary["new_client_loss"] > 0
    assert all(row["accuracy"] == "" and float(row["loss"]) > 0 for row in clients(tmp_path / "run"))


OUTPUTS = """
import math
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, outputs=10, form="rows"):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(math.prod(input_shape), outputs)
        self.form = form

    def forward(self, inputs):
        outputs = self.head(self.flat(inputs))
        forms = {"rows": outputs, "pair": (outputs, 1), "planes": outputs[:, None], "one": outputs.squeeze(-1)}
        return forms[self.form]
"""
REGRESSION = {"data": "synthetic-regression", "partition": "natural", "samples_per_client": None}


@pytest.fixture
def network_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "outputs_of_mine.py").write_text(OUTPUTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outputs_of_mine", raising=False)
    return "outputs_of_mine:Net"


@pytest.mark.parametrize(
    ("options", "settings", "line"),
    [
        ({"outputs": 7}, {}, "gives outputs of shape 2x7 for two samples, .* one of 10 classes; allowed: 2x10"),
        ({"outputs": 20}, {}, "shape 2x20 .*; allowed: 2x10"),
        ({"form": "planes"}, {}, "shape 2x1x10 .*; allowed: 2x10"),
        ({"form": "pair"}, {}, "gives a tuple; allowed: one tensor of outputs"),
        ({"outputs": 3}, REGRESSION, "shape 2x3 for two samples, .* is a number; allowed: 2x1"),
    ],
)
def test_a_network_with_other_outputs_than_the_data_need_is_refused(
    tmp_path: Path, network_of_mine: str, options: dict, settings: dict, line: str
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        execute(tmp_path / "run", "fedavg", network=network_of_mine, network_options=options, **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"outputs": 1}, {"outputs": 1, "form": "one"}])
def test_a_regression_takes_a_number_a_sample(tmp_path: Path, network_of_mine: str, options: dict) -> None:
    summary = execute(tmp_path / "run", "fedavg", network=network_of_mine, network_options=options, **REGRESSION)
    assert summary["personalized_loss"] > 0


def test_a_regression_is_not_trained_in_half_precision(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"precision=mixed: outputs have three digits.*; allowed: float32, float64"):
        execute(tmp_path / "run", "fedavg", **REGRESSION, precision="mixed")
    assert not (tmp_path / "run").exists()


def test_a_run_in_half_precision_says_so_and_goes_on_as_it_began(tmp_path: Path) -> None:
    wide, mixed = (execute(tmp_path / precision, "fedavg", precision=precision) for precision in ("float32", "mixed"))
    assert mixed["personalized_loss"] == pytest.approx(wide["personalized_loss"], rel=0.05)
    assert mixed["personalized_loss"] != wide["personalized_loss"]
    assert read_config(tmp_path / "mixed" / "config.yaml").experiment.precision == "mixed"
    stopped(tmp_path / "resumed", 2, precision="mixed")
    resumed = Run(small(precision="mixed"), tmp_path / "resumed").execute(resume=True)
    assert resumed is not None
    assert resumed["personalized_loss"] == execute(tmp_path / "whole", precision="mixed")["personalized_loss"]


def test_a_single_class_is_refused_unless_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("a,b,kind\n" + "".join(f"{row},{row % 7},oak\n" for row in range(200)))
    own = {"data": f"csv:{tmp_path / 'one.csv'}", "partition": "iid"}
    with pytest.raises(
        UserError, match=r"one\.csv has one class, 'oak'.*; allowed: two or more, or class_names"
    ) as caught:
        execute(tmp_path / "run", "fedavg", **own)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert execute(tmp_path / "run", "fedavg", **own, class_names=["oak", "elm"])["personalized_loss"] >= 0


def test_a_run_stops_at_its_target(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", target_accuracy=0.05, validation_fraction=0.2, evaluate_every=2, rounds=9)
    assert summary["rounds"] == 2
    assert len(rounds(tmp_path / "run")) == 2
    assert summary["validation_accuracy"] >= 0.05


def test_what_diverges_is_written_as_null_and_counted(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", lr=1e30, evaluate_every=1)
    text = (tmp_path / "run/rounds.jsonl").read_text() + (tmp_path / "run/summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert summary["diverged_updates"] == 9
    assert [len(line["diverged"]) for line in rounds(tmp_path / "run")] == [3, 3, 3]


def test_a_finished_run_that_is_resumed_returns_its_summary_and_changes_nothing(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run")
    before = files(tmp_path / "run")
    assert Run(small(), tmp_path / "run").execute(resume=True) == summary
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_whose_configuration_changed_is_not_resumed(tmp_path: Path, finished: bool) -> None:
    if finished:
        execute(tmp_path / "run")
    else:
        stopped(tmp_path / "run", after=1)
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=r"configuration changed: .*rounds: 3 -> 7; lr: 0.01 -> 0.5") as caught:
        Run(small(rounds=7, lr=0.5, workers=2), tmp_path / "run").execute(resume=True)
    assert "workers" not in str(caught.value)
    assert files(tmp_path / "run") == before


def test_a_run_may_go_on_with_other_workers_and_another_stack_size(tmp_path: Path) -> None:
    execute(tmp_path / "whole")
    stopped(tmp_path / "run", after=2)
    changed = small(workers=1, stack_size=2, device="auto", engine="stacked")
    assert Run(changed, tmp_path / "run").execute(resume=True) is not None
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert one.keys() == other.keys()
    assert all(torch.allclose(tensor, other[name], atol=1e-5) for name, tensor in one.items())


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=r"run exists; allowed: another --out, --resume to go on, --force"):
        Run(small(), tmp_path / "run").execute()
    assert files(tmp_path / "run") == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert execute(tmp_path)["rounds"] == 3


def test_force_replaces_a_run(tmp_path: Path) -> None:
    execute(tmp_path / "run", rounds=4)
    execute(tmp_path / "fresh")
    assert Run(small(), tmp_path / "run").execute(force=True) is not None
    assert identical(tmp_path / "run", tmp_path / "fresh")
    assert files(tmp_path / "run").keys() == files(tmp_path / "fresh").keys()


def test_how_to_go_on_is_said_with_what_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_DATA", raising=False)
    assert again(Way()) == ""
    assert again(Way(Path("my data"), loggers=("mlflow", "tensorboard"))) == (
        " --data-dir 'my data' --log mlflow --log tensorboard"
    )
    monkeypatch.setenv("TAILOR_DATA", "my data")
    assert again(Way(Path("my data"))) == ""


def test_force_does_not_replace_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError, match="not a run's folder"):
            Run(small(), folder).execute(force=True)
    assert files(tmp_path) == {"thesis.txt": b"years of work"}


def test_force_keeps_the_old_run_when_the_new_one_cannot_begin(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match="classes_per_client=11"):
        Run(small(classes_per_client=11), tmp_path / "run").execute(force=True)
    assert files(tmp_path / "run") == before


def test_what_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds no run to resume"):
        Run(small(), tmp_path).execute(resume=True)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(UserError, match=r"file is not a folder; allowed: another --out"):
        Run(small(), tmp_path / "file/run").execute()
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    with pytest.raises(UserError, match="read-only for this user"):
        Run(small(), tmp_path / "run").execute()
    assert files(tmp_path) == {"file": b""}


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_run_whose_rounds_were_lost_is_not_resumed(tmp_path: Path, harm: str) -> None:
    stopped(tmp_path / "run", after=2)
    path = tmp_path / "run/rounds.jsonl"
    if harm == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=r"rounds.jsonl lacks rounds"):
        Run(small(), tmp_path / "run").execute(resume=True)


def test_a_damaged_checkpoint_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "run", after=2)
    [folder] = (tmp_path / "run/checkpoints").iterdir()
    (folder / "server.safetensors").write_bytes(b"rot")
    before = files(tmp_path / "run")
    monkeypatch.setattr(module, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(UserError, match=r"round-000002 is damaged"):
        Run(small(), tmp_path / "run").execute(resume=True)
    assert files(tmp_path / "run") == before


def test_a_run_goes_on_from_the_older_checkpoint_when_the_damaged_one_is_deleted(tmp_path: Path) -> None:
    execute(tmp_path / "whole", checkpoint_every=1, rounds=5)
    stopped(tmp_path / "run", after=4, checkpoint_every=1, rounds=5)
    newest = sorted((tmp_path / "run/checkpoints").iterdir())[-1]
    assert newest.name == "round-000004"
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert Run(small(checkpoint_every=1, rounds=5), tmp_path / "run").execute(resume=True) is not None
    assert identical(tmp_path / "whole", tmp_path / "run")
