"""A module seen as ordered layers, base to head, and as pure functions of named tensors."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.errors import UserError
from tailorfl.models.half import half_precision, widened
from tailorfl.models.norm import valid_samples
from tailorfl.models.stacked import convert_layers

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """One trainable block in forward order: its parameters and its buffers (batch-norm statistics)."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.parameters + self.buffers


class _HeadReached(Exception):  # noqa: N818 - nothing went wrong
    """Ends a forward pass before the head, with what the head was given."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def named_tensors(module: nn.Module) -> Values:
    """The parameters and the buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass
class Network:
    """A template that never trains itself: weights always come from outside, for one client or for a stack.

    Parameters that do not require a gradient (frozen word vectors) are constants: they belong to the template, and
    neither train nor travel.
    """

    module: nn.Module
    name: str = "network"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mixed: bool = False  # passes of training are in half precision where that is accurate enough

    def __post_init__(self) -> None:
        self.module.to(self.device)
        self.layers = tuple(_layers(self.module))
        self.parameters = tuple(name for layer in self.layers for name in layer.parameters)
        self.buffers = tuple(name for layer in self.layers for name in layer.buffers)
        self.names = self.parameters + self.buffers
        self.norm = frozenset(_norm_names(self.module)) & frozenset(self.names)
        self._copies = threading.local()
        self._top_checked = False

    @cached_property
    def top(self) -> "Network":
        """The head as a network of its own, with the same names."""
        head = self.layers[-1].name
        module = nn.Sequential(OrderedDict({head: copy.deepcopy(self.module.get_submodule(head))}))
        return Network(module, f"the head of {self.name}", self.device, self.mixed)

    def check_top(self, values: Mapping[str, Tensor], sample: Tensor) -> None:
        """Refuse a network that does more after its head, or something else: found out by trying, once."""
        if self._top_checked:
            return
        features = self.features(values, sample, None, train=False)
        apart, whole = self.head(values, features, train=False), self.forward(values, sample, None, train=False)
        if apart.shape != whole.shape or not torch.allclose(apart, whole, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise UserError(
                f"network {self.name} does not end with its last layer, {self.layers[-1].name}: its head cannot be "
                "trained apart; allowed: children in the order in which they run, and nothing after the last"
            )
        self._top_checked = True

    @property
    def detects(self) -> bool:
        """Whether it finds objects in images: it then has ``anchors``, and an output for each of them."""
        return bool(getattr(self.module, "detection", False))

    def anchors(self) -> Tensor:
        """The boxes in which a detector looks for objects: corners in units of the image, [anchors, 4]."""
        found: Tensor = getattr(self.module, "anchors")(self.device)  # noqa: B009 (only some modules have it)
        return found

    def below(self, head: int) -> tuple[Layer, ...]:
        """All layers but so many at the head."""
        return self.layers[: max(0, len(self.layers) - head)]

    def names_of(self, layers: Iterable[Layer]) -> tuple[str, ...]:
        """The tensors of these layers, parameters first, in the network's order."""
        wanted = {name for layer in layers for name in layer.names}
        return tuple(name for name in self.names if name in wanted)

    def initial(self) -> Values:
        """The template's weights, copied: what every client and the server start from."""
        tensors = named_tensors(self.module)
        return {name: tensors[name].detach().clone() for name in self.names}

    def size(self, names: Iterable[str] | None = None) -> int:
        """How many trainable numbers these tensors hold (all of them by default)."""
        chosen = set(self.parameters if names is None else names) & set(self.parameters)
        return sum(p.numel() for name, p in self.module.named_parameters() if name in chosen)

    def forward(self, values: Mapping[str, Tensor], inputs: Tensor, valid: Tensor | None, train: bool) -> Tensor:
        """The outputs of one client's weights on a batch; ``valid`` marks real samples among padded ones."""
        with valid_samples(valid), half_precision(self.mixed and train):
            outputs: Tensor = functional_call(self._template(train), dict(values), (inputs,))
        return widened(outputs) if self.mixed else outputs

    def tried(self, sample: Tensor, train: bool) -> Tensor:
        """The outputs on a batch of one sample [1, ...], taken twice; refused where they cannot be computed."""
        try:
            outputs: object = self.forward(self.initial(), torch.cat([sample, sample]), None, train)
        except Exception as error:  # anything a user's module may raise
            said = " ".join(str(error).split())
            shape = "x".join(map(str, sample.shape[1:]))
            line = f"network {self.name} does not run on inputs of shape {shape}: {said}"
            raise UserError(line + (" (with precision=mixed; allowed: float32)" if self.mixed else "")) from error
        if not isinstance(outputs, Tensor):
            raise UserError(f"network {self.name} gives a {type(outputs).__name__}; allowed: one tensor of outputs")
        return outputs

    def features(
        self, values: Mapping[str, Tensor], inputs: Tensor, valid: Tensor | None, train: bool, head: int = 1
    ) -> Tensor:
        """What the head is given, so many layers: the body's output on a batch."""
        template = self._template(train)
        first = self.layers[-head].name

        def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if len(arguments) != 1:
                raise UserError(
                    f"network {self.name}: its layer {first} takes {len(arguments)} tensors and has no features to be "
                    "told apart from it; allowed: networks whose layers take one"
                )
            raise _HeadReached(arguments[0])  # the head itself must not run: its norms would count the batch twice

        hook = template.get_submodule(first).register_forward_pre_hook(stop)
        try:
            with valid_samples(valid), half_precision(self.mixed and train):
                functional_call(template, dict(values), (inputs,))
        except _HeadReached as reached:
            return widened(reached.features) if self.mixed else reached.features
        finally:
            hook.remove()
        raise UserError(f"network {self.name}: its forward pass does not call its layer {first}, as it must here")

    def head(self, values: Mapping[str, Tensor], features: Tensor, train: bool, valid: Tensor | None = None) -> Tensor:
        """The head alone, on features that were computed before."""
        layer = self.layers[-1]
        prefix = f"{layer.name}."
        own = {name.removeprefix(prefix): values[name] for name in layer.names if name.startswith(prefix)}
        with valid_samples(valid), half_precision(self.mixed and train):
            outputs: Tensor = functional_call(self._template(train).get_submodule(layer.name), own, (features,))
        return widened(outputs) if self.mixed else outputs

    def prepare(self) -> None:
        """Make this thread's copies of the module; while a program is traced, they could not be."""
        for train in (True, False):
            self._template(train)

    def _template(self, train: bool) -> nn.Module:
        # functional_call swaps tensors into the module while it runs, so every thread needs a module of its own.
        key = "train" if train else "eval"
        if not hasattr(self._copies, key):
            setattr(self._copies, key, convert_layers(copy.deepcopy(self.module)).train(train))
        template: nn.Module = getattr(self._copies, key)
        return template


def _layers(module: nn.Module) -> list[Layer]:
    """Children with parameters; the statistics of a norm without any belong to the layer before it, or after."""
    layers: list[Layer] = []
    waiting: tuple[str, ...] = ()
    for name, child in module.named_children():
        parameters = tuple(f"{name}.{n}" for n, p in child.named_parameters() if p.requires_grad)
        buffers = tuple(f"{name}.{n}" for n, b in child.named_buffers() if b.is_floating_point())
        if parameters:
            layers.append(Layer(name, parameters, waiting + buffers))
            waiting = ()
            continue
        norms = set(_norm_names(child, name))
        statistics = tuple(buffer for buffer in buffers if buffer in norms)
        if layers:
            layers[-1] = replace(layers[-1], buffers=layers[-1].buffers + statistics)
        else:
            waiting += statistics
    return layers


def _norm_names(module: nn.Module, name: str = "") -> Iterable[str]:
    for prefix, child in module.named_modules(prefix=name):
        if isinstance(child, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
            yield from (f"{prefix}.{n}" for n, _ in child.named_parameters())
            yield from (f"{prefix}.{n}" for n, _ in child.named_buffers())
