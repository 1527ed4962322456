"""What each client keeps between rounds, addressed by client: personal weights and a method's memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tailorfl.cohort.graphs import free_memory
from tailorfl.models.network import Values


class ClientStore:
    """One set of named tensors a client, on the training device while it fits there, else in host memory.

    A client that never took part has no entry and costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entries: dict[int, Values] = {}

    def stack(self, clients: Sequence[int], name: str, default: Tensor, device: torch.device) -> Tensor:
        """One kept tensor of several clients, stacked on a device; ``default`` for clients that have none.

        Where clients keep a number a sample, their tensors differ in length: shorter ones are padded with zeros.
        """
        rows = [self.entries.get(client, {}).get(name) for client in clients]
        if all(row is None for row in rows):  # tensors that travel, and newcomers
            return default.to(device).expand(len(rows), *default.shape).clone()
        default = default.to(self.device)
        found = [default if row is None else row for row in rows]
        if len({row.shape for row in found}) > 1:
            return pad_sequence(found, batch_first=True).to(device)
        return torch.stack(found).to(device)

    def keep(self, clients: Sequence[int], kept: Sequence[int], values: Mapping[str, Tensor]) -> None:
        """Keep these rows of the stacked values; what the clients kept under other names stays."""
        for name, tensor in values.items():
            local = tensor.detach().to(self.device)
            for row in kept:
                # A copy: a view would hold the whole stack in memory.
                self.entries.setdefault(clients[row], {})[name] = local[row].clone()

    def flat(self) -> Values:
        """All entries under names ``CLIENT/NAME``, for a checkpoint."""
        return {f"{client}/{name}": t for client, entry in sorted(self.entries.items()) for name, t in entry.items()}

    def restore(self, flat: Mapping[str, Tensor]) -> None:
        """The inverse of ``flat``."""
        self.entries = {}
        for key, tensor in flat.items():
            client, name = key.split("/", 1)
            self.entries.setdefault(int(client), {})[name] = tensor.to(self.device)


def store_device(device: torch.device, clients: int, bytes_per_client: int) -> torch.device:
    """The device if all clients' state takes at most a third of its free memory, else the host."""
    if device.type != "cuda":
        return device
    return device if clients * bytes_per_client * 3 <= free_memory(device) else torch.device("cpu")
