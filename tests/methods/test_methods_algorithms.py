"""Methods against what their papers say, and against each other in their limits."""

import copy

import pytest
import torch
from method_runs import IMAGES, differences, federation, run, state


def test_a_round_of_fedavg_with_one_full_batch_is_a_gradient_step_on_the_pooled_loss() -> None:
    settings = {"partition": "iid", "clients": 3, "clients_per_round": 3, "samples_per_client": 20, "rounds": 1}
    built = federation("fedavg", **settings, precision="float64", batch_size=0, momentum=0.0, lr=0.3)
    assert len(set(built.data.train.counts.tolist())) == 1
    module, data = copy.deepcopy(built.network.module), built.data
    rows = data.train.index
    loss = torch.nn.functional.cross_entropy(module(data.decode(data.inputs[rows])), data.targets[rows])
    loss.backward()
    expected = {name: p.detach() - 0.3 * p.grad for name, p in module.named_parameters()}
    [record] = run(built)
    for name, tensor in expected.items():
        torch.testing.assert_close(built.server.values[name], tensor, rtol=0, atol=1e-12)
    assert record.loss == pytest.approx(loss.item(), abs=1e-12)


def test_fedavg_weighs_clients_by_their_samples() -> None:
    settings = {"partition": "dirichlet", "clients": 3, "clients_per_round": 3, "samples_per_client": None, "rounds": 1}
    options = {"precision": "float64", "batch_size": 0, "momentum": 0.0, "lr": 0.3, "alpha": 0.3}
    built = federation("fedavg", **settings, **options)
    counts = built.data.train.counts.double()
    assert len(set(counts.tolist())) > 1
    message = built.config.method.broadcast(built.server)
    by_client = {}
    for answers in federation("fedavg", **settings, **options).federation.train(1, range(3), message):
        for row, client in enumerate(answers.clients):
            by_client[client] = answers.tensors["head.weight"][row]
    run(built)
    expected = sum(counts[client] * tensor for client, tensor in by_client.items()) / counts.sum()
    torch.testing.assert_close(built.server.values["head.weight"], expected, rtol=0, atol=1e-12)


def test_fedper_without_personal_layers_is_fedavg() -> None:
    fedavg, fedper = federation("fedavg"), federation("fedper", personal_layers=0)
    scores = [[record.evaluation.personalized.accuracy for record in run(built)] for built in (fedavg, fedper)]
    assert not differences(state(fedavg), state(fedper))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("layers", [2, 9])
def test_fedper_with_all_layers_personal_is_local_training(layers: int) -> None:
    local, fedper = federation("local"), federation("fedper", personal_layers=layers)
    for built in (local, fedper):
        assert all(record.bytes_up == record.bytes_down == 0 for record in run(built))
    assert len(local.federation.store.entries) > 3
    assert not differences(state(local), state(fedper))


def test_fedper_sends_the_body_and_keeps_the_head() -> None:
    built = federation("fedper", clients_per_round=6)
    run(built)
    assert set(built.server.values) == {"fc1.linear.weight", "fc1.linear.bias"}
    heads = [entry["head.weight"] for entry in built.federation.store.entries.values()]
    assert len(heads) == 6
    assert all(set(entry) == {"head.weight", "head.bias"} for entry in built.federation.store.entries.values())
    assert not any(torch.equal(heads[0], head) for head in heads[1:])
    assert built.config.method.global_model(built.server, built.network) is None


def test_a_client_goes_on_with_its_own_head() -> None:
    """The head that a client trains in its second round is the one that it kept, not a fresh one."""
    settings = {"clients": 1, "clients_per_round": 1, "batch_size": 0, "momentum": 0.0, "precision": "float64"}
    fedper, fedavg = federation("fedper", **settings), federation("fedavg", **settings)
    run(fedper)
    run(fedavg)
    own = fedper.federation.store.entries[0] | fedper.server.values
    for name, tensor in fedavg.server.values.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-12)


def test_fine_tuning_is_not_kept() -> None:
    plain, tuned = federation("fedavg"), federation("fedavg-ft", finetune_epochs=3)
    before, after = run(plain), run(tuned)
    assert not differences(state(plain), state(tuned))
    assert not tuned.federation.store.entries
    assert after[-1].evaluation.personalized.accuracy > before[-1].evaluation.personalized.accuracy
    assert after[-1].evaluation.common.accuracy == before[-1].evaluation.common.accuracy


def test_fedavg_without_fine_tuning_epochs_is_fedavg() -> None:
    plain, tuned = run(federation("fedavg")), run(federation("fedavg-ft", finetune_epochs=0))
    for one, other in zip(plain, tuned, strict=True):
        assert one.evaluation.personalized.accuracies.tolist() == other.evaluation.personalized.accuracies.tolist()


def test_server_sgd_with_rate_one_is_the_average() -> None:
    plain, stepped = (
        federation("fedavg", precision="float64"),
        federation("fedavg", precision="float64", server_optimizer="sgd"),
    )
    run(plain)
    run(stepped)
    for name, tensor in plain.server.values.items():
        torch.testing.assert_close(stepped.server.values[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_norm_layers_stay_home_when_they_are_local(engine: str) -> None:
    built = federation("fedavg", **IMAGES, batch_norm="local", rounds=2, engine=engine)
    norm = built.network.norm
    assert any(name.endswith("running_mean") for name in norm)
    assert any(name.endswith("weight") for name in norm)
    rounds = run(built)
    assert set(built.server.values) == set(built.network.names) - norm
    assert all(set(entry) == norm for entry in built.federation.store.entries.values())
    initial = built.network.initial()
    for name in norm:
        kept = [entry[name] for entry in built.federation.store.entries.values()]
        assert not torch.equal(kept[0], kept[1])
        assert not torch.equal(kept[0], initial[name])
    # Without its norm layers no model serves anybody.
    assert rounds[-1].evaluation.common is None


def test_only_the_statistics_stay_home_when_they_are_local() -> None:
    built = federation("fedavg", **IMAGES, batch_norm="local-statistics", rounds=2)
    run(built)
    statistics = set(built.network.buffers)
    assert statistics
    assert all(name.endswith(("running_mean", "running_var")) for name in statistics)
    assert set(built.server.values) == set(built.network.parameters)
    assert all(set(entry) == statistics for entry in built.federation.store.entries.values())


def test_shared_norm_layers_travel_with_their_statistics() -> None:
    built = federation("fedavg", **IMAGES, rounds=2)
    initial = built.network.initial()
    run(built)
    assert set(built.server.values) == set(built.network.names)
    assert all(not torch.equal(built.server.values[name], initial[name]) for name in built.network.buffers)
    assert not built.federation.store.entries


def test_the_head_and_the_norm_layers_can_both_stay_home() -> None:
    built = federation("fedper", **IMAGES, batch_norm="local", rounds=1)
    run(built)
    head = set(built.network.layers[-1].names)
    assert all(set(entry) == head | built.network.norm for entry in built.federation.store.entries.values())


def test_the_learning_rate_of_a_round_follows_the_schedule() -> None:
    rounds = run(federation("local", lr=0.1, lr_schedule="step", lr_milestones=[1, 2], lr_factor=0.5))
    assert [record.lr for record in rounds] == pytest.approx([0.1, 0.05, 0.025])
