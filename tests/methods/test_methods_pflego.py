"""PFLEGO: exactness of its steps, its cached features, heads of a client's own classes, and its server."""

import importlib
import logging
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from method_runs import SMALL, differences, federation, run, state, whole_and_resumed
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.cohort import Engine
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.config import configure

EXACT = {
    "precision": "float64", "partition": "dirichlet", "alpha": 0.5, "samples_per_client": None, "clients": 4,
    "clients_per_round": 4, "tau": 1, "exact": True, "server_optimizer": "sgd", "server_lr": 0.2, "evaluate_every": 0,
}  # fmt: skip


def weights(built: Built) -> Values:
    """All that is trained, by name: the shared tensors, and the head of each client."""
    initial, store = built.network.initial(), built.federation.store
    personal = built.federation.method.personal(built.network)
    heads = {
        f"{client}/{name}": store.stack((client,), name, initial[name], torch.device("cpu"))[0]
        for client in built.federation.trainable
        for name in personal
    }
    return {name: tensor.clone() for name, tensor in built.server.values.items()} | heads


def largest_first(built: Built) -> tuple[int, ...]:
    return tuple(built.data.train.counts.argsort(descending=True).tolist())


def client_loss(built: Built, found: Values, client: int, own: bool = True) -> Tensor:
    """The mean cross-entropy of a client over its own classes (or over all), by plain autograd."""
    data, rows = built.data, built.data.train.of(client)
    values = {name.removeprefix(f"{client}/"): t for name, t in found.items() if "/" not in name}
    values |= {name.removeprefix(f"{client}/"): t for name, t in found.items() if name.startswith(f"{client}/")}
    outputs = built.network.forward(values, data.decode(data.inputs[rows]), None, train=True)
    targets = data.targets[rows]
    if own:  # a head of its own size: a row for each class of the client
        classes = targets.unique()
        outputs, targets = outputs[:, classes], torch.searchsorted(classes, targets)
    return F.cross_entropy(outputs, targets)


def pooled_gradient(built: Built, own: bool = True) -> Values:
    """Of the sum of alpha_i l_i over all parameters (eq. 1)."""
    found = {name: tensor.requires_grad_() for name, tensor in weights(built).items()}
    shares = built.data.train.counts.double() / built.data.train.counts.sum()
    losses = [client_loss(built, found, client, own) for client in range(len(shares))]
    total = (shares * torch.stack(losses)).sum()
    gradients = torch.autograd.grad(total, list(found.values()), materialize_grads=True)
    return dict(zip(found, gradients, strict=True))


def change(built: Built, cohort: Sequence[int]) -> Values:
    """What a round with these clients does to all weights."""
    before = weights(built)
    built.loop.select = lambda number: list(cohort)
    built.loop.round(1)
    return {name: tensor - before[name] for name, tensor in weights(built).items()}


def close(one: Values, other: Values, tolerance: float = 1e-10) -> bool:
    assert set(one) == set(other)
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


# Exactness.


@pytest.mark.parametrize("own", [True, False])
def test_rounds_of_everybody_are_steps_of_gradient_descent_on_the_pooled_loss(own: bool) -> None:
    built = federation("pflego", **EXACT, own_classes=own)
    assert len(set(built.data.train.counts.tolist())) > 1  # shares that differ
    for number in (1, 2, 3):
        gradient, before = pooled_gradient(built, own), weights(built)
        built.loop.round(number)
        expected = {name: before[name] - 0.2 * gradient[name] for name in before}
        assert close(weights(built), expected)
        assert not close(weights(built), before, 1e-4)


@pytest.mark.parametrize("selection", ["uniform", "binomial"])
def test_over_all_cohorts_the_expected_step_is_the_full_gradient(selection: str) -> None:
    settings = {**EXACT, "selection": selection, "clients_per_round": 0.5}
    gradient = pooled_gradient(federation("pflego", **settings))
    if selection == "uniform":
        chances = dict.fromkeys(combinations(range(4), 2), 1 / 6)
    else:
        chances = {tuple(c for c in range(4) if taken[c]): 1 / 16 for taken in product((0, 1), repeat=4)}
    expected: Values = {}
    for cohort, chance in chances.items():
        for name, step in change(federation("pflego", **settings), cohort).items():
            expected[name] = expected.get(name, torch.zeros_like(step)) + chance * step
    assert close(expected, {name: -0.2 * tensor for name, tensor in gradient.items()})


def test_without_exact_the_last_step_of_the_head_has_no_share() -> None:
    built = federation("pflego", **{**EXACT, "exact": False, "clients_per_round": 2})
    found = {name: tensor.requires_grad_() for name, tensor in weights(built).items()}
    gradient = torch.autograd.grad(client_loss(built, found, 1), found["1/head.weight"])[0]
    step = change(built, [1, 3])["1/head.weight"]
    assert torch.allclose(step, -0.2 * (4 / 2) * gradient, rtol=0, atol=1e-10)


def test_one_step_of_everybody_is_fedper() -> None:
    ours = {**EXACT, "exact": False, "own_classes": False, "server_lr": 0.3}
    not_theirs = ("tau", "exact", "server_optimizer", "server_lr")
    theirs = {key: value for key, value in EXACT.items() if key not in not_theirs}
    one = federation("pflego", **ours)
    other = federation("fedper", **theirs, lr=0.3, momentum=0.0, batch_size=0, local_epochs=1)
    run(one)
    run(other)
    assert close(weights(one), weights(other))


# Stragglers.


def without_answer(built: Built, missing: set[int]) -> None:
    train = built.federation.train

    def some(round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]:
        for answers in train(round, clients, message):
            yield answers.only([row for row, client in enumerate(answers.clients) if client not in missing])

    built.federation.train = some  # type: ignore[method-assign]


def test_an_answer_that_never_comes_counts_as_zero_and_the_scale_stays() -> None:
    settings = {**EXACT, "clients_per_round": 2}
    steps = {}
    for name, cohort, missing in (("both", [0, 2], set()), ("one", [0, 2], {2}), ("other", [0, 2], {0})):
        built = federation("pflego", **settings)
        without_answer(built, missing)
        steps[name] = {name: step for name, step in change(built, cohort).items() if "/" not in name}
    together = {name: steps["one"][name] + steps["other"][name] for name in steps["both"]}
    assert close(steps["both"], together)  # the sum is over the answers, its scale is that of the selection
    assert all(step.abs().max() > 0 for step in steps["one"].values())


def test_a_round_without_any_answer_changes_nothing() -> None:
    built = federation("pflego", **{**EXACT, "selection": "binomial", "server_optimizer": "adam"})
    assert all(not step.any() for step in change(built, []).values())


# The head's steps.


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_of_the_head_on_cached_features_are_steps_on_the_whole_network(engine: str, optimizer: str) -> None:
    settings = {**EXACT, "tau": 6, "lr": 0.1, "engine": engine, "optimizer": optimizer}
    built = federation("pflego", **settings)
    head = list(built.federation.method.personal(built.network))
    samples = built.federation.samples(built.federation.trainable)
    message = Message(built.server.values, {"scale": 1.0, "samples": samples})
    ours, theirs = (built.federation.cohort(1, largest_first(built), message) for _ in range(2))
    sent = built.federation.method.train(ours, message)
    theirs.fit(train=head, steps=5, batch_size=0)
    gradients, _ = theirs.gradient()
    assert close(sent, {name: gradients[name] for name in built.server.values})
    share = theirs.counts.double() / samples
    for name in head:
        step = 0.2 * share.reshape(-1, *[1] * (gradients[name].dim() - 1)) * gradients[name]
        assert torch.allclose(ours.values[name], theirs.values[name] - step, rtol=0, atol=1e-10)


def test_the_heads_steps_lower_its_loss_and_leave_the_body_alone() -> None:
    built = federation("pflego", **{**EXACT, "tau": 20, "lr": 0.5, "own_classes": True})
    cohort = built.federation.cohort(1, largest_first(built))
    body = {name: cohort.values[name].clone() for name in built.server.values}
    before = cohort.gradient()[1]
    built.federation.method.finetune(cohort, 20)
    assert (cohort.gradient()[1] < before).all()
    assert not differences(body, {name: cohort.values[name] for name in body})


BODY = """
from torch import nn

class Counted(nn.Module):
    passes = 0

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        Counted.passes += 1
        return self.head(self.body(x.flatten(1)).relu())
"""


def test_the_body_is_passed_as_often_whatever_tau_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a round: without the features that are computed once every step would pass it."""
    (tmp_path / "counted_body.py").write_text(BODY)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"network": "counted_body:Counted", "network_options": {"num_classes": 10}}
    plain = {"engine": "one-by-one", "workers": 1}
    passes = {}
    for tau in (2, 40):
        built = federation("pflego", **{**EXACT, **own, **plain, "tau": tau})
        cohort = built.federation.cohort(1, largest_first(built))
        counted = importlib.import_module("counted_body").Counted
        counted.passes = 0
        built.federation.method.train(cohort, built.loop.message_for_evaluation())
        passes[tau] = counted.passes
    assert passes[2] == passes[40] > 0


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
@pytest.mark.parametrize("augment", ["none", "rotate"])
def test_a_full_batch_in_chunks_gives_the_same_gradient(
    engine: str, augment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**EXACT, "tau": 4, "engine": engine, "augment": augment}
    whole, parts = federation("pflego", **settings), federation("pflego", **settings)
    step = change(whole, [0, 1, 2, 3])
    monkeypatch.setattr(Engine, "evaluation_size", lambda *_: 3)
    assert close(change(parts, [0, 1, 2, 3]), step, 1e-12)


@pytest.mark.parametrize("tau", [1, 5])
def test_one_by_one_is_the_same_as_stacked(tau: int) -> None:
    one, other = (federation("pflego", **{**EXACT, "tau": tau}, engine=kind) for kind in ("stacked", "one-by-one"))
    run(one)
    run(other)
    assert close(weights(one), weights(other))


def test_clients_of_very_different_size_train_as_they_would_alone(tmp_path: Path) -> None:
    rows = [f"{k / 9},{k % 3},{'yes' if k % 2 else 'no'},c{client}" for client, n in enumerate((90, 30, 6, 3))
            for k in range(n)]  # fmt: skip
    (tmp_path / "table.csv").write_text("\n".join(["a,b,label,who", *rows]) + "\n")
    table = {"data": f"csv:{tmp_path / 'table.csv'}", "label_column": "label", "client_column": "who",
             "partition": "natural", "min_samples": 1}  # fmt: skip
    together, apart = (federation("pflego", **{**EXACT, **table, "tau": 5, "stack_size": size}) for size in (None, 1))
    assert len(together.federation.cohort(1, largest_first(together)).alike()) > 2
    run(together)
    run(apart)
    assert close(weights(together), weights(apart))


# Classes of a client's own.


def test_rows_of_the_head_for_classes_that_a_client_lacks_never_move() -> None:
    built = federation("pflego", rounds=3, clients_per_round=6, tau=5)
    start = built.network.initial()["head.weight"]
    run(built)
    for client, kept in built.federation.store.entries.items():
        classes = built.data.targets[built.data.train.of(client)].unique()
        lacking = [c for c in range(10) if c not in classes]
        assert len(classes) < 10
        assert torch.equal(kept["head.weight"][lacking], start[lacking])
        assert not torch.equal(kept["head.weight"][classes], start[classes])


@pytest.mark.parametrize("method", ["pflego", "fedper", "ditto", "fedavg", "fedrod", "fedbn"])
def test_no_client_is_ever_told_a_class_that_it_does_not_have(method: str) -> None:
    built = federation(method, own_classes=True, rounds=1, clients_per_round=2)
    run(built)
    (cohort,) = built.federation.served(1, range(6), built.loop.message_for_evaluation())
    found = built.loop.evaluate(1).personalized
    correct, among_all = [], 0
    for row, client in enumerate(cohort.clients):
        (batch,) = cohort.samples("test").in_order(10_000)
        count = int(cohort.samples("test").counts[row])
        outputs = built.federation.method.predict(cohort, batch)[row, :count]
        targets = batch.targets[row, :count]
        classes = built.data.targets[built.data.train.of(client)].unique()
        correct.append(int((classes[outputs[:, classes].argmax(1)] == targets).sum()))
        among_all += int((outputs.argmax(1) == targets).sum())
    measured = dict(zip(found.clients, found.correct.tolist(), strict=True))
    assert [measured[client] for client in cohort.clients] == correct
    assert sum(correct) > among_all  # it makes a difference: most clients have not trained yet


def test_a_test_sample_of_a_class_that_a_client_never_saw_is_missed_at_a_finite_loss() -> None:
    built = federation("pflego", rounds=1)
    (cohort,) = built.federation.served(1, range(6), built.loop.message_for_evaluation())
    before = cohort.evaluate("test")
    lacking = [int(row.nonzero()[0]) for row in cohort.absent]
    for row, client in enumerate(cohort.clients):
        built.data.targets[built.data.test.of(client)[0]] = lacking[row]
    cohort._samples = {}
    after = cohort.evaluate("test")
    assert (after.correct <= before.correct).all()
    assert (after.correct < after.samples).all()
    assert (after.loss / after.samples < 20).all()


def test_clients_with_different_numbers_of_classes_share_a_stack() -> None:
    built = federation("pflego", **{**EXACT, "alpha": 0.2, "tau": 5, "server_optimizer": "adam"})
    held = {len(built.data.targets[built.data.train.of(client)].unique()) for client in range(4)}
    assert len(held) > 1
    losses = [record.loss for record in run(built)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]


# The server.


def test_the_servers_adam_is_torchs() -> None:
    built = federation("pflego", **{**EXACT, "server_optimizer": "adam", "server_lr": 0.01})
    mine = {name: tensor.clone().requires_grad_() for name, tensor in built.server.values.items()}
    adam = torch.optim.Adam(mine.values(), lr=0.01)
    for number in (1, 2, 3):
        gradient = pooled_gradient(built)
        for name, tensor in mine.items():
            tensor.grad = gradient[name]
        adam.step()
        built.loop.round(number)
        assert close(built.server.values, {name: tensor.detach() for name, tensor in mine.items()})


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    config = configure("pflego", {**SMALL, "rounds": 4, "tau": 5, "server_optimizer": "adam"})
    summary, resumed = whole_and_resumed(config, tmp_path)
    same = ("personalized_accuracy", "personalized_loss", "bytes_up")
    assert [summary[key] for key in same] == [resumed[key] for key in same]


# Evaluation.


def test_both_moments_of_evaluation_are_reported(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 4, "tau": 20, "clients_per_round": 2}
    stale = federation("pflego", **settings)
    fresh = federation("pflego", **settings, adapt=True)
    one, other = run(stale)[-1].evaluation, run(fresh)[-1].evaluation
    assert not differences(state(stale), state(fresh))  # nothing of an evaluation is kept
    assert one is not None
    assert other is not None
    assert one.others["adapted"].loss.tolist() == other.personalized.loss.tolist()
    assert one.personalized.loss.tolist() != other.personalized.loss.tolist()
    assert float(other.personalized.loss.sum()) < float(one.personalized.loss.sum())


def test_a_sample_is_augmented_the_same_way_for_features_and_gradient() -> None:
    built = federation("pflego", **{**EXACT, "tau": 3, "augment": "rotate"})
    cohort = built.federation.cohort(1, largest_first(built))
    samples, again = cohort.drawn("augment"), cohort.drawn("augment")
    assert torch.equal(samples.draws["turns"], again.draws["turns"])
    client, rows = 0, built.data.train.of(cohort.clients[0])
    turns = samples.draws["turns"][client, : len(rows)].tolist()
    assert len(set(turns)) == 4
    images = [torch.rot90(built.data.inputs[row], turn, (1, 2)) for row, turn in zip(rows, turns, strict=True)]
    own = {name: tensor[client] for name, tensor in cohort.values.items()}
    by_hand = built.network.features(own, built.data.decode(torch.stack(images)), None, train=False)
    assert torch.allclose(cohort.features(samples=samples)[client, : len(rows)], by_hand)
    cohort.round = 2
    assert not torch.equal(cohort.drawn("augment").draws["turns"], samples.draws["turns"])


@pytest.mark.parametrize("tau", [1, 3])
def test_the_gradient_is_that_of_the_samples_as_they_were_augmented(tau: int) -> None:
    built = federation("pflego", **{**EXACT, "tau": tau, "augment": "rotate"})
    message = built.loop.message_for_evaluation()
    cohort = built.federation.cohort(1, largest_first(built))
    samples = cohort.drawn("augment")
    sent = built.federation.method.train(cohort, message)
    turned = federation("pflego", **{**EXACT, "tau": tau})
    for row, client in enumerate(cohort.clients):
        for place, image in enumerate(built.data.train.of(client).tolist()):
            turn = int(samples.draws["turns"][row, place])
            turned.data.inputs[image] = torch.rot90(built.data.inputs[image], turn, (1, 2))
    by_hand = turned.federation.method.train(turned.federation.cohort(1, cohort.clients), message)
    assert close(sent, by_hand)


# Warnings and refusals.


def test_what_breaks_the_bounds_of_the_proposition_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        federation("pflego", lr=0.03, server_lr=0.003)
        assert not caplog.messages
        federation("pflego", lr=0.001, server_lr=0.003, tau=1)  # no step has that rate
        assert not caplog.messages
        federation("pflego", lr=0.001, server_lr=0.003)
        federation("pflego", clients=30, clients_per_round=1, rounds=7)
        federation("pflego", lr=0.004, server_lr=0.003, lr_schedule="cosine")
        federation("pflego", lr=0.03, server_lr=0.004, lr_warmup=10, rounds=30)
    assert len(caplog.messages) == 4
    assert "lr=0.001 (beta) is below server_lr=0.003 (rho)" in caplog.messages[0]
    assert "clients_per_round=1 is too little" in caplog.messages[1]
    assert "it needs 2" in caplog.messages[1]
    assert "lr=0.004 (beta), at its lowest 0.001, is below server_lr=0.003 (rho)" in caplog.messages[2]
    assert "lr=0.03 (beta), at its lowest 0.003, is below server_lr=0.004 (rho)" in caplog.messages[3]


def test_neither_rounding_nor_a_full_first_round_hides_or_makes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        federation("pflego", lr=0.03, clients=49, samples_per_client=12, clients_per_round=1, rounds=20)
        assert not caplog.messages
        federation("pflego", lr=0.03, clients=30, clients_per_round=1, rounds=7, everyone_in=[1])
        federation("pflego", lr=0.03, selection="per-group")
    assert len(caplog.messages) == 2
    assert "it needs 2" in caplog.messages[0]
    assert "not unbiased" in caplog.messages[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_optimizer": "average"}, "allowed: sgd, adam"),
        ({"tau": 0}, "greater than or equal to 1"),
        ({"aggregation": "uniform"}, "allowed: samples"),
        ({"weight_decay": 0.1}, "allowed: 0"),
        ({"adapt": True, "evaluate": "trained"}, "adapt=true is for evaluate=paper"),
        ({"data": "synthetic", "partition": "natural", "image_size": 16, "network": "stride-cnn", "clients": 4,
          "samples_per_client": None, "network_options": {"stages": 2}}, "pflego: network stride-cnn has statistics"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        federation("pflego", **settings)


def test_a_run_that_was_restored_knows_how_many_samples_there_are() -> None:
    built = federation("pflego", **{**EXACT, "evaluate": "trained", "clients_per_round": 2})
    built.loop.round(1)
    before = built.loop.evaluate(1).personalized.loss.tolist()
    built.server.samples, built.server.share = 0, 1.0  # as in a server that is read from a checkpoint
    assert built.loop.evaluate(1).personalized.loss.tolist() == before


class Scaled(nn.Module):
    """Does something after its last layer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = 10 * self.head(self.body(x))
        return outputs


class Backwards(nn.Module):
    """Its layers run in another order than they stand in."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, classes)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x))
        return outputs


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("network", ["Scaled", "Backwards"])
def test_a_network_whose_head_cannot_be_trained_apart_is_refused(network: str, own: bool) -> None:
    built = federation("pflego", network=f"{__name__}:{network}", network_options={}, own_classes=own)
    with pytest.raises(UserError, match="does not end with its last layer"):
        run(built)
