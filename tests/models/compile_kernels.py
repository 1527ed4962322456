"""Compile the kernels for a GPU where there is none: launches that end before anything would run."""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tailorfl.models import kernels


class Absent:
    """What Triton asks of a device before it compiles for it."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def launch_all() -> None:
    """Every kernel, in each of the ways that its constants choose between."""
    for tf32, channels, bias, kind in (
        (True, 3, True, torch.float32),
        (True, 32, False, torch.float32),
        (False, 3, False, torch.float32),
        (False, 32, True, torch.float32),
        (True, 3, False, torch.bfloat16),
        (True, 14, True, torch.bfloat16),  # a filter of 126 numbers and a bias
        (True, 64, True, torch.bfloat16),
    ):
        torch.backends.cudnn.allow_tf32 = tf32
        images, filters = torch.zeros(2, 2, channels, 9, 8, dtype=kind), torch.zeros(2, 20, channels, 3, 3, dtype=kind)
        out = kernels.convolve(images, filters, torch.zeros(2, 20, dtype=kind) if bias else None, (1, 0))
        kernels.correlate(images, out, (3, 3), (1, 0), bias)
    for relu, padding, kind in ((True, (0, 0), torch.float32), (False, (1, 1), torch.bfloat16)):
        images = torch.zeros(2, 4, 9, 9, dtype=kind)
        largest, places = kernels.pool(images, (3, 3), (2, 2), padding, relu)
        kernels.unpool(largest, places, (9, 9), (3, 3), (2, 2), padding)


if __name__ == "__main__":
    driver.set_active(Absent(int(sys.argv[1])))
    compiled, run = set[str](), JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        compiled.add(self.__name__)

    JITFunction.run = compile_only
    launch_all()
    print(*sorted(compiled))
