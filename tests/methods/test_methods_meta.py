"""pFedMe, Per-FedAvg, FedProto and pFedFDA against calculations by hand, and in their limits."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from method_runs import differences, federation, run, state
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.objective import cross_entropy, squared_error
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.methods.fedproto import COUNTS, PROTOTYPES, NearPrototypes, nearness
from tailorfl.methods.per_fedavg import AfterOneStep, part
from tailorfl.methods.pfedfda import COVARIANCE, MEANS, RARE, Features, Gaussians
from tailorfl.models.network import Values
from tailorfl.study.build import Built

ALONE = {"clients": 1, "clients_per_round": 1, "rounds": 1, "batch_size": 0, "precision": "float64"}
UNEQUAL = {"partition": "dirichlet", "samples_per_client": None, "alpha": 0.3, "precision": "float64"}
ENGINES = pytest.mark.parametrize("engine", ["stacked", "one-by-one"])


class NormNet(nn.Module):
    """A body with batch norm, small enough to be traced in a moment."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Dropping(NormNet):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.2))


class NoBias(NormNet):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = nn.Linear(6, classes, bias=False)


class DeepHead(NormNet):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(6, classes))


NORM = {"network": "test_methods_meta:NormNet", "network_options": {}}


def cohort(built: Built) -> Cohort:
    """All clients, before their first round."""
    counts = built.data.train.counts
    ids = sorted(range(built.data.clients), key=lambda client: -int(counts[client]))
    return built.federation.cohort(1, tuple(ids))


def rows_of(built: Built, client: int) -> tuple[Tensor, Tensor]:
    """A client's training inputs and targets."""
    rows = built.data.train.of(client)
    return built.data.decode(built.data.inputs[rows]), built.data.targets[rows]


def leaves(values: Values) -> Values:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in values.items()}


def hand_gradient(values: Values, loss: Callable[[Values], Tensor]) -> tuple[Values, Tensor]:
    at = leaves(values)
    value = loss(at)
    return dict(zip(at, torch.autograd.grad(value, list(at.values())), strict=True)), value.detach()


def task_loss(built: Built, inputs: Tensor, targets: Tensor) -> Callable[[Values], Tensor]:
    def loss(values: Values) -> Tensor:
        outputs = torch.func.functional_call(built.network.module, values, (inputs,))
        return F.cross_entropy(outputs, targets) if built.data.classes else F.mse_loss(outputs.squeeze(-1), targets)

    return loss


def close(found: Values, expected: Values, tolerance: float = 1e-12) -> None:
    assert expected
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


# pFedMe.


@ENGINES
@pytest.mark.parametrize("beta", [1.0, 0.5, 2.0])
def test_a_step_of_pfedme_is_the_papers(engine: str, beta: float) -> None:
    options = {"lam": 3.0, "inner_steps": 4, "personal_lr": 0.2, "lr": 0.1, "beta": beta}
    built = federation("pfedme", **ALONE, **options, engine=engine)
    start, loss = built.network.initial(), task_loss(built, *rows_of(built, 0))
    theta = start
    for _ in range(4):
        gradient, _ = hand_gradient(theta, loss)
        theta = {n: t - 0.2 * (gradient[n] + 3.0 * (t - start[n])) for n, t in theta.items()}
    local = {n: t - 0.1 * 3.0 * (t - theta[n]) for n, t in start.items()}
    [record] = run(built)
    close(built.server.values, {n: (1 - beta) * start[n] + beta * local[n] for n in start})
    assert record.loss == pytest.approx(loss(theta).item(), abs=1e-12)


@ENGINES
def test_with_one_inner_step_pfedme_trains_its_global_model_as_fedavg_does(engine: str) -> None:
    settings = {"precision": "float64", "engine": engine, "local_epochs": 6}
    pfedme = federation("pfedme", **settings, inner_steps=1, lam=4, personal_lr=0.25, lr=0.1)
    fedavg = federation("fedavg", **settings, lr=0.1 * 4 * 0.25, momentum=0)
    for built in (pfedme, fedavg):
        run(built)
    close(pfedme.server.values, fedavg.server.values, 1e-10)


def test_pfedme_serves_the_model_that_the_prox_leads_to() -> None:
    built = federation("pfedme", **ALONE, lam=3, personal_lr=0.2, local_epochs=2)
    clients = cohort(built)
    start, loss = built.network.initial(), task_loss(built, *rows_of(built, 0))
    theta = start
    for _ in range(2):  # two epochs of one full batch
        gradient, _ = hand_gradient(theta, loss)
        theta = {n: t - 0.2 * (gradient[n] + 3.0 * (t - start[n])) for n, t in theta.items()}
    built.config.method.personalize(clients, Message(built.server.values))
    close(clients.values, {n: t[None] for n, t in theta.items()})


def test_the_stronger_the_pull_the_nearer_are_pfedmes_clients_to_the_global_model() -> None:
    apart = []
    for lam in (1.0, 10.0, 100.0, 1000.0):
        built = federation("pfedme", lam=lam, personal_lr=1 / lam, lr=0.5 / lam, rounds=1, precision="float64")
        [record] = run(built)
        served, common = record.evaluation.personalized, record.evaluation.common
        apart.append(abs(served.loss - common.loss).max())
    assert all(near < 0.2 * far for far, near in pairwise(apart))
    assert apart[-1] < 0.02


def test_a_rate_at_which_theta_runs_away_is_refused() -> None:
    with pytest.raises(UserError, match=r"personal_lr=0\.2 with lam=10.*below 2/lam, 0\.2"):
        federation("pfedme", lam=10, personal_lr=0.2)


@ENGINES
def test_pfedmes_statistics_are_those_of_one_pass_of_the_global_model(engine: str) -> None:
    """As in FedAvg, whatever the inner steps do."""
    pfedme, fedavg = (federation(name, **ALONE, **NORM, engine=engine) for name in ("pfedme", "fedavg"))
    initial = pfedme.network.initial()
    for built in (pfedme, fedavg):
        run(built)
    assert pfedme.network.buffers
    for name in pfedme.network.buffers:
        assert not torch.equal(pfedme.server.values[name], initial[name])
        torch.testing.assert_close(pfedme.server.values[name], fedavg.server.values[name], rtol=0, atol=1e-12)


# Per-FedAvg.


@pytest.mark.parametrize(("size", "real"), [(1, 1), (2, 1), (5, 1), (5, 2), (5, 3), (5, 5), (7, 6)])
@pytest.mark.parametrize("parts", [2, 3])
def test_the_parts_of_a_batch_are_apart_and_an_empty_one_is_the_whole(size: int, real: int, parts: int) -> None:
    valid = (torch.arange(size) < real).double()
    batch = Batch(torch.arange(size), torch.arange(size), valid, 2 * valid, valid.sum())
    found = []
    for number in range(parts):
        chosen = part(batch, number, parts)
        assert torch.equal(chosen.inputs, chosen.targets)
        assert torch.equal(chosen.weight, 2 * chosen.valid)
        assert chosen.size == chosen.valid.sum()
        found.append(chosen.inputs[chosen.valid > 0].tolist())
    for number, samples in enumerate(found):
        assert sorted(samples) == (list(range(number, real, parts)) or list(range(real)))


@ENGINES
@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_the_outer_gradient_of_per_fedavg_is_the_papers(engine: str, variant: str) -> None:
    built = federation("per-fedavg", **UNEQUAL, engine=engine)
    clients, rate, delta = cohort(built), 0.3, 1e-2
    assert len(set(clients.counts.tolist())) > 1
    found, values = clients.gradient(AfterOneStep(cross_entropy, variant, rate, delta))
    start = built.network.initial()
    for row, client in enumerate(clients.clients):
        inputs, targets = rows_of(built, client)
        parts = 2 if variant == "first-order" else 3
        losses = [task_loss(built, inputs[k::parts], targets[k::parts]) for k in range(parts)]
        slope, _ = hand_gradient(start, losses[0])
        outer, left = hand_gradient({n: t - rate * slope[n] for n, t in start.items()}, losses[1])
        if variant == "hessian-free":
            ahead, _ = hand_gradient({n: t + delta * outer[n] for n, t in start.items()}, losses[2])
            behind, _ = hand_gradient({n: t - delta * outer[n] for n, t in start.items()}, losses[2])
            outer = {n: g - rate * (ahead[n] - behind[n]) / (2 * delta) for n, g in outer.items()}
        close({n: t[row] for n, t in found.items()}, outer)
        assert values[row].item() == pytest.approx(left.item(), abs=1e-12)


def test_a_round_of_per_fedavg_is_a_step_along_its_outer_gradient() -> None:
    """With samples that are all alike it does not matter which of them are in which part."""
    built = federation("per-fedavg", **ALONE, lr=0.1, inner_lr=0.3, variant="hessian-free")
    rows = built.data.train.of(0)
    for tensor in (built.data.inputs, built.data.targets):
        tensor[rows] = tensor[rows[0]].clone()
    gradient, loss = cohort(built).gradient(AfterOneStep(cross_entropy, "hessian-free", 0.3, 1e-3))
    start = built.network.initial()
    [record] = run(built)
    close(built.server.values, {n: t - 0.1 * gradient[n][0] for n, t in start.items()}, 1e-10)
    assert record.loss == pytest.approx(loss.item(), abs=1e-10)


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_without_an_inner_step_per_fedavg_is_fedavg_on_the_second_part(variant: str) -> None:
    built = federation("per-fedavg", **ALONE)
    found, _ = cohort(built).gradient(AfterOneStep(cross_entropy, variant, 0.0, 1e-3))
    inputs, targets = rows_of(built, 0)
    parts = 2 if variant == "first-order" else 3
    expected, _ = hand_gradient(built.network.initial(), task_loss(built, inputs[1::parts], targets[1::parts]))
    close(found, {n: t[None] for n, t in expected.items()})


def test_on_a_quadratic_loss_the_hessian_free_gradient_is_the_exact_one() -> None:
    settings = {"data": "synthetic-regression", "partition": "natural", "samples": 40, "dimension": 5}
    own = {"samples_per_client": None, "network": "linear", "network_options": {}, "precision": "float64"}
    built = federation("per-fedavg", **settings, **own)
    clients, rate = cohort(built), 0.2
    found, _ = clients.gradient(AfterOneStep(squared_error, "hessian-free", rate, 1e-3))
    plain, _ = clients.gradient(AfterOneStep(squared_error, "first-order", rate, 1e-3))
    names = list(built.network.parameters)
    for row, client in enumerate(clients.clients):
        inputs, targets = rows_of(built, client)
        losses = [task_loss(built, inputs[k::3], targets[k::3]) for k in range(3)]
        start = leaves(built.network.initial())
        inner = torch.autograd.grad(losses[0](start), list(start.values()))
        outer, _ = hand_gradient({n: start[n] - rate * g for n, g in zip(names, inner, strict=True)}, losses[1])
        slope = torch.autograd.grad(losses[2](start), list(start.values()), create_graph=True)
        along = sum((s * outer[n]).sum() for n, s in zip(names, slope, strict=True))
        products = torch.autograd.grad(along, list(start.values()))
        close({n: found[n][row] for n in names}, {
            n: outer[n] - rate * product for n, product in zip(names, products, strict=True)
        }, 1e-9)  # fmt: skip
        assert any(not torch.allclose(found[n][row], plain[n][row], atol=1e-3) for n in names)


@ENGINES
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_per_fedavg_serves_the_received_model_after_full_batch_steps(engine: str, steps: int) -> None:
    built = federation("per-fedavg", **UNEQUAL, engine=engine, adapt_steps=steps, inner_lr=0.2)
    clients = cohort(built)
    built.config.method.personalize(clients, Message(built.server.values))
    for row, client in enumerate(clients.clients):
        expected = built.network.initial()
        for _ in range(steps):
            gradient, _ = hand_gradient(expected, task_loss(built, *rows_of(built, client)))
            expected = {n: t - 0.2 * gradient[n] for n, t in expected.items()}
        close({n: t[row] for n, t in clients.values.items()}, expected)


def test_gradients_under_different_dropout_are_not_compared() -> None:
    dropping = {"network": "test_methods_meta:Dropping", "network_options": {}, "rounds": 1}
    with pytest.raises(UserError, match=r"dropout.*allowed: variant=first-order"):
        run(federation("per-fedavg", **dropping, variant="hessian-free"))
    [record] = run(federation("per-fedavg", **dropping, variant="first-order"))
    assert len(record.answered) == 4


# FedProto.


def some_prototypes(clients: Cohort, unknown: int) -> Values:
    """Prototypes as a client receives them, one of them not there."""
    draws = torch.Generator().manual_seed(0)
    tables = {name: tensor[0] for name, tensor in clients.memory.items()}
    tables[PROTOTYPES] = torch.randn(tables[PROTOTYPES].shape, dtype=torch.float64, generator=draws)
    tables[COUNTS] = torch.ones_like(tables[COUNTS])
    tables[PROTOTYPES][unknown], tables[COUNTS][unknown] = 0, 0
    return tables


def body_of(built: Built, values: Values, inputs: Tensor) -> Tensor:
    return torch.relu(F.linear(inputs.flatten(1), values["fc1.linear.weight"], values["fc1.linear.bias"]))


@ENGINES
def test_fedprotos_loss_pulls_features_to_the_prototypes_that_there_are(engine: str) -> None:
    built = federation("fedproto", **UNEQUAL, engine=engine)
    clients = cohort(built)
    unknown = int(rows_of(built, clients.clients[0])[1][0])
    tables = some_prototypes(clients, unknown)
    built.config.method.receive(clients, Message(tables))
    found, losses = clients.gradient(NearPrototypes(0.7), own=clients.memory)
    for row, client in enumerate(clients.clients):
        inputs, targets = rows_of(built, client)

        def loss(values: Values, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            features = body_of(built, values, inputs)
            outputs = F.linear(features, values["head.weight"], values["head.bias"])
            pulls = [
                F.mse_loss(f, tables[PROTOTYPES][c]) for f, c in zip(features, targets, strict=True) if c != unknown
            ]
            return F.cross_entropy(outputs, targets) + 0.7 * sum(pulls) / len(targets)

        expected, value = hand_gradient(built.network.initial(), loss)
        close({n: t[row] for n, t in found.items()}, expected)
        assert losses[row].item() == pytest.approx(value.item(), abs=1e-12)


def test_fedproto_sends_the_mean_features_of_its_classes_and_nothing_else() -> None:
    built = federation("fedproto", **UNEQUAL, rounds=1, clients_per_round=1.0)
    sent = list(built.federation.train(1, range(6), built.config.method.broadcast(built.server)))
    for answers in sent:
        assert set(answers.tensors) == {PROTOTYPES, COUNTS}
        for row, client in enumerate(answers.clients):
            inputs, targets = rows_of(built, client)
            features = body_of(built, built.federation.store.entries[client], inputs)
            for number in range(10):
                mine = targets == number
                expected = features[mine].mean(0) if mine.any() else torch.zeros_like(features[0])
                assert answers.tensors[COUNTS][row, number] == mine.sum()
                torch.testing.assert_close(answers.tensors[PROTOTYPES][row, number], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_fedprotos_server_averages_class_by_class(aggregation: str) -> None:
    built = federation("fedproto", precision="float64", aggregation=aggregation)
    server, method, network = built.server, built.config.method, built.network
    server.values[PROTOTYPES][2:4], server.values[COUNTS][2:4] = 7.0, 5.0
    counts = torch.zeros(3, 10, dtype=torch.float64)
    counts[0, 0], counts[1, 0], counts[2, 1], counts[2, 2] = 1, 3, 4, 6
    prototypes = torch.randn(3, 10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prototypes *= counts[..., None] > 0
    loss = torch.zeros(3)
    whole = Answers((0, 1, 2), counts.sum(1).long(), {PROTOTYPES: prototypes, COUNTS: counts}, loss)
    method.aggregate(server, iter([whole.only([0]), whole.only([1, 2])]), network)
    shares = (0.25, 0.75) if aggregation == "samples" else (0.5, 0.5)
    expected = torch.zeros(10, 8, dtype=torch.float64)
    expected[0] = shares[0] * prototypes[0, 0] + shares[1] * prototypes[1, 0]
    expected[1], expected[2], expected[3] = prototypes[2, 1], prototypes[2, 2], 7.0
    torch.testing.assert_close(server.values[PROTOTYPES], expected, rtol=0, atol=1e-12)
    assert server.values[COUNTS].tolist() == [4, 4, 6, 5, 0, 0, 0, 0, 0, 0]


@ENGINES
def test_fedproto_without_pull_that_predicts_by_heads_is_local_training(engine: str) -> None:
    settings = {"local_epochs": 6, "engine": engine}  # enough steps to be traced
    local, fedproto = federation("local", **settings), federation("fedproto", **settings, lam=0, prediction="head")
    scores = [[record.evaluation.personalized.loss.tolist() for record in run(built)] for built in (local, fedproto)]
    assert scores[0] == scores[1]
    kept = {n: t for n, t in fedproto.federation.store.flat().items() if "/memory/" not in n}
    assert not differences(kept, local.federation.store.flat())


def test_the_pull_of_fedproto_changes_what_clients_learn() -> None:
    without, pulled = federation("fedproto", lam=0), federation("fedproto", lam=1)
    first, second = ([differences_after_round(built, number) for number in (1, 2)] for built in (without, pulled))
    assert not differences(first[0], second[0])  # there are no prototypes in the first round
    assert differences(first[1], second[1])


def differences_after_round(built: Built, number: int) -> Values:
    built.loop.round(number)
    kept = built.federation.store.flat()
    return {name: tensor.clone() for name, tensor in kept.items() if "/memory/" not in name}


def test_fedproto_predicts_the_nearest_prototype_where_a_clients_classes_all_have_one() -> None:
    built = federation("fedproto", **UNEQUAL)
    method, clients = built.config.method, cohort(built)
    lacking = int(rows_of(built, clients.clients[0])[1][0])
    tables = some_prototypes(clients, lacking)
    method.receive(clients, Message(tables))
    [batch] = clients.samples("train").in_order(1000)
    outputs, by_head = method.predict(clients, batch), clients.predict(batch)
    others = [number for number in range(10) if number != lacking]
    kinds = set()
    for row, client in enumerate(clients.clients):
        inputs, targets = rows_of(built, client)
        found = outputs[row, : len(targets)]
        if lacking in targets:
            assert torch.equal(found, by_head[row, : len(targets)])
        else:
            features = body_of(built, built.network.initial(), inputs)
            apart = (features[:, None] - tables[PROTOTYPES][others]).norm(dim=2)
            assert found.argmax(1).tolist() == [others[k] for k in apart.argmin(1).tolist()]
            torch.testing.assert_close(found[:, others], -apart.square() / 2, rtol=1e-10, atol=1e-10)
        kinds.add(bool((targets == lacking).any()))
    assert kinds == {True, False}


def test_a_class_without_a_prototype_is_never_nearest() -> None:
    known = torch.tensor([[False, True, False]])
    scores = nearness(torch.zeros(1, 2, 4), torch.ones(1, 3, 4), known)
    assert scores.isfinite().all()
    assert scores.argmax(-1).tolist() == [[1, 1]]


def test_before_there_are_prototypes_fedproto_predicts_by_heads() -> None:
    built = federation("fedproto")
    clients = cohort(built)
    built.config.method.serve(clients, built.config.method.broadcast(built.server))
    [batch] = clients.samples("test").in_order(1000)
    assert torch.equal(built.config.method.predict(clients, batch), clients.predict(batch))


# pFedFDA.


def gaussians(classes: int, features: int, *clients: int) -> Gaussians:
    draws = torch.Generator().manual_seed(0)
    means = torch.randn(*clients, classes, features, dtype=torch.float64, generator=draws)
    root = torch.randn(*clients, features, features, dtype=torch.float64, generator=draws)
    return Gaussians(means, root @ root.mT + 0.1 * torch.eye(features, dtype=torch.float64))


def test_the_classifier_of_gaussians_gives_the_posterior() -> None:
    known = gaussians(3, 5, 2)
    priors = torch.tensor([[0.2, 0.3, 0.5], [0.8, 0.1, 0.1]], dtype=torch.float64)
    weight, bias = known.classifier(priors)
    points = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for k in range(2):
        density = MultivariateNormal(known.means[k], known.covariance[k]).log_prob(points[k][:, None])
        expected = (density + priors[k].log()).log_softmax(1)
        torch.testing.assert_close((points[k] @ weight[k].T + bias[k]).log_softmax(1), expected, rtol=0, atol=1e-8)


def test_estimates_leave_out_padding_and_know_classes_without_samples() -> None:
    known, draws = gaussians(3, 4), torch.Generator().manual_seed(2)
    values = torch.randn(2, 6, 4, dtype=torch.float64, generator=draws)
    values[1, 1:] = 0  # the second client has one sample
    targets = torch.tensor([[0, 0, 2, 0, 2, 2], [1, 0, 0, 0, 0, 0]])
    classes = F.one_hot(targets, 3).double()
    classes[1, 1:] = 0
    found = Features(values, classes).estimate(known, 0.5)
    ridge = 0.5 * torch.eye(4, dtype=torch.float64)
    groups = [values[0][targets[0] == c] for c in (0, 2)]
    scatter = sum((len(group) - 1) * group.T.cov() for group in groups)
    torch.testing.assert_close(found.means[0], torch.stack([groups[0].mean(0), known.means[1], groups[1].mean(0)]))
    torch.testing.assert_close(found.covariance[0], scatter / 5 + ridge)
    torch.testing.assert_close(found.means[1], torch.stack([known.means[0], values[1, 0], known.means[2]]))
    torch.testing.assert_close(found.covariance[1], ridge)


def priors_of(targets: Tensor) -> Tensor:
    shares = torch.bincount(targets, minlength=10).double() / len(targets) + RARE
    return shares / shares.sum()


def mixture_by_hand(
    features: Tensor, targets: Tensor, known: Gaussians, betas: tuple[float, ...]
) -> tuple[float, Gaussians]:
    """The best of the betas for a client, and its mixture, by loops: two folds, every other sample of a class."""
    classes = range(len(known.means))
    seen = [0 for _ in classes]
    fold = []
    for number in targets.tolist():
        fold.append(seen[number] % 2)
        seen[number] += 1

    def mixed(chosen: Tensor, beta: float) -> Gaussians:
        values, labels = features[chosen], targets[chosen]
        own = [values[labels == c].mean(0) if (labels == c).any() else known.means[c] for c in classes]
        centered = torch.stack([v - own[c] for v, c in zip(values, labels.tolist(), strict=True)])
        covariance = centered.T @ centered / max(1, len(values) - 1) + torch.eye(features.shape[1])
        return Gaussians(
            beta * torch.stack(own) + (1 - beta) * known.means, beta * covariance + (1 - beta) * known.covariance
        )

    def loss(beta: float) -> float:
        total = 0.0
        for held in (0, 1):
            inside = torch.tensor(fold) == held
            mix = mixed(~inside, beta)
            density = MultivariateNormal(mix.means, mix.covariance).log_prob(features[inside][:, None])
            total += F.cross_entropy(density + priors_of(targets).log(), targets[inside], reduction="sum").item()
        return total

    best = min(betas, key=loss)
    return best, mixed(torch.ones(len(targets), dtype=torch.bool), best)


def test_a_client_of_pfedfda_sends_the_mixture_that_does_best_on_samples_left_out() -> None:
    betas = (0.0, 0.3, 0.7, 1.0)
    built = federation("pfedfda", **{**UNEQUAL, "samples_per_client": 12, "alpha": 2.0}, betas=betas, rounds=3)
    run(built)  # now it is worth while to listen to others
    server = built.server
    [answers] = built.federation.train(4, range(6), built.config.method.broadcast(server))
    known = Gaussians(server.values[MEANS], server.values[COVARIANCE])
    shares = set()
    for row, client in enumerate(answers.clients):
        inputs, targets = rows_of(built, client)
        body = {name: tensor[row] for name, tensor in answers.tensors.items()}
        beta, expected = mixture_by_hand(body_of(built, body, inputs), targets, known, betas)
        torch.testing.assert_close(body[MEANS], expected.means, rtol=0, atol=1e-10)
        torch.testing.assert_close(body[COVARIANCE], expected.covariance, rtol=0, atol=1e-10)
        shares.add(beta)
        weight, bias = expected.classifier(priors_of(targets))
        torch.testing.assert_close(built.federation.store.entries[client]["head.weight"], weight, rtol=0, atol=1e-9)
        torch.testing.assert_close(built.federation.store.entries[client]["head.bias"], bias, rtol=0, atol=1e-9)
    assert len(shares) > 1, shares


def test_pfedfdas_body_trains_under_a_head_that_stays() -> None:
    built = federation("pfedfda", **ALONE, momentum=0.0, lr=0.3)
    inputs, targets = rows_of(built, 0)
    initial = built.network.initial()
    head = Gaussians(initial["head.weight"], 2 * torch.eye(8, dtype=torch.float64)).classifier(priors_of(targets))
    body = {name: tensor for name, tensor in initial.items() if not name.startswith("head")}

    def loss(values: Values) -> Tensor:
        return F.cross_entropy(F.linear(body_of(built, values, inputs), *head), targets)

    gradient, value = hand_gradient(body, loss)
    [record] = run(built)
    close(built.server.values, {name: tensor - 0.3 * gradient[name] for name, tensor in body.items()}, 1e-11)
    assert record.loss == pytest.approx(value.item(), abs=1e-12)


def test_pfedfdas_server_averages_means_and_covariances_by_samples() -> None:
    built, again = (federation("pfedfda", **UNEQUAL, clients_per_round=6, rounds=1) for _ in range(2))
    [answers] = again.federation.train(1, range(6), again.config.method.broadcast(again.server))
    run(built)
    share = answers.samples.double() / answers.samples.sum()
    for name in (MEANS, COVARIANCE, "fc1.linear.weight"):
        expected = torch.tensordot(share, answers.tensors[name], dims=1)
        torch.testing.assert_close(built.server.values[name], expected, rtol=0, atol=1e-10)


def test_what_pfedfda_sends_is_the_body_the_means_and_the_covariance() -> None:
    built = federation("pfedfda", rounds=1)
    [record] = run(built)
    numbers = 64 * 8 + 8 + 10 * 8 + 8 * 8
    assert record.bytes_up == record.bytes_down == 4 * 4 * numbers


def test_with_no_share_of_its_own_a_client_of_pfedfda_keeps_the_initial_gaussians() -> None:
    built = federation("pfedfda", betas=[0], precision="float64")
    before = {name: built.server.values[name].clone() for name in (MEANS, COVARIANCE)}
    run(built)
    close(built.server.values, before)


def test_everybodys_head_of_pfedfda_holds_all_classes_alike() -> None:
    built = federation("pfedfda", precision="float64")
    run(built)
    model = built.config.method.global_model(built.server, built.network)
    known = Gaussians(built.server.values[MEANS], built.server.values[COVARIANCE])
    points = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = MultivariateNormal(known.means, known.covariance).log_prob(points[:, None]).log_softmax(1)
    found = F.linear(points, model["head.weight"], model["head.bias"]).log_softmax(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_wide_covariance_of_few_samples_can_be_solved() -> None:
    draws = torch.Generator().manual_seed(0)
    values = (100 * torch.randn(1, 12, 1600, generator=draws)).double()
    classes = F.one_hot(torch.arange(12) % 3, 3).double()[None]
    known = Gaussians(torch.zeros(3, 1600, dtype=torch.float64), torch.eye(1600, dtype=torch.float64))
    estimate = Features(values, classes).estimate(known, 1.0)
    weight, bias = estimate.classifier(torch.full((1, 3), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(weight @ estimate.covariance, estimate.means, rtol=0, atol=1e-6)
    assert (values @ weight.mT + bias[:, None]).argmax(2).tolist() == [[0, 1, 2] * 4]


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("test_methods_meta:NoBias", "no linear layer with a bias"),
        ("test_methods_meta:DeepHead", "no linear layer with a bias"),
        ("linear", "no body to share"),
    ],
)
def test_a_head_that_no_discriminant_can_replace_is_refused(network: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        federation("pfedfda", network=network, network_options={})


def test_shares_beyond_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"betas=\[0, 2\]: allowed: numbers from 0 to 1"):
        federation("pfedfda", betas=[0, 2])


# All of them, on programs that are traced or captured.

OURS = pytest.mark.parametrize("method", ["pfedme", "per-fedavg", "fedproto", "pfedfda"])


@OURS
def test_traced_steps_with_batch_norm_are_those_of_one_client_alone(method: str) -> None:
    settings = {**NORM, "local_epochs": 6, "rounds": 1, "evaluate_every": 0, "precision": "float64", "lr": 0.02}
    settings |= {"inner_steps": 2} if method == "pfedme" else {}
    together, apart = (federation(method, **settings, engine=engine) for engine in ("stacked", "one-by-one"))
    for built in (together, apart):
        run(built)
    assert together.federation.engine.traces.programs
    close(state(together), state(apart), 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@OURS
@ENGINES
def test_cuda_graphs_compute_what_the_cpu_computes(method: str, engine: str) -> None:
    settings = {**NORM, "rounds": 2, "precision": "float64", "lr": 0.02}
    cpu, gpu = federation(method, **settings), federation(method, **settings, engine=engine, device="cuda")
    scores = [run(built)[-1].evaluation.personalized for built in (cpu, gpu)]
    assert gpu.federation.engine.graphs.programs
    close({name: tensor.cpu() for name, tensor in state(gpu).items()}, state(cpu), 1e-8)
    assert scores[0].loss.tolist() == pytest.approx(scores[1].loss.tolist(), rel=1e-6)


def test_differences_of_gradients_are_not_taken_in_half_precision() -> None:
    with pytest.raises(UserError, match=r"precision=mixed: variant=hessian-free .* allowed: variant=first-order, or"):
        federation("per-fedavg", variant="hessian-free", precision="mixed")
