"""Checkpoints: a folder a round that is either whole or not there, verified when it is read."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailorfl.data.atomic import flush
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Server
from tailorfl.models.network import Values

FORMAT = "tailorfl checkpoint 1"
KEPT = 2  # the newest, and one to fall back on
PART_BYTES = 256 << 20  # a file of clients' tensors holds about so much: saving copies a part, never all
STATE = "state.json"


@dataclass
class Checkpoint:
    """All that a run needs to go on after a round."""

    round: int
    server: Server
    clients: Values  # CLIENT/NAME
    totals: dict[str, Any] = field(default_factory=dict)  # bytes, seconds and counts so far


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk, rename it, and drop older ones."""
    final = folder / f"round-{checkpoint.round:06d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    server = {f"values/{k}": v for k, v in checkpoint.server.values.items()}
    server |= {f"state/{k}": v for k, v in checkpoint.server.state.items()}
    server |= {f"archive/{k}": v for k, v in checkpoint.server.archive.items()}
    files = {"server.safetensors": server}
    files |= {f"clients-{n:04d}.safetensors": part for n, part in enumerate(_parts(checkpoint.clients))}
    digests = {name: _write(temporary / name, tensors) for name, tensors in files.items()}
    state: dict[str, Any] = {
        "format": FORMAT,
        "round": checkpoint.round,
        "numbers": checkpoint.server.numbers,
        "archive": list(checkpoint.server.archive),
        "held": [list(pair) for pair in checkpoint.server.held.items()],
        "totals": checkpoint.totals,
        "digests": digests,
    }
    (temporary / STATE).write_text(json.dumps(state | {"digest": _digest_of(state)}))
    flush(temporary / STATE)
    flush(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    flush(folder)
    for old in (*checkpoints(folder)[:-KEPT], *folder.glob(".round-*")):  # the latter by a process that was killed
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("round-*")) if folder.is_dir() else []


def newest_checkpoint(folder: Path, device: torch.device) -> Checkpoint | None:
    """The newest checkpoint of a run, or None if none was written yet."""
    found = checkpoints(folder)
    return load_checkpoint(found[-1], device) if found else None


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint; a damaged one is named, and left alone."""
    try:
        state = _read_state(path / STATE)
        tensors = {name: _read(path / name, digest) for name, digest in state["digests"].items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"checkpoint {path} is damaged ({' '.join(str(error).split())}); "
            "delete it to go on from the one before, or start again with --force"
        ) from error
    server = tensors.pop("server.safetensors")
    clients = {key: tensor for part in tensors.values() for key, tensor in part.items()}
    return Checkpoint(
        state["round"],
        _server(state, server, device),
        clients,
        state["totals"],
    )


def _server(state: dict[str, Any], tensors: Values, device: torch.device) -> Server:
    archived = _under("archive/", tensors, device)
    return Server(
        values=_under("values/", tensors, device),
        state=_under("state/", tensors, device),
        numbers=state["numbers"],
        archive={name: archived[name] for name in state.get("archive", ())},  # in the order in which it grew
        held=dict(state.get("held", ())),
        round=state["round"],
    )


def _parts(tensors: Values) -> Iterator[Values]:
    part: Values = {}
    size = 0
    for name, tensor in tensors.items():
        part[name] = tensor
        size += tensor.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # a full disk, said in its own words
        raise UserError(f"checkpoint {path} cannot be written ({' '.join(str(error).split())})") from error
    flush(path)
    return _digest(path)


def _read_state(path: Path) -> dict[str, Any]:
    text = path.read_text()
    state = json.loads(text)
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
    # The text too: two spellings of a number may mean the same.
    if json.dumps(state) != text or state.pop("digest", None) != _digest_of(state):
        raise ValueError(f"{path.name} has changed since it was written")
    return state


def _read(path: Path, digest: str) -> Values:
    if _digest(path) != digest:
        raise ValueError(f"{path.name} has changed since it was written")
    return load_file(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state).encode()).hexdigest()[:32]


def _under(prefix: str, tensors: Values, device: torch.device) -> Values:
    return {k.removeprefix(prefix): t.to(device) for k, t in tensors.items() if k.startswith(prefix)}
