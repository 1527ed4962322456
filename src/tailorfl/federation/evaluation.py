"""Scores of clients, and what is reported of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tailorfl.cohort.engine import Engine
from tailorfl.cohort.scoring import Detections, Scores, score
from tailorfl.data.federated import FederatedData, Split
from tailorfl.models.network import Network, Values


@dataclass(frozen=True)
class ClientScores:
    """Samples, hits and summed loss of clients, one entry a client."""

    clients: tuple[int, ...]
    samples: np.ndarray
    correct: np.ndarray
    loss: np.ndarray

    @staticmethod
    def gather(parts: list[tuple[tuple[int, ...], Scores]]) -> "ClientScores":
        """Parts of any order as one, clients ascending."""
        clients = [client for ids, _ in parts for client in ids]
        order = np.argsort(clients)
        columns = [
            np.concatenate([getattr(scores, field).numpy() for _, scores in parts] or [np.zeros(0)])[order]
            for field in ("samples", "correct", "loss")
        ]
        return ClientScores(tuple(clients[k] for k in order), *columns)

    def of(self, chosen: set[int]) -> "ClientScores":
        kept = np.array([client in chosen for client in self.clients], dtype=bool)
        clients = tuple(client for client in self.clients if client in chosen)
        return ClientScores(clients, self.samples[kept], self.correct[kept], self.loss[kept])

    @property
    def accuracies(self) -> np.ndarray:
        """One a client; NaN for a client without samples."""
        return np.where(self.samples > 0, self.correct / np.maximum(self.samples, 1), np.nan)

    @property
    def accuracy(self) -> float | None:
        """Mean over clients, weighted by samples; None where there is nothing to test on."""
        return float(self.correct.sum() / self.samples.sum()) if self.samples.sum() else None

    @property
    def mean_loss(self) -> float | None:
        return float(self.loss.sum() / self.samples.sum()) if self.samples.sum() else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the accuracy over clients."""
        tested = self.accuracies[self.samples > 0]
        return float(tested.std()) if len(tested) else None

    @property
    def worst_decile(self) -> float | None:
        """Mean accuracy of the tenth of the clients that is served worst (at least one client)."""
        tested = np.sort(self.accuracies[self.samples > 0])
        return float(tested[: max(1, len(tested) // 10)].mean()) if len(tested) else None

    def quantile(self, share: float) -> float | None:
        """The accuracy that this share of the clients does not exceed."""
        tested = self.accuracies[self.samples > 0]
        return float(np.quantile(tested, share)) if len(tested) else None


@dataclass
class Evaluated:
    """What clients found: scores of the model that serves each of them, and what else a method reports."""

    scores: dict[Split, ClientScores]
    others: dict[str, ClientScores] = field(default_factory=dict)  # further models, on test data
    measures: dict[str, dict[int, float]] = field(default_factory=dict)  # by name and client


def evaluate_common(
    engine: Engine, network: Network, data: FederatedData, values: Values, clients: tuple[int, ...], split: Split
) -> ClientScores:
    """One model for all clients: every sample is computed once, however many clients test on it."""
    ragged = data.rows(split)
    lists = [ragged.of(client) for client in clients]
    rows = torch.cat(lists).unique() if lists else torch.zeros(0, dtype=torch.int64)
    outputs = _outputs(engine, network, data, values, rows)
    scores = _detected(network, data, lists, outputs) if data.detection else _hit(data, lists, outputs)
    return ClientScores.gather([(clients, scores)])


def _outputs(
    engine: Engine, network: Network, data: FederatedData, values: Values, rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the model says of these rows, some of them at a time."""
    on_device = {name: tensor.to(engine.device) for name, tensor in values.items()}
    size = engine.evaluation_size(engine.plan(network, data.decode(data.inputs[:1])), 1)
    for part in rows.split(size):
        with torch.no_grad():
            inputs = data.decode(data.inputs[part.to(engine.device)])
            yield part, network.forward(on_device, inputs, None, train=False)


Outputs = Iterable[tuple[torch.Tensor, torch.Tensor]]


def _hit(data: FederatedData, lists: Sequence[torch.Tensor], outputs: Outputs) -> Scores:
    hits = torch.zeros(len(data.targets))
    losses = torch.zeros(len(data.targets), dtype=torch.float64)
    for part, found in outputs:
        hit, loss = score(found[None], data.targets[part.to(found.device)][None])
        hits[part], losses[part] = hit[0].float().cpu(), loss[0].cpu()
    return Scores(
        torch.tensor([len(own) for own in lists]),
        torch.tensor([int(hits[own].sum()) for own in lists]),
        torch.tensor([float(losses[own].sum()) for own in lists], dtype=torch.float64),
    )


def _detected(network: Network, data: FederatedData, lists: Sequence[torch.Tensor], outputs: Outputs) -> Scores:
    detections = Detections(data, network.anchors())
    for part, found in outputs:
        detections.add(part, found)
    return Scores.of([detections.of(own) for own in lists])
