"""A run on disk: a folder with its configuration, its rounds, its clients, its checkpoints and its summary."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tailorfl.data import FederatedData, save_partition
from tailorfl.data.atomic import durable_file
from tailorfl.data.occupied import occupied
from tailorfl.errors import UserError
from tailorfl.federation.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from tailorfl.federation.in_process import InProcess
from tailorfl.federation.rounds import Round
from tailorfl.study.build import Built, build, choose_device
from tailorfl.study.config import Config, read_config
from tailorfl.study.folder import (
    CHECKPOINTS,
    CLASSES,
    CLIENTS,
    CONFIG,
    MEASURES,
    NOTES,
    PARTITION,
    ROUNDS,
    SUMMARY,
    check_writable,
    clear,
    is_free,
    is_run,
    read_lines,
)
from tailorfl.study.summary import Totals, cold_start, round_line, shown, summarize, write_classes, write_clients

MAY_CHANGE = {"device", "workers", "stack_size", "engine"}  # where a run goes on, not what it computes


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
    replace: Callable[[], None] | None = None  # of a study that replaces what is there, and has looked at all folders
    totals: Totals = field(default_factory=Totals)

    def execute(self, resume: bool = False, force: bool = False) -> dict[str, Any] | None:
        """Run to the end and return the summary; None if it was stopped before."""
        if resume and (finished := self._finished()):
            return finished
        if self.replace is None:
            self.check_folder(resume, force)
        with occupied(self.folder):
            if self.replace is None:
                self.check_folder(resume, force)  # another command may just have ended there
            return self._execute(resume, force)

    def _execute(self, resume: bool, force: bool) -> dict[str, Any] | None:
        begun = resume and is_run(self.folder)  # else it was killed before it could begin
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
        if resume and is_run(self.folder):
            self._check_unchanged()
        elif not is_free(self.folder):
            if resume:
                raise UserError(f"{self.folder} holds no run to resume ({CONFIG} is missing)")
            if not force:
                raise UserError(f"{self.folder} exists; allowed: another --out, --resume to go on, --force to replace")
            if not is_run(self.folder):
                raise UserError(f"{self.folder} is not a run's folder; --force replaces only a run")
        check_writable(self.folder)

    def _check_unchanged(self) -> None:
        changes = forbidden_changes(read_config(self.folder / CONFIG), self.config)
        if changes:
            raise UserError(f"{self.folder} cannot be resumed, its configuration changed: {'; '.join(changes)}")

    def _finished(self) -> dict[str, Any] | None:
        path = self.folder / SUMMARY
        if not path.is_file() or not is_run(self.folder):
            return None
        self._check_unchanged()
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary

    def _begin(self, built: Built[Any], force: bool) -> int:
        if self.replace is not None:
            self.replace()
        if force and is_run(self.folder):
            clear(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_partition(built.data, self.folder / PARTITION)
        if self.make is None and not (built.data.regression or built.data.detection):
            write_classes(self.folder / CLASSES, built.data)
        # The configuration comes last: a folder that has one is a run that can be resumed.
        with durable_file(self.folder / CONFIG) as temporary:
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
                [record.number, data.names[client], *(shown(found[client]) for found in measures.values())]
                for client in next(iter(measures.values()))
            ]
            head = ["round", "client", *measures]
            self.totals.measures_bytes = self._add_rows(MEASURES, self.totals.measures_bytes, head, rows)

    def _noted(self, record: Round, data: FederatedData) -> None:
        """What a method writes down of the clients of a round, a row for each number."""
        rows = [
            [record.number, data.names[client], name, shown(value)]
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
        with durable_file(self.folder / SUMMARY) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def forbidden_changes(before: Config, now: Config) -> list[str]:
    """What a run that goes on would compute differently."""
    return [change for change in before.changes(now) if change.split(":")[0] not in MAY_CHANGE]


def restore(built: Built[Any], checkpoint: Checkpoint) -> None:
    """The server and the clients as they were when the checkpoint was written."""
    built.server.restore(checkpoint.server)
    built.federation.store.restore(checkpoint.clients)


def _reached(record: Round, target: float | None) -> bool:
    if target is None or record.evaluation is None or record.evaluation.validation is None:
        return False
    found = record.evaluation.validation.accuracy
    return found is not None and found >= target
