"""A recurrence that can be stacked over clients: torch's own LSTM has no batching rule."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.models.half import halved


class LSTM(nn.Module):
    """A single-layer LSTM over [batch, time, features] that returns the hidden state after the last real step.

    Its parameters carry the names of `nn.LSTM`, so one's state dict loads into the other.
    """

    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        bound = 1 / math.sqrt(hidden_size)
        shapes = {
            "weight_ih_l0": (4 * hidden_size, input_size),
            "weight_hh_l0": (4 * hidden_size, hidden_size),
            "bias_ih_l0": (4 * hidden_size,),
            "bias_hh_l0": (4 * hidden_size,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """`valid` [batch, time] is 1 where a step is real; other steps leave the state as it was."""
        inputs = functional.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        hidden = cell = inputs.new_zeros(x.shape[0], self.hidden_size)
        weight = halved(self.weight_hh_l0)  # once for all steps
        for step in range(x.shape[1]):
            gates = inputs[:, step] + functional.linear(hidden, weight)
            enter, forget, candidate, leave = gates.chunk(4, dim=1)
            new_cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
            new_hidden = torch.sigmoid(leave) * torch.tanh(new_cell)
            if valid is None:
                hidden, cell = new_hidden, new_cell
            else:
                real = valid[:, step, None] > 0
                hidden, cell = torch.where(real, new_hidden, hidden), torch.where(real, new_cell, cell)
        return hidden
