"""Small federations with unequal clients, in double precision if not asked otherwise."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tailorfl.cohort import Cohort, Engine
from tailorfl.cohort.local import LocalTraining
from tailorfl.data import FederatedData, PartitionOptions, Ragged, Source, federate
from tailorfl.models import Network, build_module


def image_data(
    counts: list[int],
    shape: tuple[int, ...] = (1, 8, 8),
    tests: int = 3,
    classes: int = 4,
    dtype: torch.dtype = torch.float64,
) -> FederatedData:
    """Clients with these numbers of training samples."""
    rows = sum(counts) + tests * len(counts)
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=rng)
    targets = torch.randint(0, classes, (rows,), generator=rng)
    targets[:classes] = torch.arange(classes)
    source = Source("made", "image", inputs, targets, rows, tuple(map(str, range(classes))))
    data = federate(source, PartitionOptions(partition="iid", clients=1, test_fraction=0.1), seed=0)
    numbers, bounds = np.arange(rows), np.cumsum(counts)
    return replace(
        data,
        names=tuple(map(str, range(len(counts)))),
        train=Ragged.from_lists(np.split(numbers[: bounds[-1]], bounds[:-1])),
        test=Ragged.from_lists(np.split(numbers[bounds[-1] :], len(counts))),
        validation=Ragged.from_lists([numbers[:0]] * len(counts)),
        mean=data.mean.to(dtype),
        std=data.std.to(dtype),
    )


def make_cohort(
    counts: list[int],
    network: str | nn.Module = "mlp",
    mode: str = "auto",
    clients: tuple[int, ...] | None = None,
    shape: tuple[int, ...] = (1, 8, 8),
    engine: Engine | None = None,
    augmentation: object = None,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Cohort:
    """A cohort of these clients (all by default), each with weights of its own."""
    data = image_data(counts, shape, dtype=dtype)
    torch.manual_seed(0)
    module = build_module(network, shape, data.num_classes) if isinstance(network, str) else network
    net = Network(module.to(dtype), "net")
    ids = tuple(range(len(counts))) if clients is None else clients
    values = {}
    for name, tensor in net.initial().items():
        rows = []
        for client in ids:  # a client's weights are its own, whoever is beside it
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(client), dtype=tensor.dtype)
            rows.append(tensor if name in net.buffers else tensor + 0.05 * noise)
        values[name] = torch.stack(rows)
    engine = engine or Engine(torch.device("cpu"), mode)  # type: ignore[arg-type]
    return Cohort(engine, net, data, ids, values, LocalTraining(**options), seed=3, augmentation=augmentation)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-10) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)
