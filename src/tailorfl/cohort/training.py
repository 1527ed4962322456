"""Local training of a stack: one step, and the loop over steps, for the stack as a whole or client by client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tailorfl.cohort.objective import Batch, Client, Objective, stacked_losses
from tailorfl.cohort.optimizer import Optimizer, Rate
from tailorfl.cohort.schedule import Schedule
from tailorfl.data.augment import Augmentation
from tailorfl.data.federated import FederatedData
from tailorfl.models.network import Network, Values


@dataclass(frozen=True)
class Samples:
    """Samples of a cohort: for each client its rows of the pool, padded to the longest."""

    data: FederatedData
    rows: Tensor  # int64 [clients, longest]
    counts: Tensor  # int64 [clients]
    weights: Tensor | None = None  # [clients, longest], one weight a sample
    inputs: Tensor | None = None  # [clients, longest, ...], instead of the pool's inputs (cached features)

    def batch(self, positions: Tensor, draws: Values | None = None, augmentation: Augmentation | None = None) -> Batch:
        """The samples at these positions, [clients, size]; -1 is padding."""
        at = positions.clamp(min=0)
        rows = self.rows.gather(1, at)
        if self.inputs is not None:
            inputs = self.inputs[torch.arange(len(at), device=at.device)[:, None], at]
        else:
            raw = self.data.inputs[rows]
            inputs = self.data.decode(augmentation.apply(raw, draws or {}) if augmentation else raw)
        dtype = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        valid = (positions >= 0).to(dtype)
        weight = valid if self.weights is None else valid * self.weights.gather(1, at)
        return Batch(inputs, self.data.targets[rows], valid, weight)

    def in_order(self, size: int) -> Iterator[tuple[int, Batch]]:
        """All samples in their own order, ``size`` of each client at a time, with the position of the first."""
        for start in range(0, self.rows.shape[1], size):
            positions = torch.arange(start, min(start + size, self.rows.shape[1]), device=self.rows.device)
            yield start, self.batch(torch.where(positions < self.counts[:, None], positions, -1))

    def of(self, clients: slice) -> "Samples":
        """The same for some of the clients."""
        return replace(
            self,
            rows=self.rows[clients],
            counts=self.counts[clients],
            weights=None if self.weights is None else self.weights[clients],
            inputs=None if self.inputs is None else self.inputs[clients],
        )


@dataclass
class Training:
    """Everything one call of ``fit`` works on. The values are trained in place."""

    network: Network
    objective: Objective
    optimizer: Optimizer
    trained: tuple[str, ...]
    rates: tuple[Rate, ...]  # a learning rate for each trained name
    values: Values  # stacked, [clients, ...]
    samples: Samples
    schedule: Schedule
    augmentation: Augmentation | None = None
    own: Values = field(default_factory=dict)  # stacked tensors that the objective reads
    common: Values = field(default_factory=dict)  # tensors that the objective reads, the same for all clients
    stacked: bool = True  # False: a cohort of one, run without vmap
    masked: bool = False  # True: a step may include clients that have finished

    def __post_init__(self) -> None:
        self.done = torch.zeros(1, dtype=torch.int64, device=self.samples.rows.device)
        self.state = self.optimizer.start([self.values[name] for name in self.trained])
        self.loss = self.values[self.trained[0]].new_zeros(len(self.samples.rows))  # summed over the steps

    def widths(self) -> list[int]:
        """For each step, how many clients still train. Cohorts run from large to small, so these come first."""
        steps = torch.arange(len(self.schedule.positions))
        return (self.schedule.steps.cpu()[None, :] > steps[:, None]).sum(1).tolist()

    def run(self) -> None:
        """All steps of all clients; the stack shrinks as clients finish."""
        for width in self.widths():
            self.step(width)

    def step(self, width: int) -> None:
        """One step of the first ``width`` clients."""
        trained = [self.values[name][:width].detach().requires_grad_() for name in self.trained]
        losses = self._losses(width, dict(zip(self.trained, trained, strict=True)))
        gradients = torch.autograd.grad(losses.sum(), trained, materialize_grads=True)
        active = (self.schedule.steps[:width] > self.done).to(losses.dtype) if self.masked else None
        self.done += 1
        self.optimizer.step(
            [t.detach() for t in trained],
            gradients,
            [[tensor[:width] for tensor in slot] for slot in self.state],
            self.rates,
            self.done,
            active,
        )
        losses = losses.detach()
        self.loss[:width] += losses if active is None else losses * active

    def one(self, client: int) -> "Training":
        """The same training of one client alone, on values of its own."""
        only = slice(client, client + 1)
        steps = int(self.schedule.steps[client])
        schedule = Schedule(
            self.schedule.positions[:steps, only],
            {name: numbers[:steps, only] for name, numbers in self.schedule.draws.items()},
            self.schedule.steps[only],
            self.schedule.seeds[only],
        )
        return replace(
            self,
            # Copies: autograd watches for changes of a tensor, and other threads change the rest of the stack.
            values={name: tensor[only].clone() for name, tensor in self.values.items()},
            samples=self.samples.of(only),
            schedule=schedule,
            own={name: tensor[only] for name, tensor in self.own.items()},
            stacked=False,
        )

    def _losses(self, width: int, trained: Values) -> Tensor:
        values = {name: trained.get(name, tensor[:width]) for name, tensor in self.values.items()}
        own = {name: tensor[:width] for name, tensor in self.own.items()}
        positions = self.schedule.positions.index_select(0, self.done)[0, :width]
        draws = {k: v.index_select(0, self.done)[0, :width] for k, v in self.schedule.draws.items()}
        batch = self.samples.of(slice(0, width)).batch(positions, draws, self.augmentation)
        return losses_of(self.network, self.objective, values, batch, own, self.common, self.stacked)


def losses_of(
    network: Network,
    objective: Objective,
    values: Values,
    batch: Batch,
    own: Values,
    common: Values,
    stacked: bool,
) -> Tensor:
    """The objective of every client, [clients]; without the stack for a cohort of one."""
    if stacked:
        return stacked_losses(network, objective, values, batch, own, common)
    client = Client(network, first(values), first(own), common)
    return objective(client, Batch(batch.inputs[0], batch.targets[0], batch.valid[0], batch.weight[0]))[None]


def first(values: Values) -> Values:
    """The tensors of a cohort's only client."""
    return {name: tensor[0] for name, tensor in values.items()}


def pad_rows(rows: Sequence[Tensor], device: torch.device, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Index lists as one table, [clients, longest], and their lengths."""
    counts = torch.tensor([len(row) for row in rows])
    table = torch.zeros(len(rows), max(1, longest or int(counts.max())), dtype=torch.int64)
    for client, row in enumerate(rows):
        table[client, : len(row)] = row
    return table.to(device), counts.to(device)
