"""From a configuration to a federation that is ready to run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from tailorfl.cohort import Engine
from tailorfl.data import (
    SOURCES,
    Augmentation,
    FederatedData,
    Group,
    PartitionOptions,
    Source,
    SourceOptions,
    assemble,
    federate,
    federate_groups,
    load_partition,
    load_source,
)
from tailorfl.data.resizing import resized
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Server
from tailorfl.federation.in_process import InProcess, trainable_clients
from tailorfl.federation.rounds import Federation, RoundLoop
from tailorfl.federation.selection import NOBODY_LATE, Latecomers, expected, select
from tailorfl.methods import Method
from tailorfl.models import Network, build_module, networks
from tailorfl.models.initialize import initialize
from tailorfl.models.scaling import Kind, Scaling, Size
from tailorfl.seeding import derive
from tailorfl.study.config import Config, Experiment

log = logging.getLogger(__name__)

DETECTOR = "ssd-resnet18"
SMALLEST_FOR_CNN = 16  # pixels: below, an image is a vector


Place = TypeVar("Place", bound=Federation)


@dataclass
class Built(Generic[Place]):
    """A run that is ready: what it is made of, and the loop that runs it."""

    config: Config
    data: FederatedData
    network: Network
    federation: Place
    server: Server
    loop: RoundLoop


def build(
    config: Config,
    data_dir: Path | None = None,
    partition: Path | None = None,
    where: Callable[..., InProcess] = InProcess,
) -> Built[InProcess]:
    """Load the data, divide it, make the network and the federation. Writes nothing.

    ``partition`` is a file that says who has which rows, of a run that is to go on.
    """
    return build_on(config, load_data(config.experiment, data_dir, partition), where)


def build_on(config: Config, data: FederatedData, where: Callable[..., Place]) -> Built[Place]:
    """A run on these data, with clients that live in the place that ``where`` makes: as ``InProcess`` does."""
    experiment = config.experiment
    data = data.to(choose_device(experiment.device))
    check_task(config, data)
    clients = trainable_clients(data)
    held = data.group_of or (data.label_counts() > 0).sum(1).tolist()
    late = latecomers(experiment, data)
    groups = tuple(held[client] for client in clients)
    selector = Selector(experiment, clients, groups, config.method.everyone_in(), late)
    least = round(min(map(selector.share, range(1, experiment.rounds + 1))) * len(clients), 9)
    for doubt in config.method.doubts(len(clients), least, experiment.rounds, experiment.selection):
        log.warning("%s: %s", config.method_name, doubt)
    network, federation = place_clients(config, data, where)
    server = replace(config.method.start(network), seed=experiment.seed, rounds=experiment.rounds)
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
        late=late,
        validate=experiment.validation_fraction > 0,
        evaluate_training=experiment.evaluate_training and not data.regression,
    )
    return Built(config, data, network, federation, server, loop)


def latecomers(experiment: Experiment, data: FederatedData) -> Latecomers:
    """Of the clients that may train, those that do so from a later round on."""
    joining = frozenset(data.joining_clients) & set(trainable_clients(data))
    return Latecomers(joining, experiment.joining_round or 1)


def place_clients(config: Config, data: FederatedData, where: Callable[..., Place]) -> tuple[Network, Place]:
    """The network, and the clients in the place where they live; refused if the network does not fit."""
    experiment, device = config.experiment, data.inputs.device
    if data.groups:
        network, group_networks = build_group_networks(experiment, config.method, data, device)
    else:
        network, group_networks = build_network(experiment, data, device), ()
    _check_network(network, data)
    if network.buffers and not config.method.statistics:
        raise UserError(
            f"{config.method_name}: network {network.name} has statistics ({network.buffers[0]}), which no gradient "
            "carries; allowed: a network without batch norms"
        )
    augmentation = Augmentation.parse(experiment.augment)
    if augmentation and data.kind != "image":
        raise UserError(f"augment={experiment.augment}: {data.source} has no images; allowed: none")
    augmentation.check(data.detection, min(data.inputs.shape[-2:]) if data.kind == "image" else None)
    engine = Engine(device, experiment.engine, experiment.stack_size, experiment.workers)
    federation = where(
        config.method, network, data, engine, experiment.seed, experiment.rounds, augmentation or None, group_networks
    )
    return network, federation


def check_task(config: Config, data: FederatedData) -> None:
    """Whether the method can do what the data asks for."""
    if data.num_classes == 1 and not (data.detection or data.groups):
        raise UserError(
            f"{data.source} has one class, {data.classes[0]!r}: there is nothing to tell apart; "
            "allowed: two or more, or class_names that has those without rows too"
        )
    if config.method.classes_only and (data.regression or data.detection):
        targets = "objects in images" if data.detection else "numbers"
        raise UserError(f"{config.method_name} needs classes, and the targets of {data.source} are {targets}")
    if data.regression and config.experiment.precision == "mixed":
        raise UserError(
            "precision=mixed: outputs have three digits, too few for a regression; allowed: float32, float64"
        )
    if config.method.holds_out() and (data.regression or not config.experiment.validation_fraction):
        why = "a regression has no accuracy" if data.regression else "there is no validation data"
        log.warning("%s: %s, so that every client counts as an average one", config.method_name, why)
    if data.detection and not config.method.detectors:
        raise UserError(f"{config.method_name} cannot train detectors, and {data.source} has objects in images")
    if config.method.own_classes and data.detection:
        raise UserError("own_classes=true: detectors have an output for every class; allowed: false")


def _check_network(network: Network, data: FederatedData) -> None:
    """Detectors are for objects, and other networks are not; these have an output for each class, or one."""
    if network.detects != data.detection:
        able = sorted(entry.name for entry in networks.values() if entry.detection == data.detection)
        what = "objects in images" if data.detection else "one target a sample"
        raise UserError(f"network={network.name}: {data.source} has {what}; allowed: {', '.join(able)}")
    if not (data.groups or data.detection) and len(data.inputs):
        _check_outputs(network, data)


def _check_outputs(network: Network, data: FederatedData) -> None:
    """A network of a user's own may have any: too few fail in training, too many learn what is never asked for."""
    found = tuple(network.tried(data.decode(data.inputs[:1]), train=False).shape)
    fit = [(2, 1), (2,)] if data.regression else [(2, data.num_classes)]
    if found not in fit:
        gives, allowed = ("x".join(map(str, shape)) or "()" for shape in (found, fit[0]))
        what = "a number" if data.regression else f"one of {data.num_classes} classes"
        raise UserError(
            f"network {network.name} gives outputs of shape {gives} for two samples, and the target of {data.source} "
            f"is {what}; allowed: {allowed}"
        )


def load_data(experiment: Experiment, data_dir: Path | None, partition: Path | None = None) -> FederatedData:
    """The federated data of an experiment, in its precision."""
    options, known = part(PartitionOptions, experiment), None if partition is None else load_partition(partition)
    if experiment.groups:
        groups = [_with_defaults(group, experiment) for group in experiment.groups]
        read = partial(read_group_source, experiment, groups, data_dir)
        data = federate_groups(groups, read, options, experiment.seed, known)
    elif known is not None:
        data = assemble(read_source(experiment, data_dir), known)
    else:
        data = federate(read_source(experiment, data_dir), options, experiment.seed)
    if experiment.pixels == "unit":
        data = data.in_unit_pixels()
    return cast(_measured(data, experiment.metric), experiment.precision)


def _measured(data: FederatedData, metric: Literal["auto", "voc07", "coco"]) -> FederatedData:
    """With the mean average precision by which detectors are judged: that of the source, unless one is named."""
    if metric == "auto":
        return data
    if not data.detection:
        raise UserError(f"metric={metric}: {data.source} has no objects to find; allowed: auto")
    return replace(data, metric=metric, groups=tuple(_measured(group, metric) for group in data.groups))


def read_source(experiment: Experiment, data_dir: Path | None) -> Source:
    source = load_source(experiment.data, data_dir, part(SourceOptions, experiment))
    return resized(source.with_classes(experiment.class_names), experiment.image_size)


def _with_defaults(group: Group, experiment: Experiment) -> Group:
    own = {"data": group.data or experiment.data, "image_size": group.image_size or experiment.image_size}
    return group.model_copy(update=own)


def read_group_source(experiment: Experiment, groups: Sequence[Group], data_dir: Path | None, name: str) -> Source:
    """A source that groups take their rows from; where it is made or read at some size, at the largest of theirs."""
    alike = [group.image_size for group in groups if group.data == name]
    sizes = [size for size in alike if size]
    entry = SOURCES.get(name.partition(":")[0])
    if 0 < len(sizes) < len(alike) and entry is not None and entry.sized:
        raise UserError(f"groups: some with data={name} have an image_size, some have none; allowed: all, or none")
    options = part(SourceOptions, experiment).model_copy(update={"image_size": max(sizes, default=None)})
    return load_source(name, data_dir, options).with_classes(experiment.class_names)


def part(kind: Any, experiment: Experiment) -> Any:
    """The fields of an experiment that one of its parts has."""
    return kind(**{name: getattr(experiment, name) for name in kind.model_fields})


def cast(data: FederatedData, precision: str) -> FederatedData:
    """The data as it is; in double precision all that is not a class, a pixel or a word."""
    if precision != "float64":
        return data
    numbers = ("inputs", "targets", "mean", "std")
    tensors = {name: getattr(data, name) for name in numbers}
    wide = {n: t.double() for n, t in tensors.items() if t is not None and t.is_floating_point()}
    return replace(data, **wide, groups=tuple(cast(group, precision) for group in data.groups))


def build_network(experiment: Experiment, data: FederatedData, device: torch.device) -> Network:
    """The network with its initial weights: the same for every method with this seed."""
    name = default_network(data) if experiment.network == "auto" else experiment.network
    options = dict(experiment.network_options)
    if name in networks and data.kind == "text" and "vocabulary" in networks[name].options:
        options = {"vocabulary": len(data.vocabulary), "vectors": data.vectors, **options}
    return made(experiment, name, data.input_shape, data.num_classes or 1, options, device)


def made(
    experiment: Experiment,
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    options: dict[str, Any],
    device: torch.device,
) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(experiment.seed, "network"))
        module = build_module(name, input_shape, classes, **options)
        initialize(module, experiment.init, experiment.head_init or experiment.init)
    if experiment.precision == "float64":
        module = module.double()
    return Network(module, name, device, mixed=experiment.precision == "mixed")


def build_group_networks(
    experiment: Experiment, method: Method, data: FederatedData, device: torch.device
) -> tuple[Network, tuple[Network, ...]]:
    """The global network of a federation of groups, and that of each group."""
    name, given = experiment.network, experiment.network_options
    if name == "auto" and data.detection:
        name = DETECTOR
    alike = [entry for entry in networks.values() if entry.detection == data.detection]
    scalable = [entry.name for entry in alike if {"width", "stages"} <= set(entry.options)]
    if name not in scalable:
        raise UserError(f"network={name}: it cannot be scaled to the groups; allowed: {', '.join(sorted(scalable))}")
    set_already = [key for key in ("width", "widths", "stages") if key in given]
    if set_already:
        raise UserError(f"network_options: {set_already[0]} follows from the groups; allowed: base_classes, base_size")
    kinds = tuple(
        Kind(view.source, view.input_shape, view.num_classes, group.stages)
        for view, group in zip(data.groups, experiment.groups or (), strict=True)
    )
    if len({kind.input_shape[0] for kind in kinds}) > 1:
        raise UserError("groups: some have grey and some have coloured images; allowed: the same number of channels")

    def build(kind: Kind, size: Size) -> Network:
        return made(experiment, name, kind.input_shape, kind.classes, {**given, **vars(size)}, device)

    def shape(kind: Kind, size: Size) -> nn.Module:
        with torch.device("meta"):
            return build_module(name, kind.input_shape, kind.classes, **given, **vars(size))

    most = max(kind.classes for kind in kinds)
    scaling = Scaling(kinds, shape, experiment.base_classes or most, experiment.base_size)
    sizes = method.sizes(scaling)
    return build(*scaling.largest(sizes)), tuple(build(kind, size) for kind, size in zip(kinds, sizes, strict=True))


def default_network(data: FederatedData) -> str:
    """By the kind of data: images with objects, text, images of at least 16 pixels, all else."""
    if data.detection:
        return DETECTOR
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
    """Whether clients are evaluated after a round; the one before others join shows how they are served till then."""
    every = experiment.evaluate_every
    before = experiment.joining_clients > 0 and number + 1 == experiment.joining_round
    return before or number > experiment.rounds - experiment.evaluate_last or (every > 0 and number % every == 0)


@dataclass(frozen=True)
class Selector:
    """Who takes part in a round of this experiment."""

    experiment: Experiment
    clients: tuple[int, ...]
    groups: tuple[int, ...] = ()  # of each client: its group, or how many classes it has
    full: frozenset[int] = frozenset()  # rounds in which the method wants everyone
    late: Latecomers = NOBODY_LATE

    def __post_init__(self) -> None:
        wanted = self.experiment.clients_per_round
        if not self.late.joined(self.clients, 1):
            fewer = "fewer new_clients" + (" or joining_clients" if self.clients else "")
            raise UserError(f"no client is left to train on; allowed: {fewer}")
        if isinstance(wanted, int) and wanted > len(self.clients):
            raise UserError(f"clients_per_round={wanted}: allowed are 1 to {len(self.clients)}, the clients that train")

    def __call__(self, number: int) -> list[int]:
        clients, groups = self._joined(number)
        if self._everyone(number):
            return list(clients)
        seed = self.experiment.seed
        return select(self.experiment.selection, self._wanted(len(clients)), clients, number, seed, groups)

    def share(self, number: int) -> float:
        """The chance of a client to take part in a round, on average over the clients that are there."""
        if self._everyone(number):
            return 1.0
        clients, groups = self._joined(number)
        there = len(clients)
        return expected(self.experiment.selection, self._wanted(there), there, groups) / there

    def _everyone(self, number: int) -> bool:
        rounds = self.experiment.rounds
        return number in {n if n > 0 else rounds + 1 + n for n in self.experiment.everyone_in} | self.full

    def _wanted(self, clients: int) -> int | float:
        wanted = self.experiment.clients_per_round
        return min(10, clients) if wanted is None else wanted

    def _joined(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Who is there in a round, and the group of each."""
        return (self.clients, self.groups) if number >= self.late.first else self._at_first

    @cached_property
    def _at_first(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        there = self.late.joined(self.clients, 1)
        group_of = dict(zip(self.clients, self.groups, strict=False))
        return there, tuple(group_of[client] for client in there if client in group_of)
