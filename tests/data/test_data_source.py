"""What a Source refuses."""

import pytest
import torch

from tailorfl.data import Source, SourceOptions, load_source
from tailorfl.errors import UserError

IMAGES, TARGETS = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])


def test_a_source_of_ones_own_tensors_is_accepted() -> None:
    source = Source("mine", "image", IMAGES, TARGETS, 3, ("a", "b"))
    assert source.test_size == 1
    assert not source.regression


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"targets": TARGETS[:3]}, "4 inputs need as many targets"),
        ({"owner": TARGETS[:3]}, "4 inputs need as many targets and owners"),
        ({"train_size": 5}, "train_size=5, allowed: 1 to 4"),
        ({"inputs": IMAGES.float()}, "image inputs are torch.float32 with 4 dimensions, allowed: torch.uint8 with 4"),
        ({"targets": TARGETS.float()}, "targets are torch.float32, allowed: torch.int64"),
        ({"targets": TARGETS + 1}, "target numbers are 1 to 2, allowed: 0 to 1"),
        ({"owner": TARGETS, "owners": ("x",)}, "owner numbers are 0 to 1, allowed: 0 to 0"),
    ],
)
def test_a_source_that_does_not_fit_together_is_refused_in_a_line(change: dict, line: str) -> None:
    good = {"name": "mine", "kind": "image", "inputs": IMAGES, "targets": TARGETS, "train_size": 4}
    with pytest.raises(UserError, match=line) as caught:
        Source(**(good | {"classes": ("a", "b")} | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["imagenet", "csv", "csv:", "mnist:x", ""])
def test_an_unknown_name_is_answered_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UserError, match=r"is not known; allowed: digits, .*csv:PATH") as caught:
        load_source(name)
    assert f"data={name} " in str(caught.value)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="sedd"):
        SourceOptions(sedd=1)
