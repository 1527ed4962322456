"""Training passes in half precision: products of matrices and convolutions in bfloat16, all else as it was.

torch's own autocast acts below the transformations of `torch.func`, which then see one type going in and another one
coming out. So calls are taken here, above them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = torch.bfloat16

PRODUCTS = {
    F.linear,
    F.bilinear,
    *(F.scaled_dot_product_attention, F.multi_head_attention_forward),
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addbmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv),
    *(Tensor.addmm, Tensor.addbmm, Tensor.baddbmm),
}
# What adds up or divides by small numbers, or wants weights and inputs of one type.
WIDE = {
    *(F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm, F.local_response_norm),
    *(F.normalize, F.cosine_similarity, F.prelu),
    *(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
}


class _Scope(threading.local):
    half = False


_scope = _Scope()


class _Halved(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            return func(*_cast(args, HALF), **_cast(dict(kwargs or {}), HALF))
        if func in WIDE:
            return func(*_cast(args, torch.float32), **_cast(dict(kwargs or {}), torch.float32))
        return func(*args, **(kwargs or {}))


@contextmanager
def half_precision(enabled: bool) -> Iterator[None]:
    """Within this scope, products of tensors in single precision are taken in bfloat16."""
    if not enabled:
        yield
        return
    outer, _scope.half = _scope.half, True
    try:
        with _Halved():
            yield
    finally:
        _scope.half = outer


def halved(tensor: Tensor | None) -> Tensor | None:
    """For layers with a kernel of their own: a tensor as the scope wants it in a product."""
    return tensor.to(HALF) if tensor is not None and _scope.half else tensor


def widened(tensor: Tensor) -> Tensor:
    """What leaves a network, in single precision again."""
    return tensor.float() if tensor.dtype == HALF else tensor


def _cast(given: Any, to: torch.dtype) -> Any:
    if isinstance(given, Tensor):
        return given.to(to) if given.dtype in (torch.float32, HALF) else given
    if isinstance(given, list | tuple):
        return type(given)(_cast(one, to) for one in given)
    if isinstance(given, dict):
        return {name: _cast(one, to) for name, one in given.items()}
    return given
