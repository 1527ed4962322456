"""Training passes in half precision: products of matrices and convolutions in bfloat16, norms in single precision.

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
    *(F.linear, F.bilinear, F.scaled_dot_product_attention),
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.inner, torch.dot, torch.tensordot, torch.einsum),
    *(torch.linalg.matmul, torch.linalg.multi_dot, torch.linalg.vecdot),
    *(torch.addmm, torch.addbmm, torch.baddbmm, torch.addmv),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.inner, Tensor.dot),
    *(Tensor.addmm, Tensor.addbmm, Tensor.baddbmm, Tensor.addmv),
}
# What adds up or divides by small numbers, or wants all that it is given to be of one type.
WIDE = {
    *(F.multi_head_attention_forward, F.grid_sample, torch.cdist, torch.lerp, Tensor.lerp),
    *(torch.scatter_add, torch.index_add, torch.scatter, torch.index_put, torch.masked_scatter),
    *(Tensor.scatter_add, Tensor.index_add, Tensor.scatter, Tensor.index_put, Tensor.masked_scatter),
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
        given = dict(kwargs or {})
        to = HALF if func in PRODUCTS else torch.float32 if func in WIDE else None
        if to is None or given.get("out") is not None:  # what is written into is of a type already
            return func(*args, **given)
        return func(*_cast(args, to), **_cast(given, to))


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


def halved(tensor: Tensor) -> Tensor:
    """A tensor as the scope wants it in a product: for layers with a kernel of their own, or that use it many times."""
    return tensor.to(HALF) if _scope.half and tensor.dtype == torch.float32 else tensor


def widened(found: Any) -> Any:
    """What leaves a network, in single precision again."""
    return _cast(found, torch.float32)


def _cast(given: Any, to: torch.dtype) -> Any:
    if isinstance(given, Tensor):
        return given.to(to) if given.dtype in (torch.float32, HALF) else given
    if type(given) in (list, tuple):
        return type(given)(_cast(one, to) for one in given)
    if isinstance(given, dict):
        return {name: _cast(one, to) for name, one in given.items()}
    return given
