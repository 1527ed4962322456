"""Finds out which trainings of several runs are alike, and trains those as one stack."""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tailorfl.cohort.engine import Engine, Plan
from tailorfl.cohort.joined import Joined, form
from tailorfl.cohort.training import Training
from tailorfl.data.federated import FederatedData
from tailorfl.models.likeness import same_program

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Handed:
    """A training that a run has handed over, with what would train it in that run alone."""

    training: Training
    plan: Plan
    engine: Engine
    error: Exception | None = None  # why it could not be trained


class Joiner:
    """Trains what runs hand over at the same time, in as few stacks as there can be."""

    def __init__(self) -> None:
        self.engines: dict[Hashable, Engine] = {}
        # What is equal in several runs is one here, known by its number.
        self.plans: list[Plan] = []
        self.data: list[FederatedData] = []
        self.numbers: dict[int, tuple[object, int]] = {}  # by the identity of what a run has, which is kept with it

    def train(self, handed: Sequence[Handed]) -> None:
        kinds: dict[Hashable, list[Handed]] = {}
        for one in handed:
            try:
                kinds.setdefault(self._kind(one), []).append(one)
            except Exception:  # what cannot be compared or hashed, of a user's own, is like nothing else
                kinds[id(one)] = [one]
        for alike in kinds.values():
            for stack in _stacks(alike):
                self._train(stack)

    def _train(self, alike: Sequence[Handed]) -> None:
        if len(alike) > 1:
            try:
                return self._train_joined(alike)
            except Exception as error:
                log.info("%d runs are trained apart: %s", len(alike), error)
        # Only here what the error held in memory is free: what failed for want of it may succeed apart.
        for one in alike:
            one.error = _error_of(one)

    def _train_joined(self, alike: Sequence[Handed]) -> None:
        first = alike[0]
        plan, data = self.plans[self._network(first)], self.data[self._rows(first)]
        settings = first.engine.settings
        if settings not in self.engines:
            self.engines[settings] = Engine(*settings)
        engine = self.engines[settings]
        engine.take_over(plan)
        joined = Joined.of([one.training for one in alike], plan.network, data)
        engine.run(joined.whole)
        joined.hand_back()

    def _kind(self, handed: Handed) -> Hashable:
        """What trainings that share a stack have in common."""
        return handed.engine.settings, self._network(handed), self._rows(handed), form(handed.training)

    def _network(self, handed: Handed) -> int:
        mine = handed.plan.network
        return self._number(mine, handed.plan, self.plans, lambda plan: same_program(plan.network, mine))

    def _rows(self, handed: Handed) -> int:
        data = handed.training.samples.data
        return self._number(data, data, self.data, data.same_rows)

    def _number(self, thing: object, entry: Any, known: list[Any], equal: Callable[[Any], bool]) -> int:
        """The place of what is equal to this among what is known; at the end where nothing is."""
        if id(thing) not in self.numbers:
            at = next((at for at, one in enumerate(known) if equal(one)), len(known))
            if at == len(known):
                known.append(entry)
            self.numbers[id(thing)] = thing, at
        return self.numbers[id(thing)][1]


def _stacks(alike: Sequence[Handed]) -> Iterator[list[Handed]]:
    """The same in lists of no more clients than a stack may hold, or of one training."""
    first, stack = alike[0], list[Handed]()
    most = first.engine.stack_size(first.plan, first.training.schedule.positions.shape[2])
    for one in alike:
        if stack and sum(len(other.training.loss) for other in (*stack, one)) > most:
            yield stack
            stack = []
        stack.append(one)
    yield stack


def _error_of(handed: Handed) -> Exception | None:
    """Train it as its run would alone."""
    try:
        handed.engine.take_over(handed.plan)
        handed.engine.run(handed.training)
        return None
    except Exception as error:
        return error
