"""Where and how cohorts are computed: the device, stacked or one by one, and how many clients at a time."""

import logging
import textwrap
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from tailorfl.cohort.gradients import Inputs, Kind, layout, single_gradients, stacked_gradients
from tailorfl.cohort.graphs import GraphCache, free_memory
from tailorfl.cohort.objective import Batch, Client
from tailorfl.cohort.traces import TraceCache
from tailorfl.cohort.training import Training
from tailorfl.errors import UserError
from tailorfl.models.network import Network, Values
from tailorfl.models.stacked import stacked_layers

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Mode = Literal["auto", "stacked", "one-by-one"]

# A stack's weights should stay in a CPU's cache: far beyond that every step goes to memory.
_CPU_STACK_NUMBERS = 1_600_000
_CPU_HELD_BYTES = 1 << 30  # weights of clients that run one by one, held at a time
# Below so many numbers in a stack, threads wait for each other longer than they work; on a busy machine far longer.
_CPU_THREADS_NUMBERS = 1_000_000
# Activations over all steps below which a stack is not split: another shape must be traced, or captured, once.
_CPU_SPLIT_BYTES, _GPU_SPLIT_BYTES = 16 << 20, 8 << 30
_GPU_MEMORY_SHARE = 0.5
_CPU_EVALUATION_BYTES = 64 << 20
_GPU_EVALUATION_BYTES, _GPU_EVALUATION_SHARE = 4 << 30, 1 / 16
_STATISTICS_BYTES = 256 << 20  # activations of the samples over which batch norms take their statistics in a gradient


@dataclass(frozen=True)
class Plan:
    """How clients of one network are computed, decided once."""

    network: Network
    stacked: bool
    numbers: int  # in one client's model
    activation_bytes: int  # of one sample in a forward pass, roughly
    random: bool  # whether a forward pass in training draws random numbers (dropout)


class Engine:
    """Computes cohorts. One engine serves a run; it may serve several networks."""

    def __init__(
        self,
        device: torch.device,
        mode: Mode = "auto",
        stack_size: int | None = None,
        workers: int | None = None,
    ) -> None:
        _use(device)
        self.settings = device, mode, stack_size, workers
        self.device = device
        self.mode = mode
        self.fixed_stack_size = stack_size
        self.workers = workers or torch.get_num_threads()
        # What is free at the start: graphs that are kept take from it, and make room for others when it is used up.
        self.memory = free_memory(device) if device.type == "cuda" else 0
        self.graphs = GraphCache(device, int(self.memory * _GPU_MEMORY_SHARE)) if device.type == "cuda" else None
        self.traces = TraceCache()
        self._pool: ThreadPoolExecutor | None = None
        self._plans: dict[int, Plan] = {}
        self._uncaptured: set[Hashable] = set()  # networks and objectives that no graph can hold
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True

    def plan(self, network: Network, sample: Tensor) -> Plan:
        """Decide, by a sample [1, ...] of the network's inputs, how it runs; said in the log the first time."""
        if id(network) not in self._plans:
            stacked, reason = self._choose(network, sample)
            log.info("%s runs %s%s", network.name, "stacked" if stacked else "one by one", reason)
            numbers = sum(tensor.numel() for tensor in network.initial().values())
            size = _activation_bytes(network, sample)
            self._plans[id(network)] = Plan(network, stacked, numbers, size, _draws_numbers(network, sample))
        return self._plans[id(network)]

    def known(self, training: Training) -> Plan:
        """The plan of a training's network, which was made before."""
        return self._plans[id(training.network)]

    def take_over(self, plan: Plan) -> None:
        """Go by what another engine has decided, maybe in another thread."""
        if id(plan.network) not in self._plans:
            plan.network.prepare()
            self._plans[id(plan.network)] = plan

    def stacks(self, network: Network) -> bool:
        """Whether clients of a network that was planned run as one tensor program."""
        return self._plans[id(network)].stacked

    def stack_size(self, plan: Plan, batch_size: int) -> int:
        """How many clients to hold at a time."""
        if self.fixed_stack_size:
            return self.fixed_stack_size
        if self.device.type == "cuda":
            # Weights, gradients, optimizer state, and the static copies of the graphs; activations and theirs.
            client = plan.numbers * 4 * 8 + 3 * batch_size * plan.activation_bytes
            return max(1, int(self.memory * _GPU_MEMORY_SHARE) // client)
        if plan.stacked:
            return max(1, _CPU_STACK_NUMBERS // plan.numbers)
        return max(self.workers, min(64 * self.workers, _CPU_HELD_BYTES // (plan.numbers * 4)))

    def evaluation_size(self, plan: Plan, clients: int) -> int:
        """How many samples of each client to evaluate at a time, or to take a gradient on."""
        small = int(self.memory * _GPU_EVALUATION_SHARE)  # a gradient holds a few times as much as the activations
        budget = _CPU_EVALUATION_BYTES if self.device.type == "cpu" else min(_GPU_EVALUATION_BYTES, small)
        at_once = clients if plan.stacked else min(clients, self.workers)
        return max(1, budget // (plan.activation_bytes * at_once))

    def gradient_sizes(self, plan: Plan, clients: int, longest: int) -> tuple[int, int]:
        """How many clients to take a gradient of at a time, and on how many samples of each."""
        if not plan.network.buffers:
            return clients, self.evaluation_size(plan, clients)
        # Norms see the samples of a part: these must be the same ones wherever, and beside whom, a client is computed.
        samples = max(1, _STATISTICS_BYTES // plan.activation_bytes)
        return min(clients, self.evaluation_size(plan, min(samples, longest))), samples

    def run(self, training: Training) -> None:
        """Train a cohort in place."""
        if not training.schedule.steps.any():
            return
        _use(self.device)
        if not self.stacks(training.network):
            return self._one_by_one(training)
        budget = _CPU_SPLIT_BYTES if self.device.type == "cpu" else _GPU_SPLIT_BYTES
        for part in training.parts(max(1, budget // self.known(training).activation_bytes)):
            self._stacked(part)

    def _stacked(self, training: Training) -> None:
        if self.graphs is not None:
            self._by_graphs(self.graphs, training, stacked_gradients)
        else:
            with self._threads(training.network, len(training.samples.rows)):
                self.traces.run(training)

    def predict(
        self, network: Network, values: Values, inputs: Tensor, valid: Tensor, features: bool = False
    ) -> Tensor:
        """The outputs (or features) of every client's own weights on its own inputs, [clients, samples, ...]."""
        compute = network.features if features else network.forward
        if self.stacks(network):
            with torch.no_grad(), stacked_layers(), self._threads(network, len(inputs)):
                return torch.vmap(lambda v, x, m: compute(v, x, m, train=False))(values, inputs, valid)

        @torch.no_grad()  # threads have a gradient mode of their own
        def work(client: int) -> Tensor:
            own = {name: _laid_out(tensor[client]) for name, tensor in values.items()}
            # On a CPU the client's own samples alone, which come first: padding would take as long as they do.
            real = max(1, int(valid[client].sum())) if self.device.type == "cpu" else len(valid[client])
            found = compute(own, _laid_out(inputs[client, :real]), valid[client, :real], train=False)
            room = found.new_zeros(len(valid[client]), *found.shape[1:])
            room[:real] = found
            return room

        return torch.stack(self.each(work, len(inputs)))

    @contextmanager
    def _threads(self, network: Network, clients: int) -> Iterator[None]:
        """On a CPU, one thread for a small stack."""
        before = torch.get_num_threads()
        small = self._plans[id(network)].numbers * clients < _CPU_THREADS_NUMBERS
        if self.device.type == "cpu" and small and before > 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def each(self, work: Callable[[int], Found], clients: int, side_by_side: bool = True) -> list[Found]:
        """Do the same for every client; on a CPU, side by side, with one core each."""
        if self.device.type != "cpu" or self.workers == 1 or clients == 1 or not side_by_side:
            return [work(client) for client in range(clients)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        return list(self._pool.map(work, range(clients)))

    def _one_by_one(self, training: Training) -> None:
        def work(client: int) -> Tensor:
            alone = training.one(client)
            self._run_alone(alone)
            for name, tensor in alone.values.items():
                training.values[name][client] = tensor[0]
            return alone.loss

        def seeded(client: int) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(training.schedule.seeds[client])
                return work(client)

        clients = range(int((training.schedule.steps > 0).sum()))
        random = self._plans[id(training.network)].random  # from the process-wide generator: no threads
        losses = self.each(seeded if random else work, len(clients), side_by_side=not random)
        for client, loss in zip(clients, losses, strict=True):
            training.loss[client] = loss[0]

    def _run_alone(self, alone: Training) -> None:
        random = self._plans[id(alone.network)].random
        if self.graphs is not None and not random:
            self._by_graphs(self.graphs, alone, single_gradients)
        else:
            _step_by_step(alone, single_gradients)

    def _by_graphs(self, graphs: GraphCache, training: Training, kind: Kind) -> None:
        """As CUDA graphs where network and objective can be captured, else step by step."""
        key = id(training.network), training.objective
        if key not in self._uncaptured:
            try:  # the values change only when all graphs are captured and have run
                return graphs.run(training, kind)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # something may ask for a value on the host, which no graph can give
                log.info("%s runs without CUDA graphs: %s", training.network.name, _said(error))
                self._uncaptured.add(key)
        _step_by_step(training, kind)

    def _choose(self, network: Network, sample: Tensor) -> tuple[bool, str]:
        network.tried(sample, train=True)
        if network.mixed:
            _check_backwards(network, sample)
        if self.mode == "one-by-one":
            return False, ""
        obstacle = _obstacle(network, sample)
        if obstacle and self.mode == "stacked":
            raise UserError(f"engine=stacked: network {network.name} cannot be stacked ({obstacle}); allowed: auto")
        if obstacle:
            return False, f": {obstacle}"
        if self.mode == "stacked":
            return True, ""
        if self.device.type == "cpu" and _convolutional(network.module):
            return False, f": on a CPU convolutions are faster side by side, {self.workers} workers"
        return True, ""


def _step_by_step(training: Training, kind: Kind) -> None:
    gradients = kind(training.network, training.objective)
    training.run(lambda active: training.step(active, gradients))


def _use(device: torch.device) -> None:
    """Let this thread launch on that GPU: kernels and graphs take the one in use, wherever their tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _check_backwards(network: Network, sample: Tensor) -> None:
    """Refuse a network that goes forwards in half precision, and not back: one that computes layers anew then, say."""
    try:
        single_gradients(network, _sum_of_outputs)(_two_clients(network, sample))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # anything a user's module may raise
        raise UserError(
            f"network {network.name} cannot be trained with precision=mixed: {_said(error)}; allowed: float32"
        ) from error


def _two_clients(network: Network, sample: Tensor) -> Inputs:
    """The same for both: the initial weights, and a batch of the sample taken twice."""
    valid = torch.ones(2, 2, device=sample.device, dtype=_dtype(network))
    batch = (_twice(_twice(sample[0])), torch.zeros_like(valid), valid, valid, valid.sum(1))
    values = {name: _twice(tensor) for name, tensor in network.initial().items()}
    trained = {name: values.pop(name) for name in network.parameters}
    return Inputs(trained, values, batch, {}, {}, {})


def _obstacle(network: Network, sample: Tensor) -> str:
    """Why a network cannot be stacked; empty when it can. Found by trying: the gradients of two clients."""
    try:
        stacked_gradients(network, _sum_of_outputs)(_two_clients(network, sample))
    except Exception as error:  # anything a user's module may raise under vmap
        return _said(error)
    return ""


def _said(error: Exception) -> str:
    """The first line of a message; the kind of error where it has none."""
    return textwrap.shorten((str(error).strip() or type(error).__name__).splitlines()[0], 160, placeholder=" ...")


def _laid_out(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=layout(tensor))


def _sum_of_outputs(client: Client, batch: Batch) -> Tensor:
    return client.predict(batch).sum()


def _draws_numbers(network: Network, sample: Tensor) -> bool:
    """Whether a forward pass in training moves a random generator."""
    cuda = [sample.device] if sample.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]
        network.forward(network.initial(), _twice(sample[0]), None, train=True)
        after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]
    return not all(map(torch.equal, before, after))


def _twice(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor])


def _dtype(network: Network) -> torch.dtype:
    return next(iter(network.initial().values())).dtype


def _convolutional(module: nn.Module) -> bool:
    return any(isinstance(child, nn.modules.conv._ConvNd) for child in module.modules())


def _activation_bytes(network: Network, sample: Tensor) -> int:
    """Roughly what one sample takes in a forward pass: the outputs of all modules together."""
    total = 0

    def count(_: nn.Module, __: object, output: object) -> None:
        nonlocal total
        total += output.numel() * output.element_size() if isinstance(output, Tensor) else 0

    template = network._template(train=False)
    hooks = [child.register_forward_hook(count) for child in template.modules()]
    try:
        with torch.no_grad():
            network.forward(network.initial(), sample[:1], None, train=False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(1, total)
