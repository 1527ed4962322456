"""A run on disk: a folder with its configuration, its rounds, its clients, its checkpoints and its summary."""

import csv
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from tailorfl.data import FederatedData, save_partition
from tailorfl.data.atomic import whole_file
from tailorfl.data.occupied import occupied
from tailorfl.errors import UserError
from tailorfl.federation.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from tailorfl.federation.evaluation import ClientScores
from tailorfl.federation.in_process import InProcess
from tailorfl.federation.rounds import Evaluation, Round
from tailorfl.federation.selection import Latecomers
from tailorfl.methods import Method
from tailorfl.study.build import Built, build, choose_device
from tailorfl.study.config import Config, read_config

log = logging.getLogger(__name__)

CONFIG, ROUNDS, CLIENTS, SUMMARY = "config.yaml", "rounds.jsonl", "clients.csv", "summary.json"
CLASSES = "classes.csv"  # only where clients are simulated and tell classes apart: who has how much of which
MEASURES = "measures.csv"  # only where a method measures something of its own
NOTES = "notes.csv"  # only where a method writes something down of the clients of a round
PARTITION, CHECKPOINTS, EXPORTS = "partition.safetensors", "checkpoints", "export"
ERROR = "error.txt"  # only in a study, where a run failed by a fault of the code or the machine: what happened
# Only where a run was logged elsewhere too: event files, which of MLflow's runs it is, and MLflow's own store.
TENSORBOARD, MLFLOW, MLFLOW_STORE = "tensorboard", "mlflow.json", "mlflow.db"
PAGE = "report.html"  # only at the end, where the extra for it is installed
FEDERATION = "federation"  # a folder; only where clients live on other machines: what the server knows of them
MAY_CHANGE = {"device", "workers", "stack_size", "engine"}  # where a run goes on, not what it computes


@dataclass
class Totals:
    """What adds up over the rounds, through restarts."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    diverged_updates: int = 0
    log_bytes: int = 0  # how far the rounds file reached
    measures_bytes: int = 0  # and that of a method's own measures
    notes_bytes: int = 0  # and that of what it wrote down
    ended: bool = False  # the last round is done; only the summary may be missing

    def add(self, record: Round) -> None:
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.seconds_training += record.seconds
        self.diverged_updates += len(record.diverged)
        self.seconds_evaluation += record.evaluation.seconds if record.evaluation else 0.0


@dataclass
class Run:
    """One experiment in its folder.

    ``watch`` is given every round as a line of ``rounds.jsonl``; ``stop`` is asked after every round.
    """

    config: Config
    folder: Path
    data_dir: Path | None = None
    watch: Callable[[dict[str, Any]], None] = lambda line: None
    stop: Callable[[], bool] = lambda: False
    make: Callable[[bool], Built[Any]] | None = None  # where clients live elsewhere; given whether the run has begun
    where: Callable[..., InProcess] = InProcess  # they live, if in this process
    totals: Totals = field(default_factory=Totals)

    def execute(self, resume: bool = False, force: bool = False) -> dict[str, Any] | None:
        """Run to the end and return the summary; None if it was stopped before."""
        if resume and (finished := self._finished()):
            return finished
        self.check_folder(resume, force)
        with occupied(self.folder):
            self.check_folder(resume, force)  # another command may just have ended there
            return self._execute(resume, force)

    def _execute(self, resume: bool, force: bool) -> dict[str, Any] | None:
        begun = resume and _is_run(self.folder)  # else it was killed before it could begin
        device = choose_device(self.config.experiment.device)
        checkpoint = newest_checkpoint(self.folder / CHECKPOINTS, device) if begun else None
        built = self.make(begun) if self.make else self._simulated(begun)
        done = self._continue(built, checkpoint) if begun else self._begin(built, force)
        last = self._last(built, done) if self.totals.ended else self._rounds(built, done)
        return None if last is None else self._finish(built, last)

    def _simulated(self, begun: bool) -> Built[InProcess]:
        return build(self.config, self.data_dir, self.folder / PARTITION if begun else None, self.where)

    def _last(self, built: Built[Any], done: int) -> Round:
        """The last round again, for a run that was killed between its last checkpoint and its summary."""
        loss = read_lines(self.folder / ROUNDS)[-1]["loss"]
        return Round(done, [], loss=loss, evaluation=built.loop.evaluate(done))

    def _rounds(self, built: Built[Any], done: int) -> Round | None:
        experiment = self.config.experiment
        for record in built.loop.run(done):
            self.totals.add(record)
            reached = _reached(record, experiment.target_accuracy)
            self.totals.ended = reached or record.number == experiment.rounds
            line = round_line(record, built.data) | self.config.method.about(record.number)
            self._measured(record, built.data)
            self._noted(record, built.data)
            self._append(line)
            self.watch(line)
            stopped = not self.totals.ended and self.stop()
            if self.totals.ended or stopped or record.number % experiment.checkpoint_every == 0:
                self._save(built, record.number)
            if self.totals.ended:
                return record
            if stopped:
                return None
        raise AssertionError("the last round ends the loop")

    def check_folder(self, resume: bool, force: bool) -> None:
        """Refuse what would lose or mix something, before anything is computed."""
        if resume and _is_run(self.folder):
            self._check_unchanged()
        elif not _is_free(self.folder):
            if resume:
                raise UserError(f"{self.folder} holds no run to resume ({CONFIG} is missing)")
            if not force:
                raise UserError(f"{self.folder} exists; allowed: another --out, --resume to go on, --force to replace")
            if not _is_run(self.folder):
                raise UserError(f"{self.folder} is not a run's folder; --force replaces only a run")
        check_writable(self.folder)

    def _check_unchanged(self) -> None:
        changes = forbidden_changes(read_config(self.folder / CONFIG), self.config)
        if changes:
            raise UserError(f"{self.folder} cannot be resumed, its configuration changed: {'; '.join(changes)}")

    def _finished(self) -> dict[str, Any] | None:
        path = self.folder / SUMMARY
        if not path.is_file() or not _is_run(self.folder):
            return None
        self._check_unchanged()
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary

    def _begin(self, built: Built[Any], force: bool) -> int:
        if force and _is_run(self.folder):
            clear(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_partition(built.data, self.folder / PARTITION)
        if self.make is None and not (built.data.regression or built.data.detection):
            write_classes(self.folder / CLASSES, built.data)
        # The configuration comes last: a folder that has one is a run that can be resumed.
        with whole_file(self.folder / CONFIG) as temporary:
            temporary.write_text(yaml.safe_dump(self.config.flat(), sort_keys=False))
        return 0

    def _continue(self, built: Built[Any], checkpoint: Checkpoint | None) -> int:
        if checkpoint is not None:
            restore(built, checkpoint)
            self.totals = Totals(**checkpoint.totals)
        # Rounds after the checkpoint are run again.
        totals = self.totals
        for name, length in (
            (ROUNDS, totals.log_bytes),
            (MEASURES, totals.measures_bytes),
            (NOTES, totals.notes_bytes),
        ):
            path = self.folder / name
            if length > (path.stat().st_size if path.is_file() else 0):
                raise UserError(f"{path} lacks rounds that its checkpoint counts; start again with --force")
            if path.is_file():
                os.truncate(path, length)
        return checkpoint.round if checkpoint else 0

    def _measured(self, record: Round, data: FederatedData) -> None:
        """A row a client for what a method measures of each, at every evaluation."""
        measures = record.evaluation.measures if record.evaluation else {}
        if measures:
            rows = [
                [record.number, data.names[client], *(_shown(found[client]) for found in measures.values())]
                for client in next(iter(measures.values()))
            ]
            head = ["round", "client", *measures]
            self.totals.measures_bytes = self._add_rows(MEASURES, self.totals.measures_bytes, head, rows)

    def _noted(self, record: Round, data: FederatedData) -> None:
        """What a method writes down of the clients of a round, a row for each number."""
        rows = [
            [record.number, data.names[client], name, _shown(value)]
            for client, numbers in sorted(record.notes.items())
            for name, value in numbers.items()
        ]
        if rows:
            head = ["round", "client", "name", "value"]
            self.totals.notes_bytes = self._add_rows(NOTES, self.totals.notes_bytes, head, rows)

    def _add_rows(self, name: str, written: int, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
        """Append to a table, with a head where it begins; its length in bytes."""
        with (self.folder / name).open("a", newline="") as file:
            writer = csv.writer(file)
            if not written:
                writer.writerow(head)
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _append(self, line: dict[str, Any]) -> None:
        with (self.folder / ROUNDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
            self.totals.log_bytes = file.tell()

    def _save(self, built: Built[Any], number: int) -> None:
        state = Checkpoint(number, built.server, built.federation.store.flat(), vars(self.totals).copy())
        save_checkpoint(self.folder / CHECKPOINTS, state)

    def _finish(self, built: Built[Any], last: Round) -> dict[str, Any]:
        assert last.evaluation is not None
        write_clients(self.folder / CLIENTS, built.data, last.evaluation, built.loop.late)
        summary = summarize(built, self.config, self.totals, last)
        lines = read_lines(self.folder / ROUNDS)
        summary |= cold_start(lines, built.loop.late) | self.config.method.summary(built.network, lines)
        with whole_file(self.folder / SUMMARY) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def forbidden_changes(before: Config, now: Config) -> list[str]:
    """What a run that goes on would compute differently."""
    return [change for change in before.changes(now) if change.split(":")[0] not in MAY_CHANGE]


def restore(built: Built[Any], checkpoint: Checkpoint) -> None:
    """The server and the clients as they were when the checkpoint was written."""
    built.server.restore(checkpoint.server)
    built.federation.store.restore(checkpoint.clients)


def round_line(record: Round, data: FederatedData) -> dict[str, Any]:
    """A round as a line of ``rounds.jsonl``."""
    line: dict[str, Any] = {
        "round": record.number,
        "selected": len(record.selected),
        "answered": len(record.answered),
        "diverged": [data.names[client] for client in record.diverged],
        **{fault: [data.names[client] for client in clients] for fault, clients in record.faults.items()},
        "loss": finite(record.loss),
        "lr": record.lr,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "seconds": round(record.seconds, 6),
    }
    if record.evaluation:
        line |= accuracies(record.evaluation, data.regression)
        line |= client_quantiles(record.evaluation.personalized, data.regression)
        line |= group_accuracies(record.evaluation, data)
        line |= {name: _mean(values.values()) for name, values in record.evaluation.measures.items()}
        line["seconds_evaluation"] = round(record.evaluation.seconds, 6)
    return line


def client_quantiles(scores: ClientScores, regression: bool) -> dict[str, float | None]:
    """The accuracies between which lie those of four fifths of the clients."""
    return {f"accuracy_p{share}": None if regression else scores.quantile(share / 100) for share in (10, 90)}


def _mean(values: Iterable[float]) -> float | None:
    """Over the clients of which there is something to measure."""
    there = [value for value in values if not math.isnan(value)]
    return finite(fmean(there)) if there else None


def _shown(value: float) -> float | str:
    return "" if math.isnan(value) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, a dictionary each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracies(evaluation: Evaluation, regression: bool) -> dict[str, float | None]:
    """The accuracies of one evaluation; a regression has losses only."""

    def accuracy(scores: ClientScores | None) -> float | None:
        return None if scores is None or regression else scores.accuracy

    personalized = evaluation.personalized
    found = {
        "personalized_accuracy": accuracy(personalized),
        "personalized_accuracy_std": None if regression else personalized.spread,
        "worst_decile_accuracy": None if regression else personalized.worst_decile,
        "personalized_loss": personalized.mean_loss,
        "global_accuracy": accuracy(evaluation.common),
        "global_loss": evaluation.common.mean_loss if evaluation.common else None,
        "validation_accuracy": accuracy(evaluation.validation),
        "validation_loss": evaluation.validation.mean_loss if evaluation.validation else None,
        "new_client_accuracy": accuracy(evaluation.new),
        "new_client_loss": evaluation.new.mean_loss if evaluation.new else None,
        "joining_accuracy": accuracy(evaluation.joining),
        "joining_loss": evaluation.joining.mean_loss if evaluation.joining else None,
        "training_accuracy": accuracy(evaluation.training),
    }
    found["participation_gap"] = _difference(found["personalized_accuracy"], found["new_client_accuracy"])
    found["out_of_sample_gap"] = _difference(found["training_accuracy"], found["personalized_accuracy"])
    for name, scores in evaluation.others.items():
        found |= {f"{name}_accuracy": accuracy(scores), f"{name}_loss": scores.mean_loss}
    return {key: finite(value) for key, value in found.items()}


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def cold_start(lines: Sequence[dict[str, Any]], late: Latecomers) -> dict[str, float | None]:
    """How well clients that join late were served at the last evaluation before their first round."""
    before = [line for line in lines if line["round"] < late.first and "joining_loss" in line]
    found = before[-1] if before else {}
    return {f"cold_start_{what}": found.get(f"joining_{what}") for what in ("accuracy", "loss")}


def group_accuracies(evaluation: Evaluation, data: FederatedData) -> dict[str, Any]:
    """In a federation of groups: the accuracy of each, and their mean."""
    if not data.groups:
        return {}
    found: dict[str, float | None] = {}
    for number, group in enumerate(data.groups):
        own = {client for client, its in enumerate(data.group_of) if its == number}
        found[group.source] = evaluation.personalized.of(own).accuracy
    tested = [accuracy for accuracy in found.values() if accuracy is not None]
    return {"group_mean_accuracy": sum(tested) / len(tested) if tested else None, "group_accuracies": found}


def group_networks(built: Built[Any], method: Method) -> dict[str, Any]:
    """In a federation of groups: the network of each, and what share of every layer of the global one it has."""
    whole, found = built.network, []
    for number, (group, network) in enumerate(zip(built.data.groups, built.federation.group_networks, strict=True)):
        own = {layer.name: network.size(layer.parameters) for layer in network.layers}
        found.append(
            {
                "group": group.source,
                "clients": built.data.group_of.count(number),
                "input_shape": list(group.input_shape),
                "classes": group.num_classes,
                "parameters": network.size(),
                "shared_parameters": network.size(method.shared(network)),
                "layers": {layer.name: own.get(layer.name, 0) / whole.size(layer.parameters) for layer in whole.layers},
            }
        )
    return {"group_networks": found} if found else {}


def metrics(data: FederatedData) -> dict[str, Any]:
    """Of detectors: which mean average precision their accuracy is, of all or of each group."""
    if not data.detection:
        return {}
    return {"metric": {group.source: group.metric for group in data.groups} if data.groups else data.metric}


def finite(value: float | None) -> float | None:
    """None in place of what JSON has no word for: the loss of a model that diverged."""
    return value if value is not None and math.isfinite(value) else None


def summarize(built: Built[Any], config: Config, totals: Totals, last: Round) -> dict[str, Any]:
    """The summary of a finished run."""
    assert last.evaluation is not None
    network, method = built.network, config.method
    return {
        "method": config.method_name,
        "data": config.experiment.data,
        "network": network.name,
        "seed": config.experiment.seed,
        "rounds": last.number,
        "clients": built.data.clients,
        **accuracies(last.evaluation, built.data.regression),
        **group_accuracies(last.evaluation, built.data),
        **metrics(built.data),
        **group_networks(built, method),
        "training_loss": finite(last.loss),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "parameters": network.size(),
        "shared_parameters": network.size(method.shared(network)),
        "diverged_updates": totals.diverged_updates,
        "seconds_training": round(totals.seconds_training, 3),
        "seconds_evaluation": round(totals.seconds_evaluation, 3),
        "device": str(network.device),
        "machine": machine(network.device),
    }


def machine(device: torch.device) -> str:
    """What the seconds of a run were measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def write_clients(path: Path, data: FederatedData, evaluation: Evaluation, late: Latecomers) -> None:
    """A row a client: its sizes, how well it is served, and its first round.

    A run that reached its target may end before some clients join: they never trained, and are new.
    """
    waiting = late.clients - set(evaluation.personalized.clients)
    strangers = [evaluation.new, evaluation.joining.of(set(waiting)) if evaluation.joining else None]
    first = dict.fromkeys(data.new_clients, "") | dict.fromkeys(late.clients, str(late.first))
    common = {} if evaluation.common is None else dict(_rows(evaluation.common))
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["client", "new", "train", "validation", "test", "accuracy", "loss", "global_accuracy", "joined"]
        writer.writerow(columns)
        for new, scores in ((0, evaluation.personalized), *((1, found) for found in strangers)):
            for client, (accuracy, loss) in _rows(scores) if scores else ():
                sizes = [len(data.rows(split).of(client)) for split in ("train", "validation", "test")]
                shared = "" if client not in common or data.regression else common[client][0]
                served = ["" if data.regression else accuracy, loss, shared]
                writer.writerow([data.names[client], new, *sizes, *served, first.get(client, "1")])


def write_classes(path: Path, data: FederatedData) -> None:
    """A row for each client and class of which it has training rows."""
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "class", "train"])
        counts = data.label_counts().tolist()
        for client, own in enumerate(counts):
            classes = data.of(client).classes
            rows = [(data.names[client], classes[label], rows) for label, rows in enumerate(own) if rows]
            writer.writerows(rows)


def _rows(scores: ClientScores) -> list[tuple[int, tuple[float | str, float | str]]]:
    rows = []
    for client, samples, correct, loss in zip(scores.clients, scores.samples, scores.correct, scores.loss, strict=True):
        rows.append((client, (correct / samples, loss / samples) if samples else ("", "")))
    return rows


def _reached(record: Round, target: float | None) -> bool:
    if target is None or record.evaluation is None or record.evaluation.validation is None:
        return False
    found = record.evaluation.validation.accuracy
    return found is not None and found >= target


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def _is_free(folder: Path) -> bool:
    """Nothing is there, or only what a run leaves that is killed while it begins."""
    beginnings = (PARTITION, f".{PARTITION}.", CLASSES, f".{CLASSES}.", f".{CONFIG}.", FEDERATION, ERROR)
    return not folder.exists() or (
        folder.is_dir() and all(path.name.startswith(beginnings) for path in folder.iterdir())
    )


def clear(folder: Path) -> None:
    """Delete what a run wrote; its configuration last, because without it the folder is not known for a run."""
    for part in (CHECKPOINTS, EXPORTS, TENSORBOARD):
        shutil.rmtree(folder / part, ignore_errors=True)
    beside, results = (PAGE, ERROR, MLFLOW, MLFLOW_STORE), (ROUNDS, MEASURES, NOTES, CLIENTS, SUMMARY)
    for name in (*beside, *results, CLASSES, PARTITION, CONFIG):
        (folder / name).unlink(missing_ok=True)


def remove(run: Path, above: Path) -> None:
    """Delete what a run wrote, and the folders below this one that are empty then."""
    with occupied(run):
        clear(run)
    for emptied in (run, *run.parents):
        if emptied == above or any(emptied.iterdir()):
            break
        emptied.rmdir()


def check_writable(folder: Path) -> None:
    """Refuse a folder that this user cannot write to, before anything is computed."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: {existing} is {_why(existing)}; allowed: another --out")


def _why(path: Path) -> str:
    return "read-only for this user" if path.is_dir() else "not a folder"
