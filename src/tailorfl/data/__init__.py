"""Files become federated data: sources, partitions, each client's training, validation and test rows, augmentation."""

from tailorfl.data.augment import Augmentation
from tailorfl.data.download import DOWNLOADS, download
from tailorfl.data.federated import (
    FederatedData,
    Partition,
    assemble,
    federate,
    load_partition,
    save_partition,
)
from tailorfl.data.groups import Group, federate_groups
from tailorfl.data.inspect import describe, draw_counts, shade_counts
from tailorfl.data.partition import PARTITIONS, PartitionOptions
from tailorfl.data.ragged import Ragged
from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources import SOURCES, SourceEntry, load_source, source_names
from tailorfl.data.sources.prepared import save_source

__all__ = [
    "DOWNLOADS",
    "PARTITIONS",
    "SOURCES",
    "Augmentation",
    "FederatedData",
    "Group",
    "Partition",
    "PartitionOptions",
    "Ragged",
    "Source",
    "SourceEntry",
    "SourceOptions",
    "assemble",
    "describe",
    "download",
    "draw_counts",
    "federate",
    "federate_groups",
    "load_partition",
    "load_source",
    "save_partition",
    "save_source",
    "shade_counts",
    "source_names",
]
