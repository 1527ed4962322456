"""Layers of a stack on a GPU: convolutions with filters for each client, and maxima over windows.

By vmap a convolution of a stack is a grouped one, for which the stack must be laid out anew, image by image with the
channels of all clients side by side; that and torch's maxima take longer than the products. The kernels here read a
stack as it is, and keep it with the channels last from layer to layer. They are for single and half precision.
"""

import logging
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailorfl.models.half import HALF, halved

Pair = tuple[int, int]

log = logging.getLogger(__name__)


class _Scope(threading.local):
    stacked = False


_scope = _Scope()


@contextmanager
def stacked_layers() -> Iterator[None]:
    """Within this scope, in which vmap runs over clients, layers are those of a stack where there is a kernel."""
    outer, _scope.stacked = _scope.stacked, True
    try:
        yield
    finally:
        _scope.stacked = outer


class Convolution(nn.Conv2d):
    """`nn.Conv2d` that knows how to be stacked: with steps of one, all channels together, zeros around the image."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (_has_kernel(input) and self._plain()):
            return super()._conv_forward(input, weight, bias)
        # Not by indices, whose gradient would be a tensor of zeros in which the result is laid.
        tensors = (None if one is None else halved(one).unsqueeze(0) for one in (input, weight, bias))
        return Convolve.apply(*tensors, self.padding).squeeze(0)

    def _plain(self) -> bool:
        alike = self.stride == self.dilation == (1, 1) and self.groups == 1 and self.padding_mode == "zeros"
        # Beyond the filter's size the way back would need less than no padding.
        return alike and isinstance(self.padding, tuple) and all(map(int.__lt__, self.padding, self.kernel_size))


class MaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d` that knows how to be stacked."""

    def forward(self, input: Tensor) -> Tensor:
        found = _maxima(self, input, relu=False)
        return super().forward(input) if found is None else found


class RectifiedMaxima(nn.Sequential):
    """The largest number of each window, or zero where none is above: pooling and ReLU, in a stack one operation."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__(OrderedDict(pool=pool, relu=nn.ReLU()))

    def forward(self, input: Tensor) -> Tensor:
        found = _maxima(self[0], input, relu=True)
        return super().forward(input) if found is None else found


def convert_layers(module: nn.Module) -> nn.Module:
    """Turn every plain torch convolution and maximum over images inside `module` into ours, in place."""
    ours: dict[type, type] = {nn.Conv2d: Convolution, nn.MaxPool2d: MaxPool}
    for child in module.modules():
        child.__class__ = ours.get(type(child), type(child))
    return module


MOST_SPOTS = 25  # of a window, which a kernel goes through one by one


def _maxima(pool: nn.Module, images: Tensor, relu: bool) -> Tensor | None:
    """What a layer computes, by a kernel; None where there is none for it."""
    if type(pool) is not MaxPool or not _has_kernel(images):
        return None
    kernel = _pair(pool.kernel_size)
    plain = _pair(pool.dilation) == (1, 1) and not pool.ceil_mode and not pool.return_indices
    if not plain or kernel[0] * kernel[1] > MOST_SPOTS:
        return None
    found: Tensor = Pool.apply(images, kernel, _pair(pool.stride), _pair(pool.padding), relu)[0]
    return found


def _pair(length: int | Pair) -> Pair:
    return (length, length) if isinstance(length, int) else length


def _has_kernel(images: Tensor) -> bool:
    fits = _scope.stacked and images.is_cuda and images.dtype in (torch.float32, HALF) and images.dim() == 4
    return fits and _kernels_run(images.device)


@cache
def _kernels_run(device: torch.device) -> bool:
    """Whether there is a Triton that can run a kernel there: it needs a compiler for C, and a GPU that it knows."""
    with ThreadPoolExecutor(1) as pool:  # inside of vmap, where this is asked, no tensor is a plain one
        error = pool.submit(_try_kernels, device).exception()
    if error is not None:  # whatever Triton or a driver comes up with
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        log.warning("convolutions of a stack take torch's grouped ones, which are slower: %s", said)
    return error is None


def _try_kernels(device: torch.device) -> None:
    from tailorfl.models import kernels

    if device.index is not None:
        torch.cuda.set_device(device)  # of this thread
    kernels.pool(torch.zeros(1, 1, 2, 2, device=device), (2, 2), (2, 2), (0, 0), False)


# Opaque to tracing, which cannot look into a kernel's launch.


@torch.library.custom_op("tailorfl::convolve", mutates_args=())
def _convolve(images: Tensor, filters: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    if len(images) == 1:
        return F.conv2d(images[0], filters[0], None if bias is None else bias[0], padding=list(padding))[None]
    from tailorfl.models import kernels

    return kernels.convolve(images, filters, bias, _two(padding))


@torch.library.custom_op("tailorfl::correlate", mutates_args=())
def _correlate(images: Tensor, gradient: Tensor, padding: Sequence[int], bias: bool) -> tuple[Tensor, Tensor]:
    kernel = [images.shape[k] + 2 * padding[k - 3] - gradient.shape[k] + 1 for k in (3, 4)]
    from tailorfl.models import kernels

    found = kernels.correlate(images, gradient, _two(kernel), _two(padding), bias)
    return found[0], found[1].clone()  # of its own memory, as torch asks of an operation's results


@torch.library.custom_op("tailorfl::pool", mutates_args=())
def _pool(
    images: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], relu: bool
) -> tuple[Tensor, Tensor]:
    from tailorfl.models import kernels

    return kernels.pool(images, _two(kernel), _two(stride), _two(padding), relu)


@torch.library.custom_op("tailorfl::unpool", mutates_args=())
def _unpool(
    gradient: Tensor,
    codes: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    from tailorfl.models import kernels

    return kernels.unpool(gradient, codes, _two(size), _two(kernel), _two(stride), _two(padding))


def _two(lengths: Sequence[int]) -> Pair:
    return lengths[0], lengths[1]


# The gradients of each of these two are again the two, so they can be differentiated any number of times.


class Convolve(torch.autograd.Function):
    """Each client's images [clients, images, channels, ...] by its filters [clients, outputs, channels, ...]."""

    @staticmethod
    def forward(images: Tensor, filters: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        found: Tensor = _convolve(images, filters, bias, padding)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, filters, bias, ctx.padding = inputs
        ctx.bias = bias is not None
        ctx.save_for_backward(images, filters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, filters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        back = _back(gradient, filters, ctx.padding) if wanted[0] else None
        if not (wanted[1] or wanted[2]):
            return back, None, None, None
        of_filters, of_bias = Correlate.apply(images, gradient, ctx.padding, ctx.bias)
        return back, of_filters if wanted[1] else None, of_bias if wanted[2] else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], images: Tensor, filters: Tensor, bias: Any, padding: Pair) -> Any:
        if in_dims[0] is not None and in_dims[1] is None and in_dims[2] is None:  # the same filters: more images
            images = images.movedim(in_dims[0], 1)
            found = Convolve.apply(images.flatten(1, 2), filters, bias, padding)
            return found.unflatten(1, images.shape[1:3]), 1
        more = _more_clients(info.batch_size, in_dims, images, filters, bias)
        return Convolve.apply(*more, padding).unflatten(0, (info.batch_size, -1)), 0


class Correlate(torch.autograd.Function):
    """The gradients of the filters and of the bias, which may be empty, given that of the outputs."""

    @staticmethod
    def forward(images: Tensor, gradient: Tensor, padding: Pair, bias: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _correlate(images, gradient, padding, bias)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        images, gradient, ctx.padding, ctx.bias = inputs
        ctx.save_for_backward(images, gradient)

    @staticmethod
    def backward(ctx: Any, filters: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        images, gradient = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _back(gradient, filters, ctx.padding) if wanted[0] else None,
            Convolve.apply(images, filters, bias if ctx.bias else None, ctx.padding) if wanted[1] else None,
            None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], images: Tensor, gradient: Tensor, padding: Pair, bias: bool) -> Any:
        more = _more_clients(info.batch_size, in_dims, images, gradient)
        found = Correlate.apply(*more, padding, bias)
        return tuple(one.unflatten(0, (info.batch_size, -1)) for one in found), (0, 0)


def _back(gradient: Tensor, filters: Tensor, padding: Pair) -> Tensor:
    """The gradient of the images: a convolution by the turned filters, from outputs to channels."""
    rest = filters.shape[3] - 1 - padding[0], filters.shape[4] - 1 - padding[1]
    found: Tensor = Convolve.apply(gradient, filters.transpose(1, 2).flip(3, 4), None, rest)
    return found


def _more_clients(mapped: int, in_dims: Sequence[Any], *tensors: Tensor | None) -> Iterator[Tensor | None]:
    """What vmap maps over becomes more clients: [mapped * clients, ...]."""
    for tensor, dim in zip(tensors, in_dims, strict=False):
        if tensor is None:
            yield None
        else:
            whole = tensor.expand(mapped, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            yield whole.flatten(0, 1)


class Pool(torch.autograd.Function):
    """The largest number of each window, or its ReLU, and its place in the window."""

    @staticmethod
    def forward(images: Tensor, kernel: Pair, stride: Pair, padding: Pair, relu: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _pool(images, kernel, stride, padding, relu)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        images, *ctx.window, _ = inputs
        ctx.size = images.shape[2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return Unpool.apply(gradient, *ctx.saved_tensors, tuple(ctx.size), *ctx.window), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], images: Tensor, *window: Any) -> Any:
        images = images.movedim(in_dims[0], 0)
        found = Pool.apply(images.flatten(0, 1), *window)
        return tuple(one.unflatten(0, images.shape[:2]) for one in found), (0, 0)


class Unpool(torch.autograd.Function):
    """The gradient of the images, given that of the largest numbers and their places."""

    @staticmethod
    def forward(gradient: Tensor, codes: Tensor, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        found: Tensor = _unpool(gradient, codes, size, kernel, stride, padding)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, ctx.size, ctx.kernel, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(codes)

    @staticmethod
    def backward(ctx: Any, images: Tensor) -> tuple[Tensor | None, ...]:
        """What lies in the chosen places."""
        (codes,) = ctx.saved_tensors
        chosen = codes < MOST_SPOTS
        spot = codes.where(chosen, ctx.padding[0] * ctx.kernel[1] + ctx.padding[1]).long()  # never outside of the image
        line, column = (torch.arange(length, device=images.device) for length in codes.shape[2:])
        y = line[:, None] * ctx.stride[0] + spot // ctx.kernel[1] - ctx.padding[0]
        x = column * ctx.stride[1] + spot % ctx.kernel[1] - ctx.padding[1]
        places = (y * ctx.size[1] + x).flatten(2)
        found = images.flatten(2).gather(2, places).reshape(codes.shape)
        return found.where(chosen, 0.0), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], gradient: Tensor, codes: Tensor, *shape: Pair) -> Any:
        more = _more_clients(info.batch_size, in_dims, gradient, codes)
        return Unpool.apply(*more, *shape).unflatten(0, (info.batch_size, -1)), 0
