"""Averages of clients' tensors, by hand."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.exchange.aggregation import average
from tailorfl.exchange.messages import Answers


def answers(samples: list[int], **tensors: list) -> Answers:
    stacks = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in tensors.items()}
    return Answers(tuple(range(len(samples))), torch.tensor(samples), stacks, torch.zeros(len(samples)))


def test_clients_count_by_their_samples() -> None:
    found = average([answers([1, 3], w=[[0.0, 4.0], [8.0, 0.0]])], {"w": torch.zeros(2, dtype=torch.float64)})
    assert found["w"].tolist() == [6.0, 1.0]


def test_clients_count_alike_in_a_uniform_average() -> None:
    values = {"w": torch.zeros(2, dtype=torch.float64)}
    assert average([answers([1, 3], w=[[0.0, 4.0], [8.0, 0.0]])], values, "uniform")["w"].tolist() == [4.0, 2.0]


def test_an_element_is_averaged_over_the_clients_that_hold_it() -> None:
    values = {"w": torch.full((3, 2), 9.0, dtype=torch.float64)}
    narrow = answers([1], w=[[[2.0]]])  # one row of one column
    wide = answers([3], w=[[[6.0, 1.0], [5.0, 7.0]]])
    found = average([narrow, wide], values)["w"]
    assert found.tolist() == [[5.0, 1.0], [5.0, 7.0], [9.0, 9.0]]


def test_a_tensor_that_some_clients_miss_is_averaged_over_the_others() -> None:
    values = {name: torch.tensor([7.0], dtype=torch.float64) for name in ("a", "b", "c")}
    found = average([answers([1], a=[[1.0]]), answers([1], a=[[3.0]], b=[[5.0]])], values)
    assert found["a"].tolist() == [2.0]
    assert found["b"].tolist() == [5.0]
    assert "c" not in found  # what nobody sent is not touched


@pytest.mark.parametrize("said", [[], [Answers((), torch.zeros(0), {"w": torch.zeros(0, 2)}, torch.zeros(0))]])
def test_values_are_kept_when_nobody_answers(said: list[Answers]) -> None:
    values = {"w": torch.tensor([1.0, 2.0])}
    assert {**values, **average(said, values)}["w"].tolist() == [1.0, 2.0]


def test_what_the_server_does_not_hold_is_not_averaged_silently() -> None:
    with pytest.raises(ValueError, match="clients sent 'head'"):
        average([answers([1], head=[[1.0]])], {"body": torch.zeros(1)})


def test_the_given_values_are_left_alone() -> None:
    values = {"w": torch.tensor([1.0], dtype=torch.float64)}
    average([answers([2], w=[[5.0]])], values)
    assert values["w"].tolist() == [1.0]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.floats(-9, 9), min_size=2, max_size=2)), min_size=1, max_size=8
    ),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    weighing=st.sampled_from(["samples", "uniform"]),
)
def test_answers_that_arrive_in_parts_average_like_answers_that_arrive_together(rows, cuts, weighing) -> None:
    samples, tensors = [row[0] for row in rows], [row[1] for row in rows]
    whole = answers(samples, w=tensors)
    bounds = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    parts = [whole.only(range(start, end)) for start, end in itertools.pairwise(bounds)]
    values = {"w": torch.zeros(2, dtype=torch.float64)}
    torch.testing.assert_close(average(parts, values, weighing)["w"], average([whole], values, weighing)["w"])


def test_a_part_of_the_answers_keeps_clients_and_rows_together() -> None:
    part = Answers((7, 3, 5), torch.tensor([1, 2, 3]), {"w": torch.tensor([[1.0], [2.0], [3.0]])}, torch.arange(3.0))
    part = part.only([2, 0])
    assert part.clients == (5, 7)
    assert (part.samples.tolist(), part.tensors["w"].tolist(), part.loss.tolist()) == ([3, 1], [[3.0], [1.0]], [2, 0])
