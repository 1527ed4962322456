"""Lists of row numbers, one a client and of different lengths, end to end in one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Index lists of all clients end to end; client i has index[offsets[i] : offsets[i + 1]]."""

    index: Tensor  # int64
    offsets: Tensor  # int64 [clients + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, client: int) -> Tensor:
        """The list of one client."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]

    @property
    def counts(self) -> Tensor:
        """int64 [clients]: the lengths of the lists."""
        return self.offsets.diff()

    @property
    def client(self) -> Tensor:
        """int64, one for each entry of ``index``: whose it is."""
        return torch.arange(len(self)).repeat_interleave(self.counts)

    def select(self, kept: Tensor) -> "Ragged":
        """Only the entries where ``kept`` (bool, one for each entry) is true."""
        return Ragged.from_clients(self.index[kept], self.client[kept], len(self))

    @staticmethod
    def from_lists(lists: Sequence[np.ndarray]) -> "Ragged":
        index = np.concatenate(lists) if lists else np.empty(0)
        return Ragged.from_lengths(index, np.array([len(rows) for rows in lists]))

    @staticmethod
    def from_lengths(index: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """From all lists end to end and their lengths."""
        return Ragged(torch.from_numpy(index.astype(np.int64)), _offsets(torch.from_numpy(lengths.astype(np.int64))))

    @staticmethod
    def from_clients(index: Tensor, client: Tensor, clients: int) -> "Ragged":
        """From entries and whose they are, in any order of clients."""
        order = client.argsort(stable=True)
        return Ragged(index[order], _offsets(torch.bincount(client, minlength=clients)))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
