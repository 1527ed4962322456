"""PPFE: its stages, what they start from, its boosting and its ensemble."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from method_runs import IMAGES, SMALL, differences, federation, run, state
from torch.nn import functional as F

from tailorfl.cohort.boosting import coefficient, reweighted
from tailorfl.cohort.cohort import Cohort
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message
from tailorfl.methods.ppfe import PPFE, PRESETS, Stage, divided
from tailorfl.models import Network, build_module
from tailorfl.models.lowrank import factor_linear
from tailorfl.models.reduction import MaskedLinear, parameters
from tailorfl.study.build import Built
from tailorfl.study.compare import write_table
from tailorfl.study.config import configure
from tailorfl.study.run import Run

DEEP = {"network_options": {"hidden": [12, 10, 8]}, "rounds": 8, "stage_rounds": [2, 2, 2, 2], "reweight": True}


def ppfe(**settings: Any) -> Built:
    return federation("ppfe", **{**DEEP, **settings})


def served(built: Built, round: int, client: int) -> Cohort:
    """A client alone, with the model that serves it after a round."""
    [cohort] = built.federation.served(round, [client], built.loop.message_for_evaluation())
    return cohort


def stages_of(built: Built) -> list[Stage]:
    return [stage for stage in built.federation.networks if isinstance(stage, Stage)]


# Limits.


@pytest.mark.parametrize("extra", [{}, IMAGES, {"lr_schedule": "cosine", "aggregation": "uniform"}])
def test_one_stage_is_fedavg_to_the_bit(extra: dict) -> None:
    alone, fedavg = federation("ppfe", stages=1, **extra), federation("fedavg", everyone_in=[-1], **extra)
    ours, theirs = run(alone), run(fedavg)
    assert not differences(alone.server.values, fedavg.server.values)
    assert [r.bytes_up for r in ours] == [r.bytes_up for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.evaluation is not None
        assert other.evaluation is not None
        assert one.evaluation.personalized.correct.tolist() == other.evaluation.personalized.correct.tolist()
        assert one.evaluation.personalized.loss.tolist() == pytest.approx(other.evaluation.personalized.loss.tolist())


def test_without_boosting_and_reduction_the_second_stage_is_fedper_from_fedavgs_model() -> None:
    both = {"network_options": {"hidden": [12, 8]}, "rounds": 5}
    staged = federation("ppfe", preset="m1", stage_rounds=[2, 3], reweight=False, body_lr=SMALL["lr"], **both)
    run(staged)
    first = federation("fedavg", everyone_in=[2], **{**both, "rounds": 2})
    run(first)
    then = federation("fedper", everyone_in=[-1], **both)
    then.federation.initial[0] = {name: tensor.clone() for name, tensor in first.server.values.items()}
    then.server.values = {name: first.server.values[name].clone() for name in then.server.values}
    run(then, done=2)
    assert not differences(staged.server.values, then.server.values)
    for client, kept in then.federation.store.entries.items():
        for name, tensor in kept.items():
            assert torch.equal(staged.federation.store.entries[client][f"memory/2/{name}"], tensor)


# Stages.


def test_the_parameters_of_the_paper_come_out() -> None:
    small = Network(build_module("ppfe-cnn", (3, 32, 32), 10), "ppfe-cnn")
    large = Network(build_module("ppfe-cnn-large", (3, 32, 32), 100), "ppfe-cnn-large")
    method = PPFE(preset="paper").completed(160)
    assert method.stage_rounds == (30, 50, 40, 40)
    assert (small.size(), large.size()) == (307_842, 1_075_044)
    sizes = [parameters(stage.module) for stage in method.networks(small)]
    assert sizes[:2] == [307_842, 307_842]
    assert [f"{100 * (1 - size / 307_842):.1f}" for size in sizes[2:]] == ["6.0", "17.7"]
    shared = [stage.size(method.shared(stage)) / large.size() for stage in method.networks(large)]
    assert [f"{100 * share:.1f}" for share in shared] == ["100.0", "98.8", "83.8", "19.5"]


def test_a_stage_shares_one_layer_less_and_what_travels_shrinks() -> None:
    built = ppfe()
    rounds = run(built)
    for stage in stages_of(built):
        shared = {name.split(".")[0] for name in built.config.method.shared(stage)}
        assert shared == {layer.name for layer in built.network.layers[: 5 - stage.number]}
    sent = [record.bytes_up / len(record.answered) for record in rounds]
    assert sent[0] == sent[1] == 4 * built.network.size()
    assert sent[1] > sent[2] == sent[3] > sent[4] == sent[5] > sent[6] == sent[7]


def test_everybody_takes_part_in_the_last_round_of_a_stage() -> None:
    assert [len(record.selected) for record in run(ppfe())] == [4, 6, 4, 6, 4, 6, 4, 6]
    assert [len(record.selected) for record in run(ppfe(full_last_round=False))] == [4] * 8


def test_stages_end_with_an_evaluation_whatever_the_interval() -> None:
    rounds = run(ppfe(evaluate_every=0))
    assert [record.number for record in rounds if record.evaluation] == [2, 4, 6, 8]


def test_a_reduced_stage_starts_from_the_first_and_the_rest_goes_on() -> None:
    built = ppfe(ranks=[[5, 4, 3, 2], [4, 3, 2, 1]])
    for _ in zip(range(4), built.loop.run(), strict=False):
        pass
    method, server = built.config.method, built.server
    first = {name: server.archive[f"1/{name}"] for name in built.network.names}
    second = {name: tensor.clone() for name, tensor in server.values.items()}
    server.round = 5
    method.advance(server, built.network)
    assert {name for name in server.archive if name.startswith("2/")} == {f"2/{name}" for name in second}
    linear = torch.nn.Linear(12, 10)
    with torch.no_grad():
        linear.weight.copy_(first["fc2.linear.weight"])
        linear.bias.copy_(first["fc2.linear.bias"])
    factors = factor_linear(linear, 4)
    assert torch.equal(server.values["fc2.linear.left"], factors.left)
    assert torch.equal(server.values["fc2.linear.right"], factors.right)
    assert torch.equal(server.values["fc2.linear.bias"], first["fc2.linear.bias"])
    assert not set(server.values) & {"fc3.linear.left", "head.left", "head.weight"}
    cohort = built.federation.cohort(5, (0, 1), Message(archive=server.archive))
    method.receive(cohort, method.broadcast(server))
    product = cohort.values["head.left"] @ cohort.values["head.right"]
    u, s, v = torch.linalg.svd(first["head.weight"], full_matrices=False)
    torch.testing.assert_close(product[1], u[:, :2] * s[:2] @ v[:2])


@pytest.mark.parametrize("reduction", ["none", "sparse"])
def test_layers_that_keep_their_form_carry_over(reduction: str) -> None:
    built = ppfe(reduction=reduction)
    for _ in zip(range(4), built.loop.run(), strict=False):
        pass
    method, server = built.config.method, built.server
    second = {name: tensor.clone() for name, tensor in server.values.items()}
    heads = {c: kept["memory/2/head.weight"].clone() for c, kept in built.federation.store.entries.items()}
    server.round = 5
    method.advance(server, built.network)
    assert set(second) - set(server.values) == {"fc3.linear.weight", "fc3.linear.bias"}
    assert not differences(server.values, {name: second[name] for name in server.values})
    cohort = built.federation.cohort(5, (3,), Message(archive=server.archive))
    method.receive(cohort, method.broadcast(server))
    assert torch.equal(cohort.values["head.weight"][0], heads[3])  # the client's own
    assert torch.equal(cohort.values["fc3.linear.weight"][0], second["fc3.linear.weight"])  # was shared until now


def test_width_shrinks_the_personal_hidden_layers_only() -> None:
    built = ppfe(reduction="width", shrinkage=1.0)
    shapes = [{n: tuple(t.shape) for n, t in stage.initial().items() if "weight" in n} for stage in stages_of(built)]
    assert shapes[1] == shapes[0]
    assert (shapes[2]["fc2.linear.weight"], shapes[2]["fc3.linear.weight"]) == ((10, 12), (3, 10))  # 8 / 3
    assert shapes[2]["head.weight"] == (10, 3)
    assert (shapes[3]["fc2.linear.weight"], shapes[3]["fc3.linear.weight"]) == ((3, 12), (2, 3))
    run(built)


def test_sparse_layers_hold_the_same_weights_at_zero_for_everybody() -> None:
    built = ppfe(reduction="sparse")
    run(built)
    found = {}
    for name, part in stages_of(built)[-1].module.named_modules():
        if isinstance(part, MaskedLinear):
            found[name] = 1 - part.mask.double().mean().item()
    assert found == pytest.approx({"head": 0.3, "fc3.linear": 0.4, "fc2.linear": 0.5}, abs=0.02)
    model = built.config.method.deployed(served(built, 8, 0))
    masks = [part.mask for part in model.modules() if isinstance(part, MaskedLinear)]
    heads = [part for part in stages_of(built)[-1].module.modules() if isinstance(part, MaskedLinear)]
    assert torch.equal(masks[-1], heads[-1].mask)


@pytest.mark.parametrize(
    "settings",
    [{"preset": name} for name in PRESETS if name != "m3"]
    + [{"reduction": "width"}, {"reduction": "sparse"}, {"combination": "logits"}, {"boosting_loss": "zero-one"}]
    + [{"weight_cap": None}, {"head_epochs": 2}, {"head_lr": 0.01}],
    ids=str,
)
def test_every_variant_serves_clients_better_than_the_global_model(settings: dict) -> None:
    enough = {"samples_per_client": 60, "local_epochs": 5, "network_options": {"hidden": [32, 16]}, "rounds": 12}
    last = run(federation("ppfe", **{**enough, **settings}))[-1].evaluation
    assert last is not None
    assert last.common is not None
    assert last.personalized.accuracy is not None
    assert last.personalized.accuracy > max(0.6, last.common.accuracy or 0)


def test_presets_are_defaults_that_an_option_overrides() -> None:
    assert not PPFE().reweight
    assert PPFE(preset="paper").reweight
    assert not PPFE(preset="paper", reweight=False).reweight
    assert PPFE(preset="wp", personal_depths=[0, 2, 2, 2]).personal_depths == (0, 2, 2, 2)
    assert PPFE(preset="m2").completed(160).stage_rounds == (30, 130)
    assert PPFE().completed(160).stage_rounds == (130, 15, 10, 5)
    assert PPFE().completed(2).stages == 2


def test_rounds_are_divided_with_one_at_least_for_each_stage() -> None:
    for stages in range(1, 8):
        for rounds in range(stages, 60):
            found = divided(rounds, stages, (26, 3, 2, 1))
            assert (len(found), sum(found)) == (stages, rounds)
            assert min(found) >= 1


# Boosting and the ensemble.


def test_a_client_is_weighed_and_served_as_by_hand() -> None:
    built = ppfe(rounds=6, stage_rounds=[2, 2, 2], precision="float64")
    run(built)
    client = 2
    cohort = served(built, 6, client)
    method, data = built.config.method, built.data
    rows = data.train.of(client)
    inputs, targets = data.decode(data.inputs[rows]), data.targets[rows]
    real = torch.ones(1, len(rows), dtype=torch.bool)
    weights = real.double()
    betas, total = [], torch.zeros(len(rows), data.num_classes, dtype=torch.float64)
    for stage in stages_of(built):
        own = built.federation.store.entries[client]
        shared = {n: built.server.archive.get(f"{stage.number}/{n}", built.server.values.get(n)) for n in stage.names}
        values = {n: own.get(f"memory/{stage.number}/{n}", shared[n]) for n in stage.names}
        assert all(tensor is not None for tensor in values.values())
        outputs = stage.forward(values, inputs, None, train=False)
        losses = F.cross_entropy(outputs, targets, reduction="none")
        betas.append(coefficient(losses[None], weights, real))
        total = total + betas[-1] * outputs.softmax(-1)
        mixed = F.nll_loss((total / sum(betas)).log(), targets, reduction="none")
        weights = reweighted(weights, mixed[None], betas[-1], real, method.weight_cap)
        if stage.number == 2:
            torch.testing.assert_close(own["memory/weights"][: len(rows)], weights[0])
    torch.testing.assert_close(cohort.memory["beta"][0], torch.cat(betas))
    batch = next(iter(cohort.samples("train").in_order(1000)))
    found = method.predict(cohort, batch)[0]
    torch.testing.assert_close(found.exp(), total / sum(betas))
    module = method.deployed(cohort).eval()
    torch.testing.assert_close(module(inputs), found)


def test_the_weights_of_a_stage_reach_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor | None] = []
    fit = Cohort.fit

    def watched(self: Cohort, *arguments: Any, **how: Any) -> torch.Tensor:
        seen.append(how.get("weights"))
        return fit(self, *arguments, **how)

    monkeypatch.setattr(Cohort, "fit", watched)
    long = {"rounds": 12, "stage_rounds": [10, 2], "evaluate_every": 0, "network_options": {"hidden": [16]}}
    built = ppfe(**long, local_epochs=5)
    run(built)
    assert seen[0] is None
    assert seen[-1] is not None
    count = int(built.data.train.counts[0])
    assert seen[-1].sum(1).tolist() == pytest.approx([count] * len(seen[-1]), rel=1e-5)
    assert seen[-1].std() > 0.05


def test_later_stages_train_the_body_slowly() -> None:
    fixed = ppfe(body_lr=1e-12, rounds=4, stages=2, stage_rounds=[2, 2])
    run(fixed)
    moved = [
        float((fixed.server.values[name] - fixed.server.archive[f"1/{name}"]).abs().max())
        for name in fixed.server.values
    ]
    assert max(moved) < 1e-6  # the average rounds
    heads = [kept["memory/2/head.weight"] for kept in fixed.federation.store.entries.values()]
    assert float((heads[0] - fixed.server.archive["1/head.weight"]).abs().max()) > 1e-3


def test_heads_are_tuned_on_the_finished_body_and_the_same_each_time() -> None:
    built = ppfe(head_epochs=2, **{**IMAGES, "rounds": 4, "stage_rounds": [2, 2], "stages": 2})
    run(built)
    one, other = served(built, 4, 1), served(built, 4, 1)
    assert not differences(one.values, other.values)
    kept = built.federation.store.entries[1]
    assert not torch.equal(one.values["head.weight"][0], kept["memory/2/head.weight"])
    for name, tensor in built.server.values.items():
        assert torch.equal(one.values[name][0], tensor), name


def test_only_the_last_model_serves_where_only_it_is_a_member() -> None:
    for record in run(ppfe(members="last")):
        assert record.evaluation is not None
        assert record.evaluation.others["stage"].correct.tolist() == record.evaluation.personalized.correct.tolist()


# Clients that come and go.


def test_a_client_that_was_away_for_whole_stages_catches_up() -> None:
    built = ppfe(clients_per_round=1, full_last_round=False, new_clients=1, seed=3)
    run(built)
    entered = {c: int(kept["memory/stage"]) for c, kept in built.federation.store.entries.items()}
    away = [client for client in range(6) if entered.get(client, 1) < 3]
    assert away
    for client in away:
        cohort = served(built, 8, client)
        assert cohort.memory["stage"].tolist() == [4]
        assert (cohort.memory["beta"] > 0).all()
    assert {c: int(kept["memory/stage"]) for c, kept in built.federation.store.entries.items()} == entered


# Runs.


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_run_resumes_inside_and_between_stages(tmp_path: Path, stop: int) -> None:
    config = configure("ppfe", {**SMALL, **DEEP, "checkpoint_every": 1, "clients_per_round": 2})
    whole, done = Run(config, tmp_path / "whole"), []
    summary = whole.execute()
    stopped = Run(config, tmp_path / "parts", watch=done.append, stop=lambda: len(done) == stop)
    assert stopped.execute() is None
    again = Run(config, tmp_path / "parts").execute(resume=True)
    assert summary is not None
    assert again is not None
    for key in ("personalized_loss", "bytes_down", "bytes_up", "stages"):
        assert again[key] == summary[key]
    lines = [
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    measures = [(tmp_path / name / "measures.csv").read_text() for name in ("whole", "parts")]
    assert measures[0] == measures[1]
    assert measures[0].startswith("round,client,beta\n")
    assert len(measures[0].splitlines()) == 1 + 8 * 6
    for one, other in zip(*lines, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }


def test_the_summary_has_a_row_a_stage(tmp_path: Path) -> None:
    summary = Run(configure("ppfe", {**SMALL, **DEEP}), tmp_path / "run").execute()
    assert summary is not None
    rows = summary["stages"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [row["rounds"] for row in rows] == [2, 2, 2, 2]
    assert rows[0]["shared_parameters"] == summary["parameters"]
    assert rows[0]["stage_accuracy"] == rows[0]["ensemble_accuracy"]
    assert [row["ensemble_accuracy"] for row in rows] == [lines[k]["personalized_accuracy"] for k in (1, 3, 5, 7)]
    assert rows[-1]["ensemble_accuracy"] == summary["personalized_accuracy"]
    assert [row["mean_beta"] for row in rows] == [lines[k]["beta"] for k in (1, 3, 5, 7)]
    whole = sum(row["shared_parameters"] + row["personal_parameters"] for row in rows)
    assert summary["inference_parameters"] == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"personal_depths": [0, 1, 2, 4]}, "has 4 layers, and one at least is shared; allowed: 0 to 3"),
        ({"personal_depths": [1, 2, 3, 3]}, "start with 0 and do not fall"),
        ({"personal_depths": [0, 2, 1, 1]}, "start with 0 and do not fall"),
        ({"personal_depths": [0, 1]}, "2 given, 4 stages"),
        ({"stage_rounds": [2, 2, 4, 0]}, "one or more rounds for each stage"),
        ({"stage_rounds": [2, 2, 2]}, "6 together, and rounds=8; allowed: rounds=6"),
        ({"stage_rounds": [2, 3, 3], "stages": 4}, "3 given, 4 stages"),
        ({"stage_rounds": None, "stages": 9}, "rounds=8: 9 stages need a round each"),
        ({"ranks": [[5, 4, 3, 2]]}, "1 given, 4 stages; allowed: one for each stage from the third on"),
        ({"ranks": [[5, 4, 3], [5, 4, 3]]}, "3 given for 4 linear layers (fc1, fc2, fc3, head)"),
        ({"ranks": [[99, 99, 99, 99], [1, 1, 1, 1]]}, "allowed: ranks that make it smaller"),
        ({"ranks": [[0, 1, 1, 1], [1, 1, 1, 1]]}, "ranks of 1 or more"),
        ({"preset": "best-of-all"}, "'wpw'"),
        ({"weight_cap": 1}, "greater than 1"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refused:
        ppfe(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_written_where_a_setting_is_refused(tmp_path: Path) -> None:
    config = configure("ppfe", {**SMALL, **DEEP, "personal_depths": [0, 1, 2, 4]})
    with pytest.raises(UserError):
        Run(config, tmp_path / "run").execute()
    assert not (tmp_path / "run").exists()


def test_state_is_small_where_nobody_took_part() -> None:
    built = ppfe(clients_per_round=1, full_last_round=False, evaluate_every=0)
    run(built)
    assert len(built.federation.store.entries) < 6
    assert all(tensor.isfinite().all() for tensor in state(built).values())


def test_a_comparison_with_other_methods_has_one_table(tmp_path: Path) -> None:
    summaries = []
    for method in ("fedavg", "ppfe"):
        summary = Run(configure(method, SMALL), tmp_path / method).execute()
        assert summary is not None
        summaries.append(summary)
    with write_table(summaries, tmp_path).open() as file:
        fedavg, ppfe = csv.DictReader(file)
    assert fedavg["inference_parameters"] == ""
    assert int(ppfe["inference_parameters"]) > int(fedavg["parameters"])
    assert "stages" not in ppfe


@pytest.mark.parametrize(
    "server",
    [{"server_optimizer": "adam", "server_lr": 0.01}, {"server_optimizer": "sgd", "server_momentum": 0.9}],
    ids=str,
)
def test_a_server_with_moments_goes_through_all_stages(server: dict) -> None:
    built = ppfe(**server)
    run(built)
    assert {key.rpartition("/")[2] for key in built.server.state} == set(built.server.values)


def test_the_summary_knows_all_stages_whoever_takes_part(tmp_path: Path) -> None:
    config = configure("ppfe", {**SMALL, **DEEP, "full_last_round": False, "evaluate_every": 0})
    summary = Run(config, tmp_path / "run").execute()
    assert summary is not None
    assert [row["stage"] for row in summary["stages"]] == [1, 2, 3, 4]


def test_a_client_keeps_its_own_norms_where_their_layer_is_reduced() -> None:
    built = ppfe(**{**IMAGES, "rounds": 4, "stage_rounds": [1, 1, 1, 1], "batch_norm": "local", "clients_per_round": 4})
    run(built)
    for kept in built.federation.store.entries.values():
        for name, tensor in kept.items():
            if name.startswith("memory/4/") and name.endswith("running_mean"):
                assert float(tensor.abs().max()) > 0


def test_models_that_diverged_count_as_no_better_than_chance() -> None:
    losses = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]], dtype=torch.float64)
    found = coefficient(losses, torch.ones_like(losses), torch.ones_like(losses, dtype=torch.bool))
    assert found.tolist() == pytest.approx([0.02] * 2, abs=1e-3)


def test_width_leaves_convolutions_alone() -> None:
    network = Network(build_module("cnn", (1, 28, 28), 10), "cnn")
    method = PPFE(reduction="width", shrinkage=1.0).completed(8)
    shapes = {name: tuple(tensor.shape) for name, tensor in method.networks(network)[3].initial().items()}
    full = {name: tuple(tensor.shape) for name, tensor in network.initial().items()}
    assert {name for name in full if shapes[name] != full[name]} == {
        "fc1.linear.weight",
        "fc1.linear.bias",
        "head.weight",
    }


def test_ranks_of_the_paper_are_for_images_as_large_as_its_own() -> None:
    network = Network(build_module("ppfe-cnn", (3, 16, 16), 10), "ppfe-cnn")
    sizes = [parameters(stage.module) for stage in PPFE().completed(8).networks(network)]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


def test_a_client_keeps_nothing_of_stages_that_it_has_not_entered() -> None:
    built = ppfe()
    next(iter(built.loop.run()))
    assert all(
        set(kept) == {"memory/stage", "memory/beta", "memory/weights"}
        for kept in built.federation.store.entries.values()
    )


def test_a_presets_depths_are_cut_to_fewer_stages() -> None:
    assert PPFE(preset="wp").completed(3).personal_depths == (0, 1, 1)
    assert PPFE(preset="wp", stages=2).completed(9).personal_depths == (0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "none", "ranks": [[5, 4, 3, 2], [4, 3, 2, 1]]}, "ranks belong to reduction=svd"),
        ({"reduction": "sparse", "sparsity": 0.8, "sparsity_step": 0.1}, "nothing is left of a layer"),
        ({"network": "linear", "network_options": {}}, "linear has one layer; allowed: two or more, or stages=1"),
    ],
    ids=str,
)
def test_settings_that_would_do_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refused:
        ppfe(**settings)
    assert message in str(refused.value)
