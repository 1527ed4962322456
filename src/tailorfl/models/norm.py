"""Batch normalization whose statistics ignore padded samples, alone or stacked over clients."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tailorfl.errors import UserError


class _Scope(threading.local):
    """The mask in force in this thread. (A context variable would do, but torch.compile cannot trace one.)"""

    mask: Tensor | None = None


_scope = _Scope()


@contextmanager
def valid_samples(mask: Tensor | None) -> Iterator[None]:
    """Within this scope, batch norms count only the samples of the batch where `mask` [batch] is 1 (None: all)."""
    outer, _scope.mask = _scope.mask, mask
    try:
        yield
    finally:
        _scope.mask = outer


class _MaskedStatistics(_BatchNorm):
    """The forward pass of batch norm with a mask of valid samples.

    Under `vmap(grad(...))` the buffers must be arguments of the differentiated function: torch.func refuses to change a
    tensor that the function merely closes over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _forget_batch_count(self)

    def reset_running_stats(self) -> None:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        mask = _scope.mask
        uses_running = not self.training and self.running_mean is not None
        # torch's own kernel is faster, but refuses a batch with one value a channel.
        if uses_running or (mask is None and x.numel() > x.shape[1]):
            return super().forward(x)
        return self._masked(x, x.new_ones(x.shape[0]) if mask is None else mask)

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.shape != x.shape[:1]:
            raise ValueError(f"valid_samples: mask of shape {tuple(mask.shape)} for a batch of {x.shape[0]} samples")
        # As torch does, statistics of half-precision values are taken in single precision.
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = (1, -1) + (1,) * (x.dim() - 2)
        over = (0, *range(2, x.dim()))
        valid = mask.to(values.dtype).reshape(-1, *(1,) * (x.dim() - 1))
        count = valid.sum() * x.shape[2:].numel()
        # A zero times an infinity of a padded sample would spoil the sums, hence `where`.
        mean = torch.where(valid > 0, values, 0).sum(over) / count.clamp(min=1)
        # Padded samples leave as zeros, so they stay finite however small the variance of the real ones is.
        centered = torch.where(valid > 0, values - mean.reshape(channels), 0)
        variance = centered.square().sum(over) / count.clamp(min=1)
        if self.training and self.running_mean is not None:
            self._remember(mean, variance, count)
        out = centered * torch.rsqrt(variance + self.eps).reshape(channels)
        if self.affine:
            out = out * self.weight.reshape(channels) + self.bias.reshape(channels)
        return out.to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics; no value leaves them alone, and one value says nothing of the variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        unbiased = variance * count / (count - 1).clamp(min=1)
        # Cast first: a float times a boolean tensor is single precision.
        mean_rate, variance_rate = (self.momentum * (count > least).to(count.dtype) for least in (0, 1))
        # In place, so that the tensors given to functional_call change, stacked or not.
        self.running_mean.copy_(self.running_mean + mean_rate * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + variance_rate * (unbiased - self.running_var))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torch's batch norm would add the count of batches that we do not keep.
        state_dict.pop(prefix + "num_batches_tracked", None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class BatchNorm1d(_MaskedStatistics, nn.BatchNorm1d):
    """`nn.BatchNorm1d` that leaves out the samples `valid_samples` calls padding."""


class BatchNorm2d(_MaskedStatistics, nn.BatchNorm2d):
    """`nn.BatchNorm2d` that leaves out the samples `valid_samples` calls padding."""


class BatchNorm3d(_MaskedStatistics, nn.BatchNorm3d):
    """`nn.BatchNorm3d` that leaves out the samples `valid_samples` calls padding."""


_OURS: dict[type, type] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def convert_norms(module: nn.Module) -> nn.Module:
    """Turn every plain torch batch norm inside `module` into ours, in place; parameters and statistics stay."""
    for name, norm in module.named_modules():
        if type(norm) not in _OURS:
            continue
        assert isinstance(norm, _BatchNorm)
        if norm.momentum is None:
            raise UserError(f"batch norm {name!r} has momentum=None (a running count); allowed: a momentum in (0, 1]")
        norm.__class__ = _OURS[type(norm)]
        _forget_batch_count(norm)
    return module


def _forget_batch_count(norm: nn.Module) -> None:
    """Drop the integer buffer that only `momentum=None` needs: averaging or stacking it makes no sense."""
    norm._buffers.pop("num_batches_tracked", None)
    norm.num_batches_tracked = None  # type: ignore[assignment]
