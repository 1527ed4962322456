"""Methods that differ in which part of a model is shared, or in how the shared part is trained."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from method_runs import IMAGES, SMALL, differences, federation, run, state, whole_and_resumed
from torch import Tensor, nn

from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.federation.evaluation import ClientScores
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.config import configure

# One full-batch step of plain SGD a client, in double precision: what can be written out by hand.
ONE_STEP: dict[str, Any] = {"precision": "float64", "batch_size": 0, "momentum": 0.0, "rounds": 1, "lr": 0.3}
ALL = {"clients_per_round": 6}
CPU = torch.device("cpu")
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


# LG-FedAvg that starts with rounds of FedAvg.


def served(built: Built, number: int) -> dict[int, Values]:
    """The model that serves each client, those included that never train."""
    everyone = (*built.federation.trainable, *built.data.new_clients)
    found = {}
    for cohort in built.federation.served(number, everyone, built.loop.message_for_evaluation()):
        for row, client in enumerate(cohort.clients):
            found[client] = {name: tensor[row] for name, tensor in cohort.values.items()}
    return found


def sizes(built: Built) -> tuple[int, int]:
    """The bytes of the base and of the upper layers."""
    upper = set(built.config.method.shared(built.network))
    tensors = built.network.initial().items()
    return sum(t.nbytes for n, t in tensors if n not in upper), sum(t.nbytes for n, t in tensors if n in upper)


def test_lg_fedavg_without_rounds_of_fedavg_archives_nothing_and_sends_the_upper_layers_only() -> None:
    built = federation("lg-fedavg", fedavg_rounds=0)
    _, upper = sizes(built)
    assert all(record.bytes_up == record.bytes_down == 4 * upper for record in run(built))
    assert not built.server.archive
    assert all(
        set(entry) == {"fc1.linear.weight", "fc1.linear.bias"} for entry in built.federation.store.entries.values()
    )
    assert not differences(state(built), learnt("lg-fedavg"))


def learnt(method: str, **settings: Any) -> Values:
    built = federation(method, **settings)
    run(built)
    return state(built)


@pytest.mark.parametrize("rounds_of_fedavg", [3, 9])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"server_optimizer": "adam", "server_lr": 0.05, "aggregation": "uniform"},
        {"finetune_epochs": 1, "lr_schedule": "cosine"},
        {**NORMS, "rounds": 3},
        {**NORMS, "rounds": 3, "batch_norm": "local"},
        {**NORMS, "rounds": 3, "batch_norm": "local-statistics"},
    ],
)
def test_lg_fedavg_is_fedavg_to_the_bit_while_its_rounds_of_fedavg_last(settings: dict, rounds_of_fedavg: int) -> None:
    new = {"new_clients": 1, "clients_per_round": 2}
    ours = federation("lg-fedavg", **settings, **new, fedavg_rounds=rounds_of_fedavg)
    plain = federation("fedavg", **settings, **new)
    for mine, theirs in zip(ours.loop.run(), plain.loop.run(), strict=True):
        assert not differences(ours.server.values, plain.server.values)
        assert not differences(ours.server.state, plain.server.state)
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        models = served(plain, mine.number)
        assert len(models) == ours.data.clients
        for client, model in served(ours, mine.number).items():
            assert not differences(model, models[client])
        for part in ("personalized", "common", "new"):
            one, other = getattr(mine.evaluation, part), getattr(theirs.evaluation, part)
            assert (one is None) == (other is None)
            assert one is None or one.accuracies.tolist() == other.accuracies.tolist()
    assert not ours.server.archive


def test_each_client_begins_its_base_from_that_of_fedavg_and_keeps_it() -> None:
    built = federation(
        "lg-fedavg", **ONE_STEP | {"rounds": 3}, fedavg_rounds=1, new_clients=1, aggregation="uniform", stack_size=6
    )
    everyone, [new] = built.federation.trainable, built.data.new_clients
    present = {1: list(everyone), 2: list(everyone[:3]), 3: [everyone[0], everyone[4]]}
    built.loop.select = present.__getitem__
    common = dict(built.network.module.named_parameters())
    bases: dict[int, Values] = {}
    for record in built.loop.run():
        after = {}
        for client in present[record.number]:
            module = with_values(built, {**common, **bases.get(client, {})})
            after[client] = stepped(module, lambda m, c=client: loss_of(built, m, built.data.train.of(c)), 1, 0.3)
        averaged = {name: torch.stack([model[name] for model in after.values()]).mean(0) for name in common}
        heads = {name: tensor for name, tensor in averaged.items() if name.startswith("head")}
        common = {**common, **(averaged if record.number == 1 else heads)}
        if record.number > 1:
            bases |= {c: {n: t for n, t in model.items() if n.startswith("fc1")} for c, model in after.items()}
            assert_close(built.server.values, heads)
            for client, base in bases.items():
                entry = built.federation.store.entries[client]
                assert_close({name: entry[name] for name in base}, base)
        # Served: those who have no base of their own yet, and the new client, have that of FedAvg.
        scores = {**scored(record.evaluation.personalized), **scored(record.evaluation.new)}
        for client in (*everyone, new):
            rows = built.data.test.of(client)
            module = with_values(built, {**common, **bases.get(client, {})})
            assert scores[client] == pytest.approx(loss_of(built, module, rows).item() * len(rows), abs=1e-9)
    assert set(bases) == {*everyone[:3], everyone[4]}


def with_values(built: Built, values: Values) -> nn.Module:
    module = copy.deepcopy(built.network.module)
    module.load_state_dict(values)
    return module


def scored(scores: ClientScores) -> dict[int, float]:
    return dict(zip(scores.clients, scores.loss.tolist(), strict=True))


def test_after_fedavg_upper_layers_travel_and_the_base_is_sent_once_to_a_client() -> None:
    built = federation("lg-fedavg", rounds=6, fedavg_rounds=2, clients_per_round=3)
    base, upper = sizes(built)
    seen: set[int] = set()
    newcomers = []
    for record in built.loop.run():
        if record.number <= 2:
            assert record.bytes_up == record.bytes_down == 3 * (base + upper)
            assert record.evaluation.common is not None
            continue
        newcomers.append(len(set(record.selected) - seen))
        seen |= set(record.selected)
        assert record.bytes_up == 3 * upper
        assert record.bytes_down == 3 * upper + newcomers[-1] * base
        assert record.evaluation.common is None
    assert newcomers[0] == 3
    assert any(count < 3 for count in newcomers)


def test_clients_that_are_away_when_fedavg_ends_are_served_what_it_ended_with() -> None:
    built = federation("lg-fedavg", fedavg_rounds=2, new_clients=2)
    select = built.loop.select
    built.loop.select = lambda number: select(number) if number <= 2 else []
    [_, before, after] = run(built)
    last = learnt("fedavg", rounds=2, new_clients=2)
    for model in served(built, 3).values():
        assert not differences({f"server/{name}": tensor for name, tensor in model.items()}, last)
    assert (after.bytes_up, after.bytes_down) == (0, 0)
    assert after.evaluation.personalized.loss.tolist() == before.evaluation.personalized.loss.tolist()
    assert after.evaluation.new.loss.tolist() == before.evaluation.new.loss.tolist()


@pytest.mark.parametrize("batch_norm", ["shared", "local", "local-statistics"])
def test_norm_layers_stay_where_they_are_when_fedavg_ends(batch_norm: str) -> None:
    built = federation("lg-fedavg", **NORMS, batch_norm=batch_norm, fedavg_rounds=1, clients_per_round=4)
    network = built.network
    home = {"shared": set(), "local": network.norm, "local-statistics": set(network.buffers)}[batch_norm]
    base = set(network.names_of(network.layers[: len(network.layers) // 2]))
    assert base & network.norm
    built.loop.select = lambda number: [0, 1, 2, 3] if number == 1 else [0]
    rounds = built.loop.run()
    next(rounds)
    ended, norms = dict(built.server.values), [dict(entry) for entry in built.federation.store.entries.values()]
    next(rounds)
    assert set(built.server.archive) == base - home
    assert set(built.server.values) == set(network.names) - base - home
    models = served(built, 2)
    for client in (1, 2, 3):  # away: FedAvg's base around the norm layers that it kept before
        assert all(torch.equal(models[client][name], ended[name]) for name in base - home)
        assert all(torch.equal(models[client][name], norms[client][name]) for name in home)
    moved = [name for name in base - home if not torch.equal(models[0][name], ended[name])]
    assert moved


def test_a_stack_of_clients_with_and_without_a_base_is_the_same_one_by_one() -> None:
    settings = {"precision": "float64", "rounds": 5, "fedavg_rounds": 2, "clients_per_round": 3}
    one, *others = (learnt("lg-fedavg", **settings, stack_size=size) for size in (1, 2, 6))
    for other in others:
        assert_close(other, one)


def test_all_layers_personal_after_fedavg_is_local_training_from_its_model() -> None:
    built, plain = federation("lg-fedavg", personal_layers=2, fedavg_rounds=1, rounds=2), federation("fedavg", rounds=2)
    train = plain.federation.train
    sent: dict[int, Values] = {}  # by clients of FedAvg's second round: local training from the model of the first

    def overheard(round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]:
        for answers in train(round, clients, message):
            sent.update({c: {n: t[row] for n, t in answers.tensors.items()} for row, c in enumerate(answers.clients)})
            yield answers

    for _ in plain.loop.run():
        plain.federation.train = overheard  # type: ignore[method-assign]
    _, after = run(built)
    assert (after.bytes_up, built.server.values) == (0, {})
    assert sorted(sent) == after.selected
    for client, model in sent.items():
        entry = built.federation.store.entries[client]
        assert not differences({name: entry[name] for name in model}, model)


@pytest.mark.parametrize("rounds_of_fedavg", [1, 2, 3])
def test_lg_fedavg_goes_on_where_it_was_stopped_before_at_and_after_the_end_of_fedavg(
    rounds_of_fedavg: int, tmp_path: Path
) -> None:
    settings = {**SMALL, "rounds": 5, "fedavg_rounds": rounds_of_fedavg, "clients_per_round": 3, "new_clients": 1}
    config = configure("lg-fedavg", {**settings, "server_optimizer": "sgd", "server_momentum": 0.5})
    summary, resumed = whole_and_resumed(config, tmp_path)
    assert {key for key in summary if summary[key] != resumed[key]} <= {"seconds_training", "seconds_evaluation"}
    one, other = (newest_checkpoint(tmp_path / name / "checkpoints", CPU) for name in ("whole", "parted"))
    assert one is not None
    assert other is not None
    assert one.server.archive
    for part in ("values", "state", "archive"):
        assert not differences(getattr(one.server, part), getattr(other.server, part))
    assert not differences(one.clients, other.clients)
    assert one.server.held == other.server.held


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
