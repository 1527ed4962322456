"""Triton kernels for a stack of clients: convolutions, each client's with its own filters, and maxima over windows.

Images are read by strides, and results are laid out with the channels last. A convolution is a product of matrices: a
row is a place of an output image, the inner dimension runs over the filter, channel fastest. Sums are made in one
order, whatever runs beside them. The sizes of blocks were chosen by time on an H200.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

PARTS = 264  # programs that keep a large GPU busy
MOST = 2**31  # places of a client's numbers in memory beyond which they need 64 bits
OFF = tl.constexpr(255)  # in place of a place: there is none

# Numbers that follow from how many clients and images there are get no kernel of their own for each kind of number.


@triton.jit
def _patch(images, rows, rows_end, inner, strides, size: tl.constexpr, out_size: tl.constexpr, pad: tl.constexpr,
           channels: tl.constexpr, kernel_width: tl.constexpr, inner_end: tl.constexpr,
           one_spot: tl.constexpr):  # fmt: skip
    """What the filter sees from each row, [rows, inner]; zero outside of the image."""
    image, place = rows // (out_size[0] * out_size[1]), rows % (out_size[0] * out_size[1])
    line, column = place // out_size[1] - pad[0], place % out_size[1] - pad[1]
    if one_spot:  # a block of the inner dimension lies in one spot of the filter: no division for each number
        spot = tl.min(inner, 0) // channels
        channel = inner - spot * channels
        y = (line + spot // kernel_width)[:, None]
        x = (column + spot % kernel_width)[:, None]
    else:
        spot = inner // channels
        channel = inner % channels
        y = line[:, None] + (spot // kernel_width)[None, :]
        x = column[:, None] + (spot % kernel_width)[None, :]
    inside = (rows < rows_end)[:, None] & (inner < inner_end)[None, :]
    if pad[0] > 0 or pad[1] > 0:
        inside = inside & (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
    at = (image * strides[0])[:, None] + (channel * strides[1])[None, :] + (y * strides[2] + x * strides[3])
    return tl.load(images + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows_end"])
def _convolve(images, filters, bias, out, rows_end, outputs, client_stride, image_stride, channel_stride, line_stride,
              column_stride, size: tl.constexpr, out_size: tl.constexpr, pad: tl.constexpr, channels: tl.constexpr,
              kernel_width: tl.constexpr, inner_end: tl.constexpr, has_bias: tl.constexpr, precision: tl.constexpr,
              block_rows: tl.constexpr, block_outputs: tl.constexpr, block_inner: tl.constexpr):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    output = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    strides = (image_stride, channel_stride, line_stride, column_stride)
    images += client * client_stride
    filters += client * outputs * inner_end
    total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
    for start in range(0, inner_end, block_inner):
        inner = start + tl.arange(0, block_inner)
        seen = _patch(images, rows, rows_end, inner, strides, size, out_size, pad, channels, kernel_width, inner_end,
                      channels % block_inner == 0)  # fmt: skip
        weights = tl.load(
            filters + output[:, None] * inner_end + inner[None, :],
            mask=(output < outputs)[:, None] & (inner < inner_end)[None, :],
            other=0.0,
        )
        total = tl.dot(seen, tl.trans(weights), total, input_precision=precision)
    if has_bias:
        total += tl.load(bias + client * outputs + output, mask=output < outputs, other=0.0)[None, :]
    at = (client * rows_end + rows[:, None]) * outputs + output[None, :]
    tl.store(out + at, total, mask=(rows < rows_end)[:, None] & (output < outputs)[None, :])


@triton.jit
def _product_in_parts(left, right, total):
    """left' right of single precision by three products of half: tensor cores take these in any order of memory.

    TF32 they take in one order alone, and turning numbers around costs more than the product. 16 bits of each number
    count here, of TF32 11.
    """
    high_left, high_right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    low_left = (left - high_left.to(tl.float32)).to(tl.bfloat16)
    low_right = (right - high_right.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(tl.trans(low_left), high_right, total)
    total = tl.dot(tl.trans(high_left), low_right, total)
    return tl.dot(tl.trans(high_left), high_right, total)


@triton.jit(do_not_specialize=["rows_end", "rows_apart", "clients"])
def _correlate(images, gradient, out, rows_end, rows_apart, outputs, clients, client_stride, image_stride,
               channel_stride, line_stride, column_stride, size: tl.constexpr, out_size: tl.constexpr,
               pad: tl.constexpr, channels: tl.constexpr, kernel_width: tl.constexpr, inner_end: tl.constexpr,
               has_bias: tl.constexpr, precision: tl.constexpr, block_rows: tl.constexpr,
               block_outputs: tl.constexpr, block_inner: tl.constexpr):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.cdiv(inner_end + has_bias, block_inner)
    inner = tl.program_id(0) % tiles * block_inner + tl.arange(0, block_inner)
    output = tl.program_id(0) // tiles * block_outputs + tl.arange(0, block_outputs)
    strides = (image_stride, channel_stride, line_stride, column_stride)
    images += client * client_stride
    gradient += client * rows_end * outputs
    first = part * rows_apart
    last = tl.minimum(first + rows_apart, rows_end)
    total = tl.zeros((block_outputs, block_inner), dtype=tl.float32)
    for start in range(first, last, block_rows):
        rows = start + tl.arange(0, block_rows)
        seen = _patch(images, rows, last, inner, strides, size, out_size, pad, channels, kernel_width, inner_end,
                      channels % block_inner == 0)  # fmt: skip
        if has_bias:  # whose filter sees ones
            seen = tl.where((inner == inner_end)[None, :], 1.0, seen).to(images.dtype.element_ty)
        change = tl.load(
            gradient + rows[:, None] * outputs + output[None, :],
            mask=(rows < last)[:, None] & (output < outputs)[None, :],
            other=0.0,
        )
        if precision == "tf32" and change.dtype == tl.float32:
            total = _product_in_parts(change, seen, total)
        else:
            total = tl.dot(tl.trans(change), seen, total, input_precision=precision)
    columns = inner_end + has_bias
    at = ((part * clients + client) * outputs + output[:, None]) * columns + inner[None, :]
    tl.store(out + at, total, mask=(output < outputs)[:, None] & (inner < columns)[None, :])


def convolve(images: Tensor, filters: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """[clients, images, channels, ...] by [clients, outputs, channels, height, width]; channels last in memory."""
    clients, count, channels, height, width = images.shape
    outputs, kernel = filters.shape[1], filters.shape[3:]
    size = height + 2 * padding[0] - kernel[0] + 1, width + 2 * padding[1] - kernel[1] + 1
    rows, inner = count * size[0] * size[1], channels * kernel[0] * kernel[1]
    if max(_span(images[0]), rows * outputs) >= MOST and count > 1:
        return torch.cat([convolve(part, filters, bias, padding) for part in images.chunk(2, 1)], 1)
    out = images.new_empty(clients, count, *size, outputs)
    small = clients * triton.cdiv(rows, 128) < PARTS // 2
    block_rows, block_outputs = (64, _power(outputs, 64)) if small else (128, _power(outputs, 128))
    # Where a block of the inner dimension has several spots of the filter, finding them costs more than the product.
    block_inner, stages = (32, 3) if channels % 32 == 0 else (16, 1)
    if images.element_size() == 2 and channels % 64 == 0:
        block_inner = 64
    _convolve[triton.cdiv(rows, block_rows), triton.cdiv(outputs, block_outputs), clients](
        images, filters.permute(0, 1, 3, 4, 2).contiguous(), out if bias is None else bias.contiguous(), out,
        rows, outputs, *images.stride(), (height, width), size, padding, channels, kernel[1], inner, bias is not None,
        _precision(), block_rows, block_outputs, block_inner, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


def correlate(images: Tensor, gradient: Tensor, kernel: Pair, padding: Pair, bias: bool) -> tuple[Tensor, Tensor]:
    """The gradients of the filters and, if wanted, of the bias, given that of the outputs."""
    clients, count, channels, height, width = images.shape
    outputs, size = gradient.shape[2], (gradient.shape[3], gradient.shape[4])
    rows, inner = count * size[0] * size[1], channels * kernel[0] * kernel[1]
    if max(_span(images[0]), gradient[0].numel()) >= MOST and count > 1:
        halves = zip(images.chunk(2, 1), gradient.chunk(2, 1), strict=True)
        first, second = (correlate(*half, kernel, padding, bias) for half in halves)
        return first[0] + second[0], first[1] + second[1]
    columns = inner + bias
    half = images.element_size() == 2
    wide = columns <= 128 or clients * triton.cdiv(columns, 128) >= PARTS // 2
    block_outputs, block_inner = _power(outputs, 64), _power(columns, 128 if wide else 64)
    block_rows = 128 if half and columns <= 128 else 64
    stages = 1 if not half else 2 if columns <= 128 else 3
    tiles = triton.cdiv(columns, block_inner) * triton.cdiv(outputs, block_outputs)
    parts = max(1, min(triton.cdiv(2 * PARTS, clients * tiles), rows // (8 * block_rows)))
    apart = triton.cdiv(triton.cdiv(rows, parts), block_rows) * block_rows
    parts = triton.cdiv(rows, apart)
    out = images.new_empty(parts, clients, outputs, columns, dtype=torch.float32)
    _correlate[tiles, parts, clients](
        images, gradient.permute(0, 1, 3, 4, 2).contiguous(), out, rows, apart, outputs, clients, *images.stride(),
        (height, width), size, padding, channels, kernel[1], inner, int(bias), _precision(), block_rows,
        block_outputs, block_inner, num_warps=4, num_stages=stages,
    )  # fmt: skip
    found = (out[0] if parts == 1 else out.sum(0)).to(images.dtype)
    filters = found[..., :inner].unflatten(2, (*kernel, channels)).permute(0, 1, 4, 2, 3)
    return filters, found[..., inner:].squeeze(2)


@triton.jit(do_not_specialize=["places"])
def _pool(images, out, codes, places, image_stride, channel_stride, line_stride, column_stride, size: tl.constexpr,
          out_size: tl.constexpr, channels: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr,
          pad: tl.constexpr, relu: tl.constexpr, block_places: tl.constexpr, block_channels: tl.constexpr,
          far: tl.constexpr):  # fmt: skip
    place = (tl.program_id(0).to(tl.int64) if far else tl.program_id(0)) * block_places + tl.arange(0, block_places)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    within = (place < places)[:, None] & (channel < channels)[None, :]
    line, column = place // out_size[1] % out_size[0], place % out_size[1]
    image = place // (out_size[0] * out_size[1])
    best = tl.full((block_places, block_channels), float("-inf"), tl.float32)
    code = tl.full((block_places, block_channels), OFF, tl.uint8)
    for spot in tl.static_range(kernel[0] * kernel[1]):
        y = line * stride[0] + spot // kernel[1] - pad[0]
        x = column * stride[1] + spot % kernel[1] - pad[1]
        inside = within & ((y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1]))[:, None]
        at = (image * image_stride + y * line_stride + x * column_stride)[:, None] + channel[None, :] * channel_stride
        value = tl.load(images + at, mask=inside, other=float("-inf")).to(tl.float32)
        better = inside & ((value > best) | (value != value) | (code == OFF))  # the first, though it be minus infinity
        best, code = tl.where(better, value, best), tl.where(better, spot, code).to(tl.uint8)
    if relu:
        off = best <= 0
        best, code = tl.where(off, 0.0, best), tl.where(off, OFF, code).to(tl.uint8)
    to = place[:, None] * channels + channel[None, :]
    tl.store(out + to, best, mask=within)
    tl.store(codes + to, code, mask=within)


@triton.jit(do_not_specialize=["places"])
def _unpool(gradient, codes, out, places, size: tl.constexpr, out_size: tl.constexpr, channels: tl.constexpr,
            kernel: tl.constexpr, stride: tl.constexpr, pad: tl.constexpr, over: tl.constexpr,
            block_places: tl.constexpr, block_channels: tl.constexpr, far: tl.constexpr):  # fmt: skip
    place = (tl.program_id(0).to(tl.int64) if far else tl.program_id(0)) * block_places + tl.arange(0, block_places)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    within = (place < places)[:, None] & (channel < channels)[None, :]
    y, x = place // size[1] % size[0] + pad[0], place % size[1] + pad[1]
    image = place // (size[0] * size[1])
    total = tl.zeros((block_places, block_channels), tl.float32)
    # The windows that a place is in: the last one that begins at or before it, and those before that.
    for back in tl.static_range(over[0] * over[1]):
        line, column = y // stride[0] - back // over[1], x // stride[1] - back % over[1]
        top, left = y - line * stride[0], x - column * stride[1]
        inside = (line >= 0) & (column >= 0) & (line < out_size[0]) & (column < out_size[1])
        inside = within & (inside & (top < kernel[0]) & (left < kernel[1]))[:, None]
        window = ((image * out_size[0] + line) * out_size[1] + column)[:, None] * channels + channel[None, :]
        chosen = tl.load(codes + window, mask=inside, other=OFF) == (top * kernel[1] + left)[:, None]
        value = tl.load(gradient + window, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside & chosen, value, 0.0)
    tl.store(out + place[:, None] * channels + channel[None, :], total, mask=within)


def pool(images: Tensor, kernel: Pair, stride: Pair, padding: Pair, relu: bool) -> tuple[Tensor, Tensor]:
    """The largest number of each window of [images, channels, ...], and its place there; channels last in memory.

    With `relu` at least zero, and no place where it is not above.
    """
    count, channels, height, width = images.shape
    out_height, out_width = (
        (length + 2 * padding[k] - kernel[k]) // stride[k] + 1 for k, length in enumerate((height, width))
    )
    out = images.new_empty(count, out_height, out_width, channels)
    codes = torch.empty_like(out, dtype=torch.uint8)
    grid, blocks = _places(count * out_height * out_width, channels)
    _pool[grid](
        images, out, codes, count * out_height * out_width, *images.stride(), (height, width), (out_height, out_width),
        channels, kernel, stride, padding, relu, *blocks, max(_span(images), out.numel()) >= MOST, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2), codes.permute(0, 3, 1, 2)


def unpool(gradient: Tensor, codes: Tensor, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient of the images, given that of the largest numbers and their places."""
    count, channels, out_height, out_width = gradient.shape
    out = gradient.new_empty(count, *size, channels)
    over = triton.cdiv(kernel[0], stride[0]), triton.cdiv(kernel[1], stride[1])  # windows above each other
    grid, blocks = _places(count * size[0] * size[1], channels)
    _unpool[grid](
        gradient.contiguous(memory_format=torch.channels_last), codes.contiguous(memory_format=torch.channels_last),
        out, count * size[0] * size[1], size, (out_height, out_width), channels, kernel, stride, padding, over,
        *blocks, max(out.numel(), gradient.numel()) >= MOST, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _places(places: int, channels: int) -> tuple[Pair, Pair]:
    """How many programs go over places and channels, and how many of these each has."""
    block_channels = min(64, triton.next_power_of_2(channels))
    block_places = 2048 // block_channels
    return (triton.cdiv(places, block_places), triton.cdiv(channels, block_channels)), (block_places, block_channels)


def _span(tensor: Tensor) -> int:
    """How far apart in memory its first and last number are: in a view farther than it has numbers."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _power(number: int, most: int) -> int:
    """The next power of two, at least 16, as tensor cores want it."""
    return max(16, min(most, triton.next_power_of_2(number)))


def _precision() -> str:
    """As torch's own convolutions round: to TF32 unless told otherwise."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
