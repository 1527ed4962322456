"""PPFE's network for text: word vectors, a recurrent layer and three linear layers."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.errors import UserError
from tailorfl.models.plain import PPFE, Layers, Shape, linear_block
from tailorfl.models.recurrent import LSTM
from tailorfl.models.registry import network, positive_integer, positive_integers


class WordVectors(nn.Module):
    """Word ids [batch, time] to vectors [batch, time, dimension + 1]; id 0 is padding.

    The last channel is 1 where a word is real, for the recurrence to skip the rest. Frozen vectors are a buffer, which
    no optimizer and no method sees as a parameter.
    """

    weight: Tensor

    def __init__(self, vectors: Tensor, frozen: bool = False) -> None:
        super().__init__()
        if frozen:
            self.register_buffer("weight", vectors)
        else:
            self.weight = nn.Parameter(vectors)

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids != 0).to(self.weight.dtype).unsqueeze(-1)
        # The product also keeps gradients from the vector of the padding.
        return torch.cat([functional.embedding(ids, self.weight) * real, real], dim=-1)


class LastState(LSTM):
    """The LSTM over what `WordVectors` gives: its state after the last real word."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return super().forward(x[..., :-1], x[..., -1] if valid is None else valid)


@network("text", paper=PPFE, input_shape=(32,))
def text(
    input_shape: Shape,
    classes: int,
    *,
    vocabulary: int | None = None,
    dimension: int = 50,
    vectors: Tensor | None = None,
    freeze_embedding: bool = False,
    recurrent: int = 128,
    hidden: Sequence[int] = (120, 64),
) -> nn.Module:
    """PPFE's network for Sent140: word vectors (GloVe), a recurrent layer, three linear layers.

    Inputs are word ids, 0 is padding. `vocabulary` counts the ids, padding included; `vectors` [vocabulary, dimension]
    are pretrained ones (then `dimension` is theirs). The paper gives no widths; an LSTM of 128 and linear layers of 120
    and 64 are our choice.
    """
    table = _initial_vectors(vocabulary, dimension, vectors)
    recurrent = positive_integer("text", "recurrent", recurrent)
    first, second = positive_integers("text", "hidden", hidden, length=2)
    layers: Layers = OrderedDict()
    layers["embedding"] = WordVectors(table, freeze_embedding)
    layers["lstm"] = LastState(table.shape[1], recurrent)
    layers["fc1"] = linear_block(recurrent, first)
    layers["fc2"] = linear_block(first, second)
    layers["head"] = nn.Linear(second, classes)
    return nn.Sequential(layers)


def _initial_vectors(vocabulary: int | None, dimension: int, vectors: Tensor | None) -> Tensor:
    """Pretrained vectors, or random ones as torch draws them, with zeros for the padding."""
    if vectors is not None:
        return _checked_vectors(vocabulary, vectors)
    if vocabulary is None:
        raise UserError("network 'text': neither vocabulary nor vectors given; allowed: vocabulary=NUMBER or vectors")
    shape = positive_integer("text", "vocabulary", vocabulary), positive_integer("text", "dimension", dimension)
    table = torch.randn(shape)
    table[0] = 0
    return table


def _checked_vectors(vocabulary: int | None, vectors: Tensor) -> Tensor:
    if not isinstance(vectors, Tensor) or vectors.dim() != 2 or not vectors.is_floating_point():
        found = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise UserError(f"network 'text': vectors of {found}; allowed: a float tensor [vocabulary, dimension]")
    if vocabulary not in (None, len(vectors)):
        raise UserError(
            f"network 'text': vocabulary={vocabulary} beside {len(vectors)} vectors; allowed: the same number"
        )
    return vectors.detach().clone()
