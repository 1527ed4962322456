"""Methods whose clients have networks of their own: HeteroFL by width, pFedHN by generated weights."""

from functools import partial
from typing import Any

import pytest
import torch
from method_runs import IMAGES, differences, federation, run, state
from torch import Tensor
from torch.nn import functional

from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.models.network import Values
from tailorfl.models.slicing import shapes_of
from tailorfl.study.build import Built

ONE_STEP = {"precision": "float64", "batch_size": 0, "momentum": 0.0, "rounds": 1, "clients_per_round": 1.0}
SKEWED = {"partition": "dirichlet", "alpha": 0.2}  # clients of unequal size that lack classes
PLAIN = {"widths": [1.0], "mask_classes": False, "batch_norm": "shared"}


def answers_of(built: Built, number: int) -> list[Answers]:
    """What the clients of a round send; the server is not told."""
    message = Message(address=partial(built.config.method.individual, built.server))
    return list(built.federation.train(number, built.loop.select(number), message))


def rows(built: Built, client: int) -> tuple[Tensor, Tensor]:
    data = built.data
    own = data.train.of(client)
    return data.decode(data.inputs[own]).flatten(1), data.targets[own]


# HeteroFL.


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("data", [{}, IMAGES])
def test_heterofl_with_one_full_width_is_fedavg(data: dict[str, Any], scale: bool) -> None:
    fedavg, heterofl = federation("fedavg", **data), federation("heterofl", **data, **PLAIN, scale=scale)
    scores = [[record.evaluation.personalized.loss.tolist() for record in run(built)] for built in (fedavg, heterofl)]
    assert not differences(state(fedavg), state(heterofl))
    # Fedavg evaluates its one model once, heterofl each client's: other batches, other rounding.
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_a_round_of_heterofl_is_the_average_of_steps_on_slices(scale: bool, mask: bool) -> None:
    """Three clients of widths 8, 4 and 2, one full-batch step each, against plain autograd."""
    options = {"scale": scale, "mask_classes": mask, "lr": 0.3}
    built = federation("heterofl", **ONE_STEP, **options, clients=3, samples_per_client=None, **SKEWED)
    names = ("fc1.linear.weight", "fc1.linear.bias", "head.weight", "head.bias")
    before = {name: tensor.clone() for name, tensor in built.server.values.items()}
    sums, held = ({name: torch.zeros_like(tensor) for name, tensor in before.items()} for _ in range(2))
    lacking = 0
    for client, (width, ratio) in enumerate([(8, 1.0), (4, 0.5), (2, 0.25)]):
        x, y = rows(built, client)
        w1, b1, w2, b2 = (before[name].clone() for name in names)
        own = [w1[:width], b1[:width], w2[:, :width], b2]
        leaves = [tensor.clone().requires_grad_() for tensor in own]
        hidden = functional.linear(x, leaves[0], leaves[1]) / (ratio if scale else 1)
        outputs = functional.linear(hidden.relu(), leaves[2], leaves[3])
        if mask:
            absent = [k for k in range(10) if k not in y]
            lacking += len(absent)
            outputs = outputs.index_fill(1, torch.tensor(absent), 0.0)
        for name, leaf, grad in zip(
            names, leaves, torch.autograd.grad(functional.cross_entropy(outputs, y), leaves), strict=True
        ):
            piece = tuple(slice(0, size) for size in leaf.shape)
            sums[name][piece] += len(y) * (leaf.detach() - 0.3 * grad)
            held[name][piece] += len(y)
    run(built)
    assert (lacking > 0) == mask
    for name in names:
        torch.testing.assert_close(built.server.values[name], sums[name] / held[name], rtol=0, atol=1e-12)


def test_heterofl_gives_clients_their_widths_in_turn() -> None:
    built = federation("heterofl", widths=[0.5, 1.0, 0.5], rounds=1)
    method = built.config.method
    assert [method.network_of(client, 1) for client in range(6)] == [0, 1, 0, 0, 1, 0]
    narrow, full = built.federation.networks
    assert full is built.network
    assert shapes_of(narrow.module)["head.weight"] == (10, 4)


def test_narrow_clients_of_heterofl_send_and_receive_less() -> None:
    built = federation("heterofl", clients=3, clients_per_round=3)
    sizes = [sum(t.nbytes for t in network.initial().values()) for network in built.federation.networks]
    [one, two, three] = run(built)
    assert sizes[0] > sizes[1] > sizes[2]
    for record in (one, two, three):
        assert record.bytes_up == record.bytes_down == sum(sizes)


def test_what_no_client_of_heterofl_holds_stays_as_it_was() -> None:
    built = federation("heterofl", widths=[0.5, 0.25], clients_per_round=6)
    initial = built.network.initial()
    assert all(record.evaluation.common is None for record in run(built))  # half of a global model never trained
    weight, first = built.server.values["fc1.linear.weight"], initial["fc1.linear.weight"]
    assert torch.equal(weight[4:], first[4:])
    assert not torch.equal(weight[:4], first[:4])


def test_the_global_model_of_heterofl_has_the_full_width() -> None:
    [record] = run(federation("heterofl", rounds=1))
    assert record.evaluation.common is not None
    [record] = run(federation("heterofl", rounds=1, personal_layers=1))
    assert record.evaluation.common is None


@pytest.mark.parametrize("network", ["resnet18", "mobilenet"])
def test_heterofl_narrows_residual_and_depthwise_networks(network: str) -> None:
    settings = {**IMAGES, "network": network, "network_options": {"width": 0.05}, "rounds": 1}
    built = federation("heterofl", **settings)
    [record] = run(built)
    assert len(record.answered) == 4
    assert record.diverged == []
    narrow = built.federation.networks[1]
    assert 0 < narrow.size() < built.network.size()
    # Statistics stay with the client in its own width, weights of norms travel.
    kept = built.federation.store.entries[1]
    assert set(kept) == set(narrow.buffers)
    assert all(kept[name].shape == shapes_of(narrow.module)[name] for name in kept)


def test_clients_of_heterofl_keep_heads_of_their_own_width() -> None:
    built = federation("heterofl", personal_layers=1, clients_per_round=6)
    run(built)
    heads = {client: entry["head.weight"].shape for client, entry in built.federation.store.entries.items()}
    assert heads == {client: (10, (8, 4, 2)[client % 3]) for client in range(6)}
    assert set(built.server.values) == {"fc1.linear.weight", "fc1.linear.bias"}


def test_a_masked_client_leaves_classes_that_it_lacks_alone() -> None:
    built = federation("heterofl", widths=[1.0], rounds=1)
    initial = built.network.initial()
    for answers in answers_of(built, 1):
        for row, client in enumerate(answers.clients):
            present = (built.data.label_counts()[client] > 0).tolist()
            changed = (answers.tensors["head.weight"][row] != initial["head.weight"]).any(1).tolist()
            assert changed == present
            assert sum(present) == 2


def test_a_masked_client_predicts_only_classes_that_it_has() -> None:
    masked, plain = (federation("heterofl", widths=[1.0], mask_classes=mask, rounds=1) for mask in (True, False))
    for built in (masked, plain):
        cohort = built.federation.cohort(1, (0, 1))
        batch = next(cohort.samples("test").in_order(5))
        outputs = built.config.method.predict(cohort, batch)
        zero = (outputs == 0).all(1)
        absent = built.data.label_counts()[[0, 1]] == 0
        assert torch.equal(zero, absent) == (built is masked)


def test_scaled_narrow_models_divide_when_they_are_evaluated_too() -> None:
    built = federation("heterofl", widths=[0.5], mask_classes=False, rounds=1)
    cohort = built.federation.cohort(1, (0,))
    batch = next(cohort.samples("test").in_order(5))
    w = {name: tensor[0] for name, tensor in cohort.values.items()}
    hidden = functional.linear(batch.inputs[0].flatten(1), w["fc1.linear.weight"], w["fc1.linear.bias"]) / 0.5
    expected = functional.linear(hidden.relu(), w["head.weight"], w["head.bias"])
    torch.testing.assert_close(cohort.predict(batch)[0], expected)


@pytest.mark.parametrize("widths", [[], [0.0], [1.0, 1.5], [-0.5]])
def test_widths_that_are_none_are_refused(widths: list[float]) -> None:
    with pytest.raises(UserError, match=r"widths=.*allowed: one or more numbers above 0, up to 1"):
        federation("heterofl", widths=widths)


# pFedHN.

TINY = {**ONE_STEP, "clients": 3, "network_options": {"hidden": [2]}, "embedding_size": 3, "hidden_size": 4}


def made_by_hand(values: Values, embedding: Tensor, layers: int) -> dict[str, Tensor]:
    """The hypernetwork for one client, written out."""
    for k in range(layers):
        embedding = (values[f"hidden/{k}/weight"] @ embedding + values[f"hidden/{k}/bias"]).clamp(min=0)
    names = [name.split("/")[1] for name in values if name.endswith("/bias") and name.startswith("output")]
    return {
        name: (values[f"output/{name}/weight"] @ embedding).reshape(values[f"output/{name}/bias"].shape)
        + values[f"output/{name}/bias"]
        for name in names
    }


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("weighing", ["uniform", "samples"])
def test_a_step_of_pfedhn_is_the_difference_times_the_jacobian(layers: int, weighing: str) -> None:
    """From a server that has taken some steps, so that all of the hypernetwork matters; full Jacobians, row by row."""
    options = {"hidden_layers": layers, "hyper_lr": 0.05, "hyper_momentum": 0.5, "aggregation": weighing}
    built = federation("pfedhn", **{**TINY, **options, "rounds": 3, **SKEWED}, samples_per_client=None)
    loop, server = built.loop, built.server
    loop.round(1)
    loop.round(2)
    before = {name: tensor.clone() for name, tensor in server.values.items()}
    kept = {name: tensor.clone() for name, tensor in server.state.items()}
    answers = answers_of(built, 3)
    total = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    weights, embeddings = 0, {}
    for answer in answers:
        for row, client in enumerate(answer.clients):
            weight = int(answer.samples[row]) if weighing == "samples" else 1
            weights += weight
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
            embedding = kept[f"embedding/{client}"].clone().requires_grad_()
            # half the squared distance to what the client made of its parameters has this gradient
            made = made_by_hand(leaves, embedding, layers)
            loss = sum((t - (t + answer.tensors[n][row]).detach()).square().sum() / 2 for n, t in made.items())
            *found, own = torch.autograd.grad(loss, [*leaves.values(), embedding])
            for name, gradient in zip(leaves, found, strict=True):
                total[name] += weight * gradient
            embeddings[f"embedding/{client}"] = own
    built.config.method.aggregate(server, iter(answers), built.network)
    moved = 0
    for name, gradient in (total | embeddings).items():
        old, new = (before, server.values) if name in before else (kept, server.state)
        velocity = 0.5 * kept[f"momentum/{name}"] + (gradient / weights if name in before else gradient)
        torch.testing.assert_close(new[name], old[name] - 0.05 * velocity, rtol=0, atol=1e-12)
        moved += int(not torch.equal(new[name], old[name]))
    assert moved == len(total) + len(embeddings)


def test_every_client_of_pfedhn_starts_from_the_initial_weights() -> None:
    built = federation("pfedhn")
    made = built.config.method.individual(built.server, (0, 3, 5), built.network)
    initial = built.network.initial()
    assert set(made) == set(initial)
    assert all(torch.equal(tensor, initial[name].expand(3, *initial[name].shape)) for name, tensor in made.items())


def test_clients_of_pfedhn_are_given_models_of_their_own_after_a_round() -> None:
    built = federation("pfedhn", rounds=2, clients_per_round=6)
    parameters = sum(tensor.nbytes for tensor in built.network.initial().values())
    for record in run(built):
        assert record.bytes_up == record.bytes_down == 6 * parameters
        assert record.evaluation.common is None
    made = built.config.method.individual(built.server, range(6), built.network)["head.weight"]
    assert len(made.flatten(1).unique(dim=0)) == 6
    assert not built.federation.store.entries


def test_pfedhn_with_blank_embeddings_and_no_hidden_layer_is_fedavg() -> None:
    """Then the parameters are the outputs' biases, and a step of rate 1 takes them to the average."""
    settings = {"precision": "float64", "aggregation": "uniform"}
    hyper = federation("pfedhn", **settings, hidden_layers=0, hyper_lr=1.0, hyper_momentum=0.0)
    fedavg = federation("fedavg", **settings)
    for client in range(6):
        hyper.server.state[f"embedding/{client}"] = torch.zeros(32, dtype=torch.float64)
    run(hyper)
    run(fedavg)
    for name, tensor in fedavg.server.values.items():
        torch.testing.assert_close(hyper.server.values[f"output/{name}/bias"], tensor, rtol=0, atol=1e-12)


def test_pfedhn_with_all_layers_personal_is_local_training() -> None:
    local, hyper = federation("local"), federation("pfedhn", personal_layers=2)
    run(local)
    assert all(record.bytes_up == record.bytes_down == 0 for record in run(hyper))
    assert not differences(local.federation.store.flat(), hyper.federation.store.flat())


def test_a_client_that_pfedhn_never_saw_is_served_by_the_mean_embedding() -> None:
    built = federation("pfedhn", new_clients=2, rounds=3, precision="float64")
    method, [new, _] = built.config.method, built.data.new_clients
    run(built)
    known = [name for name in built.server.state if name.startswith("embedding/")]
    assert len(known) == 4
    mean = torch.stack([built.server.state[name] for name in known]).mean(0)
    served = method.for_evaluation(built.server, (new,), built.network)
    for name, tensor in made_by_hand(built.server.values, mean, 3).items():
        torch.testing.assert_close(served[name][0], tensor, rtol=0, atol=1e-12)
    seen = int(known[0].split("/")[1])
    one, other = (hook(built.server, (seen,), built.network) for hook in (method.individual, method.for_evaluation))
    assert not differences(one, other)
    # In a round of its own it would begin from its own draw.
    drawn = method.individual(built.server, (new,), built.network)
    assert not torch.equal(drawn["head.weight"], served["head.weight"])
    # Nothing of this is kept.
    assert len([name for name in built.server.state if name.startswith("embedding/")]) == 4


def test_the_draws_of_pfedhn_follow_the_seed_and_the_client_alone() -> None:
    one, same, other = (federation("pfedhn", seed=seed) for seed in (0, 0, 1))
    method = one.config.method
    drawn = [method._embeddings(built.server, (2, 5), built.network) for built in (one, same, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0][1:], method._embeddings(one.server, (5,), one.network))
    assert not torch.equal(drawn[0][0], drawn[0][1])
    hidden = [built.server.values["hidden/0/weight"] for built in (one, same, other)]
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])


@pytest.mark.parametrize("batch_norm", ["shared", "local"])
def test_the_statistics_of_norms_stay_with_the_clients_of_pfedhn(batch_norm: str) -> None:
    built = federation("pfedhn", **IMAGES, batch_norm=batch_norm, hidden_size=4, rounds=1)
    run(built)
    stay = set(built.network.buffers) if batch_norm == "shared" else built.network.norm
    assert stay
    assert all(set(entry) == stay for entry in built.federation.store.entries.values())
    made = {name.split("/")[1] for name in built.server.values if name.startswith("output/")}
    assert made == set(built.network.parameters) - stay
