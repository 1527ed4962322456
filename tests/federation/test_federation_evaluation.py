"""Scores of clients, by hand."""

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch

from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.scoring import Scores
from tailorfl.exchange.messages import Message
from tailorfl.federation.evaluation import ClientScores
from tailorfl.methods.fedavg import FedAvg
from tailorfl.study.build import Built, build
from tailorfl.study.config import configure


def scores(samples: list[int], correct: list[int]) -> ClientScores:
    loss = np.array(samples, dtype=float) / 2
    return ClientScores(tuple(range(len(samples))), np.array(samples), np.array(correct), loss)


def test_the_accuracy_is_weighted_by_test_samples() -> None:
    found = scores([10, 30], [10, 15])
    assert found.accuracy == 25 / 40
    assert found.mean_loss == 0.5


def test_the_spread_is_over_clients_and_not_over_samples() -> None:
    assert scores([10, 30], [10, 15]).spread == 0.25  # 1.0 and 0.5


@pytest.mark.parametrize(("clients", "worst"), [(5, 0.0), (19, 0.0), (20, 0.005), (30, 0.01), (100, 0.045)])
def test_the_worst_decile_is_a_tenth_of_the_clients_and_at_least_one(clients: int, worst: float) -> None:
    order = np.random.default_rng(0).permutation(clients)
    found = scores([100] * clients, list(map(int, order)))
    assert found.worst_decile == pytest.approx(worst)


def test_clients_without_test_samples_do_not_count() -> None:
    found = scores([0, 4, 4], [0, 1, 3])
    assert np.isnan(found.accuracies[0])
    assert (found.accuracy, found.spread, found.worst_decile) == (0.5, 0.25, 0.25)


def test_nothing_is_reported_where_nobody_has_test_samples() -> None:
    found = scores([0, 0], [0, 0])
    assert (found.accuracy, found.spread, found.worst_decile, found.mean_loss) == (None, None, None, None)


def test_parts_in_any_order_are_gathered_by_client() -> None:
    def part(*numbers: int) -> Scores:
        return Scores(torch.tensor(numbers), torch.tensor(numbers) - 1, torch.tensor(numbers).double())

    found = ClientScores.gather([((7, 2), part(70, 20)), ((5,), part(50))])
    assert found.clients == (2, 5, 7)
    assert (found.samples.tolist(), found.correct.tolist()) == ([20, 50, 70], [19, 49, 69])
    assert found.of({7, 2}).samples.tolist() == [20, 70]


def digits(method: str = "fedavg", **settings: object) -> Built:
    small = {"clients": 6, "samples_per_client": 30, "network_options": {"hidden": [8]}, "partition": "dirichlet"}
    return build(configure(method, {**small, **settings}))


@pytest.mark.parametrize("split", ["train", "test"])
def test_one_model_for_all_scores_as_it_does_client_by_client(split) -> None:
    built = digits()
    everyone = range(built.data.clients)
    message = built.config.method.broadcast(built.server)
    apart = built.federation.evaluate(1, everyone, message, [split]).scores[split]
    together = built.federation.evaluate_global(built.server.values, everyone, split)
    assert together.clients == apart.clients
    assert together.samples.tolist() == apart.samples.tolist()
    assert together.correct.tolist() == apart.correct.tolist()
    np.testing.assert_allclose(together.loss, apart.loss, rtol=1e-5)


def test_the_loss_of_a_model_is_the_summed_cross_entropy() -> None:
    built = digits()
    rows = built.data.test.of(2)
    outputs = built.network.forward(built.server.values, built.data.decode(built.data.inputs[rows]), None, train=False)
    loss = torch.nn.functional.cross_entropy(outputs, built.data.targets[rows], reduction="sum")
    found = built.federation.evaluate_global(built.server.values, [2], "test")
    assert found.loss[0] == pytest.approx(loss.item(), rel=1e-5)
    assert found.correct[0] == (outputs.argmax(1) == built.data.targets[rows]).sum()


class Telling(FedAvg):
    """FedAvg that has something to report of each client, whose models are all the same."""

    def measures(self, clients: Cohort, received: Message) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(clients.clients)}


class Doubling(FedAvg):
    """FedAvg with a further model."""

    def others(self, clients: Cohort) -> dict[str, Callable[[Batch], torch.Tensor]]:
        return {"second": clients.predict}


def test_what_a_method_reports_of_clients_is_asked_for_where_one_model_serves_all() -> None:
    plain, telling, doubling = (digits(f"{__name__}:{name}", rounds=1) for name in ("FedAvg", "Telling", "Doubling"))
    scores, told, doubled = (built.loop.round(1).evaluation for built in (plain, telling, doubling))
    assert (scores.others, scores.measures) == ({}, {})
    assert told.measures == {"number": {client: client for client in range(6)}}
    assert doubled.others["second"].correct.tolist() == doubled.personalized.correct.tolist()
    assert told.personalized.correct.tolist() == scores.personalized.correct.tolist()


def test_clients_are_looked_at_beside_others_of_like_size_and_score_as_they_do_alone() -> None:
    found = []
    for stack_size in (None, 1):
        built = digits("fedper", clients=12, alpha=0.1, samples_per_client=None, min_samples=1, stack_size=stack_size)
        message, everyone = built.config.method.broadcast(built.server), range(built.data.clients)
        sizes = [cohort.counts.tolist() for cohort in built.federation.served(1, everyone, message)]
        assert sorted(chain(*sizes)) == sorted(built.data.train.counts.tolist())
        assert all(max(counts) <= 4 * min(counts) for counts in sizes)
        found.append((len(sizes), built.federation.evaluate(1, everyone, message, ["test"]).scores["test"]))
    (parts, together), (_, alone) = found
    assert 1 < parts < 12
    assert together.correct.tolist() == alone.correct.tolist()
    np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-5)
