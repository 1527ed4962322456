"""SGD and Adam against torch's own, in each of the ways in which a step is computed."""

import pytest
import torch

from tailorfl.cohort.optimizer import Optimizer


def stacks(clients: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(clients, *shape, generator=rng, dtype=torch.float64) for shape in ((3, 4), (3,), (2, 3, 2, 2))]


@pytest.mark.parametrize("tensor_rates", [False, True])
@pytest.mark.parametrize("decay", ["all", "weights"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_several_steps_are_those_of_torch(kind, decay, tensor_rates):
    ours = stacks(2)
    theirs = [p.clone().requires_grad_() for p in ours]
    matrices = [p for p in theirs if p.dim() > 2 or decay == "all"]
    rest = [p for p in theirs if not any(p is m for m in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, *([{"params": rest}] if rest else [])]
    reference = torch.optim.SGD(groups, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.Adam(groups, lr=0.05)
    optimizer = Optimizer(kind, momentum=0.9, weight_decay=0.1, decay=decay)
    state = optimizer.start(ours)
    rates = torch.full((3,), 0.05, dtype=torch.float64) if tensor_rates else [0.05] * 3
    for step in range(1, 5):
        gradients = [torch.sin(step * p.detach()) for p in theirs]
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        reference.step()
        optimizer.step(ours, gradients, state, rates, torch.tensor([step]))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-12)
