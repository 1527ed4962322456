"""The network, the loss, the decoding and the score together: a detector learns a few made images by heart."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from tailorfl.detection import coco, detect, multibox_losses, voc07
from tailorfl.errors import UserError
from tailorfl.methods import methods
from tailorfl.models import Network, build_module, valid_samples
from tailorfl.models.slicing import leading, narrowed

SIDE, CLASSES = 64, 3


def made_images(many: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images with one to three rectangles that lie apart; a class is a colour."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(many, 3, SIDE, SIDE, generator=generator)
    targets = torch.zeros(many, 3, 6)
    targets[..., 0] = -1
    for image in range(many):
        for place in range(1 + image % 3):
            row, column = divmod((image + place) % 4, 2)  # quarters
            width, height = torch.randint(12, 30, (2,), generator=generator).tolist()
            x, y = column * SIDE // 2 + 1, row * SIDE // 2 + 1
            kind = (image + place) % CLASSES
            images[image, kind, y : y + height, x : x + width] += 1
            corners = torch.tensor([x, y, x + width, y + height]) / SIDE
            targets[image, place] = torch.tensor([kind, *corners.tolist(), 0])
    return images, targets


def trained(network: torch.nn.Module, images: Tensor, targets: Tensor, steps: int) -> list[float]:
    """Plain training on all images at once: the loss of each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.003, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = multibox_losses(network.train()(images), targets, network.anchors("cpu")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_detector_learns_a_few_images_by_heart() -> None:
    torch.manual_seed(0)
    images, targets = made_images(4)
    network = build_module("ssd-resnet18", (3, SIDE, SIDE), CLASSES, stages=4)
    before = detect(network.eval()(images), network.anchors("cpu"))
    assert voc07(before, targets, CLASSES) < 0.5
    losses = trained(network, images, targets, steps=30)
    assert losses[-1] < losses[0] / 10
    after = detect(network.eval()(images), network.anchors("cpu"))
    assert voc07(after, targets, CLASSES) > 0.9
    assert coco(after, targets, CLASSES, SIDE) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stages": 6}, {"stages": 5, "width": 0.5}, {"stages": 2}])
def test_detectors_of_any_depth_learn(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    images, targets = made_images(6)
    network = build_module("ssd-resnet18", (3, SIDE, SIDE), CLASSES, **options)
    trained(network, images, targets, steps=80)
    assert voc07(detect(network.eval()(images), network.anchors("cpu")), targets, CLASSES) > 0.9


@pytest.mark.slow
def test_a_narrowed_detector_learns() -> None:
    torch.manual_seed(0)
    images, targets = made_images(6)
    network = narrowed(build_module("ssd-resnet18", (3, SIDE, SIDE), CLASSES, stages=6), 0.25)
    trained(network, images, targets, steps=80)
    assert voc07(detect(network.eval()(images), network.anchors("cpu")), targets, CLASSES) > 0.9


def test_a_stack_of_detectors_trains_as_each_alone() -> None:
    """Two clients of three and two images: padding counts for nothing."""
    torch.manual_seed(0)
    images, targets = made_images(6)
    images, targets = images[..., :24, :24].double().unflatten(0, (2, 3)), targets.unflatten(0, (2, 3))
    clients = [build_module("ssd-resnet18", (3, 24, 24), CLASSES, stages=3).double() for _ in range(2)]
    anchors = clients[0].anchors("cpu")
    parameters, buffers = stack_module_state(clients)
    parameters = {name: tensor.detach() for name, tensor in parameters.items()}
    masks = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    targets[1, 2] = 0  # as a batch is padded

    def loss(parameters, buffers, images, targets, mask):
        with valid_samples(mask):
            outputs = functional_call(clients[0], (parameters, buffers), (images,))
        return (multibox_losses(outputs, targets, anchors) * mask).sum() / mask.sum()

    found = vmap(grad(loss))(parameters, buffers, images, targets, masks)
    for place, (client, many) in enumerate(zip(clients, (3, 2), strict=True)):
        multibox_losses(client(images[place, :many]), targets[place, :many], anchors).mean().backward()
        for name, parameter in client.named_parameters():
            torch.testing.assert_close(found[name][place], parameter.grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_can_be_recorded_in_a_cuda_graph() -> None:
    images, targets = (tensor.cuda() for tensor in made_images(6))
    network = build_module("ssd-resnet18", (3, SIDE, SIDE), CLASSES, stages=4).cuda().eval()
    parameters = {name: tensor.detach() for name, tensor in network.named_parameters()}
    anchors = network.anchors("cuda")

    def slopes(targets: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return multibox_losses(functional_call(network, parameters, (images,)), targets, anchors).mean()

        return grad(loss)(parameters)["head.classes.0.weight"]

    given = targets.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            slopes(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = slopes(given)
    for shift in (0, 1, 2):
        given.copy_(targets.roll(shift, 0))
        graph.replay()
        torch.testing.assert_close(recorded, slopes(targets.roll(shift, 0)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["heterofl", "scalablefl"])
def test_the_methods_that_scale_networks_share_slices_of_a_detector(name: str) -> None:
    """HeteroFL by the widths of all layers, ScalableFL all but the norms and the head."""
    network = Network(build_module("ssd-resnet18", (3, 40, 40), CLASSES, stages=6), "ssd-resnet18")
    method = methods()[name]()
    server = method.start(network)
    assert any(key.startswith("head.") for key in server.values) == (name == "heterofl")
    assert any("norm" in key for key in server.values) == (name == "heterofl")
    for own in method.networks(network):
        sent = method.individual(server, (0, 1), own)
        values = {**own.initial(), **{key: tensor[1] for key, tensor in sent.items()}}
        outputs = own.forward(values, torch.zeros(1, 3, 40, 40), None, train=False)
        assert outputs.shape == (1, len(network.module.anchors("cpu")), 1 + CLASSES + 4)
        for key, tensor in sent.items():
            assert torch.equal(tensor[0], leading(server.values[key], tensor.shape[1:]))


@pytest.mark.parametrize("head", [1, 2])
def test_what_needs_the_features_of_a_detector_is_refused(head: int) -> None:
    network = Network(build_module("ssd-resnet18", (3, SIDE, SIDE), CLASSES, stages=4), "ssd-resnet18")
    values, images = network.initial(), torch.zeros(1, 3, SIDE, SIDE)
    if head == 1:
        with pytest.raises(UserError, match="ssd-resnet18: its layer head takes 3 tensors"):
            network.features(values, images, None, train=False)
        with pytest.raises(UserError, match="ssd-resnet18: its layer head takes 3 tensors"):
            network.check_top(values, images)
    else:
        assert network.features(values, images, None, train=False, head=head).shape == (1, 128, 8, 8)
