"""PFLEGO: gradient descent on what is shared and what is personal at once, by clients that mostly train their heads."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.optimizer import Optimizer
from tailorfl.cohort.samples import Samples
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.exchange.server_optimizer import ServerOptimizer
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values


class PFLEGO(Method):
    """Exact stochastic gradient descent on shared and personal weights (Nikoloutsopoulos et al., 2025).

    A client of a round takes tau - 1 steps of gradient descent on its head W_i, all its data a step, with the received
    body theta as it is: the body's features are computed once. Then it computes the joint gradient, steps with the
    head, and sends the gradient of the body. The server adds the gradients up, each weighted by the client's share
    alpha_i of all samples and by I / r, clients over clients in a round, and takes one step. With ``exact`` the head's
    last step has the weight alpha_i of equation 5 too, so that round and step are one step of SGD on the loss of all
    clients; algorithm 1 leaves alpha_i out there. A client that does not answer counts as zero.
    """

    name: ClassVar[str] = "pflego"
    paper: ClassVar[str] = "Nikoloutsopoulos et al. 2025"
    shares: ClassVar[str] = "all layers but the head; gradients come back"
    gradients: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    statistics: ClassVar[bool] = False
    detectors: ClassVar[bool] = False

    tau: int = Field(50, ge=1, description="steps of a client in a round: tau - 1 of the head, then one of all")
    exact: bool = Field(False, description="weigh the head's last step by the client's share of all samples (eq. 5)")
    adapt: bool = Field(False, description="adapt a client's head to the received body, tau - 1 steps, before its test")
    own_classes: bool = Field(True, description="leave out classes that a client has no training data of")
    lr: float = Field(0.03, gt=0, description="beta, the learning rate of a client's first tau - 1 steps")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of those steps, where they are SGD")
    batch_size: int = Field(0, ge=0, description="of no effect: a step takes all data of a client")
    local_epochs: int = Field(1, ge=1, description="of no effect: tau says how long a client trains")
    server_lr: float = Field(0.003, gt=0, description="rho, the learning rate of the server and of a head's last step")
    server_optimizer: ServerOptimizer = Field("adam", description="the server's step: adam, or sgd as in the theory")
    server_epsilon: float = Field(1e-8, gt=0, description="what the server's adam adds below, as usual for gradients")

    @field_validator("server_optimizer")
    @classmethod
    def _takes_gradients(cls, kind: ServerOptimizer) -> ServerOptimizer:
        if kind == "average":
            raise ValueError("the server receives gradients, of which there is no average to take; allowed: sgd, adam")
        return kind

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.aggregation != "samples":
            raise ValueError(f"aggregation={self.aggregation}: gradients are weighted by samples; allowed: samples")
        if self.weight_decay:
            raise ValueError(f"weight_decay={self.weight_decay:g}: the joint gradient has none; allowed: 0")
        if self.adapt and self.evaluate != "paper":
            raise ValueError(f"adapt=true is for evaluate=paper, and it is {self.evaluate}")
        return self

    def doubts(self, clients: int, per_round: float, rounds: int, selection: str) -> tuple[str, ...]:
        """The conditions of proposition 2 that can be checked, and of proposition 1."""
        found = []
        least = clients // (4 * rounds) + 1
        if selection == "per-group":
            found.append("with selection=per-group clients differ in their chance to take part: steps are not unbiased")
        if per_round < least:
            found.append(
                f"clients_per_round={per_round:g} is too little for proposition 2: of {clients} clients, in {rounds} "
                f"rounds, it needs {least}"
            )
        beta = min(self.rate(number, rounds) for number in range(1, rounds + 1))
        if self.tau > 1 and beta < self.server_lr:
            schedule = "" if beta == self.lr else f", at its lowest {beta:.2g},"
            found.append(
                f"lr={self.lr:g} (beta){schedule} is below server_lr={self.server_lr:g} (rho), whose bound in "
                "proposition 2 is the lower one"
            )
        return tuple(found)

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(1)

    # The server.

    def broadcast(self, server: Server) -> Message:
        return Message(server.values, {"scale": 1 / server.share, "samples": server.samples})

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        """One step along the sum of alpha_i g_i, times I / r (eq. 4); none where nobody answers."""
        total: Values = {}
        for answer in answers:
            for name, stack in answer.tensors.items() if answer.clients else ():
                weight = (answer.samples.double() / (server.samples * server.share)).to(stack)
                part = torch.tensordot(weight, stack, dims=1)
                total[name] = total[name] + part if name in total else part
        if total:
            self._step(server, total)

    def _step(self, server: Server, gradients: Values) -> None:
        names = list(gradients)
        kind: Literal["adam", "sgd"] = "adam" if self.server_optimizer == "adam" else "sgd"
        optimizer = Optimizer(kind, self.server_momentum, epsilon=self.server_epsilon)
        values = [server.values[name].clone() for name in names]
        state = [
            [server.state.setdefault(f"slot {slot}/{name}", tensor) for name, tensor in zip(names, fresh, strict=True)]
            for slot, fresh in enumerate(optimizer.start(values))
        ]
        count = server.numbers["steps"] = server.numbers.get("steps", 0) + 1
        rates = (self.server_lr,) * len(names)
        optimizer.step(values, [gradients[name] for name in names], state, rates, torch.tensor(count))
        server.values.update(zip(names, values, strict=True))

    # The client.

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        parts = clients.alike()
        gradients = [self._train(part, received) for part in parts]
        clients.losses["train"] = torch.cat([part.losses["train"] for part in parts])
        return {name: torch.cat([found[name] for found in gradients]) for name in received.tensors}

    def _train(self, clients: Cohort, received: Message) -> Values:
        samples = clients.drawn("augment")
        self._fit_head(clients, samples, self.tau - 1)
        gradients, clients.losses["train"] = clients.gradient(samples=samples)
        rate = torch.full((len(clients),), self.server_lr * received.numbers["scale"], dtype=torch.float64)
        if self.exact:
            rate *= clients.counts.double() / received.numbers["samples"]
        for name, gradient in gradients.items():
            if name not in received.tensors:
                step = rate.to(gradient).reshape(-1, *[1] * (gradient.dim() - 1)) * gradient
                clients.values[name].sub_(step)
        return gradients

    def personalize(self, clients: Cohort, received: Message) -> None:
        super().personalize(clients, received)
        if self.adapt:
            self._adapt(clients)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        for part in clients.alike():
            self._fit_head(part, part.samples("train"), epochs, self.lr)

    def others(self, clients: Cohort) -> Mapping[str, Callable[[Batch], Tensor]]:
        """Beside a head that may be from long ago: the same after tau - 1 steps on the body that there is now."""
        if self.adapt or self.tau == 1 or self.evaluate != "paper" or self.finetune_epochs:
            return {}
        adapted = clients.of(range(len(clients)))
        self._adapt(adapted)
        return {"adapted": partial(self.predict, adapted)}

    def _adapt(self, clients: Cohort) -> None:
        for part in clients.alike():
            self._fit_head(part, part.drawn("adapt"), self.tau - 1, self.lr)

    def _fit_head(self, clients: Cohort, samples: Samples, steps: int, lr: float | None = None) -> None:
        """Gradient descent on the head alone, on features that are computed once."""
        if steps:
            features = clients.features(samples=samples)
            clients.head(features).fit(inputs=features, steps=steps, batch_size=0, lr=lr, purpose="head")
