"""The server: our round loop over a Flower federation, in a run's folder, from where it goes on after a crash."""

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid

from tailorfl.data.atomic import durable_file
from tailorfl.errors import UserError
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.flower.directory import Directory, Rules, gather
from tailorfl.flower.federation import OnFlower
from tailorfl.flower.lock import alone
from tailorfl.flower.node import experiment_of
from tailorfl.flower.outline import ordered, outline
from tailorfl.flower.project import RunConfig
from tailorfl.flower.roll import MODELS, SITES, Roll, handed_over, served
from tailorfl.study.build import Built, build_on, cast, latecomers
from tailorfl.study.config import Config
from tailorfl.study.folder import CHECKPOINTS, FEDERATION, is_run
from tailorfl.study.run import Run, restore

log = logging.getLogger(__name__)

LOCK = ".server.lock"  # held by a server that is under way
ORPHANED = 60.0  # seconds that a server may live on after its SuperLink was killed
DEFAULTS = RunConfig(experiment="", out="").entries()  # of all keys


@dataclass(frozen=True)
class ServerOptions:
    """The run configuration, beside the experiment."""

    out: Path
    nodes: int
    wait: float
    rules: Rules

    @staticmethod
    def read(given: Mapping[str, Any]) -> "ServerOptions":
        unknown = [key for key in given if key not in DEFAULTS]
        if unknown:
            raise UserError(f"run configuration: unknown key {unknown[0]!r}; allowed: {', '.join(DEFAULTS)}")
        if not given.get("out"):
            raise UserError('run configuration: no folder for the results; allowed: out="FOLDER"')
        rules = Rules(
            deadline=_number(given, "deadline"),
            min_answers=int(_number(given, "min-answers")),
            max_update_norm=_number(given, "max-update-norm"),
            max_samples=int(_number(given, "max-samples")),
        )
        if rules.deadline <= 0:
            raise UserError(f"run configuration: deadline={rules.deadline:g}; allowed: more than 0 seconds")
        return ServerOptions(Path(str(given["out"])), int(_number(given, "nodes")), _number(given, "wait"), rules)


def _number(given: Mapping[str, Any], key: str) -> float:
    value = given.get(key, DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"run configuration: {key}={value!r}; allowed: a number, 0 or more")
    return value


def serve(grid: Grid, context: Context) -> dict[str, Any] | None:
    """Run the experiment of the run configuration to its end; go on where an earlier run of it stopped."""
    config, options = experiment_of(context.run_config), ServerOptions.read(context.run_config)
    taken = (
        f"another run is under way in {options.out}; allowed: to wait for its end ('flwr list' shows it), to stop it "
        "('flwr stop'), another out"
    )
    with alone(options.out / FEDERATION / LOCK, taken, ORPHANED):
        return _serve(grid, config, options)


def _serve(grid: Grid, config: Config, options: ServerOptions) -> dict[str, Any] | None:
    begun = is_run(options.out)
    made: list[Built[OnFlower]] = []  # nothing, if the run had ended before

    def make(begun: bool) -> Built[OnFlower]:
        made.append(_made(grid, config, options, begun))
        return made[-1]

    if begun:
        log.info("going on in %s", options.out)
    summary = Run(config, options.out, watch=_say, make=make).execute(resume=begun)
    if summary is not None:
        _hand_over(lambda: made[-1] if made else _ended(make(True), options.out), options.out)
    return summary


def _ended(built: Built[OnFlower], folder: Path) -> Built[OnFlower]:
    """A federation as it was when its run ended."""
    checkpoint = newest_checkpoint(folder / CHECKPOINTS, built.network.device)
    assert checkpoint is not None
    restore(built, checkpoint)
    return built


def _hand_over(find: Callable[[], Built[OnFlower]], folder: Path) -> None:
    """Sites get their models when the run has ended; noted, so that the next start asks those that have none."""
    if handed_over(folder):
        return
    note, before = folder / FEDERATION / MODELS, served(folder)
    built = find()
    number = built.server.round
    done = built.federation.hand_over(number, built.loop.message_for_evaluation(), before)
    log.info("%d of %d sites have written their models", len(done), built.data.clients)
    with durable_file(note) as temporary:
        temporary.write_text(json.dumps({"round": number, "sites": done}) + "\n")


def _made(grid: Grid, config: Config, options: ServerOptions, begun: bool) -> Built[OnFlower]:
    path = options.out / FEDERATION / SITES
    if begun:
        roll = Roll.read(path)
        roll.term += 1
        directory = Directory(
            grid, roll.experiment, options.rules, {site.name: site for site in roll.sites}, closed=True
        )
    else:
        (options.out / FEDERATION / MODELS).unlink(missing_ok=True)  # of a run that was deleted
        # A name of its own for every experiment: what sites kept of another one must not be mistaken for this one's.
        roll = Roll(f"{config.method_name}-{uuid.uuid4().hex[:12]}", 1, [])
        directory = Directory(grid, roll.experiment, options.rules)
        expected = options.nodes or config.experiment.clients or 0
        if not expected:
            raise UserError(
                "run configuration: how many sites are there? allowed: nodes=N, or clients in the experiment"
            )
        roll.sites = ordered(gather(directory, expected, options.wait))
        directory.closed = True
    roll.write(path)
    data = cast(outline(config.experiment, roll.sites), config.experiment.precision)
    late = latecomers(config.experiment, data)
    return build_on(config, data, partial(OnFlower, directory=directory, term=roll.term, late=late))


def _say(line: dict[str, Any]) -> None:
    """A round has ended."""
    loss = "-" if line["loss"] is None else f"{line['loss']:.4g}"
    accuracy = line.get("personalized_accuracy")
    tested = "" if accuracy is None else f", accuracy {100 * accuracy:.2f} %"
    log.info(
        "round %d: %d of %d answered, training loss %s%s, %.1f s",
        line["round"], line["answered"], line["selected"], loss, tested, line["seconds"],
    )  # fmt: skip
