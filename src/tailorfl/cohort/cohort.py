"""A cohort: clients with the same network, their tensors stacked along a leading dimension."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tailorfl.cohort.engine import Engine
from tailorfl.cohort.gradients import ABSENT, Gradients, Inputs, single_gradients, stacked_gradients
from tailorfl.cohort.local import LocalTraining
from tailorfl.cohort.objective import Batch, Objective, cross_entropy, multibox, squared_error
from tailorfl.cohort.optimizer import Optimizer
from tailorfl.cohort.samples import Samples, like_sizes, pad_rows
from tailorfl.cohort.schedule import mini_batches
from tailorfl.cohort.scoring import Detections, Scores, score
from tailorfl.cohort.training import Training, alone
from tailorfl.data.augment import Augmentation
from tailorfl.data.federated import FederatedData, Split
from tailorfl.models.network import Network, Values
from tailorfl.models.own_classes import without
from tailorfl.seeding import derive, generator


@dataclass
class Cohort:
    """Some clients, largest first. A site of a real federation is a cohort of one.

    ``values`` are the clients' whole models, [clients, ...] each; ``memory`` is what a method keeps with each client
    beside the model, from one round to the next; ``archive`` is what the server sent once and every client keeps.
    """

    engine: Engine
    network: Network
    data: FederatedData
    clients: tuple[int, ...]
    values: Values
    options: LocalTraining
    seed: int = 0
    round: int = 1
    rounds: int = 1
    augmentation: Augmentation | None = None
    memory: Values = field(default_factory=dict)
    archive: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Values = field(default_factory=dict)  # mean loss of each client over its steps, by purpose of the fit

    def __post_init__(self) -> None:
        self.plan = self.engine.plan(self.network, self._one_sample())
        self._samples: dict[Split, Samples] = {}

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def counts(self) -> Tensor:
        """How many training samples each client has, on the CPU."""
        return self.data.train.counts[list(self.clients)]

    def samples(self, split: Split) -> Samples:
        """The clients' samples of a split, as a padded table; laid out once."""
        if split not in self._samples:
            ragged = self.data.rows(split)
            rows, counts = pad_rows([ragged.of(client) for client in self.clients], self.engine.device)
            self._samples[split] = Samples(self.data, rows, counts)
        return self._samples[split]

    def class_members(self) -> Tensor:
        """Which class each training sample of each client is of, int64 [clients, samples, classes]; padding: none."""
        samples = self.samples("train")
        return F.one_hot(self.data.labels[samples.rows], self.data.num_classes) * samples.real[..., None]

    def class_counts(self) -> Tensor:
        """How many training samples of each class each client has, int64 [clients, classes]."""
        samples = self.samples("train")
        found = torch.zeros(len(self), self.data.num_classes, dtype=torch.int64, device=samples.rows.device)
        return found.scatter_add_(1, self.data.labels[samples.rows], samples.real.to(torch.int64))

    def drawn(self, purpose: str) -> Samples:
        """All training samples, each augmented once, where there is an augmentation."""
        samples = self.samples("train")
        if not self.augmentation:
            return samples
        laid: Values = {}
        for row, (client, count) in enumerate(zip(self.clients, self.counts.tolist(), strict=True)):
            rng = generator(self.seed, purpose, self.round, client)
            for name, numbers in self.augmentation.draw(rng, count).items():
                drawn = torch.from_numpy(numbers)
                laid.setdefault(name, torch.zeros(samples.rows.shape, dtype=drawn.dtype))[row, :count] = drawn
        draws = {name: numbers.to(self.engine.device) for name, numbers in laid.items()}
        return replace(samples, augmentation=self.augmentation, draws=draws)

    @cached_property
    def absent(self) -> Tensor | None:
        """The classes that are out of the question for each client, booleans [clients, classes]; None: none is."""
        if not (self.options.own_classes and self.data.num_classes):
            return None
        counts = self.class_counts()
        return (counts == 0) & (counts.sum(1, keepdim=True) > 0)  # a client without data may have any

    def head(self, features: Tensor) -> "Cohort":
        """The clients with their head as the network, to be fitted with ``inputs=features``; of the same tensors."""
        head = self.network.top
        self.engine.plan(head, features[0, :1])  # by what it is given, not by the data's inputs
        self.network.check_top({name: tensor[0] for name, tensor in self.values.items()}, self._one_sample())
        made = replace(self, network=head, values={name: self.values[name] for name in head.names}, losses={})
        made._samples = self._samples
        return made

    def _one_sample(self) -> Tensor:
        return self.data.decode(self.data.inputs[:1])

    def of(self, rows: Sequence[int]) -> "Cohort":
        """Some of these clients, by their places, with copies of what they have."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.engine.device)
        return self._part(tuple(self.clients[row] for row in rows), at)

    def alike(self) -> list["Cohort"]:
        """The clients in parts of like size, with the same tensors: a table for a part is half padding at most."""
        return [self._part(self.clients[at], at) for at in like_sizes(self.counts.tolist(), 2)]

    def _part(self, clients: tuple[int, ...], at: Tensor | slice) -> "Cohort":
        return replace(
            self,
            clients=clients,
            values={name: tensor[at] for name, tensor in self.values.items()},
            memory={name: tensor[at] for name, tensor in self.memory.items()},
            losses={},
        )

    def load(self, received: Mapping[str, Tensor]) -> None:
        """Give every client these tensors in place of its own: the same for all, or with a row for each."""
        for name, tensor in received.items():
            self.values[name].copy_(tensor.to(self.values[name].device).expand_as(self.values[name]))

    def take(self, names: Iterable[str]) -> Values:
        """These tensors of every client, stacked."""
        return {name: self.values[name] for name in names}

    @property
    def loss(self) -> Objective:
        """The plain loss of the task: cross-entropy for classes, SSD's for objects, else the squared error."""
        if self.data.detection:
            return multibox
        return cross_entropy if self.data.num_classes else squared_error

    def fit(
        self,
        objective: Objective | None = None,
        *,
        train: Sequence[str] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | Mapping[str, float] | None = None,
        optimizer: Optimizer | None = None,
        weights: Tensor | None = None,
        only: Tensor | None = None,
        inputs: Tensor | None = None,
        own: Values | None = None,
        common: Values | None = None,
        purpose: str = "train",
    ) -> Tensor:
        """Local training of some tensors (all parameters by default); the mean loss of each client over its steps.

        ``epochs`` or ``steps`` say how long, the options where neither is given. ``weights`` [clients, samples] weigh
        the samples, ``only`` (booleans of the same form) leaves some out, ``inputs`` replaces the data by features that
        were computed before, ``own`` and ``common`` reach the objective. ``lr`` may differ by name. ``purpose`` names
        the random stream: two fits of one round need two.
        """
        if epochs is None and steps is None:
            epochs, steps = self.options.local_epochs, self.options.local_steps
        trained = tuple(self.network.parameters if train is None else train)
        augmentation = None if inputs is not None else self.augmentation
        once = augmentation is not None and augmentation.once
        samples = replace(self.drawn("augment") if once else self.samples("train"), weights=weights, inputs=inputs)
        if only is not None:
            samples = samples.subset(only)
        counts = samples.counts.tolist()
        if not trained or not any(counts):
            return torch.zeros(len(self), device=self.engine.device)
        training = Training(
            network=self.network,
            objective=objective or self.loss,
            optimizer=optimizer or self.options.local_optimizer(),
            trained=trained,
            rates=self._rates(trained, lr),
            values=self.values,
            samples=samples,
            schedule=mini_batches(
                counts,
                self.options.batch_size if batch_size is None else batch_size,
                epochs,
                steps,
                [(self.seed, purpose, self.round, client) for client in self.clients],
                None if once else augmentation,
            ).to(self.engine.device),
            augmentation=augmentation,
            own=self._own(own),
            common=common or {},
        )
        self.engine.run(training)
        self.losses[purpose] = training.loss / training.schedule.steps.clamp(min=1)
        return self.losses[purpose]

    def gradient(
        self,
        objective: Objective | None = None,
        *,
        train: Sequence[str] | None = None,
        weights: Tensor | None = None,
        samples: Samples | None = None,
        own: Values | None = None,
        common: Values | None = None,
        purpose: str = "gradient",
    ) -> tuple[Values, Tensor]:
        """The gradient of the objective on all of each client's data, and the loss: accumulated over parts that fit.

        ``samples`` are those of ``drawn``, the data as it is by default. ``purpose`` names the random stream of
        networks that draw numbers (dropout).
        """
        trained = tuple(self.network.parameters if train is None else train)
        samples = replace(samples or self.samples("train"), weights=weights)
        kind = stacked_gradients if self.plan.stacked else single_gradients
        compute, beside = kind(self.network, objective or self.loss), self._own(own)
        at_once, size = self.engine.gradient_sizes(self.plan, len(self), samples.rows.shape[1])

        def of(clients: slice) -> tuple[Values, Tensor]:
            self._seed_layers(purpose, clients)
            return self._gradient_of(clients, samples.of(clients), size, trained, compute, beside, common or {})

        if self.plan.stacked:
            found = [of(slice(start, start + at_once)) for start in range(0, len(self), at_once)]
        else:
            with torch.random.fork_rng(enabled=self.plan.random):
                found = self.engine.each(lambda k: of(slice(k, k + 1)), len(self), side_by_side=not self.plan.random)
        if len(found) == 1:
            return found[0]
        return {name: torch.cat([one[name] for one, _ in found]) for name in trained}, torch.cat(
            [loss for _, loss in found]
        )

    def _gradient_of(
        self,
        clients: slice,
        samples: Samples,
        size: int,
        trained: tuple[str, ...],
        compute: Gradients,
        own: Values,
        common: Values,
    ) -> tuple[Values, Tensor]:
        """The gradient of some clients, of a stack or of one alone, over all their samples, so many at a time."""
        values = {name: tensor[clients] for name, tensor in self.values.items()}
        if not self.plan.stacked:
            values = {name: alone(tensor[0])[None] for name, tensor in values.items()}
        total = {name: torch.zeros_like(values[name]) for name in trained}
        loss = values[trained[0]].new_zeros(len(samples.rows))
        for batch in samples.in_order(size):
            inputs = Inputs(
                {name: values[name] for name in trained},
                # Copies: batch norms change their statistics in place, and a gradient must change nothing.
                {name: tensor.clone() for name, tensor in values.items() if name not in trained},
                (batch.inputs, batch.targets, batch.valid, batch.weight, batch.size),
                {name: tensor[clients] for name, tensor in own.items()},
                common,
                {},
            )
            found, losses = compute(inputs)
            share = batch.valid.sum(1) / samples.counts.clamp(min=1)
            for name, gradient in found.items():
                total[name] += gradient * share.reshape(-1, *[1] * (gradient.dim() - 1))
            loss += losses * share
        return total, loss

    def _seed_layers(self, purpose: str, clients: slice) -> None:
        """Where a network draws numbers itself, let them depend on the client, not on what ran before."""
        if self.plan.random:  # such networks run one by one
            torch.manual_seed(derive(self.seed, purpose, self.round, self.clients[clients.start], "layers"))

    def mean_loss(self) -> Tensor:
        """The loss of each client, averaged over the fits of the round; NaN where nothing was fitted."""
        if not self.losses:
            return torch.full((len(self),), torch.nan, device=self.engine.device)
        return torch.stack(list(self.losses.values())).mean(0)

    def features(self, split: Split = "train", samples: Samples | None = None) -> Tensor:
        """What each client's head is given on each of its samples, [clients, samples, ...]; padding is zero."""
        return self._on_all(samples or self.samples(split), self.features_of)

    def outputs(self, split: Split = "train") -> Tensor:
        """The outputs of each client's model on each of its samples, [clients, samples, classes]; padding is zero."""
        return self._on_all(self.samples(split), self.predict)

    def _on_all(self, samples: Samples, compute: Callable[[Batch], Tensor]) -> Tensor:
        parts = []
        for batch in samples.in_order(self.engine.evaluation_size(self.plan, len(self))):
            found = compute(batch)
            real = batch.valid.reshape(*batch.valid.shape, *[1] * (found.dim() - 2)) > 0
            parts.append(torch.where(real, found, 0))
        return torch.cat(parts, dim=1)

    def features_of(self, batch: Batch) -> Tensor:
        """What each client's head is given on its own batch, [clients, samples, ...]."""
        return self.engine.predict(self.network, self.values, batch.inputs, batch.valid, features=True)

    def predict(self, batch: Batch) -> Tensor:
        """The outputs of each client's model on its own batch, [clients, samples, classes]."""
        return self.engine.predict(self.network, self.values, batch.inputs, batch.valid)

    def evaluate(self, split: Split, predict: Callable[[Batch], Tensor] | None = None) -> Scores:
        """Loss and hits of each client's model on its own samples of a split."""
        if self.data.detection:
            return self._detected(split, predict or self.predict)
        samples = self.samples(split)
        device = self.engine.device
        correct = torch.zeros(len(self), dtype=torch.int64, device=device)
        loss = torch.zeros(len(self), dtype=torch.float64, device=device)
        for batch in samples.in_order(self.engine.evaluation_size(self.plan, len(self))):
            hits, losses = self._score((predict or self.predict)(batch), batch.targets)
            real = batch.valid > 0
            correct += (hits & real).sum(1)
            loss += losses.where(real, 0.0).sum(1)
        return Scores(samples.counts.cpu(), correct.cpu(), loss.cpu())

    def _detected(self, split: Split, predict: Callable[[Batch], Tensor]) -> Scores:
        """The objects that each client's model finds in its own images of a split."""
        samples, start = self.samples(split), 0
        found = [Detections(self.data, self.network.anchors()) for _ in self.clients]
        for batch in samples.in_order(self.engine.evaluation_size(self.plan, len(self))):
            end = start + batch.valid.shape[1]
            for row, (outputs, count) in enumerate(zip(predict(batch), samples.counts.tolist(), strict=True)):
                found[row].add(samples.rows[row, start : min(end, count)], outputs[: max(0, count - start)])
            start = end
        rows = self.data.rows(split)
        return Scores.of([one.of(rows.of(client)) for one, client in zip(found, self.clients, strict=True)])

    def _score(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hits, losses = score(outputs, targets)
        if self.absent is None:
            return hits, losses
        hits, possible = score(without(outputs, self.absent[:, None]), targets)
        # A sample of a class that the client never saw is missed, and its loss is that of all classes: not infinite.
        return hits, torch.where(self.absent.gather(1, targets), losses, possible)

    def _own(self, own: Values | None) -> Values:
        """What the objective finds beside a client's model."""
        return (own or {}) if self.absent is None else {**(own or {}), ABSENT: self.absent}

    def _rates(self, trained: Sequence[str], lr: float | Mapping[str, float] | None) -> tuple[float, ...]:
        if isinstance(lr, Mapping):
            return tuple(lr[name] for name in trained)
        rate = self.options.rate(self.round, self.rounds) if lr is None else lr
        return (rate,) * len(trained)
