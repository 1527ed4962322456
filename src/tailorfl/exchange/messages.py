"""What travels: plain named tensors and numbers, from the server to clients and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tailorfl.models.network import Network, Values


@dataclass(frozen=True)
class Message:
    """From the server: what every client of a round gets, and what each gets for itself."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)  # [clients, ...], a row for each client of a cohort
    archive: Mapping[str, Tensor] = field(default_factory=dict)  # what a client is sent once, and keeps
    address: Callable[[tuple[int, ...], Network], Values] | None = None  # to ``own``, made when it is delivered

    @property
    def bytes(self) -> int:
        """What one client receives of that which all receive."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 8 * len(self.numbers)

    def to(self, clients: tuple[int, ...], network: Network) -> "Message":
        """The message as a cohort with this network receives it."""
        return replace(self, own=self.address(clients, network) if self.address else {}, address=None)


@dataclass(frozen=True)
class Answers:
    """From some clients: their tensors stacked along a leading dimension, one row a client."""

    clients: tuple[int, ...]
    samples: Tensor  # int64 [clients], training samples
    tensors: Values  # [clients, ...]
    loss: Tensor  # [clients], mean over the local steps

    @property
    def bytes(self) -> int:
        """What these clients send together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def only(self, kept: Sequence[int]) -> "Answers":
        """The answers at these places of the stack."""
        rows = torch.tensor(list(kept), dtype=torch.int64)
        return Answers(
            tuple(self.clients[k] for k in kept),
            self.samples[rows],
            {name: tensor[rows.to(tensor.device)] for name, tensor in self.tensors.items()},
            self.loss[rows.to(self.loss.device)],
        )


@dataclass
class Server:
    """What the server keeps between rounds: the global values, and a method's own tensors and numbers.

    Tensors in the archive never change. Every client keeps them too, from the first round in which it is selected after
    they were put there, and is sent each of them once.
    """

    values: Values
    state: Values = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    archive: Values = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # how many tensors of the archive a client has, in its order
    round: int = 0  # the one that is under way, or that was the last
    samples: int = 0  # for training, of all clients together
    share: float = 1.0  # of the clients that takes part in this round, on average
    seed: int = 0  # of the experiment
    rounds: int = 1  # of the experiment
    notes: dict[int, dict[str, float]] = field(default_factory=dict)  # what a method writes down of clients, this round

    def restore(self, saved: "Server") -> None:
        """Become what was saved."""
        vars(self).update(vars(replace(saved, seed=self.seed, rounds=self.rounds)))

    def hand_out(self, client: int) -> int:
        """Let a client have all of the archive; the size of what it lacked."""
        missing = list(self.archive.values())[self.held.get(client, 0) :]
        if missing:
            self.held[client] = len(self.archive)
        return sum(tensor.nbytes for tensor in missing)
