"""How fast a round is: a plain PyTorch loop over clients, the one-by-one engine, the stacked engine.

    python benchmarks/cohort.py [--device cuda] [--clients 10 100] [--networks cnn mlp] [--part all]

All figures of a table come from one process on one machine, so their ratios can be compared; seconds of different
machines cannot. Each figure is the best of a few repeats, after a first run that is not counted.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tailorfl.cohort import Engine
from tailorfl.data import PartitionOptions, Ragged, Source, federate
from tailorfl.data.federated import FederatedData
from tailorfl.exchange.messages import Message
from tailorfl.federation.in_process import InProcess
from tailorfl.methods.fedavg import FedAvg
from tailorfl.methods.local import Local
from tailorfl.models import Network, build_module

SAMPLES, TESTS, BATCH, EPOCHS, LR, MOMENTUM = 150, 30, 10, 5, 0.01, 0.9
SHAPES = {"cnn": (3, 32, 32), "mlp": (1, 28, 28)}


def made_source(shape: tuple[int, ...], rows: int) -> Source:
    """Noise in the shape of images: what a step costs does not depend on what is learned."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=rng)
    targets = torch.randint(0, 10, (rows,), generator=rng)
    return Source("made", "image", inputs, targets, rows, tuple("0123456789"))


def federation_of(sizes: np.ndarray, shape: tuple[int, ...], device: torch.device) -> FederatedData:
    """Clients with these numbers of training samples, and TESTS test samples each."""
    options = PartitionOptions(partition="iid", clients=1, test_fraction=0.01)
    data = federate(made_source(shape, int(sizes.sum()) + TESTS * len(sizes)), options, seed=0)
    rows, bounds = np.arange(len(data.inputs)), np.cumsum(sizes)
    train = Ragged.from_lists(np.split(rows[: bounds[-1]], bounds[:-1]))
    test = Ragged.from_lists(np.split(rows[bounds[-1] :], len(sizes)))
    empty = Ragged.from_lists([rows[:0]] * len(sizes))
    names = tuple(map(str, range(len(sizes))))
    return replace(data, names=names, train=train, test=test, validation=empty).to(device)


def network_of(name: str, device: torch.device) -> Network:
    torch.manual_seed(0)
    return Network(build_module(name, SHAPES[name], 10), name, device)


def plain_loop(network: Network, data: FederatedData) -> None:
    """What a researcher writes: for each client a model, an optimizer and a loop over batches."""
    for client in range(data.clients):
        rows = data.train.of(client).to(data.inputs.device)
        inputs, targets = data.decode(data.inputs[rows]), data.targets[rows]
        module: nn.Module = build_module(network.name, SHAPES[network.name], 10).to(data.inputs.device)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(rows), device=inputs.device).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(module(inputs[batch]), targets[batch]).backward()
                optimizer.step()


def engine_round(
    network: Network, data: FederatedData, mode: str, batch_size: int = BATCH
) -> tuple[Callable[[], None], InProcess]:
    """A round of FedAvg in which everyone takes part, through the whole engine."""
    method = FedAvg(local_epochs=EPOCHS, batch_size=batch_size, lr=LR, momentum=MOMENTUM)
    engine = Engine(network.device, mode)  # type: ignore[arg-type]
    federation = InProcess(method, network, data, engine, seed=0, rounds=1000)
    server = method.start(network)
    numbers = iter(range(1, 1000))

    def one() -> None:
        message = method.broadcast(server)
        method.aggregate(server, federation.train(next(numbers), federation.trainable, message), network)

    return one, federation


def seconds(work: Callable[[], object], repeats: int) -> float:
    return best({"": work}, repeats)[""]


def best(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each, taken in turns: what else the machine does then meets all of them alike."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            _wait()
            start = time.perf_counter()
            work()
            _wait()
            times[name].append(time.perf_counter() - start)
    return {name: min(found) for name, found in times.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def even(name: str, clients: int, device: torch.device, repeats: int) -> None:
    """Equal clients: the plain loop against the engine, and evaluation against training."""
    network = network_of(name, device)
    data = federation_of(np.full(clients, SAMPLES), SHAPES[name], device)
    works: dict[str, Callable[[], object]] = {"plain loop": lambda: plain_loop(network, data)}
    for mode in ("one-by-one", "stacked", "auto"):
        if mode == "auto" or clients <= 20:  # the others in proportion
            works[mode], federation = engine_round(network, data, mode)
    everyone, initial = federation.trainable, Message(network.initial())
    works[f"evaluation, {TESTS} samples each"] = lambda: federation.evaluate(1, everyone, initial, ("test",))
    times = best(works, repeats)
    for title, spent in times.items():
        print(f"{name}, {clients} clients: {title}".ljust(62), f"{spent:9.4f} s", end="   ")
        print(f"{times['plain loop'] / spent:6.2f} times as fast", flush=True)


def uneven(name: str, clients: int, device: torch.device, repeats: int, batch_size: int) -> None:
    """Dirichlet sizes against the same number of samples evenly spread: at most 1.5 times the time."""
    network = network_of(name, device)
    shares = np.random.default_rng(0).dirichlet(np.full(clients, 2.0))
    sizes = np.maximum(BATCH, np.round(shares * clients * SAMPLES)).astype(int)
    # Steps of one client follow each other: no engine can be faster than its largest client.
    cases = {"even": np.full(clients, int(sizes.mean())), "uneven": sizes, "largest alone": sizes.max(keepdims=True)}
    works = {}
    for title, counts in cases.items():
        works[title], _ = engine_round(network, federation_of(counts, SHAPES[name], device), "auto", batch_size)
    times = best(works, repeats)
    for title, counts in cases.items():
        batches = "" if batch_size else ", full batches"
        line = f"{name}, {clients} clients{batches}, {title} ({counts.min()} to {counts.max()} samples)".ljust(62)
        print(line, f"{times[title]:9.4f} s   {times[title] / times['even']:6.2f} times", flush=True)


def many(device: torch.device, repeats: int) -> None:
    """A round with 10 clients of 100, of 1,000 and of 10,000: the cost must not grow with who stays at home."""
    network = network_of("mlp", device)
    base = 0.0
    for clients in (100, 1000, 10_000):
        start = time.perf_counter()
        data = federation_of(np.full(clients, 20), SHAPES["mlp"], device)
        method = Local(local_epochs=EPOCHS, batch_size=BATCH)
        federation = InProcess(method, network, data, Engine(device), seed=0, rounds=1000)
        ready = time.perf_counter() - start
        server, rng = method.start(network), np.random.default_rng(0)

        def one() -> None:
            chosen = rng.choice(clients, 10, replace=False).tolist()  # noqa: B023
            method.aggregate(server, federation.train(1, chosen, Message()), network)  # noqa: B023

        spent = seconds(one, 5 * repeats)
        base = base or spent
        print(f"10 of {clients:6,d} clients: round {spent:8.4f} s, {spent / base:5.2f} times; start-up {ready:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--networks", nargs="+", default=["cnn", "mlp"], choices=list(SHAPES))
    parser.add_argument("--part", nargs="+", default=["even", "uneven", "many"])
    parser.add_argument("--full-batches", action="store_true", help="of unequal clients, in place of small ones")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    batch = "full" if chosen.full_batches else BATCH
    print(f"{name}; torch {torch.__version__}; batch {batch}, {EPOCHS} epochs, SGD with momentum {MOMENTUM}")
    for network in chosen.networks:
        for clients in chosen.clients:
            if "even" in chosen.part:
                even(network, clients, device, chosen.repeats)
            if "uneven" in chosen.part:
                uneven(network, clients, device, chosen.repeats, 0 if chosen.full_batches else BATCH)
    if "many" in chosen.part:
        many(device, chosen.repeats)


if __name__ == "__main__":
    main()
