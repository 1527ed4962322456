"""Models that leave out the classes their client does not have: heads of a client's own size, in one shape for all."""

import torch
from torch import Tensor, nn

NEVER = -1e9  # an output that wins over no other; finite, so that padding, which has some class, does no harm


def without(outputs: Tensor, absent: Tensor) -> Tensor:
    """Outputs of which some classes are out of the question: as if the head had no row for them."""
    return torch.where(absent, NEVER, outputs)


class OwnClasses(nn.Module):
    """A network that leaves some classes out."""

    absent: Tensor

    def __init__(self, network: nn.Module, absent: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("absent", absent)

    def forward(self, inputs: Tensor) -> Tensor:
        return without(self.network(inputs), self.absent)
