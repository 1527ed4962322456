"""Methods whose model has two parts, or two models a client: against a calculation by hand, and in their limits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_runs import IMAGES, differences, federation, run, state
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.cohort import Batch, Client, Cohort
from tailorfl.errors import UserError
from tailorfl.methods import find_method
from tailorfl.methods.fedrod import two_heads
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.config import Experiment

GROUP = ["fedsim", "fedalt", "fedrep", "fedrecon", "ditto", "apfl", "fedrod"]
LR = 0.3
EXACT = {"precision": "float64", "batch_size": 0, "momentum": 0.0, "lr": LR}  # full batches: no order of samples
BY_HAND = {**EXACT, "clients": 3, "clients_per_round": 3, "rounds": 1}
HEAD = ("head.weight", "head.bias")
BODY = ("fc1.linear.weight", "fc1.linear.bias")
NORM = {"network": "test_methods_two_parts:NormNet", "network_options": {}}

Loss = Callable[[Values], Tensor]


class NormNet(nn.Sequential):
    """A small network with a batch norm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, classes)


def data_of(built: Built, client: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows = built.data.train.of(client)
    rows = rows if chosen is None else rows[chosen]
    return built.data.decode(built.data.inputs[rows]), built.data.targets[rows]


def logits(built: Built, values: Values, inputs: Tensor) -> Tensor:
    return functional_call(built.network.module, values, (inputs,))


def plain_loss(built: Built, client: int, chosen: Tensor | None = None) -> Loss:
    inputs, targets = data_of(built, client, chosen)
    return lambda values: F.cross_entropy(logits(built, values, inputs), targets)


def step(values: Values, names: Sequence[str], loss: Loss, lr: float = LR) -> Values:
    """One step of gradient descent on some of the tensors."""
    leaves = {name: values[name].detach().clone().requires_grad_() for name in names}
    found = torch.autograd.grad(loss({**values, **leaves}), list(leaves.values()))
    return {**values, **{n: leaves[n].detach() - lr * g for n, g in zip(leaves, found, strict=True)}}


def averaged(built: Built, of_clients: Sequence[Values], names: Sequence[str]) -> Values:
    weights = built.data.train.counts.double() / built.data.train.counts.sum()
    return {name: sum(w * values[name] for w, values in zip(weights, of_clients, strict=True)) for name in names}


def check(found: Values, expected: Values, tolerance: float = 1e-12) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


def kept(built: Built, client: int, prefix: str = "") -> Values:
    entry = built.federation.store.entries[client]
    return {name.removeprefix(prefix): tensor for name, tensor in entry.items() if name.startswith(prefix)}


def served(built: Built, clients: Sequence[int], round: int = 1) -> Cohort:
    """Clients as they are evaluated."""
    cohort = built.federation.cohort(round, tuple(clients))
    built.config.method.serve(cohort, built.config.method.broadcast(built.server))
    return cohort


def losses(built: Built) -> list[list[float]]:
    return [record.evaluation.personalized.loss.tolist() for record in run(built)]


@pytest.mark.parametrize("method", GROUP)
def test_no_option_has_the_name_of_another_key_of_an_experiment(method: str) -> None:
    """A key goes to the method where it has it, and the experiment would keep its default without a word."""
    assert not set(find_method(method).model_fields) & set(Experiment.model_fields)


# FedSim.


@pytest.mark.parametrize("settings", [{}, {"personal_lr": 0.05}, {**IMAGES, "batch_norm": "local", "rounds": 2}])
def test_fedsim_without_a_rate_of_its_own_is_fedper(settings: dict[str, Any]) -> None:
    schedule = {"lr": 0.05, "lr_schedule": "cosine"}
    shared = {name: value for name, value in settings.items() if name != "personal_lr"}
    fedper, fedsim = federation("fedper", **shared, **schedule), federation("fedsim", **settings, **schedule)
    assert losses(fedper) == losses(fedsim)
    assert not differences(state(fedper), state(fedsim))


def test_fedsim_moves_both_parts_from_the_same_point_each_at_its_rate() -> None:
    built = federation("fedsim", **BY_HAND, personal_lr=0.7)
    start = built.network.initial()
    clients = []
    for client in range(3):
        loss = plain_loss(built, client)
        clients.append(step(start, BODY, loss) | {n: step(start, HEAD, loss, 0.7)[n] for n in HEAD})
    run(built)
    check(built.server.values, averaged(built, clients, BODY))
    for client in range(3):
        check(kept(built, client), {name: clients[client][name] for name in HEAD})


# FedAlt and FedRep.


def test_fedalt_trains_the_head_on_the_received_body_and_then_the_body_under_that_head() -> None:
    built = federation("fedalt", **BY_HAND, personal_epochs=2, local_epochs=1, personal_lr=0.7)
    clients = []
    for client in range(3):
        loss, values = plain_loss(built, client), built.network.initial()
        for _ in range(2):
            values = step(values, HEAD, loss, 0.7)
        clients.append(step(values, BODY, loss))
    run(built)
    check(built.server.values, averaged(built, clients, BODY))
    for client in range(3):
        check(kept(built, client), {name: clients[client][name] for name in HEAD})


def test_fedalt_trains_both_parts_equally_long_unless_told_otherwise() -> None:
    plain, told = federation("fedalt", local_epochs=2), federation("fedalt", local_epochs=2, personal_epochs=2)
    other = federation("fedalt", local_epochs=2, personal_epochs=1)
    for built in (plain, told, other):
        run(built)
    assert not differences(state(plain), state(told))
    assert differences(state(plain), state(other))


def test_fedalt_without_personal_layers_is_fedavg() -> None:
    fedavg, fedalt = federation("fedavg", finetune_epochs=2), federation("fedalt", personal_layers=0, finetune_epochs=2)
    assert losses(fedavg) == losses(fedalt)
    assert not differences(state(fedavg), state(fedalt))


def test_fedalt_with_all_layers_personal_is_local_training() -> None:
    local, fedalt = federation("local", **EXACT), federation("fedalt", **EXACT, personal_layers=2)
    for built in (local, fedalt):
        assert all(record.bytes_up == record.bytes_down == 0 for record in run(built))
    check(state(fedalt), state(local))


def test_training_the_head_does_not_move_the_norm_statistics_that_travel() -> None:
    settings = {**IMAGES, "rounds": 1, "personal_lr": 1e-300}  # a head that stays where it is
    short, long = (
        federation("fedalt", **settings, personal_epochs=1),
        federation("fedalt", **settings, personal_epochs=4),
    )
    run(short)
    run(long)
    assert built_has_statistics(short)
    assert not differences(short.server.values, long.server.values)


def built_has_statistics(built: Built) -> bool:
    return any(name.endswith("running_mean") for name in built.server.values)


@pytest.mark.parametrize("settings", [{}, {**IMAGES, "rounds": 2}])
def test_fedrep_is_fedalt_with_its_epochs(settings: dict[str, Any]) -> None:
    fedrep = federation("fedrep", **settings, head_epochs=3, local_epochs=2, finetune_epochs=1)
    fedalt = federation("fedalt", **settings, personal_epochs=3, local_epochs=2, finetune_epochs=1)
    assert losses(fedrep) == losses(fedalt)
    assert not differences(state(fedrep), state(fedalt))


@pytest.mark.parametrize("method", ["fedalt", "fedrep", "fedrecon"])
def test_fine_tuning_leaves_the_shared_body_alone(method: str) -> None:
    plain, tuned = federation(method), federation(method, evaluate="finetuned", finetune_epochs=3)
    run(plain)
    run(tuned)
    before, after = served(plain, [0, 1]), served(tuned, [0, 1])
    for name in BODY:
        assert all(torch.equal(row, tuned.server.values[name]) for row in after.values[name])
    assert not torch.equal(after.values["head.weight"], before.values["head.weight"])


# FedRecon.


def test_fedrecon_rebuilds_the_head_on_one_part_of_the_data_and_trains_the_body_on_the_other() -> None:
    options = {"recon_epochs": 2, "recon_lr": 0.7, "local_epochs": 1, "support_fraction": 0.25}
    built = federation("fedrecon", **{**BY_HAND, "rounds": 2}, **options)
    support, query = built.config.method._parts(built.federation.cohort(1, (0, 1, 2)))
    assert len({int(count) for count in built.data.train.counts}) == 1
    body = built.network.initial()
    for _ in range(2):  # the head of the second round begins where that of the first did
        clients = []
        for client in range(3):
            values = {**built.network.initial(), **{name: body[name] for name in BODY}}
            for _ in range(2):
                values = step(values, HEAD, plain_loss(built, client, support[client]), 0.7)
            clients.append(step(values, BODY, plain_loss(built, client, query[client])))
        body = averaged(built, clients, BODY)
    run(built)
    check(built.server.values, body)


def test_fedrecon_is_evaluated_with_a_head_rebuilt_on_all_training_data() -> None:
    built = federation("fedrecon", **{**BY_HAND, "clients_per_round": 2}, recon_epochs=2, new_clients=1)
    run(built)
    cohort = served(built, range(3), round=5)
    for client in range(3):  # one of them is new: nobody has kept anything, so all are alike
        values = {**built.network.initial(), **built.server.values}
        for _ in range(2):
            values = step(values, HEAD, plain_loss(built, client))
        check({name: cohort.values[name][client] for name in values}, values)


@pytest.mark.parametrize(("batch_norm", "stays"), [("shared", False), ("local", True)])
def test_fedrecon_keeps_no_head(batch_norm: str, stays: bool) -> None:
    built = federation("fedrecon", **IMAGES, batch_norm=batch_norm, rounds=2)
    run(built)
    entries = built.federation.store.entries
    assert bool(entries) == stays
    assert all(set(entry) == built.network.norm for entry in entries.values())


def test_rebuilding_the_head_does_not_move_the_norm_statistics_of_the_body() -> None:
    built = federation("fedrecon", **IMAGES, rounds=2)
    run(built)
    cohort = served(built, [0])
    assert built_has_statistics(built)
    assert all(torch.equal(cohort.values[name][0], tensor) for name, tensor in built.server.values.items())


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.77, 0.99])
def test_support_and_query_are_apart_and_large_clients_come_first_in_both(fraction: float) -> None:
    counts = torch.arange(60, 0, -1)
    cohort: Any = SimpleNamespace(
        counts=counts, clients=tuple(range(60)), seed=0, engine=SimpleNamespace(device=torch.device("cpu"))
    )
    method: Any = find_method("fedrecon")(support_fraction=fraction)
    support, query = method._parts(cohort)
    for part in (support, query):
        sizes = part.sum(1)
        assert (sizes >= 1).all()
        assert (sizes.diff() <= 0).all()
    assert not (support & query)[:-1].any()
    assert ((support | query).sum(1) == counts).all()
    assert torch.equal((support & query)[-1], torch.arange(60) == 0)  # a single sample serves for both
    assert (support.sum(1)[:30] - fraction * counts[:30]).abs().max() <= 1
    assert not torch.equal(support[0, :59], support[1, :59])


def test_fedrecon_without_personal_layers_on_all_data_is_fedavg() -> None:
    fedavg, fedrecon = federation("fedavg"), federation("fedrecon", personal_layers=0, support_fraction=1)
    assert losses(fedavg) == losses(fedrecon)
    assert not differences(state(fedavg), state(fedrecon))


def test_the_first_round_of_fedrecon_on_all_data_is_that_of_fedalt() -> None:
    fedalt = federation("fedalt", **BY_HAND, personal_epochs=3)
    fedrecon = federation("fedrecon", **BY_HAND, recon_epochs=3, support_fraction=1)
    run(fedalt)
    run(fedrecon)
    check(fedrecon.server.values, fedalt.server.values)


# Ditto.


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 5}, {**IMAGES, "rounds": 2}])
def test_the_personal_models_of_ditto_without_a_pull_are_those_of_local_training(settings: dict[str, Any]) -> None:
    local, ditto = federation("local", **settings), federation("ditto", **settings, lam=0)
    assert losses(local) == losses(ditto)
    assert len(ditto.federation.store.entries) > 3
    for client in ditto.federation.store.entries:
        assert not differences(kept(ditto, client, "memory/own/"), kept(local, client))


def test_the_global_model_of_ditto_is_that_of_fedavg() -> None:
    fedavg, ditto = federation("fedavg", **EXACT), federation("ditto", **EXACT, personal_epochs=3)
    plain, beside = run(fedavg), run(ditto)
    check(ditto.server.values, fedavg.server.values)
    assert [r.evaluation.common.accuracy for r in plain] == [r.evaluation.common.accuracy for r in beside]


def test_ditto_pulls_the_personal_model_towards_the_one_that_was_received() -> None:
    built = federation("ditto", **{**BY_HAND, "rounds": 2}, lam=0.8, personal_epochs=2, local_epochs=1)
    own = [built.network.initial() for _ in range(3)]
    received = built.network.initial()
    for _ in range(2):
        for client in range(3):
            plain = plain_loss(built, client)

            def pulled(values: Values, plain: Loss = plain, centre: Values = received) -> Tensor:
                return plain(values) + 0.8 / 2 * sum((values[n] - centre[n]).square().sum() for n in centre)

            for _ in range(2):
                own[client] = step(own[client], list(received), pulled)
        trained = [step(received, list(received), plain_loss(built, client)) for client in range(3)]
        received = averaged(built, trained, list(received))
    run(built)
    check(built.server.values, received)
    for client in range(3):
        check(kept(built, client, "memory/own/"), own[client])


@pytest.mark.parametrize("moment", ["paper", "received"])
def test_ditto_serves_the_personal_model_as_it_is_kept(moment: str) -> None:
    built = federation("ditto", **IMAGES, rounds=2, evaluate=moment)
    run(built)
    cohort = served(built, [1])
    assert built_has_statistics(built)
    assert not differences({n: t[0] for n, t in cohort.values.items()}, kept(built, 1, "memory/own/"))
    assert set(differences({n: t[0] for n, t in cohort.values.items()}, built.server.values)) == set(
        built.network.names
    )


# APFL.


@pytest.mark.parametrize("epochs", [1, 5])
def test_apfl_with_nothing_of_the_personal_model_is_fedavg(epochs: int) -> None:
    fedavg = federation("fedavg", local_epochs=epochs)
    apfl = federation("apfl", local_epochs=epochs, mixing=0, adaptive_mixing=False)
    assert losses(fedavg) == losses(apfl)
    assert not differences(fedavg.server.values, apfl.server.values)


@pytest.mark.parametrize("batch_norm", ["local", "local-statistics"])
def test_apfl_measures_the_norm_statistics_of_the_mixture_itself(batch_norm: str) -> None:
    settings = {**IMAGES, "rounds": 2, "batch_norm": batch_norm, "precision": "float64"}
    fedavg, apfl = federation("fedavg", **settings), federation("apfl", **settings, mixing=0, adaptive_mixing=False)
    for one, other in zip(losses(fedavg), losses(apfl), strict=True):
        assert one == pytest.approx(other, abs=1e-10)
    for client in fedavg.federation.store.entries:
        measured = {name: kept(fedavg, client)[name] for name in fedavg.network.buffers}
        check(kept(apfl, client, "memory/own/"), measured, 1e-11)


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 5}, {**IMAGES, "rounds": 2}])
def test_apfl_with_nothing_of_the_global_model_is_local_training(settings: dict[str, Any]) -> None:
    local = federation("local", **settings, precision="float64")
    apfl = federation("apfl", **settings, precision="float64", mixing=1, adaptive_mixing=False)
    for one, other in zip(losses(local), losses(apfl), strict=True):
        assert one == pytest.approx(other, abs=1e-10)
    assert len(apfl.federation.store.entries) > 3
    for client in apfl.federation.store.entries:
        check(kept(apfl, client, "memory/own/"), kept(local, client), 1e-11)


def mixture(built: Built, share: float | Tensor, own: Values, received: Values) -> Values:
    return {name: share * own[name] + (1 - share) * received[name] for name in built.network.names}


def test_apfl_trains_the_personal_model_by_the_loss_of_the_mixture() -> None:
    built = federation("apfl", **{**BY_HAND, "rounds": 2}, mixing=0.3, adaptive_mixing=False, local_epochs=2)
    own = [built.network.initial() for _ in range(3)]
    received = built.network.initial()
    names = list(received)
    for _ in range(2):
        trained = []
        for client in range(3):
            plain, copy = plain_loss(built, client), received
            for _ in range(2):

                def of_mixture(values: Values, plain: Loss = plain, copy: Values = copy) -> Tensor:
                    return plain(mixture(built, 0.3, values, copy))

                own[client], copy = step(own[client], names, of_mixture), step(copy, names, plain)
            trained.append(copy)
        received = averaged(built, trained, names)
    run(built)
    check(built.server.values, received)
    cohort = served(built, range(3))
    for client in range(3):
        check(kept(built, client, "memory/own/"), own[client])
        values = {name: tensor[client] for name, tensor in cohort.values.items()}
        check(values, mixture(built, 0.3, own[client], received))


def test_apfl_learns_the_mixing_by_a_gradient_step_before_it_trains() -> None:
    settings = {**BY_HAND, "mixing": 0.4, "local_epochs": 3}
    before, after = federation("apfl", **settings), federation("apfl", **{**settings, "rounds": 2})
    run(before)
    run(after)
    for client in range(3):
        assert kept(before, client)["memory/mixing"].item() == 0.4  # both models were the initial one
        share = {"share": torch.tensor(0.4, dtype=torch.float64)}
        own, plain = kept(before, client, "memory/own/"), plain_loss(before, client)

        def loss(values: Values, own: Values = own, plain: Loss = plain) -> Tensor:
            return plain(mixture(before, values["share"], own, before.server.values))

        expected = step(share, ["share"], loss)["share"]
        assert abs(expected - 0.4) > 1e-4
        torch.testing.assert_close(kept(after, client)["memory/mixing"], expected, rtol=0, atol=1e-12)


def test_a_learnt_mixing_stays_between_zero_and_one() -> None:
    built = federation("apfl", lr=0.5, rounds=6, clients_per_round=6)
    run(built)
    shares = [entry["memory/mixing"].item() for entry in built.federation.store.entries.values()]
    assert all(0 <= share <= 1 for share in shares)
    assert any(share in (0, 1) for share in shares)
    assert len(set(shares)) > 1


# FedRoD.


def test_fedrod_trains_what_is_shared_with_a_balanced_softmax_and_the_personal_head_on_the_sum() -> None:
    settings = {**BY_HAND, "partition": "dirichlet", "alpha": 0.1, "samples_per_client": None, "min_samples": 5}
    built = federation("fedrod", **settings, local_epochs=2)
    start = built.network.initial()
    names = list(start)
    shared, personal = [], []
    for client in range(3):
        inputs, targets = data_of(built, client)
        counts = torch.bincount(targets, minlength=10).double()
        assert (counts == 0).any()
        generic, added = start, {name: torch.zeros_like(start[name]) for name in HEAD}
        for _ in range(2):

            def balanced(values: Values, counts: Tensor = counts, x: Tensor = inputs, y: Tensor = targets) -> Tensor:
                scores = logits(built, values, x).exp() * counts
                return -(scores.gather(1, y[:, None])[:, 0] / scores.sum(1)).log().mean()

            def empirical(added: Values, generic: Values = generic, x: Tensor = inputs, y: Tensor = targets) -> Tensor:
                head = {name: generic[name] + added[name] for name in HEAD}
                return F.cross_entropy(logits(built, {**generic, **head}, x), y)

            generic, added = step(generic, names, balanced), step(added, HEAD, empirical)
        shared.append(generic)
        personal.append(added)
    run(built)
    check(built.server.values, averaged(built, shared, names))
    for client in range(3):
        check(kept(built, client, "memory/own/"), personal[client])


def test_a_padded_sample_of_a_class_that_a_client_lacks_does_not_spoil_its_loss() -> None:
    built = federation("fedrod", **BY_HAND)
    cohort = built.federation.cohort(1, (0,))
    prior = built.config.method._prior(cohort)[0]
    [lacking, *_] = (cohort.class_counts()[0] == 0).nonzero().flatten()
    inputs, targets = data_of(built, 0)
    values = {name: tensor[0] for name, tensor in (cohort.values | cohort.memory).items()}
    client = Client(built.network, values, {"prior": prior}, {})

    def loss(size: int) -> Tensor:
        valid = torch.zeros(size, dtype=torch.float64)
        valid[:3] = 1
        padded = torch.where(valid > 0, targets[:size], lacking)
        return two_heads(client, Batch(inputs[:size], padded, valid, valid, valid.sum()))

    torch.testing.assert_close(loss(5), loss(3))


def test_fedrod_serves_the_sum_of_both_heads_and_its_global_model_has_the_generic_one() -> None:
    built = federation("fedrod", **BY_HAND)
    run(built)
    inputs, _ = data_of(built, 1)
    cohort = served(built, [1])
    features = built.network.features(built.server.values, inputs, None, train=False)
    own = kept(built, 1, "memory/own/")
    expected = logits(built, built.server.values, inputs) + features @ own["head.weight"].T + own["head.bias"]
    torch.testing.assert_close(logits(built, {n: t[0] for n, t in cohort.values.items()}, inputs), expected)
    assert own["head.weight"].abs().max() > 1e-3
    assert built.config.method.global_model(built.server, built.network) == built.server.values


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 5}, {**IMAGES, "rounds": 2}])
def test_the_global_model_of_fedrod_without_balance_is_that_of_fedavg(settings: dict[str, Any]) -> None:
    fedavg, fedrod = federation("fedavg", **settings), federation("fedrod", **settings, balanced=False)
    run(fedavg)
    run(fedrod)
    assert not differences(fedavg.server.values, fedrod.server.values)
    balanced = federation("fedrod", **settings)
    run(balanced)
    assert differences(fedavg.server.values, balanced.server.values)


def test_a_new_client_of_fedrod_is_served_the_generic_model() -> None:
    built = federation("fedrod", new_clients=1)
    run(built)
    cohort = served(built, built.data.new_clients)
    assert not differences({n: t[0] for n, t in cohort.values.items()}, built.server.values)


@pytest.mark.parametrize(
    ("head", "fits"),
    [
        ("nn.Linear(8, classes)", True),
        ("nn.Sequential(nn.Flatten(), nn.Linear(8, classes, bias=False))", True),
        ("nn.Sequential(nn.Linear(8, 8), nn.Linear(8, classes))", False),
        ("nn.Sequential(nn.Linear(8, classes), nn.Tanh())", False),
    ],
)
def test_fedrod_refuses_a_head_to_which_it_cannot_add(
    head: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), {head})
"""
    module = f"net_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"network": f"{module}:Net", "network_options": {}, "rounds": 1}
    if fits:
        run(federation("fedrod", **settings))
        return
    with pytest.raises(UserError, match=r"fedrod: the last layer of network .* is not one linear layer"):
        federation("fedrod", **settings)


# Engines.


@pytest.mark.parametrize("method", GROUP)
def test_steps_that_are_traced_are_those_of_one_client_alone(method: str) -> None:
    settings = {**NORM, "local_epochs": 6, "rounds": 1, "evaluate_every": 0, "precision": "float64", "lr": 0.02}
    together, apart = (federation(method, **settings, engine=engine) for engine in ("stacked", "one-by-one"))
    run(together)
    run(apart)
    assert together.federation.engine.traces.programs
    check(state(together), state(apart), 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
@pytest.mark.parametrize("method", GROUP)
def test_cuda_graphs_compute_what_a_cpu_computes(method: str, engine: str) -> None:
    settings = {**NORM, "rounds": 2, "precision": "float64", "lr": 0.02}
    cpu, gpu = federation(method, **settings), federation(method, **settings, engine=engine, device="cuda")
    found = [losses(built) for built in (cpu, gpu)]
    assert gpu.federation.engine.graphs is not None
    assert gpu.federation.engine.graphs.programs
    check({name: tensor.cpu() for name, tensor in state(gpu).items()}, state(cpu), 1e-8)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
