"""The round loop."""

import torch

from tailorfl.study.build import Built, build
from tailorfl.study.config import configure


def digits(method: str = "fedper", **settings: object) -> Built:
    small = {"clients": 5, "samples_per_client": 20, "network_options": {"hidden": [4]}, "local_epochs": 1, "rounds": 4}
    return build(configure(method, {**small, **settings}))


def test_a_round_without_clients_changes_nothing() -> None:
    built = digits(selection="binomial", clients_per_round=0.001)
    before = {name: tensor.clone() for name, tensor in built.server.values.items()}
    record = built.loop.round(1)
    assert (record.selected, record.answered, record.loss) == ([], [], None)
    assert (record.bytes_up, record.bytes_down) == (0, 0)
    assert all(torch.equal(tensor, built.server.values[name]) for name, tensor in before.items())


def test_the_loss_of_a_round_is_weighted_by_samples() -> None:
    built = digits("local", partition="dirichlet", alpha=0.3, samples_per_client=None, clients_per_round=5)
    counts = built.data.train.counts.double()
    [answers] = digits(
        "local", partition="dirichlet", alpha=0.3, samples_per_client=None, clients_per_round=5
    ).federation.train(1, range(5), built.config.method.broadcast(built.server))
    losses = dict(zip(answers.clients, answers.loss.double().tolist(), strict=True))
    expected = sum(counts[client].item() * loss for client, loss in losses.items()) / counts.sum().item()
    assert abs(built.loop.round(1).loss - expected) < 1e-6


def test_clients_are_evaluated_now_and_then_and_after_the_last_round() -> None:
    def evaluated(**settings: object) -> list[int]:
        return [record.number for record in digits(**settings, rounds=5).loop.run() if record.evaluation]

    assert evaluated(evaluate_every=2) == [2, 4, 5]
    assert evaluated(evaluate_every=0) == [5]
    assert evaluated(evaluate_every=2, evaluate_last=2) == [2, 4, 5]
    assert evaluated(evaluate_every=0, evaluate_last=3) == [3, 4, 5]


def test_validation_data_are_evaluated_where_there_are_some() -> None:
    record = digits(validation_fraction=0.2, evaluate_every=1).loop.round(1)
    assert record.evaluation.validation.samples.sum() > 0
    assert digits(evaluate_every=1).loop.round(1).evaluation.validation is None


def test_a_round_after_others_is_numbered_after_them() -> None:
    assert [record.number for record in digits().loop.run(done=2)] == [3, 4]


def test_time_is_counted_by_the_clock() -> None:
    built = digits(evaluate_every=1)
    ticks = iter(range(100))
    built.loop.clock = lambda: float(next(ticks))
    record = built.loop.round(1)
    assert (record.seconds, record.evaluation.seconds) == (1.0, 1.0)
