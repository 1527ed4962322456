"""Training steps as CUDA graphs: captured once for a shape, replayed for every step of every round."""

import gc
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tailorfl.cohort.gradients import Gradients, Kind, stacked_gradients
from tailorfl.cohort.schedule import Schedule
from tailorfl.cohort.traces import Program
from tailorfl.cohort.training import Training
from tailorfl.models.slicing import leading

FINE = 8  # sizes in each doubling for which there are graphs


def roomy(number: int, sizes: int = FINE) -> int:
    """The next of so many sizes in each doubling. Of 8: 1 to 16, 18, 20, .. 32, 36, .., an eighth too much at most."""
    step = 1
    while step * 2 * sizes < number:
        step *= 2
    return -(-number // step) * step


def _sizes(training: Training) -> int:
    """How finely sizes are told apart: steps on cached features are small, and a capture takes longer than many."""
    return FINE if training.samples.inputs is None else 2


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses, this process's own leavings included: runs that have ended leave cycles."""
    gc.collect()
    _give_back()
    return torch.cuda.mem_get_info(device)[0]


def _give_back() -> None:
    """Let go of the memory that this process has and does not use."""
    with suppress(RuntimeError):  # to some versions of torch a capture that broke off never ends
        torch.cuda.empty_cache()


class GraphCache:
    """The captured programs of one engine, the least recently used dropped first.

    Programs keep their tensors, and run one after the other, so their steps use the same memory. There are at most
    ``capacity`` of them, and fewer where a new one would find less than ``room`` bytes free.
    """

    def __init__(self, device: torch.device, room: int, capacity: int = 48) -> None:
        self.device = device
        self.room = room
        self.capacity = capacity
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # on which steps are captured
        self.programs: OrderedDict[Hashable, _Program] = OrderedDict()

    def run(self, training: Training, kind: Kind) -> None:
        """Train as ``training.run`` does, by replaying graphs of its steps."""
        try:
            return self._run(training, kind)
        except torch.OutOfMemoryError:
            if not self.programs:
                raise
        # Only here what the error held is free. The values are as they were: they change when all steps have run.
        self.programs.clear()
        gc.collect()
        self._run(training, kind)

    def _run(self, training: Training, kind: Kind) -> None:
        key = (kind, _key(training))
        program = self.programs.pop(key, None)
        if program is None:
            self._make_room()
            program = _Program(training, kind, self.pool, self.stream)
        try:
            program.run(training)
        except BaseException:
            self.pool = torch.cuda.graph_pool_handle()  # a capture that broke off may have left the old one in use
            raise
        self.programs[key] = program  # only now: one that could not be captured is not kept

    def _make_room(self) -> None:
        while len(self.programs) >= self.capacity or (self.programs and self._free() < self.room):
            self.programs.popitem(last=False)
            gc.collect()
        if not self.programs:
            self.pool = torch.cuda.graph_pool_handle()  # one that is in no graph's use cannot be taken up again

    def _free(self) -> int:
        """Bytes that a new program could have: what no process has, and what graphs share and nobody uses now."""
        _give_back()
        device = self.device
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is launched within this scope."""
    before, collects = torch.cuda.current_stream(), gc.isenabled()
    gc.disable()  # a graph of a run before that is collected while another is captured breaks the capture off
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    finally:
        torch.cuda.set_stream(before)  # a capture that broke off leaves its own
        if collects:
            gc.enable()


class _Program:
    """Static tensors with room for one shape of training, and a graph for each width of the shrinking stack."""

    def __init__(
        self,
        training: Training,
        kind: Kind,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        self.static = _static_copy(training)
        self.static.allocate()
        self.gradients = kind(training.network, training.objective)
        self.split = training.schedule.whole and kind is stacked_gradients
        self.pool, self.stream = pool, stream
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.before: dict[int, torch.cuda.CUDAGraph] = {}  # what a width's steps have in common

    def run(self, training: Training) -> None:
        clients = len(training.samples.rows)
        for active in set(training.widths()):  # captures run steps: all of them before the tensors are loaded
            self._width(active, clients)
        _load(self.static, training)
        last = None

        def step(active: int) -> None:
            nonlocal last
            width = self._width(active, clients)
            # Only now: memory of what a width has in common may have served the steps of a larger one.
            if self.split and width != last:
                self.before[width].replay()
            self.graphs[width].replay()
            last = width

        self.static.run(step)
        for name, tensor in training.values.items():
            tensor.copy_(self.static.values[name][:clients])
        training.loss.copy_(self.static.loss[:clients])

    def _width(self, width: int, clients: int) -> int:
        """The width of the graph that serves so many active clients; captured where it is new."""
        sizes = _sizes(self.static)
        # Where sizes are coarse, there may be more places than clients: those have no samples.
        chosen = roomy(width, sizes) if sizes < FINE else min(roomy(width), clients)
        if chosen not in self.graphs:
            self.graphs[chosen] = self._capture(chosen)
        return chosen

    def _capture(self, width: int) -> torch.cuda.CUDAGraph:
        gradients = self._of_one_batch(width) if self.split else self.gradients
        # Two steps on a side stream first: libraries choose their kernels and allocate what a capture may not.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.static.done.zero_()  # a run before this one has left it at its last step
                self.static.step(width, gradients)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with _captured(graph, self.pool, self.stream):
            self.static.step(width, gradients)
        return graph

    def _of_one_batch(self, width: int) -> Gradients:
        """The gradients of steps that all see the same batch; what these have in common is a graph by itself."""
        program = Program(self.gradients, self.static.inputs(width))
        program.of_one_batch(self.static.inputs(width))
        torch.cuda.synchronize()
        self.before[width] = torch.cuda.CUDAGraph()
        with _captured(self.before[width], self.pool, self.stream):
            gradients = program.of_one_batch(self.static.inputs(width))
        self.before[width].replay()  # the capture alone computes nothing, and the steps before the next one read it
        return gradients


def _key(training: Training) -> Hashable:
    steps, clients, _ = training.schedule.positions.shape
    samples, sizes = training.samples, _sizes(training)
    longest = samples.rows.shape[1]
    return (
        id(training.network),
        samples.data.inputs.data_ptr(),
        (roomy(steps), roomy(clients, sizes), _batch_size(training), roomy(longest, sizes)),
        training.signature(),
    )


def _static_copy(training: Training) -> Training:
    """Tensors of its own, with room, that stay where they are for as long as the graphs live."""
    steps, clients, _ = training.schedule.positions.shape
    sizes = _sizes(training)
    steps, clients, longest = roomy(steps), roomy(clients, sizes), roomy(training.samples.rows.shape[1], sizes)
    batch, samples, device = _batch_size(training), training.samples, training.samples.rows.device

    def room(tensor: Tensor, *lead: int) -> Tensor:
        return torch.zeros(*lead, *tensor.shape[len(lead) :], dtype=tensor.dtype, device=device)

    cached = samples.inputs
    return replace(
        training,
        values={name: room(tensor, clients) for name, tensor in training.values.items()},
        own={name: room(tensor, clients) for name, tensor in training.own.items()},
        common={name: tensor.clone() for name, tensor in training.common.items()},
        rates=torch.zeros(len(training.rates), dtype=training.loss.dtype, device=device),
        samples=replace(
            samples,
            rows=room(samples.rows, clients, longest),
            counts=room(samples.counts, clients),
            weights=None if samples.weights is None else room(samples.weights, clients, longest),
            inputs=None if cached is None else room(cached, clients, longest),
            draws={name: room(numbers, clients, longest) for name, numbers in samples.draws.items()},
        ),
        schedule=Schedule(
            room(training.schedule.positions, steps, clients, batch),
            {name: room(numbers, steps, clients, batch) for name, numbers in training.schedule.draws.items()},
            torch.zeros(clients, dtype=torch.int64, device=device),
            whole=training.schedule.whole,
        ),
    )


def _batch_size(training: Training) -> int:
    """With room where a batch is all that a client has: that differs from cohort to cohort."""
    size, longest = training.schedule.positions.shape[2], training.samples.rows.shape[1]
    return roomy(size, _sizes(training)) if training.schedule.whole or size == longest else size


def _load(static: Training, training: Training) -> None:
    """Lay this round's tensors into the static ones and start from step 0."""
    batches = training.batches.tensors()
    for name, tensor in static.batches.tensors().items():
        tensor.fill_(1 if name == "size" else 0)  # padding: neither valid nor of any weight
        _lay(tensor, batches[name])
    for name, tensor in training.values.items():
        _lay(static.values[name], tensor)
    for name, tensor in training.own.items():
        _lay(static.own[name], tensor)
    for name, tensor in training.common.items():
        static.common[name].copy_(tensor)
    assert isinstance(static.rates, Tensor)
    static.rates.copy_(torch.as_tensor(training.rates, dtype=static.rates.dtype))
    if static.samples.inputs is not None and training.samples.inputs is not None:
        static.samples.inputs.zero_()  # what an earlier cohort left may be no number, which no weight takes away
        _lay(static.samples.inputs, training.samples.inputs)
    static.schedule.steps.zero_()
    _lay(static.schedule.steps, training.schedule.steps)
    for tensor in (static.done, static.loss, *(tensor for slot in static.state for tensor in slot)):
        tensor.zero_()


def _lay(room: Tensor, tensor: Tensor) -> None:
    leading(room, tensor.shape).copy_(tensor, non_blocking=True)
