"""The networks of PPFE's stages: in each more layers are personal than in the one before, and they hold less."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from torch import Tensor, nn

from tailorfl.errors import UserError
from tailorfl.models.lowrank import factored, linear_layers
from tailorfl.models.network import Network, Values
from tailorfl.models.reduction import Reduction, factored_by, factored_to, masked, narrowed_head, parameters

# The ranks of the paper for its two networks, and ours where it gives none.
RANKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ppfe-cnn": ((100, 50, 24), (80, 40, 16)),
    "ppfe-cnn-large": ((200, 100, 80), (160, 80, 64)),
}


@dataclass
class Stage(Network):
    """The network of a stage, and how it is made of the experiment's."""

    number: int = 1
    personal_layers: int = 0
    reduce: Callable[[nn.Module], nn.Module] = copy.deepcopy
    stages: list["Stage"] = field(default_factory=list)  # all of them, in order

    @property
    def reduced(self) -> frozenset[str]:
        """The tensors of layers that have another form than in the full network."""
        full = {name: tensor.shape for name, tensor in self.stages[0].initial().items()}
        forms = {name: tensor.shape for name, tensor in self.initial().items()}
        changed = [layer for layer in self.layers if any(full.get(name) != forms[name] for name in layer.names)]
        return frozenset(name for layer in changed for name in layer.names)

    def started(self, values: Mapping[str, Tensor]) -> Values:
        """The stage's network made of a full one with these weights."""
        module = copy.deepcopy(self.stages[0].module)
        module.load_state_dict(dict(values), strict=False)
        return Network(self.reduce(module), device=self.device).initial()


@dataclass(frozen=True)
class Shrinking:
    """How the networks of later stages get smaller; what each number means is said where PPFE has it as an option."""

    network: Network  # the full one
    depths: tuple[int, ...]  # how many layers are personal, stage by stage
    reduction: Reduction
    ranks: tuple[tuple[int, ...], ...] | None
    shrinkage: float
    sparsity: float
    sparsity_step: float

    def stages(self) -> tuple[Stage, ...]:
        """The network of each stage, the full one first."""
        found: list[Stage] = []
        for number, depth in enumerate(self.depths, start=1):
            reduce, name = partial(self.reduced, number=number), f"{self.network.name} of stage {number}"
            module, like = reduce(self.network.module), self.network
            found.append(Stage(module, name, like.device, like.mixed, number, depth, reduce, found))
        return tuple(found)

    def reduced(self, module: nn.Module, number: int) -> nn.Module:
        """The network of a stage, made of a full one."""
        layers = self.network.layers
        personal = [layer.name for layer in layers[len(layers) - self.depths[number - 1] :]]
        if self.reduction == "sparse":
            return masked(module, self._sparsities(personal))
        if self.reduction == "width":
            linear = set(linear_layers(module))
            ending = list(takewhile(lambda name: name in linear, reversed(personal)))  # convolutions keep their width
            return narrowed_head(module, ending[::-1], number**-self.shrinkage)
        if self.reduction == "svd" and number > 2:
            return self._factored(module, number - 3)
        return copy.deepcopy(module)

    def _sparsities(self, personal: Sequence[str]) -> dict[str, float]:
        """A layer's share of zeros grows with the stage in which it became personal."""
        linear = set(linear_layers(self.network.module)) & set(personal)
        depths = sorted(set(self.depths) - {0})
        found = {}
        for distance, layer in enumerate(reversed(self.network.layers), start=1):
            if layer.name in linear:
                later = sum(depth < distance for depth in depths)
                found[layer.name] = self.sparsity + later * self.sparsity_step
        if max(found.values(), default=0) >= 1:
            raise UserError(
                f"sparsity={self.sparsity} sparsity_step={self.sparsity_step}: nothing is left of a layer that becomes "
                "personal late; allowed: less than 1 together, the step once for each later layer"
            )
        return found

    def _factored(self, module: nn.Module, level: int) -> nn.Module:
        if self.ranks is not None:
            return factored_to(module, self.ranks[level])
        known, layers = RANKS.get(self.network.name, ()), linear_layers(module)
        if level < len(known) and len(known[level]) == len(layers):
            reduced = factored(module, dict(zip(layers, known[level], strict=True)))
            if parameters(reduced) < parameters(module):  # not on images smaller than the paper's
                return reduced
        return factored_by(module, level)
