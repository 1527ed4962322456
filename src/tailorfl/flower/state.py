"""What a site keeps between rounds, in files that outlive its processes.

Flower starts a process for every message and forgets a node's context when the node dies. So a client's personal
tensors and its method's memory live in a folder, keyed by the experiment and the client's name: one file for each round
in which it trained, of which the last few stay, because a server that was killed may ask for its last round again.
"""

import fcntl
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailorfl.data.atomic import durable_file
from tailorfl.errors import UserError
from tailorfl.flower.project import NAME
from tailorfl.models.network import Values

FENCE, LOCK, ARCHIVE = "fence.json", "lock", "archive"
REPEATED = 2  # rounds that a server may ask for again: its newest checkpoint, and the one to fall back on


class StaleError(Exception):
    """What was asked for, or computed, is older than what the site has done since."""


@dataclass(frozen=True)
class Ticket:
    """The right to write the state of a round; void as soon as a later one is given out."""

    term: int  # which start of the server asked
    round: int
    number: str


@dataclass(frozen=True)
class SiteState:
    """The state of one client in one experiment."""

    folder: Path

    @staticmethod
    def of(root: Path, experiment: str, client: str) -> "SiteState":
        for what, name in (("experiment", experiment), ("client", client)):
            check_name(what, name)
        return SiteState(root / experiment / client)

    def begin(self, term: int, round: int) -> Ticket:
        """Take the right to write; whoever had it before, perhaps an orphan of a node that was killed, has lost it."""
        ticket = Ticket(term, round, uuid.uuid4().hex)
        with self._locked():
            held = self._fence()
            if held and (term, round) < (held.term, held.round):
                raise StaleError(f"round {round} was asked for by an earlier server or for an earlier round")
            with durable_file(self.folder / FENCE) as temporary:
                temporary.write_text(json.dumps(vars(ticket)))
        return ticket

    def commit(self, ticket: Ticket, values: Mapping[str, Tensor]) -> None:
        """Write the state after a round; refused when somebody else began to write since."""
        with self._locked():
            if self._fence() != ticket:
                raise StaleError(f"round {ticket.round} was begun again by another process")
            for left in self.folder.glob(".round-*"):  # by a process that was killed while it wrote
                left.unlink(missing_ok=True)
            _save(self._path(ticket.round), values)
            earlier = [number for number in self.rounds() if number <= ticket.round - REPEATED]
            for number in self.rounds():
                if number > ticket.round or number in earlier[:-1]:  # of a server that went back, or too old
                    self._path(number).unlink()

    def load(self, before: int) -> Values:
        """The state after the last round before this one in which the client trained; nothing if there is none."""
        earlier = [number for number in self.rounds() if number < before]
        return _load(self._path(earlier[-1])) if earlier else {}

    def rounds(self) -> list[int]:
        """The rounds after which there is a state, in order."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def archived(self) -> tuple[str, ...]:
        """The digests of the tensors that the server sent once and that are here."""
        return tuple(sorted(path.stem for path in (self.folder / ARCHIVE).glob("*.safetensors")))

    def archive(self, tensor: Tensor) -> None:
        """Keep a tensor that will not be sent again."""
        _save(self._archive_path(digest(tensor)), {"tensor": tensor})

    def from_archive(self, found: str) -> Tensor:
        return _load(self._archive_path(found))["tensor"]

    def _archive_path(self, found: str) -> Path:
        return self.folder / ARCHIVE / f"{found}.safetensors"

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _fence(self) -> Ticket | None:
        path = self.folder / FENCE
        return Ticket(**json.loads(path.read_text())) if path.is_file() else None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / LOCK).open("w")
        except OSError as error:
            raise UserError(f"the state folder {self.folder} cannot be written: {error.strerror}") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def check_name(what: str, name: str) -> str:
    """Names of experiments and clients are names of folders, whoever sends them."""
    if not NAME.fullmatch(name):
        raise UserError(f"{what} {name!r}: allowed are letters, digits, '.', '_' and '-', 100 at most")
    return name


def digest(tensor: Tensor) -> str:
    """What a tensor is known by: its type, its shape and its bytes."""
    array = tensor.detach().cpu().contiguous().numpy()
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.blake2b(head + array.tobytes(), digest_size=16).hexdigest()


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with durable_file(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)


def _load(path: Path) -> Values:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the state {path} cannot be read: {' '.join(str(error).split())}") from error
