"""Rounds in TensorBoard and MLflow: all figures, no round twice, and a run that outlives its loggers."""

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_runs import Tailor, pairs, rounds, small

from tailorfl.cli import main
from tailorfl.errors import UserError
from tailorfl.study import loggers
from tailorfl.study.folder import called
from tailorfl.study.loggers import LOGGERS, Logs, figures, topic
from tailorfl.study.run import Run

Points = dict[str, list[tuple[int, float]]]


def needs(package: str) -> Any:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"the package {package} is missing (extra log)")


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    found: Points = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tensor_util.make_ndarray(value.tensor))
                    section, _, name = value.tag.partition("/")
                    tag = name if section == topic(name) else value.tag
                    found.setdefault(tag, []).append((event.step, number))
    return found


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient()  # of the store in the environment
    return client, client.get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def mlflow_points(folder: Path) -> Points:
    client, run = mlflow_run(folder)
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


READERS: dict[str, Callable[[Path], Points]] = {"tensorboard": tensorboard_points, "mlflow": mlflow_points}
BOTH = [pytest.param(name, marks=needs(name)) for name in READERS]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where MLflow keeps what these tests log: to make such a file takes it seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'all.db'}"


@pytest.fixture(autouse=True)
def _store(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")


def execute(
    folder: Path, *names: str, rounds: int = 3, stop_after: int = 0, resume: bool = False, force: bool = False
) -> dict[str, Any] | None:
    """A run with loggers; it is asked to stop after so many of its rounds."""
    config, seen = small(rounds=rounds, evaluate_every=2), list[int]()
    with Logs(names, config, folder, resume, lambda line: seen.append(line["round"])) as logs:
        stop = lambda: len(seen) == stop_after  # noqa: E731
        summary = Run(config, folder, watch=logs, stop=stop).execute(resume, force)
        logs.end(summary)
    return summary


def expected(folder: Path) -> Points:
    """Every number of the rounds, and of the summary where there is one."""
    found: Points = {}
    for line in rounds(folder):
        for name, value in figures(line):
            found.setdefault(name, []).append((line["round"], value))
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text())
        found |= {name: [(summary["rounds"], value)] for name, value in figures(summary, "summary")}
    return found


def check(logged: Points, wanted: Points) -> None:
    assert {name: [step for step, _ in points] for name, points in logged.items()} == {
        name: [step for step, _ in points] for name, points in wanted.items()
    }
    for name, points in wanted.items():
        if "seconds" not in name:  # rounds that ran twice took another time
            assert [value for _, value in logged[name]] == pytest.approx([value for _, value in points], rel=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_every_number_of_every_round_and_of_the_summary_is_logged(name: str, tmp_path: Path) -> None:
    execute(tmp_path / "run", name)
    logged = READERS[name](tmp_path / "run")
    check(logged, expected(tmp_path / "run"))
    assert [step for step, _ in logged["loss"]] == [1, 2, 3]
    assert [step for step, _ in logged["personalized_accuracy"]] == [2, 3]
    assert "summary/personalized_accuracy" in logged


@pytest.mark.parametrize("name", BOTH)
def test_a_run_that_goes_on_has_no_round_twice_and_none_missing(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert execute(folder, name, rounds=4, stop_after=2) is None
    assert [step for step, _ in READERS[name](folder)["loss"]] == [1, 2]
    # As after a kill: the checkpoint is older than the last round that was logged, which runs again.
    newest = max((folder / "checkpoints").iterdir())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert execute(folder, name, rounds=4, resume=True) is not None
    check(READERS[name](folder), expected(folder))
    assert execute(folder, name, rounds=4, resume=True) is not None  # it is complete: nothing is added
    check(READERS[name](folder), expected(folder))


@pytest.mark.parametrize("name", BOTH)
def test_a_logger_that_comes_later_is_given_the_rounds_before(name: str, tmp_path: Path) -> None:
    execute(tmp_path / "run", rounds=3, stop_after=1)
    execute(tmp_path / "run", name, rounds=3, resume=True)
    check(READERS[name](tmp_path / "run"), expected(tmp_path / "run"))


@pytest.mark.parametrize("name", BOTH)
def test_a_run_that_is_replaced_is_logged_anew(name: str, tmp_path: Path) -> None:
    execute(tmp_path / "run", name, rounds=4)
    execute(tmp_path / "run", name, rounds=2, force=True)
    check(READERS[name](tmp_path / "run"), expected(tmp_path / "run"))


@needs("mlflow")
def test_mlflow_knows_a_run_that_failed_from_one_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, built: Any, number: int) -> None:
        raise RuntimeError("the code is at fault")

    for name, status in (("stopped", "KILLED"), ("failed", "FAILED")):
        with monkeypatch.context() as patch:
            if name == "failed":
                patch.setattr(Run, "_save", broken)
                with pytest.raises(RuntimeError):
                    execute(tmp_path / name, "mlflow", rounds=3)
            else:
                execute(tmp_path / name, "mlflow", rounds=3, stop_after=1)
        assert mlflow_run(tmp_path / name)[1].info.status == status


@needs("mlflow")
def test_an_address_of_mlflow_that_can_never_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://bar")
    with pytest.raises(UserError, match=r"^MLFLOW_TRACKING_URI=foo://bar: .*") as refused:
        execute(tmp_path / "run", "mlflow")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@needs("mlflow")
def test_mlflow_knows_the_settings_and_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    folder = tmp_path / "fast"
    execute(folder, "mlflow", stop_after=1)
    client, run = mlflow_run(folder)
    assert run.info.status == "KILLED"
    execute(folder, "mlflow", resume=True)
    _, again = mlflow_run(folder)
    assert (again.info.run_id, again.info.status, again.info.run_name) == (run.info.run_id, "FINISHED", "fast")
    assert client.get_experiment(again.info.experiment_id).name == "mine"
    assert (again.data.params["method"], again.data.params["samples_per_client"]) == ("fedper", "20")


@needs("mlflow")
@pytest.mark.slow
def test_without_a_server_mlflow_keeps_its_run_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    execute(tmp_path / "run", "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    check(mlflow_points(tmp_path / "run"), expected(tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_numbers_are_found_wherever_they_are_and_nothing_else() -> None:
    line = {"round": 3, "diverged": ["a"], "loss": None, "lr": float("nan"), "done": True, "name": "x"}
    line |= {"group_accuracies": {"a": 0.5, "b": None, "c": {"d": 2}}}
    assert dict(figures(line)) == {"round": 3, "group_accuracies/a": 0.5, "group_accuracies/c/d": 2}
    assert dict(figures({"loss": 1.5}, "summary")) == {"summary/loss": 1.5}


@needs("mlflow")
def test_mlflow_takes_names_with_any_signs(tmp_path: Path) -> None:
    logger = loggers.MLflow(tmp_path)
    logger.start(small(), False)
    logger.line({"round": 1, "group_accuracies": {"voc:a+b [ü]": 0.5}})
    assert mlflow_points(tmp_path)["group_accuracies/voc_a_b ___"] == [(1, 0.5)]


class Broken:
    """Fails at one of its tasks."""

    calls: list[str]

    def __init__(self, folder: Path, fails: str, calls: list[str]) -> None:
        self.fails, self.calls = fails, calls

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise ConnectionError("the server is gone\nsee its log")

    def start(self, config: Any, resumed: bool) -> int:
        self._do("start")
        return 0

    def line(self, line: Any) -> None:
        self._do("line")

    def end(self, summary: Any) -> None:
        self._do("end")

    def close(self, failed: bool) -> None:
        self._do("close")


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("start", ["start"]),
        ("line", ["start", "line"]),
        ("end", ["start", "line", "line", "end"]),
        ("close", ["start", "line", "line", "end", "close"]),
    ],
)
def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(
    fails: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="tailorfl")
    broken, sound = list[str](), list[str]()
    monkeypatch.setitem(LOGGERS, "broken", lambda folder: Broken(folder, fails, broken))
    monkeypatch.setitem(LOGGERS, "sound", lambda folder: Broken(folder, "", sound))
    assert execute(tmp_path / "run", "broken", "sound", rounds=2) is not None
    assert broken == calls
    assert sound == ["start", "line", "line", "end", "close"]
    said = [record.getMessage() for record in caplog.records if "--log" in record.getMessage()]
    assert said == ["--log broken failed, nothing more goes there: the server is gone"]


def test_a_run_that_is_refused_leaves_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setitem(LOGGERS, "sound", lambda folder: Broken(folder, "", calls))
    execute(tmp_path / "run", rounds=2)
    with pytest.raises(UserError, match="exists; allowed"):
        execute(tmp_path / "run", "sound", rounds=2)
    assert calls == []


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_package_that_is_missing_is_named_before_anything_runs(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"--log {name} needs the package {package}.*install tailorfl\[log\]"):
        execute(tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def test_the_command_takes_loggers_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[str]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LOGGERS, "sound", lambda folder: Broken(folder, "", calls))
    for arguments, status in ((["--log", "sound"], 0), (["--log", "sound", "--log", "wandb"], 2)):
        monkeypatch.setattr(
            sys, "argv", ["tailor", "run", "fedper", *pairs(rounds=2), "--out", str(status), *arguments]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == status
    assert calls == ["start", "line", "line", "end", "close"]
    assert "--log wandb: not known; allowed: mlflow, tensorboard" in capsys.readouterr().err
    assert not Path("2").exists()


@needs("tensorboard")
def test_every_run_of_a_study_is_logged_by_the_process_that_computes_it(
    study: Tailor, tmp_path: Path, quick_workers: None
) -> None:
    settings = ("fedavg", "local", *pairs(), "seeds=2", "-q", "--no-page")
    assert study("compare", *settings, "--jobs", "2", "--log", "tensorboard", "--out", "out")[0] == 0
    for method in ("fedavg", "local"):
        for seed in (0, 1):
            run = tmp_path / "out" / method / f"seed-{seed}"
            assert [step for step, _ in tensorboard_points(run)["loss"]] == [line["round"] for line in rounds(run)]
    status, _, err = study("compare", *settings, "--log", "paper", "--out", "other")
    assert (status, err) == (2, "tailor: --log paper: not known; allowed: mlflow, tensorboard\n")
    assert not (tmp_path / "other").exists()


@needs("mlflow")
def test_runs_of_a_study_are_side_by_side_in_one_mlflow(
    study: Tailor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    settings = ("fedavg", "local", *pairs(rounds=1), "-q", "--no-page", "--log", "mlflow", "--out", "out")
    assert study("compare", *settings, "--jobs", "2", "data_dir=x")[0] == 2
    assert not (tmp_path / "out").exists()
    assert study("compare", *settings, "--jobs", "2")[0] == 0
    assert study("compare", "ditto", *settings, "--resume")[0] == 0
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("mlflow.db")] == [Path("out/mlflow.db")]
    client = MlflowClient(f"sqlite:///{tmp_path / 'out/mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name(loggers.EXPERIMENT).experiment_id])
    assert sorted(run.info.run_name for run in found) == [f"out/{name}/seed-0" for name in ("ditto", "fedavg", "local")]
    assert {run.info.status for run in found} == {"FINISHED"}
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_runs_of_seeds_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    assert called(tmp_path / "mine") == "mine"
    assert called(tmp_path / "out/fedavg/seed-3") == "out/fedavg/seed-3"


def test_figures_that_belong_together_are_one_section_of_tensorboard() -> None:
    known = {
        "accuracy": ("personalized_accuracy", "accuracy_p10", "out_of_sample_gap"),
        "loss": ("loss", "personalized_loss"),
        "traffic": ("bytes_up", "bytes_down"),
        "time": ("seconds", "seconds_evaluation"),
        "rounds": ("selected", "answered", "lr", "round"),
    }
    for section, names in known.items():
        assert {topic(name) for name in names} == {section}


@needs("mlflow")
def test_a_new_database_of_mlflow_is_made_before_processes_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'new.db'}")
    loggers.prepare(["mlflow", "tensorboard"])
    assert (tmp_path / "new.db").is_file()
    assert MlflowClient().get_experiment_by_name(loggers.EXPERIMENT) is not None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'nowhere' / 'new.db'}")
    loggers.prepare(["mlflow"])  # what fails is for the runs to say
