"""Clients that live on other machines: a federation over Flower's grid."""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from tailorfl.cohort import Engine
from tailorfl.data import FederatedData
from tailorfl.data.augment import Augmentation
from tailorfl.data.federated import Split
from tailorfl.data.ragged import Ragged
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.federation.evaluation import ClientScores, Evaluated
from tailorfl.federation.in_process import InProcess, trainable_clients
from tailorfl.federation.selection import NOBODY_LATE, Latecomers
from tailorfl.federation.store import ClientStore
from tailorfl.flower.checks import (
    UNREADABLE,
    ChangedError,
    RefusedError,
    Schema,
    check_loss,
    check_norm,
    check_samples,
    check_score,
    check_tensors,
    said,
    schema_of,
)
from tailorfl.flower.directory import Directory, lifetime, problem, why
from tailorfl.flower.outline import Site
from tailorfl.flower.records import arrays, facts_of, metrics, metrics_of, pack, tensors_of
from tailorfl.flower.state import digest
from tailorfl.methods.method import Method
from tailorfl.models.network import Network, Values
from tailorfl.seeding import generator

log = logging.getLogger(__name__)

TRAIN, EVALUATE, COMMON, KEEP = "train", "evaluate", "evaluate.common", "evaluate.keep"
SECONDS = "site_seconds"  # that a site's own part of a round took: reading data and state, training, writing state
REHEARSED = 8  # made-up rows of the stand-in client that shows what an answer looks like
REPEATS = 10  # how often a round is repeated that has too few answers


@dataclass
class Reply:
    """What came back from a client, or what went wrong."""

    content: RecordDict | None = None
    problem: str = ""


@dataclass
class OnFlower:
    """A federation whose clients are nodes of Flower: what ``InProcess`` is for clients of this process."""

    method: Method
    network: Network
    data: FederatedData  # an outline: made-up rows
    engine: Engine
    seed: int
    rounds: int
    augmentation: Augmentation | None = None
    group_networks: tuple[Network, ...] = ()
    directory: Directory = field(kw_only=True)
    term: int = field(kw_only=True)  # which start of this server it is
    late: Latecomers = field(default=NOBODY_LATE, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    diverged: list[int] = field(default_factory=list, kw_only=True)
    faults: dict[str, list[int]] = field(default_factory=dict, kw_only=True)
    notes: dict[int, dict[str, float]] = field(default_factory=dict, kw_only=True)  # how long sites took

    def __post_init__(self) -> None:
        self.store = ClientStore(torch.device("cpu"))  # stays empty: what clients keep, they keep themselves
        self.rules = self.directory.rules
        self._stand_in = self._rehearsal()
        self._late: dict[str, int] = {}  # messages of closed rounds, and whom they were for
        parts = self.data.groups or (self.data,)
        self._forms = [vars(self.directory.known[self._someone(n)].form) for n in range(len(parts))]
        self._digests: dict[str, str] = {}
        self._round = 0  # the one that is under way
        self._trained_in: dict[int, int] = {}  # the last round in which a client's answer counted, since this start

    def _someone(self, group: int) -> str:
        groups = self.data.group_of or (0,) * self.data.clients
        return self.data.names[groups.index(group)]

    @property
    def trainable(self) -> tuple[int, ...]:
        return trainable_clients(self.data)

    def samples(self, clients: Sequence[int]) -> int:
        """For training, of these clients together."""
        return sum(self._known(client).train for client in clients)

    def train(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]:
        """Ask these clients to train. The answers are handed out when the round is closed, in a fixed order."""
        self._round, self.diverged, self.faults, self.notes = round, [], {}, {}
        found: dict[int, Answers] = {}
        asked: set[int] = set()
        able = clients if self.method.scaled else self._there(round)
        wanted, least = list(clients), min(self.rules.min_answers, len(able))
        for attempt in range(REPEATS + 1):
            asked |= set(wanted)
            found |= self._trained(round, wanted, message)
            # Who diverged has answered: asked again, it would do the same.
            if len({*found, *self.diverged}) >= least or not clients:
                break
            wanted = self._instead(round, attempt, asked, set(found))
            whom = "them again" if self.method.scaled else "others"
            log.warning("round %d: %d answers, %d are needed; asking %s", round, len(found), least, whom)
        else:
            raise UserError(f"round {round}: {len(found)} answers after {REPEATS} repeats, {least} are needed")
        yield from self._stacked(round, found)

    def evaluate(self, round: int, clients: Sequence[int], message: Message, splits: Sequence[Split]) -> Evaluated:
        """Each client's personalized model on its own data; of those that answer."""
        self._round = round
        contents = Contents(self, round, message, {"splits": list(splits)})
        replies = self._exchange(clients, EVALUATE, contents)
        found: dict[int, Report] = {}
        for client, reply in replies.items():
            expected = contents.reports(client)
            try:
                found[client] = Report.read(_good(reply), self._known(client), expected)
                if not all(math.isfinite(score["loss"]) for score in found[client].scores.values()):
                    log.warning("round %d: the loss of %s is not finite", round, self.data.names[client])
            except UNREADABLE as error:
                self._refuse(client, error)
        self._untested(clients, found)
        others = dict.fromkeys(name for report in found.values() for name in report.others)
        measures = dict.fromkeys(name for report in found.values() for name in report.measures)
        return Evaluated(
            {split: _gathered({c: r.scores[split] for c, r in found.items()}) for split in splits},
            {name: _gathered({c: r.others[name] for c, r in found.items() if name in r.others}) for name in others},
            {name: {c: r.measures[name] for c, r in found.items() if name in r.measures} for name in measures},
        )

    def evaluate_global(self, values: Values, clients: Sequence[int], split: Split) -> ClientScores:
        """One model on every client's data."""
        record = arrays(values)

        def content(client: int) -> RecordDict:
            return pack(self._facts(0, client) | {"split": split, "archive": []}, common=record)

        found: dict[int, dict[str, float]] = {}
        for client, reply in self._exchange(clients, COMMON, content).items():
            try:
                known = getattr(self._known(client), split)
                found[client] = check_score(metrics_of(_good(reply), f"score.{split}"), known)
            except UNREADABLE as error:
                self._refuse(client, error)
        self._untested(clients, found)
        return _gathered(found)

    def hand_over(self, round: int, message: Message, done: Sequence[str] = ()) -> list[str]:
        """Let every site write the model that serves it, at the end; those that have done so, now or before."""
        self._round = round
        left = [client for client, name in enumerate(self.data.names) if name not in done]
        written = list(done)
        for client, reply in self._exchange(left, KEEP, Contents(self, round, message, {})).items():
            try:
                _good(reply)
                written.append(self.data.names[client])
            except UNREADABLE as error:
                log.warning("%s has no model of its own: %s", self.data.names[client], why(error))
        return written

    # A round.

    def _trained(self, round: int, clients: Sequence[int], message: Message) -> dict[int, Answers]:
        """The answers of these clients that came in time and can be taken."""
        contents = Contents(self, round, message, {})
        found: dict[int, Answers] = {}
        for client, reply in self._exchange(clients, TRAIN, contents).items():
            schema = contents.schema(client)
            try:
                content = _good(reply)
                if facts_of(content).get("diverged"):
                    self._diverge(client)
                else:
                    found[client] = self._checked(client, content, contents.received(client), schema)
                    self._trained_in[client] = round
                    if facts_of(content).get("lost"):
                        log.warning(
                            "round %d: %s has lost what it kept, and began anew", round, self.data.names[client]
                        )
            except UNREADABLE as error:
                self._refuse(client, error)
        return found

    def _checked(self, client: int, content: RecordDict, received: Message, schema: Schema) -> Answers:
        sent, numbers = tensors_of(content, "answer"), metrics_of(content, "numbers")
        check_tensors(sent, schema)
        samples = check_samples(numbers["samples"], self._known(client).train)
        given = {**received.tensors, **{name: tensor[0] for name, tensor in received.own.items()}}
        check_norm(sent, given, self.method.gradients, self.rules.max_update_norm)
        self.directory.archived[self.data.names[client]] = set(map(str, facts_of(content).get("archived", ())))
        self.notes[client] = {SECONDS: float(numbers.get("seconds", 0))}
        device = self.engine.device
        return Answers(
            (client,),
            torch.tensor([samples]),
            {name: tensor[None].to(device) for name, tensor in sent.items()},
            torch.tensor([check_loss(float(numbers["loss"]))]),
        )

    def rehearse(self, round: int, client: int, received: Message) -> Schema:
        """What this client should send: the method's client code, run here on a few made-up rows, shows it."""
        cohort = self._stand_in.cohort(round, (client,), received)
        sent = self._stand_in.method.train(cohort, received)
        return schema_of({name: stack[0] for name, stack in sent.items()})

    def rehearse_report(self, round: int, client: int, message: Message, splits: Sequence[Split]) -> "Names":
        """What this client should report when it is evaluated, shown in the same way where the method adds to it."""
        kind = type(self.method)
        if kind.others is Method.others and kind.measures is Method.measures:
            return Names(tuple(splits))
        found = self._stand_in.evaluate(round, (client,), message, ())
        return Names(tuple(splits), tuple(found.others), tuple(found.measures))

    def _rehearsal(self) -> InProcess:
        """The simulator with clients that have a few made-up rows each."""
        few = [view.with_rows(partial(_few, view)) for view in (self.data, *self.data.groups)]
        data = replace(few[0], groups=tuple(few[1:]))
        brief = self.method.model_copy(update={"local_epochs": min(1, self.method.local_epochs)})
        return InProcess(brief, self.network, data, self.engine, self.seed, self.rounds, None, self.group_networks)

    def _stacked(self, round: int, found: dict[int, Answers]) -> Iterator[Answers]:
        """The answers in the stacks in which the simulator would have them, so that sums come out the same."""
        for clients in self._stand_in.stacks(round, list(found), self.data):
            yield _joined([found.pop(client) for client in clients])

    def _instead(self, round: int, attempt: int, asked: set[int], found: set[int]) -> list[int]:
        """Whom to ask when too few answered: those who were not asked yet, else all who did not answer."""
        if self.method.scaled:
            return sorted(asked.difference(found, self.diverged))
        able = [client for client in self._there(round) if client not in asked]
        able = able or [client for client in self._there(round) if client not in found]
        number = min(len(able), max(1, self.rules.min_answers - len(found)))
        rng = generator(self.seed, "repeat", round, attempt)
        return sorted(int(client) for client in rng.choice(np.asarray(able), size=number, replace=False))

    def _there(self, round: int) -> tuple[int, ...]:
        """Who may train in a round."""
        return self.late.joined(self.trainable, round)

    def _untested(self, clients: Iterable[int], found: Iterable[int]) -> None:
        absent = set(clients) - set(found)
        if absent:
            self.faults["untested"] = sorted(absent.union(self.faults.get("untested", ())))

    def _refuse(self, client: int, error: Exception) -> None:
        name = self.data.names[client]
        self.faults.setdefault("refused", []).append(client)
        log.warning("round %d: the answer of %s is refused: %s", self._round, name, why(error))
        if isinstance(error, ChangedError):
            self.directory.forget(name)

    def _diverge(self, client: int) -> None:
        if client not in self.diverged:
            self.diverged.append(client)
        name = self.data.names[client]
        log.warning("round %d: client %s diverged; left out, it keeps its last state", self._round, name)

    # Messages.

    def _known(self, client: int) -> Site:
        return self.directory.known[self.data.names[client]]

    def _facts(self, round: int, client: int) -> dict[str, Any]:
        groups = {"group_of": self.data.group_of} if self.data.groups else {}
        return {
            "experiment": self.directory.experiment,
            "term": self.term,
            "round": round,
            "client": client,
            "clients": self.data.clients,
            "forms": self._forms,
            "last": self._trained_in.get(client, 0),
            **groups,
        }

    def _exchange(self, clients: Sequence[int], kind: str, content: Callable[[int], RecordDict]) -> dict[int, Reply]:
        """Send to each client what is for it, and wait for the answers until the deadline."""
        end = self.clock() + self.rules.deadline
        flight: dict[str, int] = {}  # messages that are not answered, and whom they are for
        sent_to: dict[int, tuple[int, int]] = {}  # the node to which each client's message went last, and its visit
        replies: dict[int, Reply] = {}
        while len(replies) < len(clients) and self.clock() < end:
            self.directory.look()
            open_to = [client for client in clients if client not in replies]
            flight |= self._send(open_to, sent_to, kind, content)
            waiting = [*flight, *self.directory.waiting, *self._late]
            for reply in self.directory.grid.pull_messages(waiting) if waiting else ():
                identity = reply.metadata.reply_to_message_id
                if self.directory.hear(reply) or self._too_late(reply):
                    continue
                client = flight.pop(identity, None)
                if client is not None and client not in replies:
                    self._receive(client, reply, client in flight.values(), sent_to, replies)
            if len(replies) < len(clients):
                time.sleep(self.rules.pause)
        self._late |= flight
        self._miss([client for client in clients if client not in replies])
        return dict(sorted(replies.items()))

    def _send(
        self,
        clients: Iterable[int],
        sent_to: dict[int, tuple[int, int]],
        kind: str,
        content: Callable[[int], RecordDict],
    ) -> dict[str, int]:
        """To clients whose node is there, unless that node has the message already."""
        nodes = {client: self._node(client) for client in clients}
        due = {client: node for client, node in nodes.items() if node is not None and sent_to.get(client) != node}
        messages = [FlowerMessage(content(c), node, kind, ttl=lifetime(self.rules)) for c, (node, _) in due.items()]
        pushed = {
            client: identity for client, identity in zip(due, self.directory.push(messages), strict=True) if identity
        }
        sent_to |= {client: due[client] for client in pushed}
        return {identity: client for client, identity in pushed.items()}

    def _node(self, client: int) -> tuple[int, int] | None:
        """The node of a client, if it is there, and which visit of it this is: it may come again as the same node."""
        name = self.data.names[client]
        node = self.directory.node_of.get(name)
        return None if node is None else (node, self.directory.visits[name])

    def _receive(
        self,
        client: int,
        reply: FlowerMessage,
        repeated: bool,  # the message was sent again since, and that one is not answered
        sent_to: dict[int, tuple[int, int]],
        replies: dict[int, Reply],
    ) -> None:
        name = self.data.names[client]
        if reply.has_error():
            gone = repeated or self._node(client) != sent_to.get(client)  # and may come again
            if not gone and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                del sent_to[client]  # it goes just now
            elif not gone:
                replies[client] = Reply(problem=problem(reply))
        elif _says(reply.content, "lacks") and self.directory.archived.get(name):
            self.directory.archived[name] = set()
            sent_to.pop(client, None)
        elif not repeated or not _says(reply.content, "error"):  # as an orphan does whose place was taken
            replies[client] = Reply(reply.content)

    def _too_late(self, reply: FlowerMessage) -> bool:
        client = self._late.pop(reply.metadata.reply_to_message_id, None)
        if client is not None and reply.has_content():
            self.faults.setdefault("late", []).append(client)
            name = self.data.names[client]
            log.warning("round %d: an answer of %s came too late, it is dropped", self._round, name)
        return client is not None

    def _miss(self, clients: Sequence[int]) -> None:
        if clients:
            self.faults.setdefault("missing", []).extend(clients)
            names = ", ".join(self.data.names[client] for client in clients)
            log.warning("round %d: no answer within %g s from %s", self._round, self.rules.deadline, names)

    def digest(self, name: str, tensor: Tensor) -> str:
        """Of a tensor in the archive, which never changes."""
        if name not in self._digests:
            self._digests[name] = digest(tensor)
        return self._digests[name]

    def network_of(self, client: int, round: int) -> tuple[int, Network]:
        """The network that a client has in a round, and its number."""
        kind = self._stand_in.kind_of(client, round)
        return kind, self._stand_in.networks[kind]


@dataclass
class Contents:
    """What each client of a round is sent; made when it is sent, and once."""

    federation: OnFlower
    round: int
    message: Message
    more: Mapping[str, Any]
    _received: dict[int, Message] = field(default_factory=dict)
    _schemas: dict[Hashable, Schema] = field(default_factory=dict)
    _names: dict[int, "Names"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared = arrays(self.message.tensors)
        self._numbers = metrics(self.message.numbers)
        self._archive = [(name, self.federation.digest(name, tensor)) for name, tensor in self.message.archive.items()]

    def received(self, client: int) -> Message:
        """The message as this client receives it."""
        if client not in self._received:
            _, network = self.federation.network_of(client, self.round)
            self._received[client] = self.message.to((client,), network)
        return self._received[client]

    def schema(self, client: int) -> Schema:
        """What the client should send; the same for all that have its network and are sent things of the same form."""
        received, (kind, _) = self.received(client), self.federation.network_of(client, self.round)
        alike = (kind, *schema_of(received.own).items())
        if alike not in self._schemas:
            self._schemas[alike] = self.federation.rehearse(self.round, client, received)
        return self._schemas[alike]

    def reports(self, client: int) -> "Names":
        """What the client should report when it is evaluated; the same for all that have its network."""
        kind, _ = self.federation.network_of(client, self.round)
        if kind not in self._names:
            self._names[kind] = self.federation.rehearse_report(self.round, client, self.message, self.more["splits"])
        return self._names[kind]

    def __call__(self, client: int) -> RecordDict:
        federation = self.federation
        there = federation.directory.archived.get(federation.data.names[client], set())
        lacking = {n: self.message.archive[n] for n, known_by in self._archive if known_by not in there}
        return pack(
            {**federation._facts(self.round, client), "archive": self._archive, **self.more},
            shared=self._shared,
            own=arrays(self.received(client).own),
            archive=arrays(lacking),
            numbers=self._numbers,
        )


@dataclass(frozen=True)
class Names:
    """Of all that a client reports when it is evaluated."""

    splits: tuple[Split, ...]
    others: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a client found when it was evaluated: all that was asked for, and nothing else."""

    scores: dict[Split, dict[str, float]]
    others: dict[str, dict[str, float]]
    measures: dict[str, float]

    @staticmethod
    def read(content: RecordDict, site: Site, names: Names) -> "Report":
        scores = {s: check_score(metrics_of(content, f"score.{s}"), getattr(site, s)) for s in names.splits}
        others = {name: check_score(metrics_of(content, f"other.{name}"), site.test) for name in names.others}
        measures = metrics_of(content, "measures")
        return Report(scores, others, {name: float(measures[name]) for name in names.measures})


def _good(reply: Reply) -> RecordDict:
    if reply.content is None:
        raise RefusedError(reply.problem)
    facts = facts_of(reply.content)
    if "error" in facts:
        raise RefusedError(said(facts["error"]))
    if facts.get("lacks"):
        raise RefusedError("it lacks what it was sent")
    return reply.content


def _says(content: RecordDict, what: str) -> bool:
    try:
        return bool(facts_of(content).get(what))
    except ValueError:
        return False


def _joined(answers: Sequence[Answers]) -> Answers:
    return Answers(
        tuple(client for answer in answers for client in answer.clients),
        torch.cat([answer.samples for answer in answers]),
        {name: torch.cat([answer.tensors[name] for answer in answers]) for name in answers[0].tensors},
        torch.cat([answer.loss for answer in answers]),
    )


def _few(data: FederatedData, split: Split) -> Ragged:
    ragged = data.rows(split)
    return Ragged.from_lists([ragged.of(client)[:REHEARSED].numpy() for client in range(data.clients)])


def _gathered(rows: Mapping[int, Mapping[str, float]]) -> ClientScores:
    clients = tuple(sorted(rows))
    columns = [np.array([rows[client][key] for client in clients]) for key in ("samples", "correct", "loss")]
    return ClientScores(clients, *columns)
