"""What a method is: which tensors travel, what a client does in a round, what the server makes of the answers."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.local import LocalTraining
from tailorfl.exchange.aggregation import Weighing, average
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.exchange.server_optimizer import ServerOptimizer, server_step
from tailorfl.models.network import Layer, Network, Values, named_tensors
from tailorfl.models.own_classes import OwnClasses
from tailorfl.models.scaling import Scaling, Size

Moment = Literal["paper", "received", "finetuned", "trained"]
"""When a client's model is evaluated, for clients in and outside of the round alike; nothing of it is kept.

paper: as the method's own paper does; received: what the server sends beside what the client keeps, as it is;
finetuned: the same after ``finetune_epochs`` of local training (``local_epochs`` where that is 0); trained: after the
client's part of a round.
"""


class Method(LocalTraining):
    """A method's options, and its algorithm as functions of a cohort and of the server.

    A method holds no state: a client's lives in its store (``Cohort.values``, ``Cohort.memory``), the server's in
    ``Server``. Fields are the options that a user may set; a subclass adds its own, each with its range and with the
    limit in which the method becomes another one.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # authors and year
    shares: ClassVar[str] = ""  # what travels, in a few words
    classes_only: ClassVar[bool] = False  # whether it needs classes, and cannot do regression
    detectors: ClassVar[bool] = True  # whether it can train networks that find objects in images
    statistics: ClassVar[bool] = True  # whether it can train networks with the statistics of batch norms
    gradients: ClassVar[bool] = False  # whether clients send gradients under the names of the tensors they received
    scaled: ClassVar[bool] = False  # whether answers are scaled by the selection: nobody may stand in for others
    mixed: ClassVar[bool] = False  # whether it can serve groups of clients with other image sizes and classes
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # other defaults, by the value of an option ``preset``

    aggregation: Weighing = Field("samples", description="weights of the average: training samples, or uniform")
    batch_norm: Literal["shared", "local", "local-statistics"] = Field(
        "shared", description="norm layers: shared like others, kept by the client, or only their statistics kept"
    )
    evaluate: Moment = Field(
        "paper",
        description="a client's model as in the method's paper, as received, after fine-tuning, or after a round",
    )
    finetune_epochs: int = Field(0, ge=0, description="local epochs before a client's model is evaluated; not kept")
    server_optimizer: ServerOptimizer = Field("average", description="average, or the average as a gradient step")
    server_lr: float = Field(1.0, gt=0, description="learning rate of the server's sgd or adam")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the server's sgd; 0 and lr 1: average")
    server_epsilon: float = Field(
        1e-3, gt=0, description="what the server's adam adds below; gradients far smaller move nothing"
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        chosen = cls.presets.get(str(given.get("preset")), {}) if isinstance(given, dict) else {}
        return {**chosen, **given} if chosen else given

    def completed(self, rounds: int) -> Self:
        """The method for an experiment of so many rounds: options that follow from it filled in, or refused."""
        return self

    def doubts(self, clients: int, per_round: float, rounds: int, selection: str) -> tuple[str, ...]:
        """What to warn of before an experiment with so many clients, so many of them a round, and so many rounds."""
        return ()

    def holds_out(self) -> bool:
        """Whether clients train by accuracies on validation data, so that the experiment should hold some out."""
        return False

    # What travels and what stays.

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        """The layers that travel; all of them unless the method says otherwise."""
        return network.layers

    def shared(self, network: Network) -> tuple[str, ...]:
        """The names of the tensors that travel."""
        stay = {"shared": set(), "local": network.norm, "local-statistics": set(network.buffers)}[self.batch_norm]
        return tuple(name for name in network.names_of(self.shared_layers(network)) if name not in stay)

    def personal(self, network: Network) -> tuple[str, ...]:
        """The names of the tensors that never leave a client."""
        shared = set(self.shared(network))
        return tuple(name for name in network.names if name not in shared)

    def memory(self, network: Network) -> Values:
        """What a client keeps beside its model, by name, as it is before the client's first round."""
        return {}

    def networks(self, network: Network) -> tuple[Network, ...]:
        """The networks that clients have: the one of the experiment, unless clients differ."""
        return (network,)

    def network_of(self, client: int, round: int) -> int:
        """Which of the networks a client has in a round."""
        return 0

    def sizes(self, scaling: Scaling) -> tuple[Size, ...]:
        """In a federation of groups: how wide and deep the network of each group is."""
        return scaling.sizes()

    def everyone_in(self) -> frozenset[int]:
        """The rounds in which all clients take part, whatever the experiment says."""
        return frozenset()

    def evaluated_in(self) -> frozenset[int]:
        """The rounds after which clients are evaluated, whatever the experiment says."""
        return frozenset()

    # The server.

    def start(self, network: Network) -> Server:
        """The server before the first round."""
        initial = network.initial()
        return Server({name: initial[name] for name in self.shared(network)})

    def advance(self, server: Server, network: Network) -> None:
        """Prepare the server for the round that begins, ``server.round``."""

    def broadcast(self, server: Server) -> Message:
        """What the clients of a round receive, all the same."""
        return Message(server.values)

    def individual(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        """What each of these clients, who have this network, receives for itself: [clients, ...]."""
        return {}

    def for_evaluation(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        """The same for clients that are evaluated, of whom some may never take part in a round."""
        return self.individual(server, clients, network)

    def weight(self, own: Values, network: Network) -> int:
        """Bytes of what clients receive for themselves, all together."""
        return sum(tensor.nbytes for tensor in own.values())

    def answered(self, server: Server, answers: Answers, network: Network) -> int:
        """Bytes of what these clients sent, all together."""
        return answers.bytes

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        """Put the clients' answers together. ``answers`` is consumed as they arrive."""
        self.step(server, average(answers, server.values, self.aggregation), frozenset(network.buffers))

    def step(self, server: Server, averaged: Values, plain: frozenset[str]) -> None:
        """Move the server's values towards an average; ``plain`` names are simply replaced."""
        how = (self.server_optimizer, self.server_lr, self.server_momentum, self.server_epsilon)
        server_step(server, averaged, *how, plain=plain)

    def global_model(self, server: Server, network: Network) -> Values | None:
        """A whole model that serves anybody, or None where the method has none."""
        return server.values if set(server.values) >= set(network.names) else None

    # The client: one or many, the same code.

    @abstractmethod
    def train(self, clients: Cohort, received: Message) -> Values:
        """A client's part of a round; what it sends."""

    def receive(self, clients: Cohort, received: Message) -> None:
        """Lay what the server sent beside what the client keeps."""
        clients.load(received.tensors)
        clients.load(received.own)

    def assemble(self, clients: Cohort) -> None:
        """Put the model that serves a client into its values, where it is not there already."""

    def personalize(self, clients: Cohort, received: Message) -> None:
        """Make each client's model what the method's paper evaluates, before any fine-tuning."""
        self.receive(clients, received)
        self.assemble(clients)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        """Local training before evaluation; at the first round's rate: schedules are for rounds, and end near zero."""
        clients.fit(epochs=epochs, lr=self.lr, purpose="finetune")

    def serve(self, clients: Cohort, received: Message) -> None:
        """Make each client's model what is evaluated, at the moment that ``evaluate`` names."""
        if self.evaluate == "paper":
            self.personalize(clients, received)
        elif self.evaluate == "trained":
            self.train(clients, received)
            self.assemble(clients)
        else:
            self.receive(clients, received)
            self.assemble(clients)
        if self.evaluate == "finetuned":
            self.finetune(clients, self.finetune_epochs or self.local_epochs)
        elif self.evaluate == "paper" and self.finetune_epochs:
            self.finetune(clients, self.finetune_epochs)

    def predict(self, clients: Cohort, batch: Batch) -> Tensor:
        """The outputs by which clients are evaluated."""
        return clients.predict(batch)

    def deployed(self, clients: Cohort) -> nn.Module:
        """The model of a cohort of one, as a module that stands alone: what `predict` computes."""
        return self.possible(clients, self.network_with_values(clients))

    def possible(self, clients: Cohort, module: nn.Module) -> nn.Module:
        """A module for a cohort of one that leaves out the classes which the client lacks, with `own_classes`."""
        return module if clients.absent is None else OwnClasses(module, clients.absent[0])

    def network_with_values(self, clients: Cohort) -> nn.Module:
        """The network of a cohort of one with the client's own tensors."""
        module = copy.deepcopy(clients.network.module).eval()
        tensors = named_tensors(module)
        with torch.no_grad():
            for name, value in clients.values.items():
                tensors[name].copy_(value[0])
        return module

    # What is reported beside accuracy and traffic.

    def others(self, clients: Cohort) -> Mapping[str, Callable[[Batch], Tensor]]:
        """Further models of a client that are evaluated beside the one that serves it, by name."""
        return {}

    def measures(self, clients: Cohort, received: Message) -> Mapping[str, Tensor]:
        """Numbers to report of each client when it is evaluated, by name: [clients]."""
        return {}

    def about(self, round: int) -> dict[str, Any]:
        """What there is to say of a round before it begins: keys of its line in ``rounds.jsonl``."""
        return {}

    def summary(self, network: Network, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Keys of ``summary.json`` that only this method has; ``lines`` are those of the rounds."""
        return {}
