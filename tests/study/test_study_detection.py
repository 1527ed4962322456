"""Detectors of clients, from the command to the picture: trained, scored, exported, drawn, and refused in one line."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from study_runs import clients

from tailorfl.cohort.scoring import Detections
from tailorfl.data import FederatedData, Group, PartitionOptions, Source, federate_groups, save_source
from tailorfl.data.ragged import Ragged
from tailorfl.detection import coco, detect, voc07
from tailorfl.errors import UserError
from tailorfl.methods import methods
from tailorfl.study import build as building
from tailorfl.study.build import Built, build
from tailorfl.study.config import configure
from tailorfl.study.export import export
from tailorfl.study.picture import draw_detections
from tailorfl.study.run import Run

SHAPES: dict[str, Any] = {
    "data": "synthetic-detection",
    "classes": 3,
    "clients": 3,
    "samples": 16,
    "image_size": 32,
    "network_options": {"stages": 3},
    "rounds": 1,
    "local_epochs": 1,
    "batch_size": 6,
    "device": "cpu",
}
GROUPS: dict[str, Any] = {
    **{key: value for key, value in SHAPES.items() if key not in ("clients", "network_options", "image_size")},
    "groups": [
        {"name": "large", "clients": 2, "image_size": 32},
        {"name": "small", "clients": 2, "image_size": 16, "classes": 2},
    ],
    "samples": 30,
    "base_size": 4,
    "clients_per_round": 1.0,
}


def built(method: str = "fedavg", **settings: Any) -> Built:
    return build(configure(method, {**SHAPES, **settings}))


def execute(folder: Path, method: str, settings: Mapping[str, Any] = SHAPES, **more: Any) -> dict[str, Any]:
    summary = Run(configure(method, {**settings, **more}), folder).execute()
    assert summary is not None
    return summary


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned something."""
    folder = tmp_path_factory.mktemp("detection") / "run"
    execute(folder, "fedper", rounds=2, local_epochs=4, lr=0.03)
    return folder


# Training.


def test_stacked_and_one_by_one_agree() -> None:
    """Objects are matched to anchors in a stack as they are for one client alone, and also in unequal clients."""
    wide = {"precision": "float64", "partition": "dirichlet", "alpha": 1.0, "augment": "expand,sample,flip,colour"}
    found = []
    for engine in ("stacked", "one-by-one"):
        one = built("fedper", engine=engine, clients_per_round=1.0, **wide)
        one.loop.round(1)
        found.append(one.server.values)
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-8, atol=1e-10, msg=name)


def test_a_client_learns_to_find_shapes(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["personalized_accuracy"] > 0.3
    assert built("fedper").loop.evaluate(0).personalized.accuracy < 0.1


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_trains_detectors_or_says_that_it_cannot(name: str, tmp_path: Path) -> None:
    if name in ("fedproto", "fedrod", "pfedfda", "ppfe", "pfps-lwc", "pflego"):
        with pytest.raises(UserError, match=r"classes|detectors|features"):
            execute(tmp_path / "run", name)
        return
    summary = execute(tmp_path / "run", name, clients=2, samples=12, image_size=16, network_options={"stages": 2})
    assert 0 <= summary["personalized_accuracy"] <= 1
    assert math.isfinite(summary["personalized_loss"])
    assert export(tmp_path / "run", "0")


# Scores.


@pytest.mark.parametrize("metric", ["voc07", "coco"])
def test_accuracy_is_the_mean_average_precision_of_each_client(metric: str) -> None:
    one = built("local", metric=metric, local_epochs=6, lr=0.03, clients_per_round=1.0)
    evaluation = one.loop.round(1).evaluation
    assert evaluation is not None
    for cohort in one.federation.served(1, [0, 1, 2], one.loop.message_for_evaluation()):
        for row, client in enumerate(cohort.clients):
            rows = one.data.test.of(client)
            outputs = cohort.of([row]).outputs("test")[0]
            found, truth = detect(outputs, cohort.network.anchors()), list(one.data.targets[rows])
            expected = voc07(found, truth, 3) if metric == "voc07" else coco(found, truth, 3, 32)
            assert evaluation.personalized.accuracies[client] == pytest.approx(expected)
    assert evaluation.personalized.accuracy is not None
    assert evaluation.personalized.accuracy > 0


def test_the_global_model_has_the_score_that_clients_find_with_it() -> None:
    one = built("fedavg", local_epochs=4, lr=0.03, clients_per_round=1.0)
    evaluation = one.loop.round(1).evaluation
    assert evaluation is not None
    scores = one.federation.evaluate(1, [0, 1, 2], one.loop.message_for_evaluation(), ["test"]).scores["test"]
    assert evaluation.common is not None
    assert scores.accuracies.tolist() == pytest.approx(evaluation.common.accuracies.tolist())
    assert scores.loss.tolist() == pytest.approx(evaluation.common.loss.tolist(), rel=1e-4)


def test_a_client_without_an_object_to_find_has_no_score() -> None:
    one = built("fedavg")
    targets = one.data.targets.clone()
    targets[one.data.test.of(1), :, 5] = 1  # ignored, one and all
    data = replace(one.data, targets=targets)
    detections = Detections(data, one.network.anchors())
    outputs = one.network.forward(one.server.values, data.decode(data.inputs), None, train=False).detach()
    detections.add(torch.arange(len(outputs)), outputs)
    assert detections.of(data.test.of(1)) == (0, 0.0, 0.0)
    assert detections.of(data.test.of(0))[0] == len(data.test.of(0))


# Groups.


@pytest.mark.parametrize("method", ["scalablefl", "heterofl", "local"])
def test_groups_with_other_sizes_and_classes(method: str, tmp_path: Path) -> None:
    more = {"personal_layers": 1} if method == "heterofl" else {}
    summary = execute(tmp_path / "run", method, GROUPS, **more)
    assert set(summary["group_accuracies"]) == {"large", "small"}
    if method != "scalablefl":
        return
    about = [json.loads((export(tmp_path / "run", name) / "model.json").read_text()) for name in ("large/0", "small/1")]
    assert [one["input"]["shape"][-1] for one in about] == [32, 16]
    assert [len(one["classes"]) for one in about] == [3, 2]


def test_boxes_and_classes_do_not_mix() -> None:
    groups = [{"clients": 1}, {"clients": 1, "data": "synthetic"}]
    with pytest.raises(UserError, match="some have objects in images and some have classes"):
        build(configure("scalablefl", {**GROUPS, "groups": groups, "image_size": 32}))


# Files and pictures.


def test_an_exported_detector_finds_what_the_client_found(trained: Path) -> None:
    about = json.loads((export(trained, "1") / "model.json").read_text())
    assert about["task"] == "detection"
    assert about["test"]["accuracy"] == pytest.approx(float(clients(trained)[1]["accuracy"]))
    program = torch.export.load(trained / "export" / "1" / "model.pt2").module()
    outputs = program(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert list(outputs.shape[1:]) == about["output"]["shape"][1:]
    assert outputs.min() >= 0
    assert outputs.max() <= 1


def test_objects_are_drawn(trained: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    draw_detections(trained, "1", tmp_path / "one.png", images=3)
    draw_detections(trained, "1", tmp_path / "none.png", images=3, threshold=1.0)
    with_frames, without = (image.imread(tmp_path / name) for name in ("one.png", "none.png"))
    assert with_frames.shape == without.shape
    assert (with_frames != without).any()


@pytest.mark.parametrize(
    ("client", "said"), [("9", "no client '9'; allowed: 0, 1, 2"), ("all", "a picture is of one client")]
)
def test_a_picture_of_nobody_is_refused(trained: Path, tmp_path: Path, client: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        draw_detections(trained, client, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_a_run_without_objects_has_no_picture(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedavg", {"data": "digits", "clients": 2, "rounds": 1, "device": "cpu"})
    with pytest.raises(UserError, match="has no objects to draw"):
        draw_detections(tmp_path / "run", "0", tmp_path / "picture.png")


# What cannot be.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"network": "cnn", "network_options": {}}, "network=cnn: .* has objects in images; allowed: ssd-resnet18"),
        ({"data": "digits", "network": "ssd-resnet18"}, "network=ssd-resnet18: digits has one target a sample"),
        ({"own_classes": True}, "own_classes=true: detectors have an output for every class"),
        ({"augment": "crop4"}, "augment=crop: the boxes would not follow"),
        ({"data": "digits", "network": "mlp", "network_options": {}, "augment": "expand"}, "for images with boxes"),
        ({"network_options": {"stages": 7}}, "ssd-resnet18.*at least 65x65 pixels, got 32x32; allowed: larger images"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        built(**settings)


# Real images.

VOC = Path(os.environ.get("TAILOR_DATA", "nowhere")) / "voc2012_mini" / "VOCdevkit"


@pytest.mark.slow
@pytest.mark.skipif(not VOC.is_dir(), reason="TAILOR_DATA has no voc2012_mini")
def test_groups_of_two_sizes_learn_real_images_by_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that cannot learn six photographs by heart is wrong somewhere: boxes, matching, loss, or score."""
    load = building.load_data

    def tested_on_training_images(*arguments: Any) -> FederatedData:
        data = load(*arguments)
        groups = tuple(replace(group, test=copied(group.train)) for group in data.groups)
        return replace(data, test=copied(data.train), groups=groups)

    def copied(rows: Ragged) -> Ragged:
        return Ragged(rows.index.clone(), rows.offsets.clone())

    monkeypatch.setattr(building, "load_data", tested_on_training_images)
    settings = {
        "data": f"voc:{VOC}",
        "groups": [
            {"name": "small", "clients": 1, "image_size": 256, "samples_per_client": 6},
            {"name": "large", "clients": 1, "image_size": 512, "samples_per_client": 6},
        ],
        "base_size": 4,
        "clients_per_round": 1.0,
        "rounds": 5,
        "local_epochs": 10,
        "batch_size": 6,
        "optimizer": "adam",
        "lr": 5e-4,
        "evaluate_every": 0,
        "device": "cpu",
    }
    summary = execute(tmp_path / "run", "scalablefl", settings)
    assert min(summary["group_accuracies"].values()) > 0.8
    draw_detections(tmp_path / "run", "large/0", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_detector_of_one_class_can_be_scaled() -> None:
    groups = [{"clients": 1, "image_size": 32, "classes": 1}, {"clients": 1, "image_size": 16}]
    for chosen in (groups, [groups[0], {**groups[1], "classes": 1}]):
        one = build(configure("scalablefl", {**GROUPS, "groups": chosen}))
        assert one.loop.round(1).evaluation is not None


def test_defaults_fit_together() -> None:
    small = {key: value for key, value in SHAPES.items() if key not in ("network_options", "image_size")}
    assert len(build(configure("fedavg", small)).network.layers) == 7  # six stages and the head


def test_a_metric_is_that_of_the_source_even_from_a_prepared_file(tmp_path: Path) -> None:
    data = built().data
    source = Source("coco:somewhere", "image", data.inputs, data.targets, len(data.inputs), data.classes)
    save_source(source, tmp_path / "packed.safetensors")
    again = built(data=f"file:{tmp_path / 'packed.safetensors'}", partition="iid").data
    assert (data.metric, again.metric) == ("voc07", "coco")
    assert built(data=f"file:{tmp_path / 'packed.safetensors'}", metric="voc07").data.metric == "voc07"
    with pytest.raises(UserError, match="digits has no objects to find"):
        built(data="digits", metric="coco")


def test_images_without_objects_are_tested_on_in_groups_too() -> None:
    data = built().data
    targets = data.targets.clone()
    targets[40:, :, 0], targets[40:, :, 1:] = -1, 0
    source = Source("shapes", "image", data.inputs, targets, 30, data.classes)
    everyone = federate_groups([Group(clients=1, data="shapes")], lambda name: source, PartitionOptions(), 0)
    assert len(everyone.test.of(0)) == len(targets) - 30
    some = federate_groups([Group(clients=1, data="shapes", classes=2)], lambda name: source, PartitionOptions(), 0)
    assert 0 < len(some.test.of(0)) <= 10


def test_groups_of_one_source_say_their_size_or_none_does() -> None:
    with pytest.raises(UserError, match="some with data=synthetic-detection have an image_size"):
        build(configure("scalablefl", {**GROUPS, "groups": [{"clients": 1, "image_size": 32}, {"clients": 1}]}))
