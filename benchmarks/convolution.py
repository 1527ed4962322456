"""One gradient of a stack of clients on a GPU: torch's grouped convolutions, our kernels, and those in half precision.

Each is captured as a CUDA graph, as the engine does, and timed in the same process, so the ratio is what counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from tailorfl.cohort.gradients import Inputs, stacked_gradients
from tailorfl.cohort.objective import cross_entropy
from tailorfl.models import Network, build_module, stacked

# network, shape of an image, classes, clients, images of a client in a step
CASES = [
    ("ppfe-cnn", (3, 32, 32), 10, 10, 10),
    ("ppfe-cnn", (3, 32, 32), 10, 100, 10),
    ("pfps-cnn", (3, 32, 32), 10, 5, 64),
    ("pmixfed-cnn", (3, 32, 32), 10, 10, 32),
    ("pflego-cnn", (3, 32, 32), 10, 20, 500),
    ("pflego-omniglot", (1, 28, 28), 55, 10, 500),
]


def inputs_of(network: Network, shape: tuple[int, ...], classes: int, clients: int, images: int) -> Inputs:
    """Drawn images and targets, and the same weights for every client."""
    generator = torch.Generator(network.device).manual_seed(0)
    drawn = torch.randn(clients, images, *shape, device=network.device, generator=generator)
    targets = torch.randint(classes, (clients, images), device=network.device, generator=generator)
    ones = torch.ones(clients, images, device=network.device)
    values = {name: tensor.expand(clients, *tensor.shape).clone() for name, tensor in network.initial().items()}
    return Inputs(values, {}, (drawn, targets, ones, ones, ones.sum(1)), {}, {}, {})


def seconds(compute: Callable[[], object], repeats: int) -> float:
    """Of one call, captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device: on a CPU clients with convolutions run side by side, not stacked")
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| network | clients x images | grouped | kernels | times as fast | mixed | times as fast |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with_kernels = stacked._kernels_run
    for name, shape, classes, clients, images in CASES:
        found = []
        for choice, mixed in ((lambda device: False, False), (with_kernels, False), (with_kernels, True)):
            stacked._kernels_run = choice  # type: ignore[assignment]
            network = Network(build_module(name, shape, classes), name, torch.device("cuda"), mixed)
            inputs = inputs_of(network, shape, classes, clients, images)
            gradients = stacked_gradients(network, cross_entropy)
            found.append(seconds(lambda: gradients(inputs), repeats))  # noqa: B023 (called at once)
        times = (f"{1e3 * ours:.2f} ms | {found[0] / ours:.1f}" for ours in found[1:])
        print(f"| {name} | {clients} x {images} | {1e3 * found[0]:.2f} ms | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
