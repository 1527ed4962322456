"""Local training of a stack: one step, and the loop over steps, for the stack as a whole or client by client."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tailorfl.cohort.gradients import Gradients, Inputs, layout
from tailorfl.cohort.objective import Objective
from tailorfl.cohort.optimizer import Optimizer
from tailorfl.cohort.samples import Batches, Samples, decoded
from tailorfl.cohort.schedule import Schedule
from tailorfl.data.augment import Augmentation
from tailorfl.models.network import Network, Values


@dataclass
class Training:
    """Everything one call of ``fit`` works on. The values are trained in place."""

    network: Network
    objective: Objective
    optimizer: Optimizer
    trained: tuple[str, ...]
    rates: tuple[float, ...] | Tensor  # a learning rate for each trained name
    values: Values  # stacked, [clients, ...]
    samples: Samples
    schedule: Schedule
    augmentation: Augmentation | None = None
    own: Values = field(default_factory=dict)  # stacked tensors that the objective reads
    common: Values = field(default_factory=dict)  # tensors that the objective reads, the same for all clients

    def __post_init__(self) -> None:
        self.done = torch.zeros(1, dtype=torch.int64, device=self.samples.rows.device)
        self.loss = self.values[self.trained[0]].new_zeros(len(self.samples.rows))  # summed over the steps
        self.adds = self.optimizer.adds and not isinstance(self.rates, Tensor)

    # Only where steps are taken: a training that is taken apart, or computed from copies, takes none itself.

    @cached_property
    def batches(self) -> Batches:
        """What each step is given."""
        return self.samples.lay_out(self.schedule, self.values[self.trained[0]].dtype)

    @cached_property
    def state(self) -> list[list[Tensor]]:
        """What the optimizer keeps from step to step."""
        return self.optimizer.start([self.values[name] for name in self.trained])

    def allocate(self) -> None:
        """Make now what is made when it is first used: a capture may make nothing that outlives it."""
        _ = self.batches, self.state

    def signature(self) -> Hashable:
        """What makes another program of it, beside the network, the data, and how much of them there is."""

        def shapes(values: Values, skip: int) -> Hashable:
            return tuple((name, tensor.shape[skip:], tensor.dtype) for name, tensor in values.items())

        weights, inputs = self.samples.weights, self.samples.inputs
        return (
            self.objective,
            self.optimizer,
            self.trained,
            self.augmentation,
            self.schedule.whole,
            None if weights is None else weights.dtype,
            None if inputs is None else (inputs.shape[2:], inputs.dtype),
            shapes(self.values, 1),
            shapes(self.own, 1),
            shapes(self.common, 0),
        )

    def widths(self) -> list[int]:
        """For each step, how many clients still train. Cohorts run from large to small, so these come first."""
        steps = torch.arange(int(self.schedule.steps.max()))
        return (self.schedule.steps.cpu()[None, :] > steps[:, None]).sum(1).tolist()

    def run(self, step: Callable[[int], None]) -> None:
        """All steps of all clients; the stack shrinks as clients finish.

        ``step`` takes one step of so many clients, or of some more, to have few distinct widths: clients that have
        finished then go through the motions, and get back what they finished with.
        """
        widths = self.widths()
        finished = [self._rows(widths[0], len(self.samples.rows))]  # clients without a step stay as they are
        for active, next_active in zip(widths, [*widths[1:], 0], strict=True):
            step(active)
            if 0 < next_active < active:
                finished.append(self._rows(next_active, active))
        for rows, values, loss in finished:
            self.loss[rows] = loss
            for name, tensor in values.items():
                self.values[name][rows] = tensor

    def _rows(self, start: int, end: int) -> tuple[slice, Values, Tensor]:
        rows = slice(start, end)
        return rows, {name: tensor[rows].clone() for name, tensor in self.values.items()}, self.loss[rows].clone()

    def step(self, width: int, gradients: Gradients) -> None:
        """One step of the first ``width`` clients."""
        inputs = self.inputs(width)
        found, losses = gradients(inputs)
        self.done += 1
        velocities = list(inputs.velocity.values())
        self.optimizer.step(
            [inputs.trained[name] for name in self.trained],
            [found[name] for name in self.trained],
            [velocities] if velocities else [[tensor[:width] for tensor in slot] for slot in self.state],
            self.rates,
            self.done,
        )
        self.loss[:width] += losses

    def inputs(self, width: int) -> Inputs:
        """What the next step of the first ``width`` clients is computed from."""
        batch = self.batches.at(self.done, width)
        looked_up, targets = self._look_up(batch)
        trained = set(self.trained)
        return Inputs(
            {name: self.values[name][:width] for name in self.trained},
            {name: tensor[:width] for name, tensor in self.values.items() if name not in trained},
            (looked_up, targets, batch.valid, batch.weight, batch.size),
            {name: tensor[:width] for name, tensor in self.own.items()},
            self.common,
            {name: self.state[0][k][:width] for k, name in enumerate(self.trained)} if self.adds else {},
        )

    def _look_up(self, batch: Batches) -> tuple[Tensor, Tensor]:
        """The batch's inputs and targets."""
        cached, found = self.samples.inputs, batch.found
        if cached is not None and self.schedule.whole:
            return cached[: len(found), : found.shape[1]], batch.targets
        if cached is not None:
            return cached[torch.arange(len(found), device=found.device)[:, None], found], batch.targets
        raw = self.samples.data.inputs.index_select(0, found.flatten()).unflatten(0, found.shape)
        return decoded(self.samples.data, raw, batch.targets, self.augmentation, batch.draws)

    def parts(self, least: int) -> Iterator["Training"]:
        """The same training in parts of like size, where one stack would be padding for the most part.

        A split must save a quarter of what is computed, and ``least`` samples over all steps. The parts train the
        values of the whole.
        """
        sizes = self.samples.counts.clamp(max=self.schedule.positions.shape[2]).tolist()
        # Of runs that are joined, who takes fewer steps may have more samples.
        widest = list(accumulate(reversed(sizes), max))[::-1]
        splits = _splits(widest, self.schedule.steps.tolist(), least)
        if len(splits) == 1:
            yield self
        else:
            yield from (self._part(rows, max(sizes[rows])) for rows in splits)

    def _part(self, rows: slice, size: int) -> "Training":
        steps = int(self.schedule.steps[rows].max())
        positions = self.schedule.positions[:steps, rows, :size]
        draws = {name: numbers[:steps, rows, :size] for name, numbers in self.schedule.draws.items()}
        samples = self.samples.of(rows)
        part = replace(
            self,
            values={name: tensor[rows] for name, tensor in self.values.items()},
            samples=samples.first(int(samples.counts.max())),
            schedule=replace(
                self.schedule,
                positions=positions,
                draws=draws,
                steps=self.schedule.steps[rows],
                seeds=self.schedule.seeds[rows],
            ),
            own={name: tensor[rows] for name, tensor in self.own.items()},
        )
        part.loss = self.loss[rows]
        return part

    def one(self, client: int) -> "Training":
        """The same training of one client alone, on values of its own."""
        only = slice(client, client + 1)
        steps = int(self.schedule.steps[client])
        schedule = Schedule(
            self.schedule.positions[:steps, only],
            {name: numbers[:steps, only] for name, numbers in self.schedule.draws.items()},
            self.schedule.steps[only],
            self.schedule.seeds[only],
            self.schedule.whole,
        )
        return replace(
            self,
            # Copies: autograd watches for changes of a tensor, and other threads change the rest of the stack.
            values={name: alone(tensor[client])[None] for name, tensor in self.values.items()},
            samples=self.samples.of(only),
            schedule=schedule,
            own={name: tensor[only] for name, tensor in self.own.items()},
        )


def _splits(sizes: Sequence[int], steps: Sequence[int], least: int) -> list[slice]:
    """Where to part a stack whose clients have batches of these sizes in so many steps; neither ever increases."""

    def split(start: int, end: int) -> list[slice]:
        rest = list(accumulate(reversed(steps[start:end])))[::-1]  # steps from each client on
        saved = [rest[k] * (sizes[start] - sizes[start + k]) for k in range(end - start)]
        most = max(saved)
        if most < least or 4 * most < sizes[start] * rest[0]:
            return [slice(start, end)]
        middle = start + saved.index(most)
        return split(start, middle) + split(middle, end)

    return split(0, len(sizes))


def alone(tensor: Tensor) -> Tensor:
    """A copy of one client's tensor, laid out in memory as it is fastest for a client alone."""
    return tensor.clone(memory_format=layout(tensor))
