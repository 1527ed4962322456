"""Federated data: whose rows are for what, and how they are kept."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tailorfl.data import (
    PartitionOptions,
    Ragged,
    Source,
    SourceOptions,
    assemble,
    federate,
    load_partition,
    load_source,
    save_partition,
)
from tailorfl.data.holdout import apportion
from tailorfl.errors import UserError
from tailorfl.seeding import generator


def images(train: int = 600, test: int = 0, classes: int = 5, seed: int = 0) -> Source:
    rng = generator(seed, "images")
    pixels = rng.integers(0, 256, (train + test, 1, 2, 2)).astype(np.uint8)
    labels = np.arange(train + test) % classes
    return Source(
        "made", "image", torch.from_numpy(pixels), torch.from_numpy(labels), train, tuple(map(str, range(classes)))
    )


def test_ragged_lists_keep_each_clients_rows() -> None:
    lists = Ragged.from_lists([np.array([4, 2]), np.array([], int), np.array([7])])
    assert [lists.of(client).tolist() for client in range(3)] == [[4, 2], [], [7]]
    assert lists.counts.tolist() == [2, 0, 1]
    assert lists.client.tolist() == [0, 0, 2]
    kept = lists.select(torch.tensor([False, True, True]))
    assert [kept.of(client).tolist() for client in range(3)] == [[2], [], [7]]


def test_largest_remainders_by_hand() -> None:
    weights = np.array([[5, 3, 2], [0, 7, 0], [0, 0, 0]])
    assert apportion(weights, np.array([4, 3, 0]), generator(0)).tolist() == [[2, 1, 1], [0, 3, 0], [0, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=3, max_size=3), st.floats(0, 1), st.integers(0, 5))
def test_apportioned_totals_are_exact_and_within_the_weights(weights: list[int], share: float, seed: int) -> None:
    row = np.array([weights])
    total = np.array([int(row.sum() * share)])
    parts = apportion(row, total, generator(seed))
    assert parts.sum() == total[0]
    assert (parts <= row).all()


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("partition", ["classes", "shards", "dirichlet", "round-robin", "iid"])
def test_training_validation_and_test_rows_are_disjoint(partition: str, validation: float) -> None:
    data = federate(images(), PartitionOptions(partition=partition, clients=8, validation_fraction=validation), 0)
    rows = torch.cat([data.train.index, data.validation.index, data.test.index])
    assert len(rows.unique()) == len(rows)
    assert data.train.counts.min() >= 1
    assert data.test.counts.min() >= 1
    assert (data.validation.counts.min() >= 1) == (validation > 0)


def test_a_split_of_own_rows_is_stratified() -> None:
    source = images()
    data = federate(
        source, PartitionOptions(partition="iid", clients=1, test_fraction=0.25, validation_fraction=0.1), 0
    )
    assert data.label_counts("test").tolist() == [[30] * 5]
    assert data.label_counts("validation").tolist() == [[9] * 5]
    assert data.label_counts("train").tolist() == [[81] * 5]


@pytest.mark.parametrize(("rows", "train", "test"), [(1, 1, 0), (2, 1, 1), (3, 2, 1), (10, 7, 3)])
def test_a_tiny_client_keeps_a_row_for_each_if_it_can(rows: int, train: int, test: int) -> None:
    data = federate(images(rows, classes=2), PartitionOptions(partition="iid", clients=1), 0)
    assert (int(data.train.counts), int(data.test.counts)) == (train, test)


def test_the_sources_own_test_set_is_used_in_each_clients_proportions() -> None:
    source = images(600, 100)
    data = federate(source, PartitionOptions(clients=10, classes_per_client=2), 0)
    assert data.train.counts.tolist() == [60] * 10
    assert data.test.counts.tolist() == [10] * 10
    assert torch.equal(data.label_counts("train"), data.label_counts("test") * 6)
    assert int(data.train.index.max()) < 600 <= int(data.test.index.min())
    # 100 test rows, 10 a client, classes dealt evenly: each is used just once
    assert len(data.test.index.unique()) == 100


def test_test_rows_are_used_evenly_and_never_twice_by_a_client() -> None:
    data = federate(images(600, 50), PartitionOptions(clients=12, test_samples_per_client=16), 0)
    assert data.test.counts.tolist() == [16] * 12
    for client in range(12):
        assert len(data.test.of(client).unique()) == 16
    for label in range(5):
        used = torch.bincount(data.test.index, minlength=650)[600:][data.targets[600:] == label]
        assert used.max() - used.min() <= 1


def test_a_class_that_runs_short_makes_the_test_set_smaller_but_not_lopsided() -> None:
    data = federate(images(600, 50), PartitionOptions(clients=5, test_samples_per_client=1000), 0)
    assert data.test.counts.tolist() == [20] * 5
    assert sorted(data.label_counts("test").unique().tolist()) == [0, 10]


def test_unequal_clients_have_test_sets_in_proportion_to_their_size() -> None:
    data = federate(images(6000, 600), PartitionOptions(partition="dirichlet", clients=10, alpha=0.3), 0)
    assert (data.test.counts - data.train.counts / 10).abs().max() <= 0.5


def test_validation_rows_do_not_change_the_test_set() -> None:
    plain = federate(images(600, 100), PartitionOptions(clients=10), 0)
    held = federate(images(600, 100), PartitionOptions(clients=10, validation_fraction=0.5), 0)
    assert torch.equal(plain.test.index, held.test.index)
    assert held.train.counts.tolist() == held.validation.counts.tolist() == [30] * 10


def test_natural_clients_are_tested_on_their_own_rows() -> None:
    source = load_source("synthetic", None, SourceOptions(clients=4))
    data = federate(source, PartitionOptions(partition="natural"), 0)
    assert data.names == ("0", "1", "2", "3")
    assert source.owner is not None
    for client in range(4):
        rows = torch.cat([data.train.of(client), data.test.of(client)])
        assert (source.owner[rows] == client).all()
        assert len(rows) == 100


def test_a_regression_is_federated_too() -> None:
    data = federate(load_source("synthetic-regression"), PartitionOptions(partition="natural"), 0)
    assert data.regression
    assert data.num_classes == 0
    assert data.label_counts().tolist() == [[150]] * 20
    batch = data.inputs[data.train.of(0)]
    assert data.decode(batch) is batch


def test_new_clients_are_chosen_by_the_seed() -> None:
    options = PartitionOptions(clients=10, new_clients=3)
    one, same, other = (federate(images(), options, seed).new_clients for seed in (0, 0, 1))
    assert one == same != other
    assert len(set(one)) == 3


def test_clients_that_join_late_are_chosen_by_the_seed_among_the_others() -> None:
    options = PartitionOptions(clients=10, new_clients=3, joining_clients=4)
    one, same, other = (federate(images(), options, seed) for seed in (0, 0, 1))
    assert one.joining_clients == same.joining_clients != other.joining_clients
    assert len(set(one.joining_clients) - set(one.new_clients)) == 4
    assert one.new_clients == federate(images(), PartitionOptions(clients=10, new_clients=3), 0).new_clients


def test_equal_seeds_give_equal_federations() -> None:
    options = PartitionOptions(partition="dirichlet", clients=6, validation_fraction=0.2)
    one, same, other = (federate(images(), options, seed) for seed in (3, 3, 4))
    assert all(torch.equal(one.rows(s).index, same.rows(s).index) for s in ("train", "validation", "test"))
    assert not torch.equal(one.train.index, other.train.index)


def test_images_are_normalized_by_the_training_rows() -> None:
    source = images(400, 100)
    data = federate(source, PartitionOptions(clients=4), 0)
    decoded = data.decode(source.inputs[:400])
    assert decoded.dtype == torch.float32
    assert decoded.mean().abs() < 1e-5
    assert (decoded.std(correction=0) - 1).abs() < 1e-4
    # any leading dimensions
    assert torch.equal(data.decode(source.inputs[:6].view(2, 3, 1, 2, 2)), decoded[:6].view(2, 3, 1, 2, 2))


def test_pixels_may_stay_between_0_and_1() -> None:
    source = images(40)
    data = federate(source, PartitionOptions(clients=2), 0)
    assert torch.allclose(data.in_unit_pixels().decode(source.inputs), source.inputs / 255, atol=1e-7)
    with pytest.raises(UserError, match="pixels=unit: synthetic-regression has no images; allowed: standard"):
        federate(load_source("synthetic-regression"), PartitionOptions(partition="natural"), 0).in_unit_pixels()


def test_a_constant_channel_is_only_centred() -> None:
    source = images(40)
    flat = Source("flat", "image", torch.full_like(source.inputs, 51), source.targets, 40, source.classes)
    data = federate(flat, PartitionOptions(clients=2), 0)
    assert data.decode(flat.inputs).abs().max() < 1e-6


def test_moving_to_a_device_leaves_the_index_lists() -> None:
    data = federate(images(), PartitionOptions(clients=4), 0).to("meta")
    assert data.inputs.device.type == data.targets.device.type == "meta"
    assert data.mean is not None
    assert data.mean.device.type == "meta"
    assert data.train.index.device.type == "cpu"
    assert data.input_shape == (1, 2, 2)


def test_a_saved_partition_rebuilds_the_same_federation(tmp_path: Path) -> None:
    source = images(600, 100)
    options = PartitionOptions(clients=7, validation_fraction=0.1, new_clients=2, joining_clients=3)
    data = federate(source, options, 0)
    save_partition(data, tmp_path / "run/partition.safetensors")
    again = assemble(source, load_partition(tmp_path / "run/partition.safetensors"))
    assert again.names == data.names
    assert (again.new_clients, again.joining_clients) == (data.new_clients, data.joining_clients)
    assert len(again.joining_clients) == 3
    for split in ("train", "validation", "test"):
        assert torch.equal(again.rows(split).index, data.rows(split).index)
        assert torch.equal(again.rows(split).offsets, data.rows(split).offsets)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["partition.safetensors"]


def test_a_partition_from_before_clients_could_join_late_is_read(tmp_path: Path) -> None:
    save_partition(federate(images(), PartitionOptions(clients=7, new_clients=2), 0), tmp_path / "new")
    with safe_open(tmp_path / "new", framework="pt") as file:
        tensors, facts = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    del tensors["joining_clients"]
    save_file(tensors, tmp_path / "old", facts)
    old = load_partition(tmp_path / "old")
    assert (len(old.new_clients), old.joining_clients) == (2, ())


def test_a_partition_of_another_source_is_refused(tmp_path: Path) -> None:
    save_partition(federate(images(), PartitionOptions(clients=7), 0), tmp_path / "p")
    with pytest.raises(UserError, match="the partition is of data=made with 600 rows, not of data=digits with 1797"):
        assemble(load_source("digits"), load_partition(tmp_path / "p"))


def test_files_that_are_no_partitions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_partition(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        load_partition(tmp_path / "text")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"test_fraction": 0}, "test_fraction=0, allowed: above 0 and below 1"),
        ({"test_fraction": 1}, "test_fraction=1, allowed"),
        ({"validation_fraction": -0.5}, "validation_fraction=-0.5, allowed: 0 or more and below 1"),
        ({"test_samples_per_client": 0}, "test_samples_per_client=0, allowed: at least 1"),
        ({"new_clients": 20}, "new_clients=20 of 20 clients, allowed: 0 to 19"),
        ({"new_clients": -1}, "new_clients=-1 of 20 clients"),
    ],
)
def test_bad_splits_are_refused(options: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        federate(images(), PartitionOptions(**options), 0)


def test_an_unknown_partition_option_is_refused() -> None:
    with pytest.raises(ValueError, match="client_count"):
        PartitionOptions(client_count=3)


@pytest.mark.parametrize("partition", ["classes", "shards", "dirichlet", "round-robin", "iid"])
def test_ten_thousand_clients_are_ready_in_seconds(partition: str) -> None:
    source = images(60_000, 10_000, classes=10)
    start = time.perf_counter()
    options = PartitionOptions(partition=partition, clients=10_000, min_samples=2, validation_fraction=0.2)
    data = federate(source, options, 0)
    assert time.perf_counter() - start < 10
    assert data.test.counts.min() >= 1


def test_the_real_cifar10_is_normalized_with_its_published_statistics() -> None:
    if not os.environ.get("TAILOR_DATA"):
        pytest.skip("TAILOR_DATA does not name a folder with the real data")
    data = federate(load_source("cifar10"), PartitionOptions(clients=100), 0)
    assert data.mean is not None
    assert data.std is not None
    assert torch.allclose(data.mean, torch.tensor([0.49139968, 0.48215841, 0.44653091]), atol=1e-6)
    assert torch.allclose(data.std, torch.tensor([0.24703223, 0.24348513, 0.26158784]), atol=1e-6)
    assert data.inputs.dtype == torch.uint8
    assert data.train.counts.tolist() == [500] * 100
    assert data.test.counts.tolist() == [100] * 100
