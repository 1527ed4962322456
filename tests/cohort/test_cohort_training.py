"""Local training: what a step computes, and that it does not depend on who trains beside a client."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_cohorts import close, make_cohort
from torch import Tensor, nn

from tailorfl.cohort import Engine, engine, traces
from tailorfl.cohort.objective import Batch, Client, cross_entropy
from tailorfl.data import Augmentation
from tailorfl.errors import UserError
from tailorfl.models import BatchNorm1d, build_module

UNEQUAL = [23, 12, 12, 7, 1]


def reference(cohort, client: int, epochs: int, **sgd: float) -> dict[str, Tensor]:
    """Ordinary PyTorch for one client: its own module, torch.optim.SGD, the batches of the cohort's schedule."""
    from tailorfl.cohort.schedule import mini_batches

    module = cohort.network.module
    module.load_state_dict({name: tensor[client] for name, tensor in cohort.values.items()}, strict=False)
    optimizer = torch.optim.SGD(module.parameters(), **sgd)
    rows = cohort.data.train.of(client)
    stream = (cohort.seed, "train", cohort.round, client)
    schedule = mini_batches([len(rows)], cohort.options.batch_size, epochs, None, [stream], None)
    for positions in schedule.positions[:, 0]:
        chosen = rows[positions[positions >= 0]]
        optimizer.zero_grad()
        outputs = module(cohort.data.decode(cohort.data.inputs[chosen]))
        F.cross_entropy(outputs, cohort.data.targets[chosen]).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_one_full_batch_step_is_the_gradient_step_computed_by_hand():
    cohort = make_cohort([5], "linear", batch_size=0, lr=0.1, momentum=0.0, local_epochs=1)
    weight, bias = (cohort.values[name][0].clone() for name in cohort.network.parameters)
    rows = cohort.data.train.of(0)
    x = cohort.data.decode(cohort.data.inputs[rows]).flatten(1)
    wrong = (x @ weight.T + bias).softmax(1) - F.one_hot(cohort.data.targets[rows], 4)
    loss = cohort.fit()
    assert torch.allclose(cohort.values[cohort.network.parameters[0]][0], weight - 0.1 * wrong.T @ x / 5, atol=1e-12)
    assert torch.allclose(cohort.values[cohort.network.parameters[1]][0], bias - 0.1 * wrong.mean(0), atol=1e-12)
    by_hand = F.cross_entropy(x @ weight.T + bias, cohort.data.targets[rows])
    assert loss[0].item() == pytest.approx(by_hand.item(), abs=1e-12)


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_training_is_what_plain_pytorch_computes_for_each_client(mode):
    cohort = make_cohort(UNEQUAL, "mlp", mode, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01, local_epochs=3)
    wanted = [reference(cohort, k, 3, lr=0.1, momentum=0.9, weight_decay=0.01) for k in range(len(UNEQUAL))]
    cohort.fit()
    for client, values in enumerate(wanted):
        assert close(values, {name: tensor[client] for name, tensor in cohort.values.items()})


@pytest.mark.parametrize("network", ["linear", "mlp", "cnn", "ppfe-cnn", "pflego-omniglot", "pmixfed-cnn"])
def test_stacked_equals_one_by_one_for_unequal_clients(network):
    results = []
    for mode in ("stacked", "one-by-one"):
        cohort = make_cohort([9, 6, 4, 1], network, mode, shape=(1, 16, 16), batch_size=4, local_epochs=2,
                             augmentation=Augmentation.parse("flip,crop2"))  # fmt: skip
        results.append((cohort.values, cohort.fit()))
    assert close(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-10)


@pytest.mark.parametrize(
    ("network", "options"),
    [("stride-cnn", {}), ("resnet18", {"width": 0.1, "stages": 4, "stem": "cifar"}), ("mobilenet", {"width": 0.1})],
)
def test_one_step_of_a_deep_network_is_the_same_stacked_and_alone(network, options):
    # One step: from then on batch norm magnifies rounding.
    results = []
    for mode in ("stacked", "one-by-one"):
        torch.manual_seed(0)
        module = build_module(network, (3, 16, 16), 4, **options)
        cohort = make_cohort([6, 5, 3], module, mode, shape=(3, 16, 16), batch_size=0, local_epochs=1)
        cohort.fit()
        results.append(cohort.values)
    assert close(*results)


def test_adam_is_the_same_stacked_and_alone():
    results = []
    for mode in ("stacked", "one-by-one"):
        cohort = make_cohort(UNEQUAL, "mlp", mode, batch_size=5, optimizer="adam", lr=0.001, weight_decay=0.01)
        cohort.fit()
        results.append(cohort.values)
    assert close(*results, 1e-8)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}])
@pytest.mark.parametrize("batch_size", [4, 0])
@pytest.mark.parametrize("network", ["mlp", "stride-cnn"])
def test_a_traced_step_computes_what_vmap_computes(network, batch_size, options, monkeypatch):
    results = []
    given = {"shape": (3, 16, 16), "batch_size": batch_size, "local_epochs": 2, "own_classes": True, **options}
    for traced_steps in (10**9, 1):
        monkeypatch.setattr(traces, "TRACED_STEPS", traced_steps)
        cohort = make_cohort(UNEQUAL, network, "stacked", **given)
        for cohort.round in (1, 2):  # what is computed once for a fit must not be that of the fit before
            cohort.fit()
        results.append(cohort.values)
        assert bool(cohort.engine.traces.programs) == (traced_steps == 1)
    assert close(*results)


def test_steps_on_one_batch_share_what_no_step_changes(monkeypatch):
    monkeypatch.setattr(traces, "TRACED_STEPS", 1)
    work = {}
    for network in ("mlp", "stride-cnn"):
        cohort = make_cohort([12, 11, 11], network, "stacked", shape=(3, 16, 16), batch_size=0, momentum=0.0)
        cohort.fit(train=cohort.network.names_of(cohort.network.layers[-1:]))
        (program,) = cohort.engine.traces.programs.values()
        work[network] = [
            sum(node.target == torch.ops.aten.bmm.default for node in part.graph.nodes) for part in program.parts
        ]
    assert work["mlp"] == [1, 2]  # the layer below the head, once; the head and its gradient, in every step
    assert work["stride-cnn"][0] == 0  # batch norms change their statistics in every step


def loss_of_a_sum(client: Client, batch: Batch) -> torch.Tensor:
    """Two tensors with one gradient: a shared layer and a client's own beside it."""
    weight = client.values["fc1.linear.weight"] + client.values["fc2.linear.weight"]
    return batch.mean(F.linear(batch.inputs.flatten(1), weight).square().sum(1))


def test_two_tensors_with_one_gradient_can_be_traced(monkeypatch):
    monkeypatch.setattr(traces, "TRACED_STEPS", 1)
    results = []
    for mode in ("stacked", "one-by-one"):
        module = build_module("mlp", (3, 16, 16), 4, hidden=(768, 768))
        cohort = make_cohort([6, 5], module, mode, shape=(3, 16, 16), momentum=0.9, lr=1e-6)
        start = torch.linspace(-1, 1, 768 * 768).double().reshape(768, 768)
        for name in ("fc1.linear.weight", "fc2.linear.weight"):
            cohort.values[name][:] = start
        cohort.fit(loss_of_a_sum, train=["fc1.linear.weight", "fc2.linear.weight"])
        results.append({name: cohort.values[name] for name in ("fc1.linear.weight", "fc2.linear.weight")})
    assert close(*results)


@pytest.mark.parametrize("batch_size", [0, 5, 100])
@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_a_client_trains_the_same_whoever_is_beside_it(mode, batch_size):
    together = make_cohort(UNEQUAL, "stride-cnn", mode, shape=(3, 16, 16), batch_size=batch_size,
                           augmentation=Augmentation.parse("flip,crop1"))  # fmt: skip
    together.fit()
    for client in range(len(UNEQUAL)):
        alone = make_cohort(UNEQUAL, "stride-cnn", mode, clients=(client,), shape=(3, 16, 16), batch_size=batch_size,
                            augmentation=Augmentation.parse("flip,crop1"))  # fmt: skip
        alone.fit()
        beside = {name: tensor[client : client + 1] for name, tensor in together.values.items()}
        assert close(alone.values, beside, 1e-7)  # norms over a sample or two make much of the last bit


def test_a_client_without_samples_keeps_its_weights():
    cohort = make_cohort([6, 0], "mlp", "stacked")
    before = {name: tensor[1].clone() for name, tensor in cohort.values.items()}
    loss = cohort.fit()
    assert all(torch.equal(before[name], cohort.values[name][1]) for name in before)
    assert loss[1] == 0


def test_only_the_named_tensors_are_trained():
    cohort = make_cohort(UNEQUAL, "mlp")
    before = {name: tensor.clone() for name, tensor in cohort.values.items()}
    head = cohort.network.layers[-1].parameters
    cohort.fit(train=head)
    for name, tensor in cohort.values.items():
        assert torch.equal(tensor, before[name]) == (name not in head)


def test_a_sample_of_weight_zero_might_as_well_not_be_there():
    cohort = make_cohort([4], "mlp", batch_size=0, local_epochs=2, momentum=0.5)
    module = cohort.network.module
    module.load_state_dict({name: tensor[0] for name, tensor in cohort.values.items()})
    # Weights sum to the number of samples; the mean over the three that count is 4/3 of theirs.
    cohort.fit(weights=torch.tensor([[4 / 3, 4 / 3, 4 / 3, 0.0]], dtype=torch.float64))
    rows = cohort.data.train.of(0)[:3]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = module(cohort.data.decode(cohort.data.inputs[rows]))
        F.cross_entropy(outputs, cohort.data.targets[rows]).backward()
        optimizer.step()
    assert close({n: p.detach() for n, p in module.named_parameters()}, {n: t[0] for n, t in cohort.values.items()})


def test_learning_rates_may_differ_by_name():
    cohort = make_cohort([6], "mlp", batch_size=0, local_epochs=1, momentum=0.0)
    slow = make_cohort([6], "mlp", batch_size=0, local_epochs=1, momentum=0.0)
    before = {name: tensor.clone() for name, tensor in cohort.values.items()}
    head = set(cohort.network.layers[-1].parameters)
    cohort.fit(lr={name: 0.1 if name in head else 0.01 for name in cohort.network.parameters})
    slow.fit(lr=0.01)
    for name in cohort.network.parameters:
        factor = 10 if name in head else 1
        moved, slowly = cohort.values[name] - before[name], slow.values[name] - before[name]
        assert torch.allclose(moved, factor * slowly, atol=1e-12)


def pulled(client: Client, batch: Batch) -> Tensor:
    """Cross-entropy, and a pull of the head's bias to a target of the client's and to one of all."""
    bias = client.values["head.bias"]
    away = (bias - client.own["target"]).square().sum() + (bias - client.common["target"]).square().sum()
    return cross_entropy(client, batch) + away


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_an_objective_reads_what_a_method_lays_beside_the_weights(mode):
    cohort = make_cohort([6, 5], "mlp", mode, batch_size=0, local_epochs=1, momentum=0.0, lr=0.5)
    own = {"target": torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float64)}
    common = {"target": torch.full((4,), 3.0, dtype=torch.float64)}
    plain, _ = cohort.gradient(train=["head.bias"])
    bias = cohort.values["head.bias"].clone()
    cohort.fit(pulled, train=["head.bias"], own=own, common=common)
    wanted = bias - 0.5 * (plain["head.bias"] + 2 * (bias - own["target"]) + 2 * (bias - common["target"]))
    assert torch.allclose(cohort.values["head.bias"], wanted, atol=1e-12)


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
@pytest.mark.parametrize("batch_size", [0, 5])
def test_what_is_augmented_once_is_in_all_steps_of_a_round_as_if_it_had_always_been_so(batch_size, mode):
    options = {"mode": mode, "batch_size": batch_size, "local_epochs": 12, "lr": 0.05}
    cohort = make_cohort(UNEQUAL, "mlp", augmentation=Augmentation.parse("rotate,once"), **options)
    turns, turned = cohort.drawn("augment").draws["turns"], make_cohort(UNEQUAL, "mlp", **options)
    images = turned.data.inputs.clone()
    for row, client in enumerate(cohort.clients):
        for place, at in enumerate(cohort.data.train.of(client).tolist()):
            images[at] = images[at].rot90(int(turns[row, place]), (1, 2))
    turned.data = replace(turned.data, inputs=images)
    some = torch.arange(max(UNEQUAL)).expand(len(UNEQUAL), -1) % 3 > 0
    for settings in ({}, {"train": ["head.bias"], "only": some, "purpose": "head"}):
        assert torch.allclose(cohort.fit(**settings), turned.fit(**settings), atol=1e-10)
    assert close(cohort.values, turned.values)
    cohort.round = 2
    assert not torch.equal(cohort.drawn("augment").draws["turns"], turns)


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_the_full_gradient_is_the_same_in_parts(mode, monkeypatch):
    cohort = make_cohort(UNEQUAL, "mlp", mode)
    whole, loss = cohort.gradient()
    monkeypatch.setattr(Engine, "evaluation_size", lambda self, plan, clients: 3)
    parts, loss_of_parts = cohort.gradient()
    assert close(whole, parts, 1e-12)
    assert torch.allclose(loss, loss_of_parts, atol=1e-12)
    rows = cohort.data.train.of(1)
    module = cohort.network.module
    module.load_state_dict({name: tensor[1] for name, tensor in cohort.values.items()})
    module.zero_grad()
    F.cross_entropy(module(cohort.data.decode(cohort.data.inputs[rows])), cohort.data.targets[rows]).backward()
    assert close({n: p.grad for n, p in module.named_parameters()}, {n: t[1] for n, t in whole.items()}, 1e-12)


@pytest.mark.parametrize("memory", [1 << 12, 1 << 20, 1 << 30])
@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_the_gradient_of_a_client_with_norms_is_the_same_whoever_is_beside_it_and_whatever_is_free(
    mode, memory, monkeypatch
):
    monkeypatch.setattr(engine, "_STATISTICS_BYTES", 1 << 18)
    alone = make_cohort(UNEQUAL, "stride-cnn", "stacked", clients=(0,), shape=(3, 16, 16))
    at_once, size = alone.engine.gradient_sizes(alone.plan, 1, UNEQUAL[0])
    assert (at_once, 1 < size < UNEQUAL[0] - 1) == (1, True), "in parts, or there is nothing to see"
    wanted, loss = alone.gradient()
    monkeypatch.setattr(engine, "_CPU_EVALUATION_BYTES", memory)
    cohort = make_cohort(UNEQUAL, "stride-cnn", mode, shape=(3, 16, 16))
    found, losses = cohort.gradient()
    assert close(wanted, {name: tensor[:1] for name, tensor in found.items()})
    assert torch.allclose(losses[:1], loss)


def test_the_head_on_the_features_is_the_network_and_can_be_trained_on_them():
    cohort = make_cohort(UNEQUAL, "mlp", batch_size=0, local_epochs=3)
    features = cohort.features()
    assert (features[-1, 1:] == 0).all()  # the last client has one sample, the rest is padding
    for client in range(len(UNEQUAL)):
        own = {name: tensor[client] for name, tensor in cohort.values.items()}
        rows = cohort.data.train.of(client)
        outputs = cohort.network.forward(own, cohort.data.decode(cohort.data.inputs[rows]), None, train=False)
        assert torch.allclose(cohort.network.head(own, features[client, : len(rows)], False), outputs, atol=1e-12)

    def head_loss(client: Client, batch: Batch) -> Tensor:
        return batch.mean(F.cross_entropy(client.head(batch.inputs), batch.targets, reduction="none"))

    again = make_cohort(UNEQUAL, "mlp", batch_size=0, local_epochs=3)
    head = cohort.network.layers[-1].parameters
    cohort.fit(head_loss, train=head, inputs=features)
    again.fit(train=head)
    assert close(again.values, cohort.values)


def test_batch_norm_statistics_are_each_clients_own_and_ignore_padding():
    cohort = make_cohort([7, 3], "stride-cnn", "stacked", shape=(3, 16, 16), batch_size=5, local_epochs=1, lr=1e-9)
    cohort.fit()
    for client in (0, 1):
        alone = make_cohort([7, 3], "stride-cnn", "stacked", shape=(3, 16, 16), batch_size=5, local_epochs=1, lr=1e-9,
                            clients=(client,))  # fmt: skip
        alone.fit()
        for name in cohort.network.buffers:
            assert torch.allclose(alone.values[name][0], cohort.values[name][client], atol=1e-12)
    assert not torch.allclose(*cohort.values["conv1.norm.running_mean"])


class Recurrent(nn.Module):
    """Rows of an image as a sequence: torch's LSTM, which some versions of torch can stack and others cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, 0])[0][:, -1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class DroppingByHand(Dropping):
    """Draws without a dropout layer that could be recognized."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body[:-1](x), 0.5, self.training))


class OwnNorm(nn.BatchNorm1d):
    """A batch norm that is not torch's own: it cannot be stacked, and must not see padding."""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), OwnNorm(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_dropout_of_any_kind_draws_from_each_clients_own_stream():
    results = []
    for seed in (1, 2):
        torch.manual_seed(0)
        cohort = make_cohort([9, 8, 7, 6], DroppingByHand())
        torch.manual_seed(seed)
        cohort.fit()
        results.append(cohort.values)
    assert cohort.plan.random
    assert close(*results, 0)


def test_a_norm_that_cannot_know_of_padding_never_sees_any():
    results = []
    for batch_size in (0, 6):  # alone and beside a larger client, whose full batch is longer
        torch.manual_seed(0)
        clients = (1,) if batch_size else (0, 1)
        cohort = make_cohort([11, 6], Normed(), clients=clients, batch_size=batch_size, local_epochs=1)
        cohort.fit()
        results.append({name: tensor[-1] for name, tensor in cohort.values.items()})
    assert not cohort.plan.stacked
    assert close(*results)


class Statistics(nn.Module):
    """A norm without parameters as a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.norm = BatchNorm1d(16, affine=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_statistics_of_a_norm_without_parameters_are_each_clients_own(mode):
    torch.manual_seed(0)
    cohort = make_cohort([9, 5], Statistics(), mode)
    assert cohort.network.layers[0].buffers == ("norm.running_mean", "norm.running_var")
    cohort.fit()
    assert not torch.allclose(*cohort.values["norm.running_mean"])


def test_asking_for_a_gradient_changes_nothing():
    cohort = make_cohort([9, 5], Statistics())
    before = {name: tensor.clone() for name, tensor in cohort.values.items()}
    cohort.gradient()
    assert close(before, cohort.values, 0)


def fragile(client: Client, batch: Batch) -> Tensor:
    """Not finite on an empty batch, as a user's objective may be."""
    return cross_entropy(client, batch) / batch.valid.sum()


def test_clients_that_have_finished_are_safe_from_what_an_objective_makes_of_an_empty_batch():
    results = []
    for mode in ("stacked", "one-by-one"):
        cohort = make_cohort(UNEQUAL, "mlp", mode, batch_size=4, local_epochs=1)
        loss = cohort.fit(fragile)
        assert loss.isfinite().all()
        results.append(cohort.values)
    assert close(*results)


def test_torchs_lstm_trains_alike_however_it_runs():
    results = []
    for mode in ("auto", "one-by-one"):
        torch.manual_seed(0)
        cohort = make_cohort(UNEQUAL, Recurrent(), mode, batch_size=4, local_epochs=2)
        cohort.fit()
        results.append(cohort.values)
    assert close(*results)


@pytest.mark.parametrize("module", [Normed, Dropping])
def test_what_cannot_be_stacked_runs_one_by_one_and_the_log_says_so(module, caplog):
    with caplog.at_level(logging.INFO, logger="tailorfl"):
        together = make_cohort([12, 8, 6], module(), batch_size=4)
    assert not together.plan.stacked
    assert "net runs one by one: " in caplog.text
    alone = make_cohort([12, 8, 6], together.network.module, clients=(1,), batch_size=4)
    alone.values = {name: tensor[1:2].clone() for name, tensor in together.values.items()}
    torch.manual_seed(5)  # what other code draws must not matter
    alone.fit()
    together.fit()
    assert close(alone.values, {name: tensor[1:2] for name, tensor in together.values.items()})
    with pytest.raises(UserError, match="cannot be stacked"):
        make_cohort([12, 8, 6], module(), "stacked")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(63, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def test_a_network_that_does_not_run_at_all_shows_its_own_error():
    for mode in ("auto", "one-by-one"):
        with pytest.raises(UserError, match=r"network net does not run on inputs of shape 1x8x8: .*63"):
            make_cohort(UNEQUAL, Broken(), mode)


def test_evaluation_counts_hits_and_losses_of_each_client():
    for mode in ("stacked", "one-by-one"):
        cohort = make_cohort(UNEQUAL, "mlp", mode)
        scores = cohort.evaluate("test")
        for client in range(len(UNEQUAL)):
            rows = cohort.data.test.of(client)
            own = {name: tensor[client] for name, tensor in cohort.values.items()}
            outputs = cohort.network.forward(own, cohort.data.decode(cohort.data.inputs[rows]), None, train=False)
            targets = cohort.data.targets[rows]
            assert scores.samples[client] == len(rows)
            assert scores.correct[client] == (outputs.argmax(1) == targets).sum()
            assert scores.loss[client].item() == pytest.approx(
                F.cross_entropy(outputs, targets, reduction="sum").item()
            )


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_outputs_are_each_clients_own_on_each_of_its_samples_and_zero_on_padding(mode, monkeypatch):
    cohort = make_cohort([*UNEQUAL, 0], "mlp", mode)
    whole = {split: cohort.outputs(split) for split in ("train", "test")}
    assert {split: tuple(found.shape) for split, found in whole.items()} == {"train": (6, 23, 4), "test": (6, 3, 4)}
    for client, count in enumerate([*UNEQUAL, 0]):
        own = {name: tensor[client] for name, tensor in cohort.values.items()}
        for split, length in (("train", count), ("test", 3)):
            rows = cohort.data.rows(split).of(client)
            outputs = cohort.network.forward(own, cohort.data.decode(cohort.data.inputs[rows]), None, train=False)
            assert torch.allclose(whole[split][client, :length], outputs, atol=1e-12)
            assert whole[split][client, length:].eq(0).all()
    monkeypatch.setattr(Engine, "evaluation_size", lambda *_: 5)
    assert torch.allclose(cohort.outputs(), whole["train"], atol=1e-12)


def test_clients_without_any_sample_have_outputs_of_nothing():
    assert make_cohort([3, 0], "mlp", clients=(1,)).outputs().eq(0).all()


def test_outputs_change_neither_weights_nor_statistics():
    cohort = make_cohort([6, 4], "stride-cnn", shape=(3, 16, 16))
    before = {name: tensor.clone() for name, tensor in cohort.values.items()}
    cohort.outputs()
    assert close(before, cohort.values, 0.0)


def test_some_clients_of_a_cohort_have_copies_of_what_they_had():
    cohort = make_cohort(UNEQUAL, "mlp", lr=0.1)
    cohort.round, cohort.rounds, cohort.archive = 4, 9, {"1/w": torch.ones(3)}
    cohort.memory = {"seen": torch.arange(5), "weights": torch.rand(5, 23)}
    cohort.samples("train")  # laid out for all of them
    cohort.fit(purpose="before")
    part = cohort.of([1, 3])
    assert part.clients == (1, 3)
    assert part.counts.tolist() == [12, 7]
    assert part.samples("train").rows.shape == (2, 12)
    assert part.memory["seen"].tolist() == [1, 3]
    assert torch.equal(part.memory["weights"], cohort.memory["weights"][[1, 3]])
    assert close(part.values, {name: tensor[[1, 3]] for name, tensor in cohort.values.items()}, 0.0)
    assert part.archive is cohort.archive
    assert (part.round, part.rounds, part.seed) == (4, 9, cohort.seed)
    assert part.losses == {}
    before = {name: tensor.clone() for name, tensor in cohort.values.items()}
    part.fit()
    part.memory["seen"].fill_(-1)
    assert close(before, cohort.values, 0.0)
    assert cohort.memory["seen"].tolist() == [0, 1, 2, 3, 4]
    assert set(cohort.losses) == {"before"}


@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
def test_some_clients_of_a_cohort_train_as_they_do_among_all(mode):
    cohort = make_cohort(UNEQUAL, "mlp", mode, batch_size=4, local_epochs=2, momentum=0.9)
    part = cohort.of([0, 2, 3])
    loss = part.fit()
    whole = cohort.fit()
    assert close(part.values, {name: tensor[[0, 2, 3]] for name, tensor in cohort.values.items()})
    assert torch.allclose(loss, whole[[0, 2, 3]], atol=1e-10)


def test_parts_of_like_size_have_little_padding_and_the_same_tensors():
    cohort = make_cohort([40, 21, 19, 12, 10, 4, 1], "mlp", batch_size=0, local_epochs=2)
    parts = cohort.alike()
    assert [part.counts.tolist() for part in parts] == [[40, 21], [19, 12, 10], [4], [1]]
    apart = make_cohort([40, 21, 19, 12, 10, 4, 1], "mlp", batch_size=0, local_epochs=2)
    cohort.fit()
    for part in apart.alike():
        part.fit()
    assert close(cohort.values, apart.values)  # what a part trains is the cohort's
