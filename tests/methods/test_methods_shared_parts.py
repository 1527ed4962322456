"""Methods that differ in which part of a model is shared, or in how the shared part is trained."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from method_runs import IMAGES, differences, federation, run, state
from torch import Tensor, nn

from tailorfl.errors import UserError
from tailorfl.models.network import Values
from tailorfl.study.build import Built

# One full-batch step of plain SGD a client, in double precision: what can be written out by hand.
ONE_STEP: dict[str, Any] = {"precision": "float64", "batch_size": 0, "momentum": 0.0, "rounds": 1, "lr": 0.3}
ALL = {"clients_per_round": 6}
NORMS = {**IMAGES, "samples": 12, "network_options": {"width": 0.25, "stages": 2}, "rounds": 2, "engine": "stacked"}


def assert_same_run(one: Built, other: Built) -> None:
    """Two federations learn the same to the bit, send as much, and serve their clients alike."""
    records = [run(built) for built in (one, other)]
    assert not differences(state(one), state(other))
    for mine, theirs in zip(*records, strict=True):
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert mine.evaluation.personalized.loss.tolist() == theirs.evaluation.personalized.loss.tolist()
        assert (mine.evaluation.common is None) == (theirs.evaluation.common is None)


def loss_of(built: Built, module: nn.Module, rows: Tensor) -> Tensor:
    data = built.data
    return nn.functional.cross_entropy(module(data.decode(data.inputs[rows])), data.targets[rows])


def stepped(
    module: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int, lr: float, train: tuple[str, ...] = ()
) -> Values:
    """A module's parameters after some steps of plain gradient descent; of those that begin like ``train``."""
    module = copy.deepcopy(module)
    chosen = [p for name, p in module.named_parameters() if name.startswith(train or "")]
    for _ in range(steps):
        gradients = torch.autograd.grad(loss(module), chosen)
        with torch.no_grad():
            for parameter, gradient in zip(chosen, gradients, strict=True):
                parameter -= lr * gradient
    return {name: p.detach() for name, p in module.named_parameters()}


def assert_close(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


# FedSGD.


def test_a_round_of_fedsgd_with_everybody_is_a_gradient_step_on_the_pooled_loss() -> None:
    unequal = {"partition": "dirichlet", "alpha": 0.3, "samples_per_client": None, "clients": 4, "clients_per_round": 4}
    built = federation("fedsgd", **ONE_STEP | {"batch_size": 10, "momentum": 0.9, "optimizer": "adam"}, **unequal)
    counts = built.data.train.counts
    assert len(set(counts.tolist())) == 4
    expected = stepped(built.network.module, lambda m: loss_of(built, m, built.data.train.index), 1, 0.3)
    run(built)
    assert_close(built.server.values, expected)


def test_fedsgd_is_fedavg_with_one_full_batch_step_without_momentum() -> None:
    plain = {"batch_size": 0, "momentum": 0.0, "local_epochs": 1, "weight_decay": 0.01, "lr_schedule": "cosine"}
    assert_same_run(federation("fedsgd", **plain), federation("fedavg", **plain))


def test_the_keys_that_fedsgd_ignores_do_not_act() -> None:
    ignored = {"local_epochs": 4, "batch_size": 3, "momentum": 0.9, "optimizer": "adam", "finetune_epochs": 2}
    one, other = federation("fedsgd", finetune_epochs=2, lr=0.2), federation("fedsgd", **ignored, lr=0.2)
    assert_same_run(one, other)


# FedProx.


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedprox_without_pull_is_fedavg_to_the_bit(engine: str, momentum: float) -> None:
    settings = {"engine": engine, "momentum": momentum}
    assert_same_run(federation("fedprox", mu=0, **settings), federation("fedavg", **settings))


def test_three_steps_of_fedprox_are_those_of_the_loss_with_its_pull() -> None:
    built = federation("fedprox", **ONE_STEP, clients=1, clients_per_round=1, local_epochs=3, mu=0.7)
    start = built.network.initial()

    def pulled(module: nn.Module) -> Tensor:
        distance = sum((p - start[name]).square().sum() for name, p in module.named_parameters())
        return loss_of(built, module, built.data.train.of(0)) + 0.35 * distance

    expected = stepped(built.network.module, pulled, 3, 0.3)
    free = stepped(built.network.module, lambda m: loss_of(built, m, built.data.train.of(0)), 3, 0.3)
    assert (expected["head.bias"] - free["head.bias"]).abs().max() > 1e-3
    run(built)
    assert_close(built.server.values, expected)


def test_norm_layers_that_stay_with_a_client_are_not_pulled() -> None:
    one = {**NORMS, **ONE_STEP, "clients": 1, "clients_per_round": 1, "local_epochs": 3}
    built = federation("fedprox", **one, batch_norm="local", mu=2.0)
    start, norm = built.network.initial(), built.network.norm

    def pulled(module: nn.Module) -> Tensor:
        distance = sum((p - start[name]).square().sum() for name, p in module.named_parameters() if name not in norm)
        return loss_of(built, module.train(), built.data.train.of(0)) + distance

    expected = stepped(built.network.module, pulled, 3, 0.3)
    run(built)
    found = built.server.values | built.federation.store.entries[0]
    assert_close({name: found[name] for name in expected}, expected)


def test_a_stronger_pull_keeps_clients_nearer() -> None:
    moved = []
    for mu in (0.0, 1.0, 10.0):
        built = federation("fedprox", mu=mu, rounds=1, momentum=0.0)
        start = built.network.initial()
        run(built)
        moved.append(sum(float((built.server.values[name] - start[name]).square().sum()) for name in start))
    assert moved[0] > moved[1] > moved[2] > 0


# FedBN.


def test_fedbn_is_fedavg_with_local_norm_layers() -> None:
    assert_same_run(federation("fedbn", **NORMS), federation("fedavg", **NORMS, batch_norm="local"))


def test_fedbn_with_shared_norm_layers_is_fedavg() -> None:
    assert_same_run(federation("fedbn", **NORMS, batch_norm="shared"), federation("fedavg", **NORMS))


def test_fedbn_sends_all_but_the_norm_layers_and_serves_each_client_with_its_own() -> None:
    built = federation("fedbn", **NORMS)
    rounds = run(built)
    norm = built.network.norm
    assert norm
    assert set(built.server.values) == set(built.network.names) - norm
    assert all(set(entry) == norm for entry in built.federation.store.entries.values())
    assert rounds[-1].evaluation.common is None


def test_fedbn_says_once_that_a_network_has_no_norm_layers_and_is_fedavg(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built = federation("fedbn")
        assert_same_run(built, federation("fedavg"))
        federation("fedbn", **NORMS)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["fedbn: network mlp has no norm layers that could stay; this is FedAvg"]


# PartialFed-Fix.


def test_partialfed_fix_keeps_norm_layers_and_the_head() -> None:
    built = federation("partialfed-fix", **NORMS)
    run(built)
    home = built.network.norm | set(built.network.layers[-1].names)
    assert all(set(entry) == home for entry in built.federation.store.entries.values())
    assert set(built.server.values) == set(built.network.names) - home
    assert built.server.values


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"batch_norm": "shared"}, "fedper"),
        ({"batch_norm": "shared", "personal_layers": 2}, "fedper"),
        ({"personal_layers": 0}, "fedbn"),
        ({"personal_layers": 0, "batch_norm": "shared"}, "fedavg"),
        ({"personal_layers": 9}, "local"),
    ],
)
def test_partialfed_fix_in_its_limits(settings: dict, method: str) -> None:
    same = {"personal_layers": 2} if settings.get("personal_layers") == 2 else {}
    assert_same_run(federation("partialfed-fix", **NORMS, **settings), federation(method, **NORMS, **same))


# LG-FedAvg.


def test_lg_fedavg_without_personal_layers_is_fedavg() -> None:
    assert_same_run(federation("lg-fedavg", personal_layers=0), federation("fedavg"))


@pytest.mark.parametrize("layers", [2, 9])
def test_lg_fedavg_with_all_layers_personal_is_local_training(layers: int) -> None:
    assert_same_run(federation("lg-fedavg", personal_layers=layers), federation("local"))


@pytest.mark.parametrize(("hidden", "shared"), [([], 0), ([8], 1), ([8, 8], 2), ([8, 8, 8], 2)])
def test_lg_fedavg_keeps_the_lower_half_of_the_layers_by_default(hidden: list[int], shared: int) -> None:
    built = federation("lg-fedavg", network_options={"hidden": hidden})
    layers = built.network.layers
    assert set(built.server.values) == set(built.network.names_of(layers[len(layers) - shared :]))


def test_one_step_of_lg_fedavg_averages_heads_over_bases_that_stay() -> None:
    built = federation("lg-fedavg", **ONE_STEP, **ALL, aggregation="uniform")
    after = [
        stepped(built.network.module, lambda m, c=client: loss_of(built, m, built.data.train.of(c)), 1, 0.3)
        for client in range(6)
    ]
    [record] = run(built)
    heads = {name: torch.stack([model[name] for model in after]).mean(0) for name in ("head.weight", "head.bias")}
    assert_close(built.server.values, heads)
    bases = {name for name in after[0] if name.startswith("fc1")}
    for client, model in enumerate(after):
        assert_close(built.federation.store.entries[client], {name: model[name] for name in bases})
    # Served: the own base under the shared head.
    test = built.data.test
    for client, model in enumerate(after):
        module = copy.deepcopy(built.network.module)
        module.load_state_dict({**model, **heads})
        found = record.evaluation.personalized.loss[client]
        assert found == pytest.approx(loss_of(built, module, test.of(client)).item() * len(test.of(client)), abs=1e-9)


# FedBABU.


def test_one_round_of_fedbabu_trains_and_averages_the_body_under_the_initial_head() -> None:
    built = federation("fedbabu", **ONE_STEP, **ALL, local_epochs=2, aggregation="uniform")
    after = [
        stepped(built.network.module, lambda m, c=client: loss_of(built, m, built.data.train.of(c)), 2, 0.3, ("fc1",))
        for client in range(6)
    ]
    run(built)
    bodies = {n: torch.stack([model[n] for model in after]).mean(0) for n in after[0] if n.startswith("fc1")}
    assert_close(built.server.values, bodies)
    whole = built.config.method.global_model(built.server, built.network)
    initial = built.network.initial()
    assert_close(whole, {**bodies, "head.weight": initial["head.weight"], "head.bias": initial["head.bias"]})


def test_the_head_of_fedbabu_neither_travels_nor_is_kept() -> None:
    built = federation("fedbabu")
    rounds = run(built)
    body = sum(tensor.nbytes for tensor in built.server.values.values())
    assert set(built.server.values) == {"fc1.linear.weight", "fc1.linear.bias"}
    assert all(record.bytes_up == record.bytes_down == 4 * body for record in rounds)
    assert not built.federation.store.entries or not any(built.federation.store.entries.values())


@pytest.mark.parametrize(("part", "trained"), [("all", ("fc1", "head")), ("head", ("head",)), ("body", ("fc1",))])
def test_fedbabu_is_evaluated_after_fine_tuning_the_part_that_is_asked_for(part: str, trained: tuple[str, ...]) -> None:
    built = federation("fedbabu", **ONE_STEP, finetune_epochs=3, finetune_part=part)
    [record] = run(built)
    start = copy.deepcopy(built.network.module)
    start.load_state_dict({**start.state_dict(), **built.server.values})
    for client in range(6):
        tuned = copy.deepcopy(start)
        values = stepped(start, lambda m, c=client: loss_of(built, m, built.data.train.of(c)), 3, 0.3, trained)
        tuned.load_state_dict(values)
        rows = built.data.test.of(client)
        found = record.evaluation.personalized.loss[client]
        assert found == pytest.approx(loss_of(built, tuned, rows).item() * len(rows), abs=1e-9)


def test_fedbabu_without_fine_tuning_serves_the_global_model() -> None:
    [*_, record] = run(federation("fedbabu", finetune_epochs=0))
    assert record.evaluation.personalized.accuracies.tolist() == record.evaluation.common.accuracies.tolist()


def test_fedbabu_keeps_norm_layers_home_when_they_are_local() -> None:
    built = federation("fedbabu", **NORMS, batch_norm="local")
    rounds = run(built)
    assert all(set(entry) == built.network.norm for entry in built.federation.store.entries.values())
    assert rounds[-1].evaluation.common is None


def test_fedbabu_refuses_a_network_without_a_body() -> None:
    with pytest.raises(UserError, match="fedbabu: network linear is a head without a body"):
        federation("fedbabu", network="linear", network_options={})
