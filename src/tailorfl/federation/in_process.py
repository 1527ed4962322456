"""Clients that live in this process: the simulator."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar

from torch import Tensor

from tailorfl.cohort import Cohort, Engine
from tailorfl.cohort.samples import like_sizes
from tailorfl.cohort.scoring import Scores
from tailorfl.data.augment import Augmentation
from tailorfl.data.federated import FederatedData, Split
from tailorfl.exchange.messages import Answers, Message
from tailorfl.federation.evaluation import ClientScores, Evaluated, evaluate_common
from tailorfl.federation.store import ClientStore, store_device
from tailorfl.methods.method import Method
from tailorfl.models.network import Network, Values

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=str)
Parts = list[tuple[tuple[int, ...], Scores]]
LIKE = 4  # times as much data that clients of like size may have
MEMORY = "memory/"  # prefix of a method's memory in the store, beside the personal weights


@dataclass
class InProcess:
    """A federation whose clients are rows of tensors."""

    method: Method
    network: Network
    data: FederatedData
    engine: Engine
    seed: int
    rounds: int
    augmentation: Augmentation | None = None
    group_networks: tuple[Network, ...] = ()  # of a federation of groups: that of each
    diverged: list[int] = field(default_factory=list)  # clients left out of the round that trained last
    faults: dict[str, list[int]] = field(default_factory=dict)  # nothing gets lost in one process
    notes: dict[int, dict[str, float]] = field(default_factory=dict)  # and nothing takes a client longer than it must

    def __post_init__(self) -> None:
        self.networks = self.group_networks or self.method.networks(self.network)
        self.initial = [network.initial() for network in self.networks]
        self.memory = [self.method.memory(network) for network in self.networks]
        size = max(map(self._kept_bytes, range(len(self.networks))))
        self.store = ClientStore(store_device(self.engine.device, self.data.clients, size))
        batch_size = self.method.batch_size or int(self.data.train.counts.max())
        samples = [part.decode(part.inputs[:1]) for part in self.data.groups or [self.data] * len(self.networks)]
        plans = [self.engine.plan(*pair) for pair in zip(self.networks, samples, strict=True)]
        self._stack_sizes = [self.engine.stack_size(plan, batch_size) for plan in plans]

    @property
    def trainable(self) -> tuple[int, ...]:
        return trainable_clients(self.data)

    def samples(self, clients: Sequence[int]) -> int:
        """For training, of these clients together."""
        return int(self.data.train.counts[list(clients)].sum())

    def train(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]:
        """Train these clients, a stack at a time, and hand out each stack's answers as they are ready."""
        self.diverged = []
        for ids in self._stacks(round, clients):
            cohort = self.cohort(round, ids, message)
            sent = self.method.train(cohort, message.to(ids, cohort.network))
            healthy = _finite((*cohort.values.values(), *cohort.memory.values(), *sent.values()), len(ids))
            kept = [row for row in range(len(ids)) if healthy[row]]
            self._report(round, [ids[row] for row in range(len(ids)) if not healthy[row]])
            self.store.keep(ids, kept, self._state(cohort))
            answers = Answers(ids, cohort.counts, sent, cohort.mean_loss())
            yield answers if len(kept) == len(ids) else answers.only(kept)

    def evaluate(self, round: int, clients: Sequence[int], message: Message, splits: Sequence[Split]) -> Evaluated:
        """Each client's personalized model on its own data."""
        scores: dict[Split, Parts] = {split: [] for split in splits}
        others: dict[str, Parts] = {}
        measures: dict[str, dict[int, float]] = {}
        for cohort in self.served(round, clients, message):
            ids = cohort.clients
            for split in splits:
                scores[split].append((ids, cohort.evaluate(split, partial(self.method.predict, cohort))))
            for name, predict in self.method.others(cohort).items():
                others.setdefault(name, []).append((ids, cohort.evaluate("test", predict)))
            for name, numbers in self.method.measures(cohort, message.to(ids, cohort.network)).items():
                measures.setdefault(name, {}).update(zip(ids, numbers.tolist(), strict=True))
        return Evaluated(_gathered(scores), _gathered(others), measures)

    def served(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Cohort]:
        """The clients, a stack at a time, each with the model that serves it. Nothing that is done for it is kept."""
        for ids in chain.from_iterable(map(self._of_like_size, self._stacks(round, clients))):
            cohort = self.cohort(round, ids, message)
            self.method.serve(cohort, message.to(ids, cohort.network))
            yield cohort

    def evaluate_global(self, values: Values, clients: Sequence[int], split: Split) -> ClientScores:
        """One model on every client's data."""
        if self.data.groups:
            raise ValueError("no one model serves groups of clients: global_model must be None")
        return evaluate_common(self.engine, self.network, self.data, values, tuple(clients), split)

    def cohort(self, round: int, ids: tuple[int, ...], message: Message | None = None) -> Cohort:
        """These clients, of one network, each with what it keeps."""
        device, kind = self.engine.device, self.kind_of(ids[0], round)
        initial, empty = self.initial[kind], self.memory[kind]
        values = {name: self.store.stack(ids, name, default, device) for name, default in initial.items()}
        memory = {name: self.store.stack(ids, MEMORY + name, default, device) for name, default in empty.items()}
        return Cohort(
            engine=self.engine,
            network=self.networks[kind],
            data=self.data.of(ids[0]),
            clients=ids,
            values=values,
            options=self.method,
            seed=self.seed,
            round=round,
            rounds=self.rounds,
            augmentation=self.augmentation,
            memory=memory,
            archive=message.archive if message else {},
        )

    def _state(self, cohort: Cohort) -> Values:
        personal = {name: cohort.values[name] for name in self.method.personal(cohort.network)}
        return personal | {MEMORY + name: tensor for name, tensor in cohort.memory.items()}

    def _stacks(self, round: int, clients: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The clients in stacks of one network that fit, largest first: clients of like size share a stack."""
        return self.stacks(round, clients, self.data)

    def stacks(self, round: int, clients: Sequence[int], data: FederatedData) -> Iterator[tuple[int, ...]]:
        """The same for clients that have other data than they have here."""
        counts = data.train.counts
        ordered = sorted(clients, key=lambda client: (-int(counts[client]), client))
        for kind, size in enumerate(self._stack_sizes):
            alike = [client for client in ordered if self.kind_of(client, round) == kind]
            for start in range(0, len(alike), size):
                yield tuple(alike[start : start + size])

    def _of_like_size(self, ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A stack in parts: all data of a client are looked at, in a table as long as the largest client's."""
        return (ids[part] for part in like_sizes(self.data.train.counts[list(ids)].tolist(), LIKE))

    def kind_of(self, client: int, round: int) -> int:
        """The number of the network that a client has in a round."""
        return self.data.group_of[client] if self.data.groups else self.method.network_of(client, round)

    def _kept_bytes(self, kind: int) -> int:
        kept = [self.initial[kind][name] for name in self.method.personal(self.networks[kind])]
        return sum(tensor.nbytes for tensor in (*kept, *self.memory[kind].values()))

    def _report(self, round: int, diverged: list[int]) -> None:
        self.diverged += diverged
        for client in diverged:
            log.warning(
                "round %d: client %s diverged (its update is not finite); left out, it keeps its last state",
                round, self.data.names[client],
            )  # fmt: skip


def trainable_clients(data: FederatedData) -> tuple[int, ...]:
    """The clients that may be selected, some perhaps only later: not held out, and with something to train on."""
    held_out, counts = set(data.new_clients), data.train.counts.tolist()
    return tuple(client for client in range(data.clients) if client not in held_out and counts[client])


def _gathered(parts: dict[Key, Parts]) -> dict[Key, ClientScores]:
    return {key: ClientScores.gather(found) for key, found in parts.items()}


def _finite(tensors: Iterable[Tensor], clients: int) -> list[bool]:
    healthy: Tensor | None = None
    for tensor in tensors:
        row = tensor.reshape(clients, -1).sum(1).isfinite()  # one pass; what is not finite makes the sum so
        healthy = row if healthy is None else healthy & row.to(healthy.device)  # what is measured is not on a GPU
    return [True] * clients if healthy is None else healthy.tolist()
