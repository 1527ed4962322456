"""Stacks of clients that differ in size: they are parted where they would be padding for the most part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_cohorts import close, make_cohort

from tailorfl.cohort import Engine, engine
from tailorfl.cohort.training import _splits
from tailorfl.data import Augmentation

COUNTS = [60, 59, 12, 11, 11, 9, 3, 0]


def computed(sizes, steps, splits):
    return sum(sizes[rows.start] * sum(steps[rows]) for rows in splits)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 300))
def test_parts_cover_all_clients_in_order_and_each_split_saves_a_quarter(clients, least):
    sizes, steps = (sorted(column, reverse=True) for column in zip(*clients, strict=True))
    splits = _splits(sizes, steps, least)
    assert [at for rows in splits for at in range(rows.start, rows.stop)] == list(range(len(sizes)))
    saved = computed(sizes, steps, [slice(0, len(sizes))]) - computed(sizes, steps, splits)
    assert saved >= least * (len(splits) - 1)
    for rows in splits:  # and none is left that would
        for middle in range(rows.start + 1, rows.stop):
            parted = [slice(rows.start, middle), slice(middle, rows.stop)]
            before, after = computed(sizes, steps, [rows]), computed(sizes, steps, parted)
            assert before - after < max(least, before / 4) or before == 0


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9))
def test_clients_of_one_size_stay_together(size, clients, steps):
    assert _splits([size] * clients, [steps] * clients, 1) == [slice(0, clients)]


def parted(cohort, monkeypatch, least=0, **settings):
    """Train in parts, and say of how many clients and samples in a step these are."""
    seen = []
    stacked = Engine._stacked

    def watched(self, training):
        seen.append((len(training.loss), training.schedule.positions.shape[2]))
        stacked(self, training)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_CPU_SPLIT_BYTES", engine._CPU_SPLIT_BYTES if least is None else least)
        patch.setattr(Engine, "_stacked", watched)
        losses = cohort.fit(**settings)
    return losses, seen


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0, "momentum": 0.9},
        {"batch_size": 0, "augmentation": Augmentation.parse("flip")},
        {"batch_size": 0, "augmentation": Augmentation.parse("flip,once")},
        {"batch_size": 0, "optimizer": "adam", "own_classes": True},
        {"batch_size": 64, "momentum": 0.9},
    ],
)
def test_parts_train_as_the_whole_stack_does(options, monkeypatch):
    options = {"network": "cnn", "mode": "stacked", "shape": (1, 16, 16), "lr": 0.01, "local_epochs": 3, **options}
    whole, apart = (make_cohort(COUNTS, **options) for _ in range(2))
    weights = torch.rand(len(COUNTS), max(COUNTS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses, seen = parted(apart, monkeypatch, weights=weights)
    assert torch.allclose(whole.fit(weights=weights), losses, atol=1e-9)
    assert close(whole.values, apart.values, 1e-8)
    assert seen == [(2, 60), (6, 12)]


def test_parts_of_cached_features_train_as_the_whole_stack_does(monkeypatch):
    whole, apart = (make_cohort(COUNTS, "mlp", "stacked", lr=0.05) for _ in range(2))
    losses = []
    for cohort in (whole, apart):
        features = cohort.features()
        settings = {"inputs": features, "steps": 12, "batch_size": 0}
        head = cohort.head(features)
        losses.append(head.fit(**settings) if cohort is whole else parted(head, monkeypatch, **settings)[0])
    assert torch.allclose(*losses, atol=1e-9)
    assert close(whole.values, apart.values)


@pytest.mark.parametrize(("batch_size", "least"), [(0, None), (4, 0)])
def test_a_stack_is_not_parted_for_little_nor_where_batches_are_small(batch_size, least, monkeypatch):
    cohort = make_cohort(COUNTS, "mlp", "stacked", batch_size=batch_size, local_epochs=1)
    _, seen = parted(cohort, monkeypatch, least)
    assert [clients for clients, _ in seen] == [len(COUNTS)]
