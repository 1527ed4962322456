"""Gradients of a stack as traced programs: what vmap decides anew in every step is decided once for a shape."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tailorfl.cohort.gradients import Gradients, Inputs, stacked_gradients
from tailorfl.cohort.training import Training
from tailorfl.models.network import Values

EAGER_STEPS = 30  # a shape is traced once it has cost about as much as the trace
APART = 4  # traced widths are multiples of this
VIEWS = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default}


class TraceCache:
    """The traced programs of one engine, the least recently used dropped first."""

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.programs: OrderedDict[Hashable, _Program] = OrderedDict()

    def run(self, training: Training) -> None:
        """Train a stack, tracing the shapes that come back often."""
        programs: dict[int, _Program] = {}

        def step(active: int) -> None:
            width = min(-(-active // APART) * APART, len(training.samples.rows))
            if width not in programs:
                programs[width] = self._program(training, width)
            training.step(width, programs[width])

        training.run(step)

    def _program(self, training: Training, width: int) -> "_Program":
        key = (id(training.network), training.objective, _shapes(training.inputs(width)))
        if key not in self.programs:
            self.programs[key] = _Program(stacked_gradients(training.network, training.objective))
            while len(self.programs) > self.capacity:
                self.programs.popitem(last=False)
        self.programs.move_to_end(key)
        return self.programs[key]


class _Program:
    """The gradients of one shape: as vmap computes them at first, then as a flat list of tensor operations."""

    def __init__(self, eager: Gradients) -> None:
        self.eager, self.steps = eager, 0
        self.traced: Callable[..., list[Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[Values, Tensor]:
        if self.traced is None:
            self.steps += 1
            if self.steps < EAGER_STEPS:
                return self.eager(inputs)
            self._trace(inputs)
            assert self.traced is not None
        *found, losses = self.traced(*_leaves(inputs))
        return dict(zip(inputs.trained, found, strict=True)), losses

    def _trace(self, inputs: Inputs) -> None:
        leaves, form = pytree.tree_flatten(inputs)

        def flat(*tensors: Tensor) -> list[Tensor]:
            found, losses = self.eager(pytree.tree_unflatten(list(tensors), form))
            return [*(found[name] for name in inputs.trained), losses]

        # Tracing runs the operations once; on copies, because batch norms change their statistics in place.
        module = make_fx(flat)(*(leaf.clone() for leaf in leaves))
        _drop_idle(module)
        self.traced = module.forward


def _drop_idle(module: GraphModule) -> None:
    """Take out views that change nothing, and results that nobody reads."""
    for node in list(module.graph.nodes):
        if node.target in VIEWS and _meta(node) == _meta(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()


def _meta(node: Node) -> tuple[torch.Size, tuple[int, ...]]:
    value = node.meta["val"]
    return value.shape, value.stride()


def _leaves(inputs: Inputs) -> list[Tensor]:
    """As pytree flattens them, without its cost in every step."""
    return [
        *inputs.trained.values(),
        *inputs.fixed.values(),
        *inputs.batch,
        *inputs.own.values(),
        *inputs.common.values(),
    ]


def _shapes(inputs: Inputs) -> Hashable:
    names = (*inputs.trained, "", *inputs.fixed, "", *inputs.own, "", *inputs.common)
    return names, tuple((leaf.shape, leaf.dtype) for leaf in _leaves(inputs))
