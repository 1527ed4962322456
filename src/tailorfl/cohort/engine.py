"""Where and how cohorts are computed: the device, stacked or one by one, and how many clients at a time."""

import logging
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tailorfl.cohort.gradients import single_gradients, stacked_gradients
from tailorfl.cohort.graphs import GraphCache
from tailorfl.cohort.traces import TraceCache
from tailorfl.cohort.training import Training
from tailorfl.errors import UserError
from tailorfl.models.network import Network, Values

log = logging.getLogger(__name__)

Mode = Literal["auto", "stacked", "one-by-one"]

# A stack's weights should stay in a CPU's cache: far beyond that every step goes to memory.
_CPU_STACK_NUMBERS = 3_200_000
_CPU_HELD_BYTES = 1 << 30  # weights of clients that run one by one, held at a time
# Below so many numbers in a stack, threads wait for each other longer than they work; on a busy machine far longer.
_CPU_THREADS_NUMBERS = 1_000_000
_GPU_MEMORY_SHARE = 0.5
_CPU_EVALUATION_BYTES = 64 << 20
_GPU_EVALUATION_BYTES = 4 << 30


@dataclass(frozen=True)
class Plan:
    """How clients of one network are computed, decided once."""

    network: Network
    stacked: bool
    numbers: int  # in one client's model
    activation_bytes: int  # of one sample in a forward pass, roughly


class Engine:
    """Computes cohorts. One engine serves a run; it may serve several networks."""

    def __init__(
        self,
        device: torch.device,
        mode: Mode = "auto",
        stack_size: int | None = None,
        workers: int | None = None,
    ) -> None:
        self.device = device
        self.mode = mode
        self.fixed_stack_size = stack_size
        self.workers = workers or torch.get_num_threads()
        self.graphs = GraphCache() if device.type == "cuda" else None
        self.traces = TraceCache()
        self._pool: ThreadPoolExecutor | None = None
        self._plans: dict[int, Plan] = {}
        self._uncaptured: set[int] = set()
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True

    def plan(self, network: Network, sample: Tensor) -> Plan:
        """Decide, by a sample [1, ...] of the network's inputs, how it runs; said in the log the first time."""
        if id(network) not in self._plans:
            stacked, reason = self._choose(network, sample)
            log.info("%s runs %s%s", network.name, "stacked" if stacked else "one by one", reason)
            numbers = sum(tensor.numel() for tensor in network.initial().values())
            self._plans[id(network)] = Plan(network, stacked, numbers, _activation_bytes(network, sample))
        return self._plans[id(network)]

    def stacks(self, network: Network) -> bool:
        """Whether clients of a network that was planned run as one tensor program."""
        return self._plans[id(network)].stacked

    def stack_size(self, plan: Plan, batch_size: int) -> int:
        """How many clients to hold at a time."""
        if self.fixed_stack_size:
            return self.fixed_stack_size
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            # Weights, gradients, optimizer state, and the static copies of the graphs; activations and theirs.
            client = plan.numbers * 4 * 8 + 3 * batch_size * plan.activation_bytes
            return max(1, int(free * _GPU_MEMORY_SHARE) // client)
        if plan.stacked:
            return max(1, _CPU_STACK_NUMBERS // plan.numbers)
        return max(self.workers, min(64 * self.workers, _CPU_HELD_BYTES // (plan.numbers * 4)))

    def evaluation_size(self, plan: Plan, clients: int) -> int:
        """How many samples of each client to evaluate at a time."""
        budget = _CPU_EVALUATION_BYTES if self.device.type == "cpu" else _GPU_EVALUATION_BYTES
        at_once = clients if plan.stacked else min(clients, self.workers)
        return max(1, budget // (plan.activation_bytes * at_once))

    def run(self, training: Training) -> None:
        """Train a cohort in place."""
        if not training.schedule.steps.any():
            return
        if not self.stacks(training.network):
            self._one_by_one(training)
        elif self.graphs is not None:
            self.graphs.run(training, stacked_gradients)
        else:
            with self._threads(training.network, len(training.samples.rows)):
                self.traces.run(training)

    def predict(self, network: Network, values: Values, inputs: Tensor, valid: Tensor) -> Tensor:
        """The outputs of every client's own weights on its own inputs, [clients, samples, ...]."""
        if self.stacks(network):
            with torch.no_grad(), self._threads(network, len(inputs)):
                return torch.vmap(lambda v, x, m: network.forward(v, x, m, train=False))(values, inputs, valid)

        @torch.no_grad()  # threads have a gradient mode of their own
        def work(client: int) -> Tensor:
            own = {name: tensor[client] for name, tensor in values.items()}
            return network.forward(own, inputs[client], valid[client], train=False)

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

    def each(self, work: Callable[[int], Tensor], clients: int) -> list[Tensor]:
        """Do the same for every client; on a CPU, side by side, with one core each."""
        if self.device.type != "cpu" or self.workers == 1 or clients == 1:
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
        if _random(training.network.module):  # dropout draws from the process-wide generator: no threads
            losses = [seeded(client) for client in clients]
        else:
            losses = self.each(work, len(clients))
        for client, loss in zip(clients, losses, strict=True):
            training.loss[client] = loss[0]

    def _run_alone(self, alone: Training) -> None:
        """A client by itself: as a CUDA graph where the network can be captured, else step by step."""
        if self.graphs is not None and not _random(alone.network.module) and id(alone.network) not in self._uncaptured:
            before = {name: tensor.clone() for name, tensor in alone.values.items()}
            try:
                self.graphs.run(alone, single_gradients)
                return
            except RuntimeError as error:  # a network may ask for a value on the host, which no graph can give
                log.info("%s runs without CUDA graphs: %s", alone.network.name, str(error).splitlines()[0])
                self._uncaptured.add(id(alone.network))
                alone.values.update(before)
        gradients = single_gradients(alone.network, alone.objective)
        alone.run(lambda width: gradients)

    def _choose(self, network: Network, sample: Tensor) -> tuple[bool, str]:
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


def _obstacle(network: Network, sample: Tensor) -> str:
    """Why a network cannot be stacked; empty when it can. Found by trying: two clients, one forward and backward."""
    inputs = sample[:1].expand(2, 2, *sample.shape[1:]).clone()
    values = {name: torch.stack([tensor, tensor]) for name, tensor in network.initial().items()}
    leaves = [values[name].requires_grad_() for name in network.parameters]
    try:
        outputs = torch.vmap(lambda v, x: network.forward(v, x, None, train=True))(values, inputs)
        torch.autograd.grad(outputs.sum(), leaves, materialize_grads=True)
    except Exception as error:  # anything a user's module may raise under vmap
        if _runs_alone(network, inputs[0]):
            return textwrap.shorten(str(error).strip().splitlines()[0], 160, placeholder=" ...")
        raise
    return ""


def _runs_alone(network: Network, inputs: Tensor) -> bool:
    try:
        network.forward(network.initial(), inputs, None, train=True)
    except Exception:  # the network itself is broken: let its own error be seen
        return False
    return True


def _random(module: nn.Module) -> bool:
    return any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in module.modules())


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
