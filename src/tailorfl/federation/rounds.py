"""The round loop: select, train, aggregate, evaluate. Where the clients live is the federation's affair."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tailorfl.data.federated import Split
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.federation.evaluation import ClientScores, Evaluated
from tailorfl.federation.selection import NOBODY_LATE, Latecomers
from tailorfl.federation.store import ClientStore
from tailorfl.methods.method import Method
from tailorfl.models.network import Network, Values


class Federation(Protocol):
    """Where clients live: in this process, or on other machines."""

    store: ClientStore  # what clients keep between rounds, where this process keeps it for them
    diverged: list[int]  # clients left out of the round that trained last, because their updates were not finite
    faults: dict[str, list[int]]  # clients of that round with which something else went wrong, by what it was
    notes: dict[int, dict[str, float]]  # what is worth writing down of clients of that round

    @property
    def trainable(self) -> tuple[int, ...]: ...

    def samples(self, clients: Sequence[int]) -> int: ...

    def train(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]: ...

    def evaluate(self, round: int, clients: Sequence[int], message: Message, splits: Sequence[Split]) -> Evaluated: ...

    def evaluate_global(self, values: Values, clients: Sequence[int], split: Split) -> ClientScores: ...


@dataclass
class Evaluation:
    """The scores of one moment; ``new`` are clients that never train, ``joining`` those that join late.

    The latter are among the others once they have joined, and only then.
    """

    personalized: ClientScores
    validation: ClientScores | None
    common: ClientScores | None  # of the global model, where there is one
    new: ClientScores | None
    seconds: float
    others: dict[str, ClientScores] = field(default_factory=dict)  # further models of the clients, on test data
    measures: dict[str, dict[int, float]] = field(default_factory=dict)  # a method's own numbers, by client
    joining: ClientScores | None = None
    training: ClientScores | None = None  # of the personalized models, on training data


@dataclass
class Round:
    """What happened in a round."""

    number: int
    selected: list[int]
    answered: list[int] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)
    faults: dict[str, list[int]] = field(default_factory=dict)  # what else went wrong with which clients
    loss: float | None = None
    lr: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    notes: dict[int, dict[str, float]] = field(default_factory=dict)  # what is written down of clients, by name
    evaluation: Evaluation | None = None


@dataclass
class RoundLoop:
    """Runs rounds of a method over a federation; the server's state is changed in place."""

    method: Method
    network: Network
    federation: Federation
    server: Server
    rounds: int
    select: Callable[[int], list[int]]
    evaluate_in: Callable[[int], bool]
    share: Callable[[int], float] = lambda number: 1.0  # of the clients that is selected in a round, on average
    new_clients: tuple[int, ...] = ()
    late: Latecomers = NOBODY_LATE
    validate: bool = False
    evaluate_training: bool = False
    clock: Callable[[], float] = time.perf_counter

    def run(self, done: int = 0) -> Iterator[Round]:
        """The rounds after the first ``done``, each as it ends."""
        for number in range(done + 1, self.rounds + 1):
            yield self.round(number)

    def round(self, number: int) -> Round:
        record = Round(number, self.select(number), lr=self.method.rate(number, self.rounds))
        start = self._now()
        self.server.round = number
        self.method.advance(self.server, self.network)
        message = self._message(record, self.method.individual)
        record.bytes_down += sum(map(self.server.hand_out, record.selected))
        self.method.aggregate(self.server, self._answers(record, message), self.network)
        record.notes, self.server.notes = self.server.notes, {}
        for client, numbers in self.federation.notes.items():
            record.notes.setdefault(client, {}).update(numbers)
        record.diverged = sorted(self.federation.diverged)
        record.seconds = self._now() - start
        if self.evaluate_in(number):
            record.evaluation = self.evaluate(number)
        record.faults = {fault: sorted(set(clients)) for fault, clients in self.federation.faults.items()}
        return record

    def evaluate(self, number: int) -> Evaluation:
        """All clients that train, and those that do not yet or never, on their own data."""
        start = self._now()
        message = self.message_for_evaluation()
        everyone = (*self.federation.trainable, *self.new_clients)
        trained = set(self._joined(number))
        due: dict[Split, bool] = {"test": True, "validation": self.validate, "train": self.evaluate_training}
        splits = [split for split, wanted in due.items() if wanted]
        model = self.method.global_model(self.server, self.network)
        common = None if model is None else self.federation.evaluate_global(model, everyone, "test")
        if model is not None and common and self._serves_global():
            further = {split: self.federation.evaluate_global(model, everyone, split) for split in splits[1:]}
            found = Evaluated({"test": common, **further})
        else:
            found = self.federation.evaluate(number, everyone, message, splits)
        scores = found.scores
        return Evaluation(
            personalized=scores["test"].of(trained),
            validation=scores["validation"].of(trained) if self.validate else None,
            common=common.of(trained) if common else None,
            new=scores["test"].of(set(self.new_clients)) if self.new_clients else None,
            seconds=self._now() - start,
            others={name: other.of(trained) for name, other in found.others.items()},
            measures={
                name: {client: value for client, value in values.items() if client in trained}
                for name, values in found.measures.items()
            },
            joining=scores["test"].of(set(self.late.clients)) if self.late.clients else None,
            training=scores["train"].of(trained) if self.evaluate_training else None,
        )

    def message_for_evaluation(self) -> Message:
        """What clients receive when they are evaluated; it is no traffic."""
        return self._message(Round(self.server.round, []), self.method.for_evaluation)

    def _message(self, record: Round, individual: Callable[[Server, Sequence[int], Network], Values]) -> Message:
        """What the server sends; what each client gets for itself is counted when it is delivered."""
        self.server.samples = self.federation.samples(self._joined(record.number))
        self.server.share = self.share(record.number)
        message = self.method.broadcast(self.server)
        record.bytes_down = message.bytes * len(record.selected)

        def address(clients: tuple[int, ...], network: Network) -> Values:
            own = individual(self.server, clients, network)
            record.bytes_down += self.method.weight(own, network)
            return own

        return replace(message, address=address, archive=dict(self.server.archive))

    def _joined(self, number: int) -> tuple[int, ...]:
        """Who may be selected in a round."""
        return self.late.joined(self.federation.trainable, number)

    def _serves_global(self) -> bool:
        """Whether every client's model is simply the global one, and all there is to report: one evaluation serves."""
        method, kind = self.method, type(self.method)
        hooks = ("receive", "assemble", "personalize", "serve", "predict", "individual", "for_evaluation", "networks")
        plain = all(getattr(kind, hook) is getattr(Method, hook) for hook in (*hooks, "others", "measures"))
        kept = method.personal(self.network) or method.memory(self.network)
        as_it_is = method.evaluate == "received" or (method.evaluate == "paper" and not method.finetune_epochs)
        return plain and not kept and as_it_is and not method.own_classes

    def _answers(self, record: Round, message: Message) -> Iterator[Answers]:
        total, samples = 0.0, 0
        for answers in self.federation.train(record.number, record.selected, message):
            record.answered += answers.clients
            record.bytes_up += self.method.answered(self.server, answers, self.network)
            total += float((answers.loss.double().cpu() * answers.samples).sum())
            samples += int(answers.samples.sum())
            yield answers
        record.answered.sort()
        record.loss = total / samples if samples else None

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()
