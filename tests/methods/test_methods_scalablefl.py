"""ScalableFL, and the methods it is compared with, on clients whose networks differ."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tailorfl.errors import UserError
from tailorfl.exchange.aggregation import average
from tailorfl.study.build import build
from tailorfl.study.config import configure
from tailorfl.study.export import export
from tailorfl.study.run import Run

GROUPS = [{"clients": 2, "image_size": 16, "classes": 10}, {"clients": 3, "image_size": 8, "classes": 5}]
SMALL: dict[str, Any] = {
    "data": "digits",
    "groups": GROUPS,
    "network": "stride-cnn",
    "base_size": 4,
    "partition": "iid",
    "samples_per_client": 30,
    "clients_per_round": 1.0,
    "selection": "per-group",
    "rounds": 2,
    "local_epochs": 1,
    "device": "cpu",
}


def built(method: str = "scalablefl", **settings: Any):
    return build(configure(method, {**SMALL, **settings}))


def test_widths_and_depths_follow_the_groups() -> None:
    run = built()
    large, small = run.federation.networks
    convolutions = [name for name in run.network.names if name.endswith("conv.weight")]
    assert convolutions == ["conv1.conv.weight", "conv2.conv.weight"]
    assert [n for n in small.names if n.endswith("conv.weight")] == convolutions[:1]
    assert [len(network.initial()["conv1.conv.weight"]) for network in (large, small)] == [32, 23]
    assert [len(network.initial()["head.bias"]) for network in (large, small)] == [10, 5]
    assert set(run.server.values) == set(convolutions), "batch norms and heads stay with the clients"


def test_a_round_is_the_average_of_each_element_over_those_who_hold_it() -> None:
    run = built()
    before = {name: tensor.clone() for name, tensor in run.server.values.items()}
    message = run.loop.message_for_evaluation()
    answers = list(run.federation.train(1, range(5), message))
    deep, flat = ([a for a in answers if run.data.group_of[a.clients[0]] == group] for group in (0, 1))
    sums, counts = torch.zeros(32, 1, 3, 3), torch.zeros(32, 1, 3, 3)
    for answer in answers:
        for row, samples in zip(answer.tensors["conv1.conv.weight"], answer.samples.tolist(), strict=True):
            sums[: len(row)] += samples * row
            counts[: len(row)] += samples
    found = average(answers, run.server.values)
    assert torch.allclose(found["conv1.conv.weight"], sums / counts, atol=1e-6)
    rows = torch.cat([a.tensors["conv2.conv.weight"] for a in deep])
    weights = torch.cat([a.samples for a in deep]).float()
    expected = torch.tensordot(weights / weights.sum(), rows, dims=1)
    assert torch.allclose(found["conv2.conv.weight"], expected, atol=1e-6)
    assert all("conv2.conv.weight" not in a.tensors for a in flat)
    assert not torch.equal(found["conv1.conv.weight"], before["conv1.conv.weight"])


def test_clients_receive_the_leading_slices() -> None:
    run = built()
    run.server.values["conv1.conv.weight"].copy_(torch.arange(32 * 9.0).reshape(32, 1, 3, 3))
    message = run.loop.message_for_evaluation()
    for cohort in run.federation.served(1, range(5), message):
        own = cohort.values["conv1.conv.weight"]
        assert torch.equal(own, run.server.values["conv1.conv.weight"][: own.shape[1]].expand_as(own))


def test_where_all_clients_are_alike_it_is_fedper_with_norms_of_their_own(tmp_path: Path) -> None:
    alike = {**SMALL, "groups": [], "clients": 4, "network_options": {"stages": 2}}
    one = Run(configure("scalablefl", alike), tmp_path / "one").execute()
    other = Run(configure("fedper", {**alike, "batch_norm": "local"}), tmp_path / "other").execute()
    assert one is not None
    assert other is not None
    assert one["personalized_loss"] == other["personalized_loss"]
    grouped = {**SMALL, "groups": [{"clients": 4, "image_size": 16}]}
    assert Run(configure("scalablefl", grouped), tmp_path / "group").execute() is not None


@pytest.mark.parametrize("method", ["scalablefl", "local", "heterofl"])
def test_groups_train_alike_stacked_and_one_by_one(method: str, tmp_path: Path) -> None:
    own = {"personal_layers": 1} if method == "heterofl" else {}
    found = []
    for engine in ("stacked", "one-by-one"):
        settings = {**SMALL, **own, "engine": engine, "precision": "float64"}
        found.append(Run(configure(method, settings), tmp_path / engine).execute())
    assert found[0] is not None
    assert found[1] is not None
    assert found[0]["personalized_loss"] == pytest.approx(found[1]["personalized_loss"], rel=1e-6)
    assert set(found[0]["group_accuracies"]) == {"digits-16px-10", "digits-8px-5"}
    assert found[0]["group_mean_accuracy"] == pytest.approx(sum(found[0]["group_accuracies"].values()) / 2)


def test_a_run_of_groups_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config = configure("scalablefl", {**SMALL, "clients_per_round": 0.5, "validation_fraction": 0.2})
    whole = Run(config, tmp_path / "whole").execute()
    seen: list[int] = []
    assert (
        Run(config, tmp_path / "two", watch=lambda line: seen.append(line["round"]), stop=lambda: bool(seen)).execute()
        is None
    )
    again = Run(config, tmp_path / "two").execute(resume=True)
    assert whole is not None
    assert again is not None
    assert again["personalized_loss"] == whole["personalized_loss"]
    assert again["group_accuracies"] == whole["group_accuracies"]


def test_each_site_gets_a_model_for_its_own_images(tmp_path: Path) -> None:
    Run(configure("scalablefl", SMALL), tmp_path / "run").execute()
    for client, pixels, classes in (("digits-16px-10/1", 16, 10), ("digits-8px-5/0", 8, 5)):
        folder = export(tmp_path / "run", client, tmp_path / f"model-{pixels}")
        about = json.loads(next(folder.rglob("model.json")).read_text())
        assert about["input"]["shape"] == ["batch", 1, pixels, pixels]
        assert len(about["classes"]) == classes


def test_heterofl_has_one_depth_and_as_many_parameters() -> None:
    ours, theirs = built().federation.networks, built("heterofl", personal_layers=1).federation.networks
    assert [sum(n.endswith("conv.weight") for n in network.names) for network in theirs] == [2, 2]
    for one, other in zip(ours, theirs, strict=True):
        assert other.size() == pytest.approx(
            one.size(), rel=0.2
        )  # a channel more or less is much of so small a network


def test_a_group_that_names_the_experiments_source_shares_it_with_those_that_do_not() -> None:
    plain = built(groups=[{"clients": 2}, {"clients": 2}], samples_per_client=None).data
    named = built(groups=[{"clients": 2}, {"clients": 2, "data": "digits"}], samples_per_client=None).data
    assert [len(group.inputs) for group in named.groups] == [len(group.inputs) for group in plain.groups]
    assert torch.equal(named.groups[1].inputs, plain.groups[1].inputs)


def test_images_are_resized_once() -> None:
    as_they_are = built(groups=[{"clients": 2, "image_size": 8}]).data
    again = built(groups=[{"clients": 2, "image_size": 8}], image_size=4).data
    assert torch.equal(again.groups[0].inputs, as_they_are.groups[0].inputs)


def test_a_narrow_resnet_trains() -> None:
    run = built(network="resnet18", groups=[{"clients": 2, "image_size": 32, "classes": 2}], base_classes=1000)
    answers = list(run.federation.train(1, range(2), run.loop.message_for_evaluation()))
    assert all(tensor.isfinite().all() for answer in answers for tensor in answer.tensors.values())
    assert [*run.federation.networks[0].initial()["stage3_1.shortcut.conv.weight"].shape] == [13, 7, 1, 1]


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        (
            "fedavg",
            {},
            "fedavg cannot serve groups .* allowed: heterofl with personal_layers=1, local, "
            "pmixfed with personal_layers=1, scalablefl$",
        ),
        ("heterofl", {}, "groups cannot share a head; allowed: personal_layers=1 or more"),
        ("scalablefl", {"network": "mlp"}, "network=mlp: it cannot be scaled .* resnet18, .*stride-cnn, vgg11"),
        ("scalablefl", {"network_options": {"stages": 2}}, "stages follows from the groups"),
        ("scalablefl", {"base_size": 8}, "images of 8 pixels, too small"),
        ("scalablefl", {"groups": [{"clients": 2, "classes": 1}]}, "allowed: 2 or more"),
        ("scalablefl", {"groups": [{"clients": 0}]}, "groups"),
        ("scalablefl", {"clients": 5}, "^clients=5: the groups say how many"),
        ("scalablefl", {"image_size": 0}, "image_size=0"),
        ("scalablefl", {"groups": [{**group, "name": "x"} for group in GROUPS]}, "two are called 'x'"),
        ("scalablefl", {"groups": [{"classes": 2}]}, "groups"),
        ("scalablefl", {"groups": [{"clients": 2, "size": 8}]}, "a group has no 'size'; allowed: clients, name, data"),
        ("scalablefl", {"groups": [4]}, "allowed: groups such as"),
    ],
)
def test_what_cannot_be_is_refused(method: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        built(method, **settings)
