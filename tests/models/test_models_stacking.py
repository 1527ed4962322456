"""Every built-in network, stacked over clients with padded batches, equals its clients one by one without padding."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from tailorfl.models import build_module, networks, valid_samples

CLIENTS, CLASSES = 3, 4
COUNTS = (4, 2, 3)
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    **{name: (name, entry.input_shape, {}) for name, entry in networks.items()},
    "ppfe-cnn-large": ("ppfe-cnn-large", (1, 28, 28), {}),
    "pfps-cnn": ("pfps-cnn", (1, 28, 28), {}),
    "pflego-cnn": ("pflego-cnn", (1, 28, 28), {}),
    "mobilenet": ("mobilenet", (3, 32, 32), {"width": 0.1}),
    "resnet18": ("resnet18", (3, 48, 48), {"width": 0.1}),
    "resnet18, cifar stem": ("resnet18", (3, 16, 16), {"width": 0.1, "stem": "cifar", "stages": 4}),
    "ssd-resnet18": ("ssd-resnet18", (3, 24, 24), {"stages": 3}),
    "stride-cnn": ("stride-cnn", (3, 32, 32), {"width": 0.5}),
    "text": ("text", (6,), {"vocabulary": 20, "dimension": 8, "recurrent": 16}),
    "text, frozen vectors": ("text", (6,), {"vectors": torch.randn(20, 8), "freeze_embedding": True}),
}


def cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of a detector, that has outputs at each anchor, some loss to which all of them contribute."""
    if outputs.dim() == 3:
        outputs = outputs.square().mean(1)
    return functional.cross_entropy(outputs, targets, reduction=reduction)


def samples(shape: tuple[int, ...]) -> Tensor:
    size = (CLIENTS, max(COUNTS), *shape)
    return torch.randint(0, 20, size) if len(shape) == 1 else torch.randn(size, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_stacked_equals_one_by_one(case):
    torch.manual_seed(0)
    name, shape, options = CASES[case]
    clients = [build_module(name, shape, CLASSES, **options).double() for _ in range(CLIENTS)]
    parameters, buffers = stack_module_state(clients)
    parameters = {key: value.detach() for key, value in parameters.items()}
    x, y = samples(shape), torch.randint(0, CLASSES, (CLIENTS, max(COUNTS)))
    masks = torch.stack([(torch.arange(max(COUNTS)) < count).double() for count in COUNTS])

    def loss(parameters, buffers, x, y, mask):
        with valid_samples(mask):
            scores = functional_call(clients[0], (parameters, buffers), (x,))
        return (cross_entropy(scores, y, reduction="none") * mask).sum() / mask.sum()

    gradients = vmap(grad(loss))(parameters, buffers, x, y, masks)
    assert gradients
    for index, count in enumerate(COUNTS):
        check_client(clients[index], x[index, :count], y[index, :count], gradients, buffers, index)


def check_client(
    client: nn.Module, x: Tensor, y: Tensor, gradients: dict[str, Tensor], buffers: dict[str, Tensor], index: int
) -> None:
    cross_entropy(client(x), y).backward()
    for key, parameter in client.named_parameters():
        torch.testing.assert_close(gradients[key][index], parameter.grad, rtol=1e-9, atol=1e-9, msg=key)
    for key, buffer in client.named_buffers():
        torch.testing.assert_close(buffers[key][index], buffer, rtol=1e-9, atol=1e-9, msg=key)


def test_every_network_is_stacked_here():
    assert {name for name, _, _ in CASES.values()} == set(networks)


def test_a_stacked_step_can_be_compiled():
    clients = [build_module("stride-cnn", (1, 8, 8), 2, stages=1, width=0.1) for _ in range(2)]
    parameters, buffers = stack_module_state(clients)

    def loss(parameters, buffers, x, mask):
        with valid_samples(mask):
            return functional_call(clients[0], (parameters, buffers), (x,)).square().sum()

    def step(*arguments):
        return vmap(grad(loss))(*arguments)

    x, masks = torch.randn(2, 3, 1, 8, 8), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    copies = {key: value.clone() for key, value in buffers.items()}
    with torch.no_grad():
        expected = step(parameters, buffers, x, masks)
        # Without code generation: that the step can be traced in one piece is what matters.
        compiled = torch.compile(step, backend="eager", fullgraph=True)(parameters, copies, x, masks)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(copies, buffers)
