"""Narrower copies of a network: every hidden width cut to a ratio, the weights leading slices of the original's."""

import copy
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tailorfl.errors import UserError
from tailorfl.models.registry import scaled_widths

Shapes = dict[str, torch.Size]
"""The shape of each parameter and buffer, by name."""

ALLOWED = "linear layers, convolutions (plain or depthwise), batch norms and layers without weights"
JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack}
SIZES = {"size", "dim", "numel"}  # methods of a tensor that give numbers


def narrowed(module: nn.Module, ratio: float) -> nn.Module:
    """A copy of a network with every hidden width ceil(ratio * width); its inputs and its outputs stay as wide.

    The network is made of linear layers, convolutions (also depthwise), batch norms and layers without weights, wired
    in any way that torch can trace: residual connections are followed. A linear layer after a flatten keeps whole
    channels. With ratio 1 it is a plain copy, whatever the network is made of.
    """
    return cut(module, narrowed_shapes(module, ratio))


def narrowed_shapes(module: nn.Module, ratio: float) -> Shapes:
    """The shapes of all tensors of the narrowed network."""
    if not 0 < ratio <= 1:
        raise UserError(f"width ratio {ratio}; allowed: above 0, up to 1 (the full width)")
    full = shapes_of(module)
    return full if ratio == 1 else full | _Narrowing(module, ratio).shapes()


def shapes_of(module: nn.Module) -> Shapes:
    """The shape of each parameter and buffer of a network."""
    return {name: tensor.shape for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def leading(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The leading slice of a tensor that has this shape: a view."""
    if any(size > there for size, there in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"a slice of {tuple(shape)} is wider than the tensor, {tuple(tensor.shape)}")
    return tensor[tuple(slice(0, size) for size in shape)]


def slices(values: Mapping[str, Tensor], names: Iterable[str], module: nn.Module, clients: int) -> dict[str, Tensor]:
    """Of these tensors what so many clients with this network hold, the same for each of them: [clients, ...]."""
    shapes = shapes_of(module)
    found = {name: leading(values[name], shapes[name]) for name in names}
    return {name: tensor.expand(clients, *tensor.shape) for name, tensor in found.items()}


def cut(module: nn.Module, shapes: Mapping[str, torch.Size]) -> nn.Module:
    """A copy of a network whose tensors are leading slices of these shapes; tensors that are not named stay."""
    smaller = copy.deepcopy(module)
    for prefix, part in smaller.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if tensor is not None and shape is not None and shape != tensor.shape:
                    tensors[name] = _cut(tensor, shape)
        _declare(part)
    return smaller


def _cut(tensor: Tensor, shape: torch.Size) -> Tensor:
    piece = leading(tensor.detach(), shape).clone()
    return nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece


def _declare(part: nn.Module) -> None:
    """Let the sizes that a layer states agree with its tensors."""
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = part.weight.shape
    elif isinstance(part, _ConvNd) and not isinstance(part, _ConvTransposeNd):
        if _depthwise(part):
            part.groups = len(part.weight) * part.groups // part.out_channels
        part.out_channels, part.in_channels = len(part.weight), part.weight.shape[1] * part.groups
    elif isinstance(part, _BatchNorm):
        tensor = part.running_mean if part.weight is None else part.weight
        part.num_features = part.num_features if tensor is None else len(tensor)


class _Width(NamedTuple):
    """How many channels a tensor has in the full network, and how many in the narrow one."""

    full: int
    narrow: int


INPUT = None  # the width of the network's input, and of what is made of it or of outputs without a layer: not cut


class _Layers(fx.Tracer):
    """Follows a forward pass down to single layers."""

    def is_leaf_module(self, part: nn.Module, name: str) -> bool:
        return super().is_leaf_module(part, name) or not any(True for _ in part.children())


class _Narrowing:
    """Follows the widths through a network, from its input to its output."""

    def __init__(self, module: nn.Module, ratio: float) -> None:
        self.module = module
        self.ratio = ratio
        self.graph = _traced(module)
        self.heads, self.tail = self._heads()
        self.found: Shapes = {}

    def shapes(self) -> Shapes:
        """The shapes of the tensors of all layers on the way."""
        widths: dict[fx.Node, _Width | None] = {}  # of the results that are tensors
        for node in self.graph.nodes:
            given = [widths[source] for source in node.all_input_nodes if source in widths]
            if node.op == "placeholder":
                widths[node] = INPUT
            elif node.op == "get_attr":
                self._check_alone(str(node.target))
            elif given and not _gives_numbers(node):
                width = _common(node, given, cut=node not in self.tail)
                widths[node] = self._through(node, width) if node.op == "call_module" else width
        return self.found

    def _heads(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """The layers whose outputs are the network's, back to the first that sets a width, and all that follows."""
        heads: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        waiting = [node for node in self.graph.nodes if node.op == "output"]
        while waiting:
            node = waiting.pop()
            if node.op == "call_module" and _kind(self._layer(node)) == "sets":
                heads.add(node)
            elif node not in seen:
                waiting += node.all_input_nodes
            seen.add(node)
        return heads, seen - heads

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def _check_alone(self, name: str) -> None:
        """A tensor that is used outside of a layer: a single number goes with any width."""
        if shapes_of(self.module).get(name, torch.Size()).numel() > 1:
            raise UserError(f"cannot narrow {name}: it is used outside of a layer; allowed: {ALLOWED}")

    def _through(self, node: fx.Node, before: _Width | None) -> _Width | None:
        """The width after a layer; notes the shapes of the layer's tensors."""
        name, layer = str(node.target), self._layer(node)
        kind, own = _kind(layer), shapes_of(layer)
        if kind == "unknown":
            raise UserError(f"cannot narrow layer {name} ({type(layer).__name__}); allowed: {ALLOWED}")
        if kind == "sets":
            outputs, inputs, *kernel = own["weight"]
            after = outputs if node in self.heads else scaled_widths("", self.ratio, (outputs,))[0]
            narrow = inputs if before is INPUT else _inputs(name, inputs, before, whole=bool(kernel))
            sizes = {"weight": (after, narrow, *kernel), "bias": (after,)}
            own = {key: torch.Size(sizes[key]) for key in own}
            before = _Width(outputs, after)
        elif kind == "follows" and before is not INPUT:
            channels = layer.in_channels if isinstance(layer, _ConvNd) else max(map(torch.Size.numel, own.values()))
            narrow = _inputs(name, channels, before, whole=isinstance(layer, _ConvNd))
            times = layer.out_channels // channels if isinstance(layer, _ConvNd) else 1
            own |= {key: torch.Size((narrow * times, *shape[1:])) for key, shape in own.items() if shape}
            before = _Width(before.full * times, before.narrow * times)
        self._note(name, own)
        return before

    def _note(self, name: str, shapes: Mapping[str, torch.Size]) -> None:
        for key, shape in shapes.items():
            if self.found.setdefault(f"{name}.{key}", shape) != shape:
                raise UserError(f"cannot narrow layer {name}: it is used twice, for tensors of different widths")


def _traced(module: nn.Module) -> fx.Graph:
    try:
        return _Layers().trace(module)
    except Exception as error:  # anything that a user's forward may do with what is not yet a tensor
        said = " ".join(str(error).split())
        raise UserError(f"cannot narrow {type(module).__name__}: its forward cannot be traced ({said})") from error


def _gives_numbers(node: fx.Node) -> bool:
    """Whether the result is a size, not a tensor."""
    return node.target in SIZES if node.op == "call_method" else node.target is getattr


def _common(node: fx.Node, widths: list[_Width | None], cut: bool) -> _Width | None:
    """The one width of all tensors that an operation takes; where none is cut, it may put together any."""
    if not cut and (len(set(widths)) > 1 or node.target in JOINS):
        return INPUT
    if len(set(widths)) > 1:
        raise UserError(f"cannot narrow what {node.name} puts together: tensors of different widths")
    if node.target in JOINS and widths[0] is not INPUT:
        raise UserError(f"cannot narrow what {node.name} joins; allowed: sums of tensors of the same width")
    return widths[0]


def _inputs(name: str, inputs: int, before: _Width, whole: bool) -> int:
    """The inputs of a layer in the narrow network; unless ``whole``, a flatten may have made several of a channel."""
    if inputs % before.full or (whole and inputs != before.full):
        raise UserError(f"cannot narrow layer {name}: it takes {inputs} channels and is given {before.full}")
    return before.narrow * (inputs // before.full)


def _kind(layer: nn.Module) -> Literal["plain", "sets", "follows", "unknown"]:
    """How a layer is narrowed: it has no weights, sets a width, or follows the width that it is given."""
    tensors = set(shapes_of(layer))
    if not tensors:
        return "plain"
    if isinstance(layer, nn.Linear) and tensors <= {"weight", "bias"}:
        return "sets"
    if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd) and tensors <= {"weight", "bias"}:
        return "sets" if layer.groups == 1 else "follows" if _depthwise(layer) else "unknown"
    return "follows" if isinstance(layer, _BatchNorm) else "unknown"


def _depthwise(layer: _ConvNd) -> bool:
    return 1 < layer.groups == layer.in_channels
