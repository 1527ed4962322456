"""What holds for all tests."""

import pytest
import torch

# Tests run side by side, a process a core. With more threads than cores, each small step waits for its threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever a test before this one has set."""
    torch.set_num_threads(1)
