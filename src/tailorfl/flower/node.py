"""A site: its data, its state, and what it does when the server asks."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, RecordDict

from tailorfl.data import FederatedData, PartitionOptions
from tailorfl.data.atomic import flush
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.federation.evaluation import ClientScores
from tailorfl.federation.in_process import InProcess
from tailorfl.flower.outline import Form, Site, alone, group_names, outline, with_own
from tailorfl.flower.project import NAME
from tailorfl.flower.records import arrays, facts_of, metrics, metrics_of, pack, tensors_of
from tailorfl.flower.state import SiteState, StaleError, check_name, digest
from tailorfl.models.network import Network, Values
from tailorfl.study.build import cast, check_task, choose_device, load_data, place_clients
from tailorfl.study.config import Config, Experiment, configure
from tailorfl.study.export import Exporter, check_deployable, whole_folder

log = logging.getLogger(__name__)

MODEL = "model"  # the folder, beside a client's state, of the model that serves it
NODE_KEYS = ("client", "data", "partition", "state", "group", "data-dir", "device")
# Of the keys that divide data among clients and purposes, those that concern one client.
KEPT = ("test_fraction", "test_samples_per_client", "validation_fraction")
GIVEN_BY_FLOWER = ("partition-id", "num-partitions")  # to the virtual nodes of its simulation


class LackingError(Exception):
    """A tensor of the archive that the server takes to be here is not."""


@dataclass(frozen=True)
class SiteOptions:
    """The node configuration, checked."""

    state: Path
    client: str = ""
    data: str = ""
    partition: int | None = None
    group: str = ""
    data_dir: Path | None = None
    device: str = ""

    @staticmethod
    def read(given: Mapping[str, Any], default_state: str) -> "SiteOptions":
        unknown = [key for key in given if key not in (*NODE_KEYS, *GIVEN_BY_FLOWER)]
        if unknown:
            raise UserError(f"node configuration: unknown key {unknown[0]!r}; allowed: {', '.join(NODE_KEYS)}")
        partition = given.get("partition", given.get("partition-id"))
        data, client = str(given.get("data", "")), str(given.get("client", ""))
        if (partition is None) == (not data):
            raise UserError("node configuration: where is the data? allowed: one of data and partition")
        if partition is not None and (not isinstance(partition, int) or partition < 0):
            raise UserError(f"node configuration: partition={partition}; allowed: 0, 1, 2 ...")
        if data and not client:
            raise UserError('node configuration: the site has no name; allowed: client="NAME"')
        state = str(given.get("state", default_state))
        if not state:
            raise UserError('node configuration: no folder to keep the site\'s model in; allowed: state="FOLDER"')
        folder = str(given.get("data-dir", ""))
        return SiteOptions(
            Path(state),
            check_name("client", client) if client else "",
            data,
            partition,
            str(given.get("group", "")),
            Path(folder) if folder else None,
            str(given.get("device", "")),
        )


def experiment_of(run_config: Mapping[str, Any]) -> Config:
    """The experiment that the run's configuration holds, as both sides read it."""
    text = run_config.get("experiment")
    try:
        found = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict) or "method" not in found:
        raise UserError("run configuration: experiment is missing; allowed: YAML text with a line 'method: NAME'")
    # A server must be able to go on after every round.
    return configure(str(found["method"]), {**found, "checkpoint_every": 1})


def handle(content: RecordDict, context: Context, work: Callable[["Node", dict[str, Any]], RecordDict]) -> RecordDict:
    """Do what a message asks for; what a user can mend is said in the answer, because Flower would not say it."""
    try:
        return work(Node.of(context), facts_of(content))
    except LackingError:
        return pack({"lacks": True})
    except (UserError, StaleError) as error:
        log.warning("%s", error)
        return pack({"error": str(error)})
    except Exception as error:  # Flower would send its text to the server, and there may be data in it
        log.exception("unexpected")
        return pack({"error": f"{type(error).__name__}; its own log says more"})


@dataclass(frozen=True)
class Own:
    """What is here: the data of one client, as a federation of one, and its place among others."""

    data: FederatedData
    group: int = 0
    new: bool = False
    joining: bool = False


@dataclass(frozen=True)
class Node:
    """One client of an experiment, on this machine."""

    config: Config
    options: SiteOptions

    @staticmethod
    def of(context: Context) -> "Node":
        config = experiment_of(context.run_config)
        options = SiteOptions.read(context.node_config, str(context.run_config.get("state", "")))
        device = options.device or config.experiment.device
        experiment = config.experiment.model_copy(update={"device": device})
        return Node(replace(config, experiment=experiment), options)

    # What the server may ask.

    def hello(self, facts: dict[str, Any]) -> RecordDict:
        """Who is here, with how much data of what form, and what was kept of the archive."""
        site = self.site()
        state = SiteState.of(self.options.state, str(facts["experiment"]), site.name)
        return pack({"site": site.facts(), "archived": state.archived()})

    def train(self, facts: dict[str, Any], content: RecordDict) -> RecordDict:
        """This client's part of a round. Its state is on the disk before the answer is on its way."""
        start = time.perf_counter()
        number, client, state = int(facts["round"]), int(facts["client"]), self._state(facts)
        ticket = state.begin(int(facts["term"]), number)
        lost = int(facts.get("last", 0)) > 0 and not state.rounds()
        federation = self._federation(facts, state.load(number))
        message = self._message(facts, content, state)
        answers = next(iter(federation.train(number, (client,), message)), None)
        if answers is None or not answers.clients:
            return pack({"diverged": True})
        entries = federation.store.entries.get(client, {})
        state.commit(ticket, entries)
        seconds = time.perf_counter() - start
        return _answer(answers, {"archived": state.archived()} | ({"lost": True} if lost else {}), seconds)

    def evaluate(self, facts: dict[str, Any], content: RecordDict) -> RecordDict:
        """How well this client's model does on its own data; nothing is kept."""
        number, client, state = int(facts["round"]), int(facts["client"]), self._state(facts)
        federation = self._federation(facts, state.load(number + 1))
        message = self._message(facts, content, state)
        found = federation.evaluate(number, (client,), message, facts["splits"])
        scores = {f"score.{split}": _score(scores) for split, scores in found.scores.items()}
        others = {f"other.{name}": _score(scores) for name, scores in found.others.items()}
        measures = {name: values[client] for name, values in found.measures.items()}
        return pack({}, **{k: metrics(v) for k, v in (scores | others | {"measures": measures}).items()})

    def evaluate_common(self, facts: dict[str, Any], content: RecordDict) -> RecordDict:
        """How well the global model does on this client's data."""
        federation = self._federation(facts, {})
        scores = federation.evaluate_global(tensors_of(content, "common"), (int(facts["client"]),), facts["split"])
        return pack({}, **{f"score.{facts['split']}": metrics(_score(scores))})

    def keep_model(self, facts: dict[str, Any], content: RecordDict) -> RecordDict:
        """Write the model that serves this client, as files that work without tailorfl."""
        number, client, state = int(facts["round"]), int(facts["client"]), self._state(facts)
        network, federation = self._placed(facts, state.load(number + 1))
        [cohort] = federation.served(number, (client,), self._message(facts, content, state))
        exporter = Exporter(self.config, network, federation.data, number, str(facts["experiment"]))
        check_deployable(type(self.config.method), self.config.method_name)
        with whole_folder(state.folder / MODEL) as temporary:
            exporter.write(temporary, cohort)
            for path in temporary.iterdir():  # the server will believe that it is here for good
                flush(path)
        flush(state.folder)
        log.info("the model of round %d: %s", number, state.folder / MODEL)
        return pack({})

    # What there is.

    def site(self) -> Site:
        """What the server may know of the data here: counts, and their form."""
        own = self.own
        return Site(
            name=self.name,
            train=len(own.data.train.of(0)),
            validation=len(own.data.validation.of(0)),
            test=len(own.data.test.of(0)),
            held=int((own.data.label_counts()[0] > 0).sum()),
            form=Form.of(own.data),
            partition=self.options.partition,
            group=own.group,
            new=own.new,
            joining=own.joining,
        )

    @property
    def name(self) -> str:
        owner = self.own.data.names[0]
        return self.options.client or (owner if NAME.fullmatch(owner) else f"client-{self.options.partition}")

    @cached_property
    def own(self) -> Own:
        partition = self.options.partition
        if partition is None:
            group = self._group()
            return Own(self._own_data(group), group or 0)
        whole = _loaded(self.config.experiment.model_dump_json(), self.options.data_dir)
        if partition >= whole.clients:
            raise UserError(f"node configuration: partition={partition}; allowed: 0 to {whole.clients - 1}")
        group = whole.group_of[partition] if whole.groups else 0
        return Own(alone(whole, partition), group, partition in whole.new_clients, partition in whole.joining_clients)

    def _group(self) -> int | None:
        names, wanted = group_names(self.config.experiment), self.options.group
        if names and wanted not in names:
            raise UserError(f"node configuration: group={wanted!r}; allowed: {', '.join(names)}")
        return names.index(wanted) if names else None

    def _own_data(self, group: int | None) -> FederatedData:
        """The site's own files: all rows are one client's."""
        experiment = self.config.experiment
        divided = {name: field.default for name, field in PartitionOptions.model_fields.items() if name not in KEPT}
        size = None if group is None else experiment.groups[group].image_size
        own = {"data": self.options.data, "partition": "iid", "clients": 1, "groups": ()}
        update = {**divided, **own, "image_size": size or experiment.image_size}
        try:
            return _loaded(experiment.model_copy(update=update).model_dump_json(), self.options.data_dir)
        except UserError as error:
            # Said here only: it may name files, and what is in them.
            log.warning("%s", error)
            raise UserError(f"{self.options.client}: its data cannot be used, its own log says why") from error

    def _state(self, facts: Mapping[str, Any]) -> SiteState:
        return SiteState.of(self.options.state, str(facts["experiment"]), self.name)

    def _federation(self, facts: Mapping[str, Any], kept: Values) -> InProcess:
        return self._placed(facts, kept)[1]

    def _placed(self, facts: Mapping[str, Any], kept: Values) -> tuple[Network, InProcess]:
        """The simulator with one client in it, who has what was kept."""
        client = int(facts["client"])
        forms, group_of = [Form.read(form) for form in facts["forms"]], facts.get("group_of") or [0] * facts["clients"]
        names = {client: self.name}
        others = [Site(names.get(k, str(k)), 0, 0, 0, 1, forms[group], group=group) for k, group in enumerate(group_of)]
        whole = cast(outline(self.config.experiment, others), self.config.experiment.precision)
        data = with_own(whole, self.own.data, client).to(choose_device(self.config.experiment.device))
        check_task(self.config, data)
        network, federation = place_clients(self.config, data, InProcess)
        if kept:
            federation.store.entries[client] = {name: t.to(federation.store.device) for name, t in kept.items()}
        return network, federation

    def _message(self, facts: Mapping[str, Any], content: RecordDict, state: SiteState) -> Message:
        device = choose_device(self.config.experiment.device)

        def moved(tensors: Values) -> Values:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        own = moved(tensors_of(content, "own"))
        return Message(
            tensors=moved(tensors_of(content, "shared")),
            numbers=metrics_of(content, "numbers"),
            archive=moved(_archive(facts, content, state)),
            address=lambda clients, network: own,
        )


@lru_cache(maxsize=64)  # a process of Flower's simulation is many clients, one after the other
def _loaded(experiment: str, data_dir: Path | None) -> FederatedData:
    return load_data(Experiment.model_validate_json(experiment), data_dir)


def _archive(facts: Mapping[str, Any], content: RecordDict, state: SiteState) -> Values:
    """What the server sent once: kept here, some of it from now on."""
    sent, there, found = tensors_of(content, "archive"), set(state.archived()), {}
    for name, known_by in facts["archive"]:
        if name in sent:
            if digest(sent[name]) != known_by:
                raise UserError(f"{name} of the archive has changed on its way")
            state.archive(sent[name])
            found[name] = sent[name]
        elif known_by in there:
            found[name] = state.from_archive(known_by)
        else:
            raise LackingError(name)
    return found


def _answer(answers: Answers, facts: dict[str, Any], seconds: float) -> RecordDict:
    numbers = {
        "samples": int(answers.samples[0]),
        "loss": float(answers.loss[0]),
        "seconds": seconds,
    }
    sent = {name: stack[0] for name, stack in answers.tensors.items()}
    return pack(facts, answer=arrays(sent), numbers=metrics(numbers))


def _score(scores: ClientScores) -> dict[str, float]:
    return {key: getattr(scores, key)[0].item() for key in ("samples", "correct", "loss")}
