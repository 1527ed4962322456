"""Plain networks: linear, multi-layer perceptron, and the papers' stacks of convolutions and linear layers."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from tailorfl.models.registry import network, positive_integers
from tailorfl.models.stacked import RectifiedMaxima

Shape = tuple[int, ...]
Layers = OrderedDict[str, nn.Module]

PFLEGO = "PFLEGO: personalized federated learning with exact gradient-based optimization"
PPFE = "PPFE: progressive personalized federated ensembles"
PMIXFED = "pMixFed: layer-wise mixing of global and local weights"


def linear_block(inputs: int, outputs: int) -> nn.Sequential:
    """One layer: a linear map of the flattened input, then ReLU."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(inputs, outputs), relu=nn.ReLU()))


def convolution_block(conv: nn.Conv2d, pool: nn.Module, flatten: bool = False) -> nn.Sequential:
    """One layer: convolution, ReLU, pooling; `flatten` where the classifier follows, so that features are vectors.

    The largest number after a ReLU is the ReLU of the largest number, so maxima come first: there are fewer of them.
    """
    parts: Layers = OrderedDict(conv=conv)
    if isinstance(pool, nn.MaxPool2d):
        parts["pool"] = RectifiedMaxima(pool)
    else:
        parts.update(relu=nn.ReLU(), pool=pool)
    if flatten:
        parts["flatten"] = nn.Flatten()
    return nn.Sequential(parts)


def _linear_layers(inputs: int, hidden: Sequence[int], classes: int) -> Layers:
    """fc1, fc2, ... and the head."""
    layers: Layers = OrderedDict()
    for number, outputs in enumerate(hidden, start=1):
        layers[f"fc{number}"] = linear_block(inputs, outputs)
        inputs = outputs
    layers["head"] = nn.Linear(inputs, classes)
    return layers


def _two_convolutions(name: str, input_shape: Shape, classes: int, channels: object, hidden: object) -> nn.Module:
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 max-pooling, then linear layers."""
    first, second = positive_integers(name, "channels", channels, length=2)
    widths = positive_integers(name, "hidden", hidden)
    inputs, height, width = input_shape
    layers: Layers = OrderedDict()
    layers["conv1"] = convolution_block(nn.Conv2d(inputs, first, 5), nn.MaxPool2d(2))
    layers["conv2"] = convolution_block(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), flatten=not widths)
    height, width = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    layers.update(_linear_layers(second * height * width, widths, classes))
    return nn.Sequential(layers)


def _small_convolutions(input_shape: Shape, classes: int, channels: Sequence[int]) -> nn.Module:
    """3x3 convolutions with padding, each with ReLU and 2x2 max-pooling, then the head."""
    inputs, height, width = input_shape
    layers: Layers = OrderedDict()
    for number, outputs in enumerate(channels, start=1):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers[f"conv{number}"] = convolution_block(conv, nn.MaxPool2d(2), flatten=number == len(channels))
        inputs, height, width = outputs, height // 2, width // 2
    layers["head"] = nn.Linear(inputs * height * width, classes)
    return nn.Sequential(layers)


def _size(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


@network("linear", paper="multinomial logistic regression", input_shape=(1, 28, 28), any_shape=True)
def linear(input_shape: Shape, classes: int) -> nn.Module:
    """One linear layer over the flattened input: a head and nothing else."""
    head = nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(_size(input_shape), classes)))
    return nn.Sequential(OrderedDict(head=head))


@network("mlp", paper=PFLEGO, input_shape=(1, 28, 28), any_shape=True)
def mlp(input_shape: Shape, classes: int, *, hidden: Sequence[int] = (200,)) -> nn.Module:
    """Multi-layer perceptron with ReLU; 784-200-10 is PFLEGO's network for MNIST, Fashion-MNIST and EMNIST."""
    widths = positive_integers("mlp", "hidden", hidden)
    if not widths:
        return linear(input_shape, classes)
    return nn.Sequential(_linear_layers(_size(input_shape), widths, classes))


@network("cnn", paper="FedAvg: McMahan et al., 2017", input_shape=(3, 32, 32), minimum=16)
def cnn(
    input_shape: Shape, classes: int, *, channels: Sequence[int] = (32, 64), hidden: Sequence[int] = (512,)
) -> nn.Module:
    """FedAvg's CNN: two 5x5 convolutions with 32 and 64 channels, a linear layer of 512, the head."""
    return _two_convolutions("cnn", input_shape, classes, channels, hidden)


@network("ppfe-cnn", paper=PPFE, input_shape=(3, 32, 32), minimum=16)
def ppfe_cnn(
    input_shape: Shape, classes: int, *, channels: Sequence[int] = (64, 64), hidden: Sequence[int] = (120, 64)
) -> nn.Module:
    """PPFE's network for CIFAR-10: two 5x5 convolutions and three linear layers, 307,842 parameters."""
    return _two_convolutions("ppfe-cnn", input_shape, classes, channels, hidden)


@network("ppfe-cnn-large", paper=PPFE, input_shape=(3, 32, 32), minimum=16)
def ppfe_cnn_large(
    input_shape: Shape, classes: int, *, channels: Sequence[int] = (64, 128), hidden: Sequence[int] = (256, 128)
) -> nn.Module:
    """PPFE's network for CIFAR-100: two 5x5 convolutions and three linear layers, 1,075,044 parameters."""
    return _two_convolutions("ppfe-cnn-large", input_shape, classes, channels, hidden)


@network(
    "pfps-cnn",
    paper="PFPS-LWC: progressive local training, lightweight classifier",
    input_shape=(3, 32, 32),
    minimum=16,
)
def pfps_cnn(
    input_shape: Shape, classes: int, *, channels: Sequence[int] = (32, 64), hidden: Sequence[int] = (512, 128)
) -> nn.Module:
    """PFPS-LWC's five-layer CNN: four feature layers and the classifier.

    The paper gives no widths; 5x5 convolutions of 32 and 64 channels and linear layers of 512 and 128 are our choice.
    """
    return _two_convolutions("pfps-cnn", input_shape, classes, channels, hidden)


@network("pflego-cnn", paper=PFLEGO, input_shape=(3, 32, 32))
def pflego_cnn(input_shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for CIFAR-10 (table 4): two 5x5 convolutions of 64 channels, linear layers of 384 and 192.

    The convolutions keep the image's size, the 3x3 max-pooling of stride 2 halves it: 32, 16, 8, hence 4,096 features.
    """
    inputs, height, width = input_shape
    layers: Layers = OrderedDict()
    for name in ("conv1", "conv2"):
        conv = nn.Conv2d(inputs, 64, 5, padding=2)
        layers[name] = convolution_block(conv, nn.MaxPool2d(3, stride=2, padding=1))
        inputs, height, width = 64, (height + 1) // 2, (width + 1) // 2
    layers.update(_linear_layers(inputs * height * width, (384, 192), classes))
    return nn.Sequential(layers)


@network("pflego-omniglot", paper=PFLEGO, input_shape=(1, 28, 28), minimum=16)
def pflego_omniglot(input_shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for Omniglot (table 4): four 3x3 convolutions of 64 channels and the head on 64 features."""
    return _small_convolutions(input_shape, classes, (64, 64, 64, 64))


@network("pmixfed-cnn", paper=PMIXFED, input_shape=(3, 32, 32), minimum=16)
def pmixfed_cnn(input_shape: Shape, classes: int, *, channels: Sequence[int] = (32, 64, 128, 256)) -> nn.Module:
    """pMixFed's CNN for CIFAR: four convolutions and one linear layer.

    The paper gives no widths; 3x3 convolutions of 32, 64, 128 and 256 channels are our choice.
    """
    return _small_convolutions(input_shape, classes, positive_integers("pmixfed-cnn", "channels", channels, length=4))


@network("pmixfed-mnist", paper=PMIXFED, input_shape=(1, 28, 28), minimum=16)
def pmixfed_mnist(
    input_shape: Shape, classes: int, *, channels: Sequence[int] = (32, 64), hidden: Sequence[int] = (128,)
) -> nn.Module:
    """pMixFed's CNN for MNIST: two convolutions and two linear layers.

    The paper gives no widths; 5x5 convolutions of 32 and 64 channels and 128 features are our choice.
    """
    return _two_convolutions("pmixfed-mnist", input_shape, classes, channels, hidden)
