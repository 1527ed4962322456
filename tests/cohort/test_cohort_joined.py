"""Trainings joined to one: every client learns what it learns in its own run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_cohorts import close, make_cohort
from torch import Tensor

from tailorfl.cohort import Cohort, Engine
from tailorfl.cohort import engine as engines
from tailorfl.cohort.joined import Joined, form
from tailorfl.cohort.objective import Batch, Client, cross_entropy
from tailorfl.cohort.training import Training
from tailorfl.data import Augmentation

COUNTS = [23, 12, 12, 7, 1]  # of both federations; each run has some of the clients
RUNS = ((1, 3), (0, 2, 4))


@dataclass(frozen=True)
class Drawn:
    """A loss that draws a client towards what is common to its run, as strongly as it wants for itself."""

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        apart = sum(((client.values[name] - client.common[name]) ** 2).sum() for name in client.common)
        return cross_entropy(client, batch) + client.own["pull"] * apart


class Listening(Engine):
    """Keeps what it should train, and trains it only then."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), "stacked")
        self.heard: list[Training] = []
        self.deaf = False

    def run(self, training: Training) -> None:
        if self.deaf:
            super().run(training)
        else:
            self.heard.append(training)


def fit_plainly(cohort: Cohort) -> Tensor:
    return cohort.fit()


def fit_weighted(cohort: Cohort) -> Tensor:
    weights = torch.linspace(0.5, 1.5, max(COUNTS), dtype=torch.float64)
    return cohort.fit(weights=weights[: int(cohort.counts.max())].expand(len(cohort), -1))


def fit_drawn(cohort: Cohort) -> Tensor:
    common = {name: tensor.mean(0) for name, tensor in cohort.values.items()}
    pull = torch.linspace(0, 1, len(cohort), dtype=torch.float64)
    return cohort.fit(Drawn(), own={"pull": pull}, common=common)


def fit_head(cohort: Cohort) -> Tensor:
    features = cohort.features()
    return cohort.head(features).fit(inputs=features, batch_size=0, steps=7)


def fit_some(cohort: Cohort) -> Tensor:
    return cohort.fit(only=torch.arange(int(cohort.counts.max())).expand(len(cohort), -1) % 2 == 0, steps=5)


def parts(engine: Engine, run: int, **options: Any) -> Cohort:
    cohort = make_cohort(COUNTS, "mlp", clients=RUNS[run], engine=engine, batch_size=5, local_epochs=2, **options)
    cohort.seed = run  # runs draw batches of their own
    return cohort


FITS = [fit_plainly, fit_weighted, fit_drawn, fit_head, fit_some]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("augment", ["flip,crop2", "flip,crop2,once"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"optimizer": "adam"}, {"own_classes": True}])
def test_clients_of_two_runs_learn_in_one_stack_what_they_learn_in_their_own(
    fit: Callable[[Cohort], Tensor], augment: str, options: dict[str, Any]
) -> None:
    if fit is not fit_head:
        options = options | {"augmentation": Augmentation.parse(augment)}
    engine = Listening()
    engine.deaf = True
    apart = [parts(engine, run, **options) for run in (0, 1)]
    wanted = [fit(cohort) for cohort in apart]
    engine.deaf = False
    together = [parts(engine, run, **options) for run in (0, 1)]
    for cohort in together:
        fit(cohort)
    one, other = engine.heard
    assert form(one) == form(other)
    joined = Joined.of([one, other], one.network, one.samples.data)
    steps = joined.whole.schedule.steps.tolist()
    assert steps == sorted(steps, reverse=True)
    assert len(steps) == 5
    engine.deaf = True
    engine.run(joined.whole)
    joined.hand_back()
    for cohort, alone, training, loss in zip(together, apart, (one, other), wanted, strict=True):
        assert close(cohort.values, alone.values)
        taken = training.schedule.steps.clamp(min=1)
        torch.testing.assert_close(training.loss / taken, loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("counts", "epochs", "sizes"),  # three clients of one run, the others of another; samples of the parts in a step
    [
        ([60, 9, 5, 58, 40, 7, 1], (2, 2), [60, 9]),
        ([30, 9, 5, 60, 7, 1], (1, 3), [60, 30]),  # who takes fewer steps has more samples than some before it
        ([60, 9, 5, 58, 40, 7, 1], (3, 1), [60]),
    ],
)
@pytest.mark.parametrize("batch_size", [0, 64])
def test_a_joined_stack_that_is_trained_in_parts_leaves_no_sample_out(
    batch_size: int, counts: list[int], epochs: tuple[int, int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (0, 1, 2), tuple(range(3, len(counts)))

    def cohorts(engines: list[Engine]) -> list[Cohort]:
        return [
            make_cohort(counts, "mlp", clients=run, engine=engine, batch_size=batch_size, local_epochs=passes)
            for run, passes, engine in zip(runs, epochs, engines, strict=True)
        ]

    apart = cohorts([Engine(torch.device("cpu"), "stacked") for _ in runs])
    wanted = [cohort.fit() for cohort in apart]
    engine = Listening()
    together = cohorts([engine, engine])
    for cohort in together:
        cohort.fit()
    joined = Joined.of(engine.heard, engine.heard[0].network, engine.heard[0].samples.data)
    monkeypatch.setattr(engines, "_CPU_SPLIT_BYTES", 0)
    assert [part.schedule.positions.shape[2] for part in joined.whole.parts(1)] == sizes
    engine.deaf = True
    engine.run(joined.whole)
    joined.hand_back()
    for cohort, alone, training, loss in zip(together, apart, engine.heard, wanted, strict=True):
        assert close(cohort.values, alone.values)
        torch.testing.assert_close(training.loss / training.schedule.steps, loss, rtol=0, atol=1e-10)


def test_a_client_that_diverges_leaves_those_of_other_runs_as_they_are() -> None:
    alone, engine = make_cohort([9, 5], "mlp", mode="stacked", batch_size=4), Listening()
    alone.fit()
    together = [make_cohort([9, 5], "mlp", engine=engine, batch_size=4) for _ in range(2)]
    for tensor in together[0].values.values():
        tensor[0] = torch.nan
    for cohort in together:
        cohort.fit()
    joined = Joined.of(engine.heard, engine.heard[0].network, engine.heard[0].samples.data)
    engine.deaf = True
    engine.run(joined.whole)
    joined.hand_back()
    assert close(together[1].values, alone.values)
    assert close({name: tensor[1] for name, tensor in together[0].values.items()},
                 {name: tensor[1] for name, tensor in alone.values.items()})  # fmt: skip
    assert all(tensor[0].isnan().all() for tensor in together[0].values.values())


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.5}, {"optimizer": "adam"}, {"weight_decay": 0.1}, {"own_classes": True}, {"batch_size": 0}],
)
def test_trainings_of_another_form_are_not_joined(options: dict[str, Any]) -> None:
    engine = Listening()
    for more in ({}, options):
        make_cohort(COUNTS, "mlp", engine=engine, **{"batch_size": 5, **more}).fit()
    one, other = engine.heard
    assert form(one) != form(other)
