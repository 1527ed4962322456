"""Layer-wise mixing of the global model and a client's own, on the way down and on the way up (pMixFed)."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Network, Values, named_tensors
from tailorfl.seeding import generator

Rule = Literal["none", "sigmoid", "fixed", "gradual", "random", "phases"]

OWN = "own/"  # prefix of a client's own layers in its memory
DOWN, UP = "mix/down", "mix/up"  # the degrees of the global layers, on broadcast and aggregation: [clients, layers]
ACCURACY, GLOBAL = "mix/accuracy", "mix/global accuracy"  # what a client reports of its own and of the global model
ABSENT = -1.0  # in place of a degree on aggregation: the server has no such layer
UNKNOWN = -1.0  # no accuracy; what is not finite would count as a model that diverged
PHASES = (0.1, 100.0, 10.0)  # of Beta(a, a), in each third of the rounds (the paper's equation 14)


def mix_factor(accuracy: Tensor, progress: float, exponent: float = 2.0) -> Tensor:
    """The paper's mu, equation 5: near 0 for models that are better than others, from 1/2 on for the rest.

    ``accuracy`` is relative, 1 where it is not known; ``progress`` is delta = t / T.
    """
    known = torch.where(accuracy.isnan(), 1.0, accuracy)
    return 1 - torch.sigmoid(progress * (known.pow(exponent) - 1))


def relative(accuracy: Tensor, overall: float) -> Tensor:
    """A client's accuracy over that of all; 1 where either is not known, or where both are zero."""
    if math.isnan(overall):
        return torch.full_like(accuracy, math.nan)
    return accuracy / overall if overall > 0 else torch.where(accuracy > 0, math.inf, accuracy + 1)


def degrees_down(mu: Tensor, layers: int, head: bool = False) -> Tensor:
    """Lambda on broadcast, equation 6: how much of each layer, from the base on, is the global one.

    Of the head it is none, unless ``head`` says that it is mixed like a layer before another.
    """
    number = torch.arange(1, layers + 1, dtype=mu.dtype)
    return (mu[:, None] * (layers - number + head)).clamp(max=1)


def degrees_up(mu: Tensor, layers: int) -> Tensor:
    """Lambda on aggregation, equation 6: how much of each layer stays as it was before the round."""
    number = torch.arange(1, layers + 1, dtype=mu.dtype)
    return (1 - number * mu[:, None]).clamp(min=0)


@dataclass(frozen=True)
class Mix:
    """The mix factors of some clients in a round, and their degrees: [clients] and [clients, layers]."""

    mu_down: Tensor
    down: Tensor
    mu_up: Tensor
    up: Tensor

    def note(self, row: int) -> dict[str, float]:
        """What is written down of one client."""
        found = {"mu_down": float(self.mu_down[row]), "mu_up": float(self.mu_up[row])}
        for way, degrees in (("down", self.down), ("up", self.up)):
            # A layer that takes no part stays as it was on both sides.
            shown = torch.where(degrees[row] == ABSENT, 1.0, degrees[row])
            found |= {f"{way}_{place}": degree for place, degree in enumerate(shown.tolist(), start=1)}
        return found


class LayerMixing(Method):
    """A method whose shared layers may be mixed with those that a client had before.

    A client keeps its own copy of every layer. On broadcast a layer becomes lambda times the global one plus 1 - lambda
    times its own. On aggregation the server averages lambda times the global layer plus 1 - lambda times the trained
    one. Lambda follows from the layer's place and a mix factor mu, for each client and round. The paper's clients mix
    before they send; the server has both, and mixes what it receives, which is the same.
    """

    mix: Rule = Field("none", description="how mu is found: by accuracies, fixed, by the round, or random degrees")
    mu: float = Field(0.5, ge=0, le=1, description="mix=fixed: mu in all rounds; 0: local training")
    beta: float = Field(1.0, gt=0, description="mix=random: a of Beta(a, a), from which degrees are drawn")
    exponent: float = Field(2.0, gt=0, description="mix=sigmoid: b, the power of the relative accuracy")
    overall: Literal["clients", "global"] = Field(
        "clients",
        description="mix=sigmoid: a client's accuracy is relative to that of all clients, or of the global model",
    )
    accuracy_on: Literal["validation", "test"] = Field(
        "validation", description="mix=sigmoid: data for accuracies; test: as in the paper, which trains on test data"
    )
    mix_head: bool = Field(False, description="mix the head too: with mix=fixed and mu=1 it is FedAvg, else FedPer")
    negligible: float = Field(0.0, ge=0, lt=0.5, description="degrees so near to 0 or 1 count as 0 or 1: less traffic")
    horizon: int | None = Field(None, ge=1, description="T of delta = t / T; null: the rounds of the experiment")

    @abstractmethod
    def train_alone(self, clients: Cohort, received: Message) -> Values:
        """A client's part of a round on the layers of ``received.tensors``; these, trained."""

    def holds_out(self) -> bool:
        return self.mix == "sigmoid" and self.accuracy_on == "validation"

    def doubts(self, clients: int, per_round: float, rounds: int, selection: str) -> tuple[str, ...]:
        if self.mix == "sigmoid" and self.accuracy_on == "test":
            return ("accuracy_on=test: clients train by the accuracy on their test data, which is then no test",)
        return ()

    def memory(self, network: Network) -> Values:
        if self.mix == "none":
            return {}
        initial = network.initial()
        return {OWN + name: initial[name] for name in self.shared(network)}

    # The server.

    def broadcast(self, server: Server) -> Message:
        return super().broadcast(server) if self.mix == "none" else Message()

    def individual(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        if self.mix == "none":
            return {}
        found = self.mixed_for(server, clients, network)
        for row, client in enumerate(clients):
            server.notes.setdefault(client, {}).update(found.note(row))
        return self._sent(server, found, network)

    def for_evaluation(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        if self.mix == "none":
            return {}
        return self._sent(server, self.mixed_for(server, clients, network), network)

    def mixed_for(self, server: Server, clients: Sequence[int], network: Network) -> Mix:
        """The mix of these clients in the round that is under way. Who never trained has nothing to mix with."""
        layers, known = len(network.layers), [_accuracy_of(client) in server.numbers for client in clients]
        progress = server.round / self._horizon(server)
        mu_down, mu_up = self._factors(server, clients, progress)
        down, up = degrees_down(mu_down, layers, self.mix_head), degrees_up(mu_up, layers)
        if self.mix in ("random", "phases"):
            down, up = (self._drawn(server, clients, layers, way, progress) for way in ("down", "up"))
            if not self.mix_head:
                down[:, -1] = 0  # the head is the client's own, however degrees are found
            mu_down, mu_up = torch.full_like(mu_down, math.nan), torch.full_like(mu_up, math.nan)
        down = torch.where(torch.tensor(known, dtype=torch.bool)[:, None], down, 1.0)
        alike = torch.tensor(self._alike(server, network))
        # A layer that only one side has takes no part: nothing of it comes down, and nothing of it goes up.
        return Mix(mu_down, self._rounded(down) * alike, mu_up, torch.where(alike, self._rounded(up), ABSENT))

    def _horizon(self, server: Server) -> int:
        return self.horizon or server.rounds

    def _factors(self, server: Server, clients: Sequence[int], progress: float) -> tuple[Tensor, Tensor]:
        count = len(clients)
        if self.mix == "gradual":
            mu = torch.full((count,), max(0.0, 1 - (server.round - 1) / self._horizon(server)), dtype=torch.float64)
            return mu, mu
        if self.mix != "sigmoid":
            mu = torch.full((count,), self.mu, dtype=torch.float64)
            return mu, mu
        own = [server.numbers.get(_accuracy_of(client), math.nan) for client in clients]
        before = server.numbers.get("global" if self.overall == "global" else "clients", math.nan)
        down = mix_factor(relative(torch.tensor(own, dtype=torch.float64), before), progress, self.exponent)
        known = torch.full((count,), server.numbers.get("global", math.nan), dtype=torch.float64)
        up = mix_factor(known, progress, self.exponent)
        return down, up

    def _drawn(self, server: Server, clients: Sequence[int], layers: int, way: str, progress: float) -> Tensor:
        a = self.beta if self.mix == "random" else PHASES[min(2, max(0, math.ceil(3 * progress) - 1))]
        rows = [generator(server.seed, "mix", way, server.round, client).beta(a, a, layers) for client in clients]
        return torch.from_numpy(np.stack(rows))

    def _rounded(self, degrees: Tensor) -> Tensor:
        degrees = torch.where(degrees <= self.negligible, 0.0, degrees)
        return torch.where(degrees >= 1 - self.negligible, 1.0, degrees)

    def _alike(self, server: Server, network: Network) -> list[bool]:
        """Of each layer, whether something of it is shared and the server has it too, in the same form."""
        own, common = named_tensors(network.module), server.values
        return [
            bool(names) and all(name in common and common[name].shape == own[name].shape for name in names)
            for names in self._by_layer(network)
        ]

    def _by_layer(self, network: Network) -> list[list[str]]:
        """The shared tensors of each layer, from the base on."""
        chosen = set(self.shared(network))
        return [[name for name in layer.names if name in chosen] for layer in network.layers]

    def _sent(self, server: Server, mix: Mix, network: Network) -> Values:
        """The layers that some of these clients mix in, with their degrees; and the head, to be tested with."""
        wanted = mix.down > 0
        if self.mix == "sigmoid":  # clients report how good the global model is, though none of its head is mixed in
            wanted[:, -1] |= mix.up[:, -1] != ABSENT
        sent = (names for names, some in zip(self._by_layer(network), wanted.any(0), strict=True) if some)
        tensors = {name: server.values[name] for names in sent for name in names}
        copies = {name: tensor.expand(len(wanted), *tensor.shape) for name, tensor in tensors.items()}
        return {DOWN: mix.down, UP: mix.up, **copies}

    def weight(self, own: Values, network: Network) -> int:
        """Each client is sent the layers that it mixes in itself."""
        if DOWN not in own:
            return super().weight(own, network)
        down, total = own[DOWN], own[DOWN].nbytes + own[UP].nbytes
        for place, layer in enumerate(network.layers):
            names = [name for name in layer.names if name in own]
            wanted = down[:, place] > 0
            if self.mix == "sigmoid" and place == len(network.layers) - 1:
                wanted = wanted | self._tests(down, network)
            total += int(wanted.sum()) * sum(own[name][0].nbytes for name in names)
        return total

    def _tests(self, down: Tensor, network: Network) -> Tensor:
        """Who is sent all shared layers below the head, and so can test the global model: booleans [clients]."""
        below = [place for place, names in enumerate(self._by_layer(network)[:-1]) if names]
        return (down[:, below] > 0).all(1)

    def answered(self, server: Server, answers: Answers, network: Network) -> int:
        """Layers of which nothing enters the global model need not be sent."""
        if self.mix == "none" or not answers.clients:
            return super().answered(server, answers, network)
        up, total = self.mixed_for(server, answers.clients, network).up, 0
        place_of = _places(network)
        for name, stack in answers.tensors.items():
            senders = int((up[:, place_of[name]] < 1).sum()) if name in place_of else len(stack)
            total += senders * stack[0].nbytes
        return total

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        if self.mix == "none":
            super().aggregate(server, answers, network)
            return
        reports: dict[int, tuple[float, float]] = {}
        super().aggregate(server, self._mixed_up(server, answers, network, reports), network)
        for client, (own, common) in reports.items():
            server.numbers[_accuracy_of(client)] = own
            server.notes.setdefault(client, {}).update(accuracy=own, global_accuracy=common)
        for place, name in enumerate(("clients", "global")):
            told = [report[place] for report in reports.values() if not math.isnan(report[place])]
            if told:
                server.numbers[name] = sum(told) / len(told)

    def _mixed_up(
        self, server: Server, answers: Iterable[Answers], network: Network, reports: dict[int, tuple[float, float]]
    ) -> Iterator[Answers]:
        """Answers as they are averaged: what clients trained, mixed with what the server has."""
        place_of = _places(network)
        for answer in answers:
            tensors = dict(answer.tensors)
            told = zip(*(map(_known, tensors.pop(name).tolist()) for name in (ACCURACY, GLOBAL)), strict=True)
            up = self.mixed_for(server, answer.clients, network).up
            for name, trained in tensors.items():
                tensors[name] = mixed(trained, server.values[name], up[:, place_of[name]])
            yield replace(answer, tensors=tensors)
            reports |= dict(zip(answer.clients, told, strict=True))

    # The client.

    def receive(self, clients: Cohort, received: Message) -> None:
        if self.mix == "none":
            super().receive(clients, received)
        else:
            clients.load(self._mixed_down(clients, received))

    def _mixed_down(self, clients: Cohort, received: Message) -> Values:
        found: Values = {}
        for place, names in enumerate(self._by_layer(clients.network)):
            for name in names:
                own = clients.memory[OWN + name]
                common = received.own.get(name)
                found[name] = own if common is None else mixed(own, common, received.own[DOWN][:, place])
        return found

    def train(self, clients: Cohort, received: Message) -> Values:
        if self.mix == "none":
            return self.train_alone(clients, received)
        trained = self.train_alone(clients, replace(received, tensors=self._mixed_down(clients, received), own={}))
        for name, tensor in trained.items():
            clients.memory[OWN + name].copy_(tensor)
        reports = {ACCURACY: self._accuracy(clients), GLOBAL: self._accuracy_of_global(clients, received)}
        return self._known_to_server(clients.network, trained, received.own[UP]) | reports

    def _known_to_server(self, network: Network, trained: Values, up: Tensor) -> Values:
        """The layers that the server has too; who sends nothing of one, by its degree, votes for what is there."""
        places = [layer for place, layer in enumerate(network.layers) if (up[:, place] != ABSENT).all()]
        return {name: trained[name] for layer in places for name in layer.names if name in trained}

    def _accuracy(self, clients: Cohort) -> Tensor:
        """Of each client's model as it is; -1 where that is not asked for, or where there is no data."""
        if self.mix != "sigmoid" or not clients.data.num_classes:
            return _unknown(clients)
        scores = clients.evaluate(self.accuracy_on)
        return torch.where(scores.samples > 0, scores.correct.double() / scores.samples.clamp(min=1), UNKNOWN)

    def _accuracy_of_global(self, clients: Cohort, received: Message) -> Tensor:
        """Of the model that the server sent, for those to whom it sent all of what is shared."""
        common = {name: received.own.get(name) for name in self.shared(clients.network)}
        if self.mix != "sigmoid" or not common or any(tensor is None for tensor in common.values()):
            return _unknown(clients)
        values = {name: tensor.contiguous() for name, tensor in common.items() if tensor is not None}
        found = self._accuracy(replace(clients, values={**clients.values, **values}))
        return torch.where(self._tests(received.own[DOWN], clients.network), found, UNKNOWN)


def _places(network: Network) -> dict[str, int]:
    """The layer of each tensor, counted from the base."""
    return {name: place for place, layer in enumerate(network.layers) for name in layer.names}


def _unknown(clients: Cohort) -> Tensor:
    return torch.full((len(clients),), UNKNOWN, dtype=torch.float64)


def _known(accuracy: float) -> float:
    return math.nan if accuracy == UNKNOWN else accuracy


def _accuracy_of(client: int) -> str:
    return f"accuracy/{client}"


def mixed(own: Tensor, common: Tensor, degrees: Tensor) -> Tensor:
    """Degree times the common tensor plus the rest of a client's own: [clients, ...]; exact at 0 and at 1."""
    weight = degrees.to(own).reshape(-1, *[1] * (own.dim() - 1))
    return torch.lerp(own, common.to(own.device).expand_as(own), weight)
