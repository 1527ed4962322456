"""From a configuration to a federation that is ready to run."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailorfl.cohort import Engine
from tailorfl.data import (
    Augmentation,
    FederatedData,
    PartitionOptions,
    Source,
    SourceOptions,
    assemble,
    federate,
    load_partition,
    load_source,
)
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Server
from tailorfl.federation.in_process import InProcess, trainable_clients
from tailorfl.federation.rounds import RoundLoop
from tailorfl.federation.selection import expected, select
from tailorfl.models import Network, build_module, networks
from tailorfl.seeding import derive
from tailorfl.study.config import Config, Experiment

log = logging.getLogger(__name__)

SMALLEST_FOR_CNN = 16  # pixels: below, an image is a vector


@dataclass
class Built:
    """A run that is ready: what it is made of, and the loop that runs it."""

    config: Config
    data: FederatedData
    network: Network
    federation: InProcess
    server: Server
    loop: RoundLoop


def build(config: Config, data_dir: Path | None = None, partition: Path | None = None) -> Built:
    """Load the data, divide it, make the network and the federation. Writes nothing.

    ``partition`` is a file that says who has which rows, of a run that is to go on.
    """
    experiment = config.experiment
    device = choose_device(experiment.device)
    data = load_data(experiment, data_dir, partition).to(device)
    if config.method.classes_only and data.regression:
        raise UserError(f"{config.method_name} needs classes, and the targets of {data.source} are numbers")
    clients = trainable_clients(data)
    held = (data.label_counts() > 0).sum(1).tolist()
    selector = Selector(experiment, clients, tuple(held[client] for client in clients), config.method.everyone_in())
    least = round(min(map(selector.share, range(1, experiment.rounds + 1))) * len(clients), 9)
    for doubt in config.method.doubts(len(clients), least, experiment.rounds, experiment.selection):
        log.warning("%s: %s", config.method_name, doubt)
    network = build_network(experiment, data, device)
    if network.buffers and not config.method.statistics:
        raise UserError(
            f"{config.method_name}: network {network.name} has statistics ({network.buffers[0]}), which no gradient "
            "carries; allowed: a network without batch norms"
        )
    augmentation = Augmentation.parse(experiment.augment)
    if augmentation and data.kind != "image":
        raise UserError(f"augment={experiment.augment}: {data.source} has no images; allowed: none")
    engine = Engine(device, experiment.engine, experiment.stack_size, experiment.workers)
    federation = InProcess(
        config.method, network, data, engine, experiment.seed, experiment.rounds, augmentation or None
    )
    server = config.method.start(network)
    loop = RoundLoop(
        method=config.method,
        network=network,
        federation=federation,
        server=server,
        rounds=experiment.rounds,
        select=selector,
        share=selector.share,
        evaluate_in=lambda number: evaluates(experiment, number) or number in config.method.evaluated_in(),
        new_clients=data.new_clients,
        validate=experiment.validation_fraction > 0,
    )
    return Built(config, data, network, federation, server, loop)


def load_data(experiment: Experiment, data_dir: Path | None, partition: Path | None = None) -> FederatedData:
    """The federated data of an experiment, in its precision."""
    source = read_source(experiment, data_dir)
    if partition is not None:
        data = assemble(source, load_partition(partition))
    else:
        data = federate(source, part(PartitionOptions, experiment), experiment.seed)
    if experiment.pixels == "unit":
        data = data.in_unit_pixels()
    return cast(data, experiment.precision)


def read_source(experiment: Experiment, data_dir: Path | None) -> Source:
    return load_source(experiment.data, data_dir, part(SourceOptions, experiment))


def part(kind: Any, experiment: Experiment) -> Any:
    """The fields of an experiment that one of its parts has."""
    return kind(**{name: getattr(experiment, name) for name in kind.model_fields})


def cast(data: FederatedData, precision: str) -> FederatedData:
    """The data as it is in single precision; in double precision all that is not a class, a pixel or a word."""
    if precision == "float32":
        return data
    numbers = ("inputs", "targets", "mean", "std")
    tensors = {name: getattr(data, name) for name in numbers}
    return replace(data, **{n: t.double() for n, t in tensors.items() if t is not None and t.is_floating_point()})


def build_network(experiment: Experiment, data: FederatedData, device: torch.device) -> Network:
    """The network with its initial weights: the same for every method with this seed."""
    name = default_network(data) if experiment.network == "auto" else experiment.network
    options = dict(experiment.network_options)
    if name in networks and data.kind == "text" and "vocabulary" in networks[name].options:
        options = {"vocabulary": len(data.vocabulary), "vectors": data.vectors, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(experiment.seed, "network"))
        module = build_module(name, data.input_shape, data.num_classes or 1, **options)
    if experiment.precision == "float64":
        module = module.double()
    return Network(module, name, device)


def default_network(data: FederatedData) -> str:
    """By the kind of input: text, images of at least 16 pixels, all else."""
    if data.kind == "text":
        return "text"
    if data.kind == "image" and min(data.input_shape[1:]) >= SMALLEST_FOR_CNN:
        return "cnn"
    return "mlp"


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={wanted}: this machine has {torch.cuda.device_count()} CUDA devices; allowed: cpu")
    return device


def evaluates(experiment: Experiment, number: int) -> bool:
    every = experiment.evaluate_every
    return number == experiment.rounds or (every > 0 and number % every == 0)


@dataclass(frozen=True)
class Selector:
    """Who takes part in a round of this experiment."""

    experiment: Experiment
    clients: tuple[int, ...]
    groups: tuple[int, ...] = ()  # of each client: how many classes it has
    full: frozenset[int] = frozenset()  # rounds in which the method wants everyone

    def __post_init__(self) -> None:
        wanted = self.experiment.clients_per_round
        if not self.clients:
            raise UserError("no client is left to train on; allowed: fewer new_clients")
        if isinstance(wanted, int) and wanted > len(self.clients):
            raise UserError(f"clients_per_round={wanted}: allowed are 1 to {len(self.clients)}, the clients that train")

    def __call__(self, number: int) -> list[int]:
        if self._everyone(number):
            return list(self.clients)
        seed = self.experiment.seed
        return select(self.experiment.selection, self._wanted(), self.clients, number, seed, self.groups)

    def share(self, number: int) -> float:
        """The chance of a client to take part in a round, on average over the clients."""
        if self._everyone(number):
            return 1.0
        clients = len(self.clients)
        return expected(self.experiment.selection, self._wanted(), clients, self.groups) / clients

    def _everyone(self, number: int) -> bool:
        rounds = self.experiment.rounds
        return number in {n if n > 0 else rounds + 1 + n for n in self.experiment.everyone_in} | self.full

    def _wanted(self) -> int | float:
        wanted = self.experiment.clients_per_round
        return min(10, len(self.clients)) if wanted is None else wanted
