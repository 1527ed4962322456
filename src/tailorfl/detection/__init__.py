"""Object detection by SSD: boxes, anchors, the multibox loss, what a network found, and how good that is."""

from tailorfl.detection.anchors import grid_anchors
from tailorfl.detection.boxes import decode, encode, overlaps
from tailorfl.detection.detections import detect, located, select
from tailorfl.detection.mean_ap import coco, voc07
from tailorfl.detection.multibox import match, multibox_losses

__all__ = [
    "coco",
    "decode",
    "detect",
    "encode",
    "grid_anchors",
    "located",
    "match",
    "multibox_losses",
    "overlaps",
    "select",
    "voc07",
]
