"""What clients keep between rounds."""

import torch

from tailorfl.federation.store import ClientStore

CPU = torch.device("cpu")


def test_a_client_that_was_never_seen_has_the_default() -> None:
    store = ClientStore(CPU)
    store.keep([3], [0], {"w": torch.tensor([[1.0, 2.0]])})
    stack = store.stack([5, 3], "w", torch.tensor([8.0, 9.0]), CPU)
    assert stack.tolist() == [[8.0, 9.0], [1.0, 2.0]]
    assert 5 not in store.entries


def test_the_defaults_of_newcomers_are_copies() -> None:
    default = torch.tensor([8.0, 9.0])
    ClientStore(CPU).stack([5, 6], "w", default, CPU).zero_()
    assert default.tolist() == [8.0, 9.0]


def test_only_the_rows_that_are_kept_are_kept() -> None:
    store = ClientStore(CPU)
    store.keep([3, 4, 6], [0, 2], {"w": torch.tensor([[1.0], [2.0], [3.0]])})
    assert {client: entry["w"].tolist() for client, entry in store.entries.items()} == {3: [1.0], 6: [3.0]}


def test_a_kept_row_is_a_copy_and_not_a_view_of_the_stack() -> None:
    store, stack = ClientStore(CPU), torch.arange(1000.0).reshape(2, 500)
    store.keep([0, 1], [0, 1], {"w": stack})
    stack.zero_()
    kept = store.entries[1]["w"]
    assert kept[0] == 500.0
    assert kept.untyped_storage().nbytes() == 500 * 4


def test_a_stack_is_a_copy_of_what_is_kept() -> None:
    store = ClientStore(CPU)
    store.keep([0], [0], {"w": torch.ones(1, 3)})
    store.stack([0], "w", torch.zeros(3), CPU).zero_()
    assert store.entries[0]["w"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_of_different_lengths_are_padded_with_zeros() -> None:
    """Clients that keep a number a sample have as many as samples, one that was never seen has the default's."""
    store = ClientStore(CPU)
    store.keep([3], [0], {"weights": torch.tensor([[0.5, 2.0, 0.5]], dtype=torch.float64)})
    store.keep([4], [0], {"weights": torch.tensor([[1.5, 0.5]], dtype=torch.float64)})
    stack = store.stack([4, 9, 3], "weights", torch.ones(1, dtype=torch.float64), CPU)
    assert stack.tolist() == [[1.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 2.0, 0.5]]
    assert stack.dtype == torch.float64
    assert store.entries[4]["weights"].tolist() == [1.5, 0.5]


def test_a_default_that_is_longer_than_what_is_kept_pads_it() -> None:
    store = ClientStore(CPU)
    store.keep([3], [0], {"rows": torch.tensor([[[1.0, 2.0]]])})
    stack = store.stack([3, 5], "rows", torch.tensor([[7.0, 8.0], [9.0, 9.0]]), CPU)
    assert stack.tolist() == [[[1.0, 2.0], [0.0, 0.0]], [[7.0, 8.0], [9.0, 9.0]]]


def test_a_padded_stack_is_a_copy_of_what_is_kept() -> None:
    store = ClientStore(CPU)
    store.keep([0], [0], {"w": torch.ones(1, 3)})
    store.keep([1], [0], {"w": torch.ones(1, 2)})
    store.stack([0, 1], "w", torch.zeros(1), CPU).zero_()
    assert [store.entries[client]["w"].tolist() for client in (0, 1)] == [[1.0, 1.0, 1.0], [1.0, 1.0]]


def test_a_client_has_the_same_numbers_beside_whomever_it_is_stacked() -> None:
    """What it is given back with padding from one stack is what it had, up to zeros at the end."""
    store = ClientStore(CPU)
    store.keep([0], [0], {"w": torch.tensor([[1.0, 2.0, 3.0, 4.0]])})
    store.keep([1], [0], {"w": torch.tensor([[5.0, 6.0]])})
    store.keep([0, 1], [0, 1], {"w": store.stack([0, 1], "w", torch.zeros(1), CPU)})
    assert store.stack([1], "w", torch.zeros(1), CPU)[0, :2].tolist() == [5.0, 6.0]
    assert store.stack([1], "w", torch.zeros(1), CPU)[0, 2:].eq(0).all()


def test_what_a_client_keeps_under_other_names_stays() -> None:
    store = ClientStore(CPU)
    store.keep([0], [0], {"a": torch.tensor([[1.0]])})
    store.keep([0], [0], {"b": torch.tensor([[2.0]])})
    assert {name: tensor.tolist() for name, tensor in store.entries[0].items()} == {"a": [1.0], "b": [2.0]}


def test_a_store_is_restored_from_its_flat_form() -> None:
    store, other = ClientStore(CPU), ClientStore(CPU)
    store.keep([12, 3], [0, 1], {"head/weight": torch.randn(2, 4), "memory/seen": torch.tensor([[1], [2]])})
    other.keep([99], [0], {"old": torch.zeros(1, 1)})
    other.restore(store.flat())
    assert set(store.flat()) == {"3/head/weight", "3/memory/seen", "12/head/weight", "12/memory/seen"}
    assert other.flat().keys() == store.flat().keys()
    assert all(torch.equal(tensor, other.flat()[key]) for key, tensor in store.flat().items())
