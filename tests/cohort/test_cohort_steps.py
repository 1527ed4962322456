"""local_steps: every client takes as many steps in a round, however much data it has."""

import pytest
import torch
from small_cohorts import make_cohort

from tailorfl.cohort.schedule import Schedule
from tailorfl.errors import UserError
from tailorfl.study.config import configure

UNEQUAL = [23, 12, 7, 1]


def trained(counts: list[int], **options: object) -> dict[str, torch.Tensor]:
    cohort = make_cohort(counts, "mlp", batch_size=5, lr=0.1, **options)
    cohort.fit()
    return cohort.values


def schedule_of(monkeypatch: pytest.MonkeyPatch, counts: list[int], **options: object) -> Schedule:
    """The batches that a fit takes."""
    cohort = make_cohort(counts, "linear", **options)
    seen: list[Schedule] = []
    monkeypatch.setattr(cohort.engine, "run", lambda training: seen.append(training.schedule))
    cohort.fit()
    return seen[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_steps_of_an_epoch_are_the_epoch() -> None:
    assert same(trained([20, 20], local_steps=4), trained([20, 20], local_epochs=1))
    assert same(trained([18, 17], local_steps=8), trained([18, 17], local_epochs=2)), "the short batch is a step"
    assert not same(trained([20, 20], local_steps=3), trained([20, 20], local_epochs=1))


def test_every_client_takes_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of(monkeypatch, UNEQUAL, batch_size=5, local_steps=6)
    assert schedule.steps.tolist() == [6, 6, 6, 6]
    assert schedule_of(monkeypatch, UNEQUAL, batch_size=5, local_epochs=2).steps.tolist() == [10, 6, 4, 2]
    assert schedule_of(monkeypatch, UNEQUAL, batch_size=0, local_steps=3).steps.tolist() == [3, 3, 3, 3]


def test_steps_beyond_an_epoch_go_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = schedule_of(monkeypatch, [7], batch_size=5, local_steps=5).positions[:, 0]
    epochs = [batches[0:2], batches[2:4]]
    assert [sorted(one[one >= 0].tolist()) for one in epochs] == [list(range(7))] * 2
    assert epochs[0].tolist() != epochs[1].tolist(), "shuffled anew"
    assert (batches[4] >= 0).sum() == 5


def test_fits_that_say_how_long_are_not_affected() -> None:
    for how in ({"epochs": 2}, {"steps": 3}):
        one, other = (make_cohort(UNEQUAL, "mlp", batch_size=5, **more) for more in ({}, {"local_steps": 1}))
        one.fit(**how)
        other.fit(**how)
        assert same(one.values, other.values)


@pytest.mark.parametrize("value", [0, -1, 2.5, "many"])
def test_what_is_no_number_of_steps_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=f"local_steps={value}: "):
        configure("fedavg", {"local_steps": value})
