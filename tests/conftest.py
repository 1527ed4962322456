"""What holds for all tests."""

import os

import pytest
import torch
from hypothesis import settings

# The kernels for GPUs then run in Triton's interpreter; it is asked when Triton is imported, by whatever test.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests run side by side, a process a core. With more threads than cores, each small step waits for its threads.
torch.set_num_threads(1)

# How long an example takes says nothing: the machine may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever a test before this one has set."""
    torch.set_num_threads(1)
