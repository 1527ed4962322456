"""The model that serves a client of a run, as files that work without tailorfl."""

import copy
import io
import itertools
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from tailorfl.cohort import Cohort
from tailorfl.cohort.scoring import mean_average_precision, score
from tailorfl.data import FederatedData, load_partition
from tailorfl.detection.detections import located, select
from tailorfl.errors import UserError
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.federation.in_process import InProcess
from tailorfl.methods import Method
from tailorfl.models import Network
from tailorfl.models.reduction import parameters
from tailorfl.study.build import Built, build, choose_device
from tailorfl.study.config import Config, read_config
from tailorfl.study.folder import CHECKPOINTS, CONFIG, EXPORTS, PARTITION, called, is_run, runs_in
from tailorfl.study.run import restore
from tailorfl.study.summary import finite

TENSORS, PROGRAM, ABOUT, VOCABULARY = "model.safetensors", "model.pt2", "model.json", "vocabulary.txt"
FORMAT = "tailorfl model 2"
EVERYONE = "all"
NAMES_SHOWN = 12  # in an error
MODES = {1: "L", 3: "RGB"}  # of Pillow, by an image's channels
AT_A_TIME = 64  # test samples that go through a program at once


class FromRaw(nn.Module):
    """A model on inputs as they are stored: images as bytes, normalized here as in training."""

    def __init__(self, model: nn.Module, decode: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.decode = model, decode

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(self.decode(inputs))
        return outputs


class Located(nn.Module):
    """A detector whose outputs are probabilities and boxes, not logits and codes."""

    anchors: Tensor

    def __init__(self, model: nn.Module, anchors: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("anchors", anchors)

    def forward(self, inputs: Tensor) -> Tensor:
        return located(self.model(inputs), self.anchors)


@dataclass(frozen=True)
class Restored:
    """A run as it was after its newest checkpoint."""

    folder: Path
    config: Config
    built: Built[InProcess]
    round: int

    def served(self, clients: list[int]) -> Iterator[Cohort]:
        """Each client alone, with the model by which it is evaluated."""
        message = self.built.loop.message_for_evaluation()
        for cohort in self.built.federation.served(self.round, clients, message):
            for row in range(len(cohort)):
                yield cohort.of([row])


@dataclass(frozen=True)
class Exporter:
    """Writes the models of a run's clients."""

    config: Config
    network: Network
    data: FederatedData
    round: int
    run: str  # its name
    programs: dict[int, ExportedProgram] = field(default_factory=dict)  # of networks

    def program(self, client: Cohort, module: nn.Module) -> ExportedProgram:
        """A client's model as a program. Where it is a network and nothing else, that is traced once for all."""
        what, data = f"the model of client {client.data.names[client.clients[0]]!r}", client.data
        if type(self.config.method).deployed is not Method.deployed:
            return as_program(module, data, what)
        network = id(client.network)
        if network not in self.programs:
            self.programs[network] = as_program(module, data, what)
        program = self.programs[network]
        own = {**program.state_dict, **program.constants}
        for name, tensor in tensors_of(module).items():
            if f"model.{name}" in own:  # a tensor with two names is there once
                own[f"model.{name}"].copy_(tensor)
        return program

    @cached_property
    def network_cost(self) -> dict[str, int]:
        """That of the one network of the experiment."""
        module = copy.deepcopy(self.network.module).to("cpu").eval()
        return cost(module, from_raw(module, self.data), self.data)

    def write(self, folder: Path, client: Cohort) -> dict[str, Any]:
        """Write the files of one client's model; what they say of it."""
        data, [number] = client.data, client.clients
        module = self.config.method.deployed(client)
        if data.detection:
            module = Located(module, client.network.anchors())
        module = module.to("cpu").eval()
        program = self.program(client, module)
        raw = program.module()
        about = {
            "format": FORMAT,
            "method": self.config.method_name,
            "network": self.network.name,
            "client": data.names[number],
            "run": self.run,
            "data": data.source,
            "seed": self.config.experiment.seed,
            "round": self.round,
            "task": "regression" if data.regression else "detection" if data.detection else "classification",
            "classes": None if data.regression else list(data.classes),
            "input": _input(data),
            "normalization": _normalization(data),
            "output": _output(raw, data),
            "test": _test_objects(raw, data, number) if data.detection else _test(raw, data, number),
            "cost": {"model": cost(module, raw, data), "network": self.network_cost},
        }
        folder.mkdir(exist_ok=True)
        save_file(tensors_of(module), folder / TENSORS)
        torch.export.save(program, folder / PROGRAM)
        if data.vocabulary:
            (folder / VOCABULARY).write_text("".join(f"{word}\n" for word in data.vocabulary), encoding="utf-8")
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        return about


def export(
    folder: Path,
    client: str,
    out: Path | None = None,
    data_dir: Path | None = None,
    force: bool = False,
    watch: Callable[[dict[str, Any]], None] = lambda about: None,
) -> Path:
    """Write the model of a client of a run, or of each into a folder of its own; where they are.

    ``watch`` is given what is written of each model.
    """
    config, names = read_run(folder)
    check_deployable(type(config.method), config.method_name)
    clients, everyone = chosen(client, names, folder), client == EVERYONE
    places = folder_names(names)
    out = out or (folder / EXPORTS if everyone else folder / EXPORTS / places[clients[0]])
    _check_free(out, force)
    run = restored(folder, config, data_dir)
    exporter = Exporter(run.config, run.built.network, run.built.data, run.round, called(folder))
    with whole_folder(out) as temporary:
        for cohort in run.served(clients):
            watch(exporter.write(temporary / places[cohort.clients[0]] if everyone else temporary, cohort))
    return out


def read_run(folder: Path) -> tuple[Config, tuple[str, ...]]:
    """The configuration of a run, and its clients' names."""
    if not is_run(folder):
        inside = [str(run) for run in runs_in(folder)]
        allowed = first_names(inside) if inside else "a folder that 'tailor run' has written"
        raise UserError(f"{folder} holds no run ({CONFIG} is missing); allowed: {allowed}")
    return read_config(folder / CONFIG), load_partition(folder / PARTITION).names


def chosen(client: str, names: Sequence[str], folder: Path) -> list[int]:
    """The clients that a name stands for."""
    if client == EVERYONE:
        return list(range(len(names)))
    if client not in names:
        raise UserError(f"{folder} has no client {client!r}; allowed: {first_names(names)}, or {EVERYONE}")
    return [names.index(client)]


def one_client(client: str, names: Sequence[str], folder: Path) -> int:
    """The client of that name, and not all of them."""
    if client == EVERYONE:
        raise UserError(f"a picture is of one client; allowed: {first_names(names)}")
    return chosen(client, names, folder)[0]


def first_names(names: Sequence[str]) -> str:
    """Names for an error line, which may be many."""
    more = f", ... ({len(names)} names)" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def restored(folder: Path, config: Config, data_dir: Path | None = None) -> Restored:
    """Build a run again, from its folder, as it was after its newest checkpoint."""
    try:
        device = choose_device(config.experiment.device)
    except UserError:  # a run of a machine with a GPU is exported on one without
        device = torch.device("cpu")
        config = replace(config, experiment=config.experiment.model_copy(update={"device": "cpu"}))
    checkpoint = newest_checkpoint(folder / CHECKPOINTS, device)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet; allowed: 'tailor run --resume --out {folder}', then this")
    built = build(config, data_dir, folder / PARTITION)
    restore(built, checkpoint)
    return Restored(folder, config, built, checkpoint.round)


def check_deployable(kind: type[Method], name: str) -> None:
    """Refuse a method whose clients predict by something else than what `deployed` would hand out."""

    def depth(hook: str) -> int:
        return next(place for place, owner in enumerate(kind.__mro__) if hook in vars(owner))

    if depth("predict") < depth("deployed"):
        raise UserError(
            f"{name} cannot be exported: it has a 'predict' of its own, and no 'deployed' that gives a module for it"
        )


def as_program(module: nn.Module, data: FederatedData, what: str) -> ExportedProgram:
    """The module on inputs as they are stored, any number of them, as a graph of torch's own operations."""
    # Zeros: what a program is traced with is saved in it, and no client's data may be.
    sample = torch.zeros(2, *data.input_shape, dtype=data.inputs.dtype)
    model = from_raw(copy.deepcopy(module).requires_grad_(False), data)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):  # torch tells how far it came
            program = torch.export.export(model, (sample,), dynamic_shapes=({0: Dim("batch")},))
    except Exception as error:  # anything that a user's module may raise when it is traced
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{what} cannot be made a torch.export program: {said}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of this machine
    program.graph.eliminate_dead_code()  # a head whose outputs nobody asks for
    program.graph_module.recompile()
    return program


def from_raw(module: nn.Module, data: FederatedData) -> FromRaw:
    """The module on inputs as they are stored."""
    plain = replace(data, inputs=data.inputs[:1], targets=data.targets[:1]).to("cpu")
    plain.decode(plain.inputs)  # its constants are made now: made while a program is traced, they would be no numbers
    return FromRaw(module, plain.decode).eval()


def cost(module: nn.Module, raw: nn.Module, data: FederatedData) -> dict[str, int]:
    """What a model takes: trainable numbers, bytes of all tensors, and the work of one sample."""
    sample = torch.zeros(1, *data.input_shape, dtype=data.inputs.dtype)
    counter = FlopCounterMode(display=False)
    # Without the fused kernels of a CPU: in those of an nn.LSTM nothing is counted.
    plain = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), plain, counter:
        raw(sample)
    return {
        "parameters": parameters(module),
        "bytes": sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())),
        "multiply_adds": counter.get_total_flops() // 2,
    }


def in_words(about: dict[str, Any]) -> str:
    """A line on a model: what it costs, beside the network of the experiment."""
    model, network = about["cost"]["model"], about["cost"]["network"]
    words = {"parameters": "parameters", "multiply_adds": "multiply-adds a sample"}
    parts = [f"{model[key]:,} {word} ({_share(model[key], network[key])})" for key, word in words.items()]
    return f"client {about['client']}: {', '.join(parts)} of {about['network']}"


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module by name, each with memory of its own."""
    named = {**module.state_dict(), **dict(module.named_buffers())}  # the latter: some are kept out of state dicts
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def folder_names(clients: Sequence[str]) -> list[str]:
    """A folder's name for each client; no two are alike, in capitals or not."""
    names: dict[str, str] = {}
    for client in clients:
        plain = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in client).lstrip(".") or "-"
        candidates = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
        name = next(name for name in candidates if name.casefold() not in names)
        names[name.casefold()] = name
    return list(names.values())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place at the end; nothing stays behind if the writing fails."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    before = temporary.with_name(f"{temporary.name}.before")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.replace(path, before)
        try:
            os.replace(temporary, path)
        except BaseException:
            if before.exists():
                os.replace(before, path)
            raise
    finally:
        for left in (temporary, before):
            shutil.rmtree(left, ignore_errors=True)


def _check_free(folder: Path, force: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not force:
        raise UserError(f"{folder} exists; allowed: another --out, --force to replace")
    if not _is_export(folder):
        raise UserError(f"{folder} is not an export; --force replaces only an export")


def _is_export(folder: Path) -> bool:
    """A model's folder, or one of such folders and nothing else."""
    return (folder / ABOUT).is_file() or (
        folder.is_dir() and all((path / ABOUT).is_file() for path in folder.iterdir())
    )


def _input(data: FederatedData) -> dict[str, Any]:
    meaning = {
        "image": "images, each pixel 0 to 255, channels first",
        "features": "rows of numbers, after the normalization",
        "text": "word ids, padded with 0",
    }
    found = {"kind": data.kind, "dtype": _name(data.inputs.dtype), "shape": ["batch", *data.input_shape]}
    found |= {"meaning": meaning[data.kind]} | ({"vocabulary": VOCABULARY} if data.vocabulary else {})
    if data.kind == "image":
        return found | {"files": _image_files(data)}
    return found | {"columns": [column.name for column in data.reading.columns] or None}


def _image_files(data: FederatedData) -> dict[str, Any]:
    """How an image file becomes an input."""
    channels, height, width = data.input_shape
    return {
        "mode": MODES.get(channels),
        "width": width,
        "height": height,
        "resize": "box if neither side of the file is shorter, else bilinear; proportions are not kept",
        "inverted": data.reading.inverted,
    }


def _normalization(data: FederatedData) -> dict[str, Any]:
    """Of images a number a channel, in units of 0 to 1; of tables one a column."""
    if data.mean is not None and data.std is not None:
        return {"where": "inside", "mean": data.mean.tolist(), "std": data.std.tolist()}
    columns = data.reading.columns
    if data.kind != "features" or not columns:
        return {"where": "none", "mean": None, "std": None}
    return {"where": "outside", "mean": [one.mean for one in columns], "std": [one.deviation for one in columns]}


def _output(raw: nn.Module, data: FederatedData) -> dict[str, Any]:
    outputs = raw(torch.zeros(1, *data.input_shape, dtype=data.inputs.dtype))
    meaning = "the number" if data.regression else "a score for each class; the largest is the prediction"
    if data.detection:
        meaning = (
            "at each anchor the probability of each class, then x0, y0, x1, y1 in units of the image; keep those above "
            "a threshold and, of boxes of a class that overlap, the best"
        )
    return {"dtype": _name(outputs.dtype), "shape": ["batch", *outputs.shape[1:]], "meaning": meaning}


def _test(raw: nn.Module, data: FederatedData, client: int) -> dict[str, Any]:
    """The model on the client's test rows."""
    rows = data.test.of(client)
    hits, loss = 0, 0.0
    with torch.no_grad():
        for part in rows.split(AT_A_TIME):
            there = part.to(data.inputs.device)
            hit, losses = score(raw(data.inputs[there].cpu())[None], data.targets[there].cpu()[None])
            hits, loss = hits + int(hit.sum()), loss + float(losses.sum())
    samples = len(rows)
    return {
        "samples": samples,
        "accuracy": None if data.regression or not samples else hits / samples,
        "loss": finite(loss / samples) if samples else None,
    }


def _test_objects(raw: nn.Module, data: FederatedData, client: int) -> dict[str, Any]:
    """The detector on the client's test images; its accuracy is the mean average precision."""
    rows = data.test.of(client)
    found = []
    with torch.no_grad():
        for part in rows.split(AT_A_TIME):
            found += select(raw(data.inputs[part.to(data.inputs.device)].cpu()))
    precision = mean_average_precision(data, rows, found)
    return {"samples": len(rows), "accuracy": finite(precision), "loss": None}


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
