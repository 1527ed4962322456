"""Networks as ordered layers, base to head."""

from tailorfl.models.lowrank import LowRankLinear, factor_linear, factored, linear_layers
from tailorfl.models.network import Layer, Network, Values
from tailorfl.models.norm import BatchNorm1d, BatchNorm2d, convert_norms, valid_samples
from tailorfl.models.recurrent import LSTM
from tailorfl.models.zoo import build_module, load_user_module, networks

__all__ = [
    "LSTM",
    "BatchNorm1d",
    "BatchNorm2d",
    "Layer",
    "LowRankLinear",
    "Network",
    "Values",
    "build_module",
    "convert_norms",
    "factor_linear",
    "factored",
    "linear_layers",
    "load_user_module",
    "networks",
    "valid_samples",
]
