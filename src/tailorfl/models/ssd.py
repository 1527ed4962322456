"""Object detection in one pass: SSD on ResNet-18, as ScalableFL scales it (Liu et al., 2016; Nitta et al., 2023)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from tailorfl.detection.anchors import Grid, grid_anchors
from tailorfl.errors import UserError
from tailorfl.models.deep import RESNET_WIDTHS, SCALABLEFL, BasicBlock, convolution, norm_block, resnet_stem
from tailorfl.models.plain import Layers, Shape
from tailorfl.models.registry import network, scaled_widths, stage_count

EXTRA_WIDTHS = (128, 256)  # of the 1x1 and of the 3x3 convolution of the stages after ResNet's
STAGES = 7
HEADS = 5  # one for each of the last stages
FIRST, BETWEEN, LAST = 5, 7, 5  # anchors a cell, of the first head, of those between, and of the last


class MultiboxHead(nn.Module):
    """SSD's heads: of each feature map, at each anchor, the classes' logits and the code of a box."""

    def __init__(self, channels: Sequence[int], anchors: Sequence[int], classes: int) -> None:
        super().__init__()
        self.anchors = tuple(anchors)
        pairs = list(zip(channels, anchors, strict=True))
        self.classes = nn.ModuleList(nn.Conv2d(width, many * (1 + classes), 3, padding=1) for width, many in pairs)
        self.boxes = nn.ModuleList(nn.Conv2d(width, many * 4, 3, padding=1) for width, many in pairs)

    def forward(self, *maps: Tensor) -> Tensor:
        scores = [self._rows(*one) for one in zip(self.classes, maps, self.anchors, strict=True)]
        codes = [self._rows(*one) for one in zip(self.boxes, maps, self.anchors, strict=True)]
        return torch.cat([torch.cat(scores, dim=1), torch.cat(codes, dim=1)], dim=-1)

    @staticmethod
    def _rows(layer: nn.Module, features: Tensor, anchors: int) -> Tensor:
        """The outputs of a layer, an anchor a row, in the order of `grid_anchors`."""
        outputs: Tensor = layer(features)
        return outputs.permute(0, 2, 3, 1).unflatten(-1, (anchors, -1)).flatten(1, 3)


class SSD(nn.Module):
    """Stages, each of which has a feature map of half the side, and one head on the last of them.

    The output is [batch, anchors, 1 + classes + 4]: logits, background first, and the code of a box.
    """

    detection: ClassVar[bool] = True

    def __init__(self, stages: Layers, head: MultiboxHead, grids: Sequence[Grid]) -> None:
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, stage)
        self.head = head
        self._stages = tuple(stages)
        # No buffer: it would be averaged and sent.
        self._anchors = grid_anchors(grids, head.anchors)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for name in self._stages:
            x = self.get_submodule(name)(x)
            maps.append(x)
        outputs: Tensor = self.head(*maps[-len(self.head.anchors) :])
        return outputs

    def anchors(self, device: torch.device | str) -> Tensor:
        """The boxes in which each output looks for an object: corners in units of the image, [anchors, 4]."""
        return self._anchors.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The anchors go where the network goes, so that none are copied while a step is recorded.
        super()._apply(fn, recurse)
        self._anchors = fn(self._anchors)
        return self


def extra_stage(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    """A stage after ResNet's: fewer channels, then half the side."""
    reduce, halve = convolution(inputs, widths[0], 1), convolution(widths[0], widths[1], 3, stride=2)
    return nn.Sequential(OrderedDict(reduce=norm_block(reduce), halve=norm_block(halve)))


def resnet_stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Two basic blocks of ResNet-18."""
    return nn.Sequential(OrderedDict(block1=BasicBlock(inputs, outputs, stride), block2=BasicBlock(outputs, outputs)))


def grid_of(input_shape: Shape, stage: int) -> Grid:
    """Rows and columns of the feature map of a stage, from stage 2 on: half as many a stage, rounded up."""
    height, width = (-(-size // 2**stage) for size in input_shape[1:])
    return height, width


@network("ssd-resnet18", paper=SCALABLEFL, input_shape=(3, 256, 256), detection=True)
def ssd_resnet18(input_shape: Shape, classes: int, *, width: float = 1.0, stages: int | None = None) -> nn.Module:
    """ResNet-18, two extra stages and SSD heads on the last five, for object detection.

    The width ratio (kappa) scales the extra stages alone, as in the paper, and `stages` (c) is how many there are, by
    default seven, or as many as the images have room for. The
    first of the heads has 5 anchors a cell, the last 5, those between 7. With fewer than six stages there are as many
    heads as stages from the second on.
    """
    name = "ssd-resnet18"
    room = max(2, (min(input_shape[1:]) - 1).bit_length())
    stages = stage_count(name, min(STAGES, room) if stages is None else stages, STAGES, least=2)
    _check_size(name, input_shape, stages)
    extra = scaled_widths(name, width, EXTRA_WIDTHS)
    channels = (*RESNET_WIDTHS, *[extra[-1]] * (STAGES - len(RESNET_WIDTHS)))[:stages]
    layers: Layers = OrderedDict(stage1=resnet_stem(input_shape[0], channels[0], "imagenet", stages))
    for stage in range(2, stages + 1):
        inputs, outputs = channels[stage - 2], channels[stage - 1]
        resnet = stage <= len(RESNET_WIDTHS)
        made = resnet_stage(inputs, outputs, 1 if stage == 2 else 2) if resnet else extra_stage(inputs, extra)
        layers[f"stage{stage}"] = made
    heads = min(HEADS, stages - 1)
    anchors = (FIRST, *[BETWEEN] * (heads - 2), LAST)[:heads]
    grids = [grid_of(input_shape, stage) for stage in range(stages - heads + 1, stages + 1)]
    return SSD(layers, MultiboxHead(channels[-heads:], anchors, classes), grids)


def _check_size(name: str, input_shape: Shape, stages: int) -> None:
    """Each stage must have something to halve."""
    least = 2 ** (stages - 1) + 1
    if min(input_shape[1:]) < least:
        size = f"{input_shape[1]}x{input_shape[2]}"
        raise UserError(
            f"network {name!r} of {stages} stages takes images of at least {least}x{least} pixels, got {size}; "
            "allowed: larger images (image_size) or fewer stages (network_options, or in groups a larger base_size)"
        )
