"""Gradients of a stack as traced programs: what vmap decides anew in every step is decided once for a shape."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tailorfl.cohort.gradients import Gradients, Inputs, stacked_gradients
from tailorfl.cohort.training import Training
from tailorfl.models.network import Values

TRACED_STEPS = 10  # a shape with fewer steps in a fit runs as it is: a trace costs as much as some 50 steps save
APART = 4  # traced widths are multiples of this, or of an eighth of the stack
VIEWS = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default}


class TraceCache:
    """The traced programs of one engine, the least recently used dropped first."""

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()

    def run(self, training: Training) -> None:
        """Train a stack, tracing the shapes that have many steps.

        What is traced depends on this training alone, never on what ran before: traced and untraced programs round
        differently, and a resumed run must end where an uninterrupted one does.
        """
        clients = len(training.samples.rows)
        apart = max(APART, clients // 8)
        programs: dict[int, Gradients] = {}

        def rounded(active: int) -> int:
            return min(-(-active // apart) * apart, clients)

        steps = Counter(map(rounded, training.widths()))

        def step(active: int) -> None:
            width = rounded(active)
            if width not in programs:
                programs[width] = self._gradients(training, width, steps[width] >= TRACED_STEPS)
            training.step(width, programs[width])

        training.run(step)

    def _gradients(self, training: Training, width: int, traced: bool) -> Gradients:
        eager = stacked_gradients(training.network, training.objective)
        if not traced:
            return eager
        inputs = training.inputs(width)
        key = (id(training.network), training.objective, training.optimizer.momentum, _shapes(inputs))
        if key not in self.programs:
            self.programs[key] = Program(eager, inputs, training.optimizer.momentum)
            while len(self.programs) > self.capacity:
                self.programs.popitem(last=False)
        self.programs.move_to_end(key)
        return self.programs[key].of_one_batch(inputs) if training.schedule.whole else self.programs[key]


class Program:
    """The gradients of one shape as a flat list of tensor operations."""

    def __init__(self, eager: Gradients, inputs: Inputs, momentum: float = 0.0) -> None:
        leaves, form = pytree.tree_flatten(inputs)

        def flat(*tensors: Tensor) -> list[Tensor]:
            found, losses = eager(pytree.tree_unflatten(list(tensors), form))
            return [*(found[name] for name in inputs.trained), losses]

        # Tracing runs the operations once; on copies, because batch norms change their statistics in place.
        with torch.no_grad():
            module = make_fx(flat)(*(leaf.clone() for leaf in leaves))
        _drop_idle(module)
        if inputs.velocity:
            _add_to_velocities(module, len(inputs.trained), momentum)
        self.module = module
        self.traced: Callable[..., list[Tensor]] = module.forward
        self.changing = len(inputs.trained), len(inputs.velocity)

    @cached_property
    def parts(self) -> tuple[GraphModule, GraphModule]:
        """What can be computed before the first step on a batch, and the step."""
        return _split(self.module, *self.changing)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[Values, Tensor]:
        *found, losses = self.traced(*_leaves(inputs))
        return dict(zip(inputs.trained, found, strict=True)), losses

    @torch.no_grad()
    def of_one_batch(self, inputs: Inputs) -> Gradients:
        """The same for steps that all see this batch: what depends on nothing that is trained is computed here."""
        before, after = self.parts
        known = before.forward(*_leaves(inputs))

        @torch.no_grad()
        def compute(inputs: Inputs) -> tuple[Values, Tensor]:
            *found, losses = after.forward(*_leaves(inputs), *known)
            return dict(zip(inputs.trained, found, strict=True)), losses

        return compute


def _split(module: GraphModule, trained: int, velocities: int) -> tuple[GraphModule, GraphModule]:
    """What can be computed before the first step, and a step that is given it beside its inputs."""
    nodes = list(module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    early = _early(nodes, given[trained : len(given) - velocities])
    known = [node for node in early if any(user not in early for user in node.users)]
    before, after = Graph(), Graph()
    copies = {node: before.node_copy(node) for node in given}
    for node in early:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output([copies[node] for node in known])
    copies = {node: after.node_copy(node) for node in given}
    copies |= {node: after.placeholder(f"known_{k}") for k, node in enumerate(known)}
    for node in nodes:
        if node not in early and node not in copies:
            copies[node] = after.node_copy(node, copies.__getitem__)
    return GraphModule(module, before), GraphModule(module, after)


def _early(nodes: list[Node], fixed: list[Node]) -> dict[Node, None]:
    """What depends on inputs alone that no step changes, in order."""
    if not all(_pure(node) or node.target == torch.ops.aten.baddbmm_.default for node in nodes):
        return {}  # batch norms change their statistics: what reads them must follow
    early: dict[Node, None] = {}
    for node in nodes:
        computed = node.op in ("call_function", "get_attr") and _pure(node)
        if computed and all(source in early or source in fixed for source in node.all_input_nodes):
            early[node] = None
    return early


def _pure(node: Node) -> bool:
    """Whether an operation gives the same each time and changes none of its inputs."""
    operation = node.target
    if not isinstance(operation, OpOverload):
        return True
    return not (operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags)


def _add_to_velocities(module: GraphModule, trained: int, momentum: float) -> None:
    """Where a gradient is a product of matrices, let the product add itself to momentum times the velocity.

    That saves a pass over memory to write the gradient and one to read it, which is a fifth of a small network's step.
    """
    graph = module.graph
    outputs = cast(list[Node], graph.output_node().args[0])
    *found, losses = outputs
    velocities = [node for node in graph.nodes if node.op == "placeholder"][-trained:]
    for k, (gradient, velocity) in enumerate(zip(found, velocities, strict=True)):
        if gradient.target == torch.ops.aten.bmm.default and len(gradient.users) == 1 and found.count(gradient) == 1:
            with graph.inserting_after(gradient):
                graph.call_function(torch.ops.aten.baddbmm_.default, (velocity, *gradient.args), {"beta": momentum})
            found[k] = velocity
            graph.output_node().args = ([*found, losses],)
            graph.erase_node(gradient)
    module.recompile()


def _drop_idle(module: GraphModule) -> None:
    """Take out what changes nothing, and results that nobody reads."""
    for node in list(module.graph.nodes):
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
    module.graph.eliminate_dead_code()
    module.recompile()


def _same_as(node: Node) -> Node | None:
    """The earlier result that a node only repeats: a view of the same form, transposed twice, or multiplied by one."""
    aten = torch.ops.aten
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None:
        return None
    if node.target in VIEWS and _meta(node) == _meta(source):
        return source
    if node.target == source.target == aten.transpose.int and set(node.args[1:]) == set(source.args[1:]):
        return cast(Node, source.args[0])
    if node.target == aten.mul.Scalar and node.args[1] == 1 and _meta(node) == _meta(source):
        return source
    return None


def _meta(node: Node) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype


def _leaves(inputs: Inputs) -> list[Tensor]:
    """As pytree flattens them, without its cost in every step."""
    return [
        *inputs.trained.values(),
        *inputs.fixed.values(),
        *inputs.batch,
        *inputs.own.values(),
        *inputs.common.values(),
        *inputs.velocity.values(),
    ]


def _shapes(inputs: Inputs) -> Hashable:
    names = (*inputs.trained, "", *inputs.fixed, "", *inputs.own, "", *inputs.common, "", *inputs.velocity)
    return names, tuple((leaf.shape, leaf.dtype) for leaf in _leaves(inputs))
