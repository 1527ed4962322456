"""Runs in tools that people have already: TensorBoard and MLflow."""

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import yaml

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import import_extra
from tailorfl.data.reason import reason
from tailorfl.errors import UserError
from tailorfl.study.config import Config
from tailorfl.study.folder import MLFLOW, MLFLOW_STORE, ROUNDS, TENSORBOARD, called, read_lines

log = logging.getLogger(__name__)

EXTRA = "log"
EXPERIMENT = "tailorfl"
ADDRESS = "MLFLOW_TRACKING_URI"
SUMMARY = "summary"  # before the names of figures of the whole run
DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}
AT_ONCE = 100  # settings that MLflow takes in one go
UNLESS_SET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # no news of who uses it
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # no chatter through the progress bar
    # MLflow would ask a server that is gone for four minutes, and the run would wait for it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}

Line = dict[str, Any]


class Logger(Protocol):
    """Where rounds go beside the run's own files. Any of these may raise; then it is not asked again."""

    def prepare(self) -> None:
        """Before runs in several processes begin: what only one of them may do."""

    def start(self, config: Config, resumed: bool) -> int:
        """Begin, or go on where the run was resumed; the last round that is there already."""

    def line(self, line: Line) -> None:
        """A round has ended."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run has ended."""

    def close(self, failed: bool) -> None:
        """Nothing more is to come: the run has ended, was stopped, or failed."""


class Logs(AbstractContextManager["Logs"]):
    """The loggers of one run; to be called with every line, and told the summary at the end.

    They begin with the first line, because before it a run may still be refused. They are then given all rounds that
    ``rounds.jsonl`` has and they lack: those before a restart too, also if nothing was logged then.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: Config,
        folder: Path,
        resume: bool = False,
        watch: Callable[[Line], None] = lambda line: None,
    ) -> None:
        self.config, self.folder, self.resume, self.watch = config, folder, resume, watch
        self.loggers: dict[str, Logger] = {name: find_logger(name)(folder) for name in dict.fromkeys(names)}
        self.done: dict[str, int] = {}  # the last round that each has; who is missing has not begun

    def __call__(self, line: Line) -> None:
        self.watch(line)
        self._all(lambda name: self._catch_up(name, line))

    def end(self, summary: dict[str, Any] | None) -> None:
        """The run has ended, or was stopped, then without a summary."""
        if summary is not None:
            self._all(lambda name: self._catch_up(name))
            self._all(lambda name: self.loggers[name].end(summary))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        self._all(lambda name: self.loggers[name].close(failed) if name in self.done else None)

    def _catch_up(self, name: str, *lines: Line) -> None:
        if name not in self.done:
            self.done[name] = self.loggers[name].start(self.config, self.resume)
            lines = tuple(read_lines(self.folder / ROUNDS))
        for one in lines:
            if one["round"] > self.done[name]:
                self.loggers[name].line(one)
                self.done[name] = one["round"]

    def _all(self, do: Callable[[str], None]) -> None:
        """A run of days must not end because a logger fails: that is said once, and it is left out from then on."""
        for name in list(self.loggers):
            try:
                do(name)
            except Exception as error:  # whatever a library, a disk or a server comes up with
                del self.loggers[name]
                log.warning("--log %s failed, nothing more goes there: %s", name, reason(error))


class TensorBoard:
    """Event files in the run's folder.

    They are written anew when a run goes on: what is in them is in ``rounds.jsonl`` too, and no round is there twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / TENSORBOARD
        import_extra("tensorboard", EXTRA, "--log tensorboard")
        self.module = import_extra("torch.utils.tensorboard", EXTRA, "--log tensorboard")

    def prepare(self) -> None:
        pass

    def start(self, config: Config, resumed: bool) -> int:
        shutil.rmtree(self.folder, ignore_errors=True)
        # The step to purge from is for a TensorBoard that has read the old files and is still running.
        self.writer = self.module.SummaryWriter(str(self.folder), purge_step=0)
        self.writer.add_text("config", f"```yaml\n{yaml.safe_dump(config.flat(), sort_keys=False)}```")
        return 0

    def line(self, line: Line) -> None:
        self._add(line["round"], figures(line))

    def end(self, summary: dict[str, Any]) -> None:
        self._add(summary["rounds"], figures(summary, SUMMARY))

    def close(self, failed: bool) -> None:
        self.writer.close()

    def _add(self, step: int, found: Iterable[tuple[str, float]]) -> None:
        for name, value in found:
            self.writer.add_scalar(name if "/" in name else f"{topic(name)}/{name}", value, step)
        self.writer.flush()


def topic(name: str) -> str:
    """Below what TensorBoard shows a figure: what comes before the slash is a section there."""
    words = {"accuracy": "accuracy", "gap": "accuracy", "loss": "loss", "bytes": "traffic", "seconds": "time"}
    return next((topic for word, topic in words.items() if word in name), "rounds")


class MLflow:
    """A run of MLflow: on the server that MLFLOW_TRACKING_URI names, else in a database in the run's or study's folder.

    ``mlflow.json`` keeps its name there. When a run goes on, rounds that MLflow has are not sent again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, ""
        for key, value in UNLESS_SET.items():
            os.environ.setdefault(key, value)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of every time that it asks a server again
        self.mlflow = import_extra("mlflow", EXTRA, "--log mlflow")
        self.entities = import_extra("mlflow.entities", EXTRA, "--log mlflow")
        if os.environ.get(ADDRESS):
            self._check_address(os.environ[ADDRESS])
        else:
            import_extra("sqlalchemy", EXTRA, f"--log mlflow without {ADDRESS}")
            import_extra("alembic", EXTRA, f"--log mlflow without {ADDRESS}")

    def _check_address(self, address: str) -> None:
        """Refuse what can never work. A database is not asked: it would be made."""
        if urlsplit(address).scheme not in DATABASES:
            try:
                self.mlflow.MlflowClient()
            except self.mlflow.MlflowException as error:
                raise UserError(f"{ADDRESS}={address}: {reason(error)}") from error

    def prepare(self) -> None:
        """A database that is new is made by whoever comes first, and only one may."""
        if os.environ.get(ADDRESS):
            self.client = self.mlflow.MlflowClient()
            self._experiment()

    def start(self, config: Config, resumed: bool) -> int:
        folder = self.folder.resolve()
        self.client = self.mlflow.MlflowClient(
            tracking_uri=os.environ.get(ADDRESS) or f"sqlite:///{folder / MLFLOW_STORE}"
        )
        found = self._known() if resumed else None
        self.ended = found is not None and found.info.status == "FINISHED"
        if found is None:
            self._create(config)
            return 0
        self.run = found.info.run_id
        if not self.ended:
            self.client.update_run(self.run, status="RUNNING")
        return int(found.data.metrics.get("round", 0))

    def line(self, line: Line) -> None:
        # The round itself comes last: where it is, all of its figures are.
        found = [*((name, value) for name, value in figures(line) if name != "round"), ("round", line["round"])]
        self._send(line["round"], found)

    def end(self, summary: dict[str, Any]) -> None:
        if not self.ended:
            self._send(summary["rounds"], figures(summary, SUMMARY))
            self.client.set_terminated(self.run)
            self.ended = True

    def close(self, failed: bool) -> None:
        if not self.ended:
            self.client.set_terminated(self.run, "FAILED" if failed else "KILLED")

    def _known(self) -> Any:
        """The run of MLflow that this one has begun, if it is in this store."""
        try:
            return self.client.get_run(json.loads((self.folder / MLFLOW).read_text())["run_id"])
        except (OSError, ValueError, KeyError, self.mlflow.MlflowException):
            return None

    def _experiment(self) -> tuple[str, str]:
        """Its name and MLflow's number for it; made where there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        known = self.client.get_experiment_by_name(name)
        return name, known.experiment_id if known else self.client.create_experiment(name)

    def _create(self, config: Config) -> None:
        name, number = self._experiment()
        tags = {"folder": str(self.folder.resolve())}  # runs of several comparisons may have one name
        self.run = self.client.create_run(number, run_name=called(self.folder), tags=tags).info.run_id
        with whole_file(self.folder / MLFLOW) as temporary:
            temporary.write_text(json.dumps({"run_id": self.run, "experiment": name}) + "\n")
        settings = [self.entities.Param(key, str(value)) for key, value in config.flat().items()]
        for start in range(0, len(settings), AT_ONCE):
            self.client.log_batch(self.run, params=settings[start : start + AT_ONCE])

    def _send(self, step: int, found: Iterable[tuple[str, float]]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self.entities.Metric(_allowed(name), value, now, step) for name, value in found]
        self.client.log_batch(self.run, metrics=metrics)


LOGGERS: dict[str, Callable[[Path], Logger]] = {"mlflow": MLflow, "tensorboard": TensorBoard}


@contextmanager
def one_store(names: Sequence[str], folder: Path) -> Iterator[None]:
    """MLflow has all runs of a study in one database, in the study's folder, where no other place is named for them."""
    if "mlflow" not in names or os.environ.get(ADDRESS):
        yield
        return
    store = folder.resolve() / MLFLOW_STORE
    os.environ[ADDRESS] = f"sqlite:///{store}"  # other processes find it, too
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        if not any(folder.rglob(MLFLOW)):  # no run came to its first round
            store.unlink(missing_ok=True)


def prepare(names: Sequence[str]) -> None:
    """For runs in several processes; what fails here is said by the runs."""
    for name in dict.fromkeys(names):
        with suppress(Exception):
            find_logger(name)(Path()).prepare()


def find_logger(name: str) -> Callable[[Path], Logger]:
    if name not in LOGGERS:
        raise UserError(f"--log {name}: not known; allowed: {', '.join(LOGGERS)}")
    return LOGGERS[name]


def figures(line: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, float]]:
    """All finite numbers of a line, or of a summary, by their names; those of groups as ``group_accuracies/NAME``."""
    for key, value in line.items():
        name = f"{below}/{key}" if below else key
        if isinstance(value, Mapping):
            yield from figures(value, name)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield name, float(value)


def _allowed(name: str) -> str:
    """As MLflow takes it: no other signs than these."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
