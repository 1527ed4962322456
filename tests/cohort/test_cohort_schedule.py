"""Batches: every sample once an epoch, and never another client's business."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.cohort.local import LocalTraining
from tailorfl.cohort.schedule import mini_batches
from tailorfl.data import Augmentation

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=5).map(lambda counts: sorted(counts, reverse=True))


def streams(counts: list[int]) -> list[tuple[int, str, int, int]]:
    return [(0, "train", 1, client) for client in range(len(counts))]


@given(counts=COUNTS, batch_size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_every_epoch_has_every_sample_once_and_uses_the_short_batch(counts, batch_size, epochs):
    schedule = mini_batches(counts, batch_size, epochs, None, streams(counts), None)
    for client, count in enumerate(counts):
        each = -(-count // batch_size)
        assert schedule.steps[client] == epochs * each
        mine = schedule.positions[:, client]
        assert (mine[epochs * each :] == -1).all()
        for epoch in range(epochs):
            seen = mine[epoch * each : (epoch + 1) * each]
            assert sorted(seen[seen >= 0].tolist()) == list(range(count))


@given(counts=COUNTS, epochs=st.integers(1, 500))
def test_full_batches_are_laid_out_once_however_often_they_are_taken(counts, epochs):
    for how in ((epochs, None), (None, epochs)):
        schedule = mini_batches(counts, 0, *how, streams(counts), None)
        assert schedule.steps.tolist() == [epochs] * len(counts)
        assert schedule.positions.shape == (1, len(counts), counts[0])
        for client, count in enumerate(counts):
            assert schedule.positions[0, client].tolist() == [*range(count), *[-1] * (counts[0] - count)]


@given(counts=COUNTS, steps=st.integers(1, 20), batch_size=st.integers(1, 12))
def test_a_number_of_steps_is_kept_to(counts, steps, batch_size):
    schedule = mini_batches(counts, batch_size, None, steps, streams(counts), None)
    assert schedule.steps.tolist() == [steps] * len(counts)
    assert ((schedule.positions >= 0).any(2)).all()


@given(counts=COUNTS, batch_size=st.integers(0, 12))
def test_what_a_client_draws_does_not_depend_on_the_cohort(counts, batch_size):
    augmentation = Augmentation.parse("flip,crop2,rotate")
    together = mini_batches(counts, batch_size, 2, None, streams(counts), augmentation)
    for client, count in enumerate(counts):
        alone = mini_batches([count], batch_size, 2, None, [streams(counts)[client]], augmentation)
        mine = together.positions[: len(alone.positions), client]
        width = alone.positions.shape[2]
        assert torch.equal(mine[:, :width], alone.positions[:, 0])
        real = alone.positions[:, 0] >= 0
        for name, numbers in alone.draws.items():
            assert torch.equal(together.draws[name][: len(numbers), client, :width][real], numbers[:, 0][real])


def test_streams_give_other_orders_to_other_clients_rounds_and_purposes():
    orders = {
        tuple(mini_batches([20], 10, 1, None, [stream], None).positions.flatten().tolist())
        for stream in [
            (0, "train", 1, 1),
            (1, "train", 1, 1),
            (0, "finetune", 1, 1),
            (0, "train", 2, 1),
            (0, "train", 1, 2),
        ]
    }
    assert len(orders) == 5


def test_learning_rates_over_the_rounds():
    cosine = LocalTraining(lr=0.2, lr_schedule="cosine")
    assert cosine.rate(1, 10) == pytest.approx(0.2)
    assert cosine.rate(6, 10) == pytest.approx(0.1)
    assert cosine.rate(10, 10) == pytest.approx(0.1 * (1 + np.cos(0.9 * np.pi)))
    step = LocalTraining(lr=1.0, lr_schedule="step", lr_milestones=(3, 5), lr_warmup=2)
    assert [round(step.rate(n, 6), 6) for n in range(1, 7)] == [0.5, 1.0, 1.0, 0.1, 0.1, 0.01]
    assert LocalTraining(lr=0.3).rate(7, 9) == 0.3
