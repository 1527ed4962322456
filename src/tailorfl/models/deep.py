"""Deep networks with batch norm: ResNet-18, VGG-11, MobileNet and ScalableFL's plain stride-2 CNN."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tailorfl.errors import UserError
from tailorfl.models.norm import BatchNorm2d
from tailorfl.models.plain import Layers, Shape
from tailorfl.models.registry import network, positive_integers, scaled_widths, stage_count

SCALABLEFL = "ScalableFL: clients with other image sizes and class counts"
RESNET_WIDTHS = (64, 64, 128, 256, 512)
VGG_WIDTHS, VGG_CONVOLUTIONS = (64, 128, 256, 512, 512), (1, 1, 2, 2, 2)
# Output channels and stride of the thirteen depthwise-separable blocks, after the stem's 32 channels.
MOBILENET_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class AveragePool(nn.Module):
    """Global average pooling: a feature vector a sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class Every(nn.Module):
    """Every so many pixels, in height and width."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :: self.stride, :: self.stride]


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution that batch norm follows: padded to keep the size, without bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def norm_block(conv: nn.Conv2d, pool: nn.Module | None = None) -> nn.Sequential:
    """One layer: convolution, batch norm, ReLU, perhaps pooling."""
    parts: Layers = OrderedDict(conv=conv, norm=BatchNorm2d(conv.out_channels), relu=nn.ReLU())
    if pool is not None:
        parts["pool"] = pool
    return nn.Sequential(parts)


class BasicBlock(nn.Module):
    """ResNet's basic block, post-activation: two 3x3 convolutions beside a shortcut (He et al., 2016).

    `pool` averages the result over the image: for the block before the head.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, pool: bool = False) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, 3, stride)
        self.norm1 = BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.norm2 = BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            # Not a 1x1 convolution with a stride, which is the same: torch 2.13 on a CPU writes beyond the memory of
            # one that has few channels, where they are last.
            parts: Layers = OrderedDict(every=Every(stride), conv=convolution(inputs, outputs, 1))
            parts["norm"] = BatchNorm2d(outputs)
            self.shortcut = nn.Sequential(parts)
        self.pool: nn.Module = AveragePool() if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.pool(torch.relu(out + self.shortcut(x)))


class SeparableBlock(nn.Module):
    """MobileNet's depthwise-separable convolution: 3x3 in each channel, then 1x1 across (Howard et al., 2017)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, pool: bool = False) -> None:
        super().__init__()
        self.depthwise = norm_block(convolution(inputs, inputs, 3, stride, groups=inputs))
        self.pointwise = norm_block(convolution(inputs, outputs, 1), AveragePool() if pool else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(x))


def resnet_stem(inputs: int, outputs: int, kind: str, stages: int) -> nn.Sequential:
    """Stage 1 of ResNet; the max-pooling that opens stage 2 is part of it."""
    imagenet = kind == "imagenet"
    conv = convolution(inputs, outputs, 7, 2) if imagenet else convolution(inputs, outputs, 3)
    if stages == 1:
        return norm_block(conv, AveragePool())
    return norm_block(conv, nn.MaxPool2d(3, stride=2, padding=1) if imagenet else None)


@network("resnet18", paper=SCALABLEFL, input_shape=(3, 224, 224))
def resnet18(
    input_shape: Shape,
    classes: int,
    *,
    width: float = 1.0,
    widths: Sequence[int] | None = None,
    stages: int = 5,
    stem: str = "imagenet",
) -> nn.Module:
    """ResNet-18, scaled in width (a ratio, or the channels of every stage) and in depth (its first stages).

    Stage 1 is the stem, 7x7 with stride 2 ("imagenet", max-pooling follows) or 3x3 with stride 1 ("cifar"); stages 2 to
    5 are two basic blocks each. ScalableFL calls the ratio kappa and the number of stages c.
    """
    name = "resnet18"
    stages = stage_count(name, stages, len(RESNET_WIDTHS))
    if stem not in ("imagenet", "cifar"):
        raise UserError(f"network {name!r}: stem={stem!r}; allowed: imagenet, cifar")
    scaled = scaled_widths(name, width, RESNET_WIDTHS[:stages])
    channels = scaled if widths is None else positive_integers(name, "widths", widths, length=stages)
    layers: Layers = OrderedDict(stem=resnet_stem(input_shape[0], channels[0], stem, stages))
    for stage in range(2, stages + 1):
        inputs, outputs = channels[stage - 2], channels[stage - 1]
        layers[f"stage{stage}_1"] = BasicBlock(inputs, outputs, stride=1 if stage == 2 else 2)
        layers[f"stage{stage}_2"] = BasicBlock(outputs, outputs, pool=stage == stages)
    layers["head"] = nn.Linear(channels[-1], classes)
    return nn.Sequential(layers)


@network("vgg11", paper="ScalableFL; VGG: Simonyan and Zisserman, 2015", input_shape=(3, 32, 32))
def vgg11(input_shape: Shape, classes: int, *, width: float = 1.0, stages: int = 5) -> nn.Module:
    """VGG-11 with batch norm, scaled in width and in depth (its first stages), and a head on averaged features.

    A stage is one or two 3x3 convolutions and a 2x2 max-pooling; the last stage is averaged over the image instead of
    VGG's three linear layers.
    """
    stages = stage_count("vgg11", stages, len(VGG_WIDTHS))
    channels = scaled_widths("vgg11", width, VGG_WIDTHS[:stages])
    layers: Layers = OrderedDict()
    inputs = input_shape[0]
    for stage, outputs in enumerate(channels, start=1):
        for number in range(1, VGG_CONVOLUTIONS[stage - 1] + 1):
            last = number == VGG_CONVOLUTIONS[stage - 1]
            layers[f"stage{stage}_{number}"] = norm_block(
                convolution(inputs, outputs, 3), _halved(average=stage == stages) if last else None
            )
            inputs = outputs
    layers["head"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


def _halved(average: bool) -> nn.Module:
    """Max-pooling to half the size; at the end the average over the image follows."""
    pool = nn.MaxPool2d(2, ceil_mode=True)  # of a single pixel too
    return nn.Sequential(OrderedDict(pool=pool, average=AveragePool())) if average else pool


@network("mobilenet", paper="pMixFed; MobileNet: Howard et al., 2017", input_shape=(3, 32, 32))
def mobilenet(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """MobileNet v1: fourteen convolution layers (the stem and thirteen depthwise-separable blocks) and the head.

    The stem has stride 1, as suits images of 32x32 pixels: the last feature map is 2x2.
    """
    channels = scaled_widths("mobilenet", width, [32, *(outputs for outputs, _ in MOBILENET_BLOCKS)])
    layers: Layers = OrderedDict(stem=norm_block(convolution(input_shape[0], channels[0], 3)))
    for number, (_, stride) in enumerate(MOBILENET_BLOCKS, start=1):
        last = number == len(MOBILENET_BLOCKS)
        layers[f"block{number}"] = SeparableBlock(channels[number - 1], channels[number], stride, pool=last)
    layers["head"] = nn.Linear(channels[-1], classes)
    return nn.Sequential(layers)


@network("stride-cnn", paper=SCALABLEFL, input_shape=(3, 128, 128))
def stride_cnn(input_shape: Shape, classes: int, *, width: float = 1.0, stages: int = 4) -> nn.Module:
    """ScalableFL's plain CNN (figure 1): 3x3 convolutions of stride 2 and 32, 64, 128, 256 channels, and the head.

    The width ratio (kappa) scales the channels and `stages` (c) is the number of convolutions; beyond four the channels
    go on doubling.
    """
    stages = stage_count("stride-cnn", stages, 6)
    channels = scaled_widths("stride-cnn", width, [32 * 2**stage for stage in range(stages)])
    layers: Layers = OrderedDict()
    for number, (inputs, outputs) in enumerate(zip((input_shape[0], *channels), channels, strict=False), start=1):
        layers[f"conv{number}"] = norm_block(
            convolution(inputs, outputs, 3, stride=2), AveragePool() if number == stages else None
        )
    layers["head"] = nn.Linear(channels[-1], classes)
    return nn.Sequential(layers)
