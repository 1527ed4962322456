"""PFPS-LWC: a shared body that first recalls what the client knew, and a light personal classifier."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from tailorfl.cohort import Batch, Client, Cohort, Objective
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedper import FedPer
from tailorfl.models.network import Network, Values

BODY = "body/"  # prefix of the body of a client's last participation, in its memory


@dataclass(frozen=True)
class Recall:
    """L_sim: one minus the cosine of the body's features and those of the body in ``client.own`` (eq. 3)."""

    layers: int = 1

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        known = {**client.values, **client.own}
        target = client.network.features(known, batch.inputs, batch.valid, train=False, head=self.layers).detach()
        found = client.features(batch, head=self.layers)
        return batch.mean(1 - functional.cosine_similarity(found.flatten(1), target.flatten(1)))


@dataclass(frozen=True)
class Light:
    """L_local: the task's loss plus lam times the L2 norm of the classifier, not its square (eqs. 7 and 9)."""

    loss: Objective
    lam: float
    classifier: tuple[str, ...]

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        classifier = torch.cat([client.values[name].flatten() for name in self.classifier])
        # At zero, where the norm has no gradient, torch's is zero.
        return self.loss(client, batch) + self.lam * torch.linalg.vector_norm(classifier)


class PFPSLWC(FedPer):
    """Recall, then train, with a light classifier (Liu et al., 2025).

    A client that takes part again first recalls: it trains the received body so that its features on the client's data
    point where those of its last body did. Then body and head train together, the head's L2 norm being penalized. The
    body is sent, and kept for the next recall; the head stays. With ``recall_epochs=0`` and ``lam=0`` it is FedPer.
    Other than the paper says, a client recalls before it is tested too; ``preset=paper`` leaves that out.
    """

    name: ClassVar[str] = "pfps-lwc"
    paper: ClassVar[str] = "Liu et al. 2025"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"recall_epochs": 1, "recall_when": "training", "lam": 0.02},
    }

    preset: Literal["best", "paper"] = Field("best", description="defaults: the best found, or the paper's")

    recall_epochs: int = Field(1, ge=0, description="passes over a client's data to recall its last body; 0: none")
    recall_lr: float | None = Field(None, gt=0, description="learning rate of the recall; default: that of the round")
    recall_when: Literal["training", "evaluation", "both"] = Field(
        "both", description="recall before local training, before a client is evaluated (or exported), or both"
    )
    recall_layers: int = Field(1, ge=1, description="features compared: what the last layers, so many, are given")
    lam: float = Field(0.05, ge=0, description="weight of the L2 norm of the head; 0: none")
    forgetting: bool = Field(
        False, description="when evaluating, test clients after recall and with their last body too"
    )

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        if self.forgetting and (self.evaluate not in ("paper", "received") or self.finetune_epochs):
            raise ValueError("forgetting=true measures what is received, not what is trained; allowed: evaluate=paper")
        return self

    def memory(self, network: Network) -> Values:
        if not self.recall_epochs and not self.forgetting:
            return {}
        self._check(network)
        initial = network.initial()
        body = {BODY + name: initial[name] for name in self.shared(network)}
        return {"last_round": torch.tensor(0), **body}

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        if self.recall_when != "evaluation":
            self.recall(clients)
        self._fit(clients)
        self._remember(clients)
        return clients.take(received.tensors)

    def personalize(self, clients: Cohort, received: Message) -> None:
        super().personalize(clients, received)
        if self.recall_when != "training":
            self.recall(clients)

    def recall(self, clients: Cohort) -> None:
        """Local knowledge recall: train the body towards the features of the last one; not the first time."""
        again = clients.memory["last_round"].nonzero().flatten().tolist() if self.recall_epochs else []
        if not again:
            return
        part = clients.of(again)
        part.fit(
            Recall(self.recall_layers),
            train=[name for name in self.shared(part.network) if name in part.network.parameters],
            epochs=self.recall_epochs,
            lr=self.recall_lr,
            own=self._last_body(part),
            purpose="recall",
        )
        for name in self.shared(part.network):
            clients.values[name][again] = part.values[name]

    def finetune(self, clients: Cohort, epochs: int) -> None:
        self._fit(clients, epochs=epochs, lr=self.lr, purpose="finetune")

    def measures(self, clients: Cohort, received: Message) -> Mapping[str, Tensor]:
        """Forgetting: how a client is served by the body it just received, after recall, and by its last body."""
        if not self.forgetting:
            return {}
        last = clients.memory["last_round"]
        fresh, recalled, kept = (clients.of(range(len(clients))) for _ in range(3))
        fresh.load(received.tensors)
        recalled.load(received.tensors)
        self.recall(recalled)
        kept.load(self._last_body(clients))
        known = {"received": fresh, "recalled": recalled, "kept": kept}
        never = last == 0
        away = (clients.round - last).double().masked_fill(never, torch.nan)
        scores = {name: _score(model) for name, model in known.items()}
        scores["kept"] = scores["kept"].masked_fill(never.cpu(), torch.nan)
        kind = "accuracy" if clients.data.num_classes else "loss"
        return {"rounds_away": away, **{f"{name}_{kind}": score for name, score in scores.items()}}

    def _fit(self, clients: Cohort, **how: Any) -> None:
        layers = clients.network.layers[-max(1, self.personal_layers) :]
        classifier = tuple(name for layer in layers for name in layer.parameters)
        clients.fit(Light(clients.loss, self.lam, classifier) if self.lam else None, **how)

    def _remember(self, clients: Cohort) -> None:
        if "last_round" in clients.memory:
            clients.memory["last_round"] = torch.full_like(clients.memory["last_round"], clients.round)
            for name in self.shared(clients.network):
                clients.memory[BODY + name] = clients.values[name].clone()

    def _last_body(self, clients: Cohort) -> Values:
        return {name: clients.memory[BODY + name] for name in self.shared(clients.network)}

    def _check(self, network: Network) -> None:
        if self.recall_layers >= len(network.layers):
            most = len(network.layers) - 1
            allowed = f"1 to {most}" if most else "recall_epochs=0, or a network of more layers"
            there = f"{network.name} has {len(network.layers)} layers"
            raise UserError(f"recall_layers={self.recall_layers}: {there}; allowed: {allowed}")


def _score(clients: Cohort) -> Tensor:
    """The accuracy of each client on its test data; the loss, where there are no classes."""
    scores = clients.evaluate("test")
    return (scores.correct if clients.data.num_classes else scores.loss) / scores.samples.clamp(min=1)
