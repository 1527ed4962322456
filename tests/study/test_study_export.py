"""A client's model as files: they compute what the run found, stand alone, and are refused in one line."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from safetensors.torch import load_file
from study_runs import clients, execute, small
from torch import Tensor, nn

from tailorfl.cli import main
from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.scoring import mean_average_precision
from tailorfl.data import FederatedData, load_partition
from tailorfl.detection.detections import select
from tailorfl.errors import UserError
from tailorfl.methods import methods
from tailorfl.methods.fedavg import FedAvg
from tailorfl.study.config import read_config
from tailorfl.study.export import Restored, check_deployable, export, folder_names, restored
from tailorfl.study.run import Run

IMAGES: dict[str, Any] = {
    "data": "synthetic",
    "partition": "natural",
    "image_size": 16,
    "samples": 20,
    "clients": 4,
    "samples_per_client": None,
    "network": "stride-cnn",
    "network_options": {"stages": 2, "width": 0.25},
}

GROUPS: dict[str, Any] = {
    "groups": [{"clients": 2, "image_size": 16}, {"clients": 2, "image_size": 8, "classes": 5}],
    "clients": None,
    "partition": "iid",
    "network": "stride-cnn",
    "network_options": {},
    "base_size": 4,
    "lr": 0.1,
}
OBJECTS: dict[str, Any] = {
    "data": "synthetic-detection",
    "classes": 2,
    "clients": 3,
    "samples": 16,
    "samples_per_client": None,
    "image_size": 32,
    "network": "auto",
    "network_options": {"stages": 3},
    "rounds": 2,
    "local_epochs": 4,
    "batch_size": 6,
    "lr": 0.03,
}
OBJECTS_IN_GROUPS: dict[str, Any] = {
    "groups": [{"clients": 2, "image_size": 32}, {"clients": 1, "image_size": 16}],
    "clients": None,
    "clients_per_round": 1.0,
    "image_size": None,
    "network_options": {},
    "base_size": 2,
    "rounds": 1,
}


class Vote(FedAvg):
    """Predicts in a way of its own, and does not say which module does that."""

    name: ClassVar[str] = "vote"

    def predict(self, clients: Cohort, batch: Batch) -> Tensor:
        return -clients.predict(batch)


class Untraceable(nn.Module):
    """A network whose way depends on what it is given."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x * 2 if x.isnan().any() else x))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of clients with models of three sizes, one of them new."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    execute(folder, "heterofl", new_clients=1)
    return folder


def program(folder: Path) -> nn.Module:
    return torch.export.load(folder / "model.pt2").module()


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return found


def again(folder: Path) -> Restored:
    return restored(folder, read_config(folder / "config.yaml"))


def samples(run: Restored, name: str) -> tuple[Tensor, Tensor]:
    """The inputs, as they are stored, and the targets of a client's test samples."""
    number = run.built.data.names.index(name)
    data = run.built.data.of(number)
    rows = data.test.of(number)
    return data.inputs[rows], data.targets[rows]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return (outputs.argmax(1) == targets).sum().item() / len(targets)


def precision(data: FederatedData, client: int, outputs: Tensor) -> float:
    """What accuracy is for detectors."""
    return mean_average_precision(data, data.test.of(client), select(outputs))


def check_clients(folder: Path, exported: Mapping[str, Path]) -> float:
    """Program and tensors give on each client's test samples what the run says of it; the accuracy over them all."""
    run, right, total = again(folder), 0.0, 0
    said = {row["client"]: row for row in clients(folder)}
    for cohort in run.served([run.built.data.names.index(name) for name in exported]):
        [number] = cohort.clients
        name = run.built.data.names[number]
        (inputs, targets), row, files = samples(run, name), said[name], exported[name]
        outputs = program(files)(inputs)
        assert not outputs.requires_grad
        detects = cohort.data.detection
        found = precision(cohort.data, number, outputs) if detects else accuracy(outputs, targets)
        assert found == float(row["accuracy"])
        assert about(files)["test"]["accuracy"] == found
        if not detects:
            assert about(files)["test"]["loss"] == pytest.approx(float(row["loss"]), rel=1e-4)
            check_tensors(run, cohort, files, inputs, outputs)
        right, total = right + found * len(targets), total + len(targets)
    return right / total


def check_tensors(run: Restored, cohort: Cohort, files: Path, inputs: Tensor, outputs: Tensor) -> None:
    """The tensors alone are the whole model."""
    alone = run.config.method.deployed(cohort)
    for tensor in (*alone.parameters(), *alone.buffers()):
        tensor.detach().zero_()
    alone.load_state_dict(load_file(files / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(alone(cohort.data.decode(inputs)), outputs, rtol=1e-5, atol=1e-6)


def check_client(folder: Path, exported: Path, name: str) -> None:
    check_clients(folder, {name: exported})


# What is exported is what was evaluated.


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *(pytest.param(method, {"rounds": 4, "lr": 0.1}, id=method) for method in methods()),
        *(pytest.param(method, GROUPS, id=f"{method}-groups") for method in ("scalablefl", "local")),
        pytest.param("heterofl", {**GROUPS, "personal_layers": 1}, id="heterofl-groups"),
        *(pytest.param(method, OBJECTS, id=f"{method}-objects") for method in ("fedper", "heterofl")),
        pytest.param("scalablefl", {**OBJECTS, **OBJECTS_IN_GROUPS}, id="scalablefl-objects-groups"),
    ],
)
def test_the_models_of_every_method_serve_as_well_as_the_run_says(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    summary = execute(tmp_path / "run", method, **settings)
    export(tmp_path / "run", "all", tmp_path / "models")
    names = [row["client"] for row in clients(tmp_path / "run")]
    places = {name: tmp_path / "models" / place for name, place in zip(names, folder_names(names), strict=True)}
    assert check_clients(tmp_path / "run", places) == pytest.approx(summary["personalized_accuracy"], abs=1e-12)


@pytest.mark.parametrize("method", ["fedper", "fedproto", "heterofl", "ppfe"])
def test_classes_that_a_client_lacks_are_left_out_there_too(method: str, tmp_path: Path) -> None:
    execute(tmp_path / "run", method, rounds=4, own_classes=True)
    export(tmp_path / "run", "1", tmp_path / "model")
    check_client(tmp_path / "run", tmp_path / "model", "1")
    data = again(tmp_path / "run").built.data
    own = data.targets[data.train.of(1)].unique()
    assert len(own) < data.num_classes
    assert torch.isin(program(tmp_path / "model")(data.inputs[:200]).argmax(1), own).all()


@pytest.mark.parametrize("method", ["fedbn", "fedproto", "heterofl"])
def test_a_network_with_batch_norm_takes_its_statistics_along(method: str, tmp_path: Path) -> None:
    execute(tmp_path / "run", method, **IMAGES)
    export(tmp_path / "run", "1", tmp_path / "model")
    check_client(tmp_path / "run", tmp_path / "model", "1")
    tensors = load_file(tmp_path / "model/model.safetensors")
    assert any(name.endswith("running_var") and not torch.all(tensors[name] == 1) for name in tensors)


def test_a_network_for_text_comes_with_its_words(tmp_path: Path) -> None:
    lines = ["text,who,label"]
    lines += [f"{word} {'film' if n % 3 else 'song'},p{n % 3},{word}" for n, word in enumerate(["fine", "bad"] * 24)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    words = {"data": f"csv:{tmp_path / 'table.csv'}", "text_column": "text", "client_column": "who", "max_length": 4}
    text = {"partition": "natural", "samples_per_client": None, "clients": None, "network": "auto"}
    sizes = {"recurrent": 4, "dimension": 4, "hidden": [4, 4]}
    execute(tmp_path / "run", "fedper", **words, **text, network_options=sizes, local_epochs=4, lr=0.1)
    export(tmp_path / "run", "p1", tmp_path / "model")
    check_client(tmp_path / "run", tmp_path / "model", "p1")
    said = about(tmp_path / "model")
    vocabulary = (tmp_path / "model/vocabulary.txt").read_text().splitlines()
    assert (said["input"]["dtype"], said["input"]["shape"]) == ("int64", ["batch", 4])
    assert said["input"]["vocabulary"] == "vocabulary.txt"
    assert vocabulary[:2] == ["<padding>", "<unknown>"]
    assert set(vocabulary[2:]) == {"fine", "bad", "film", "song"}


def test_a_regression_gives_a_number_a_row(tmp_path: Path) -> None:
    natural = {"data": "synthetic-regression", "partition": "natural", "samples": 40, "samples_per_client": None}
    execute(tmp_path / "run", "fedavg-ft", **natural, dimension=5, network="mlp", lr=0.01, precision="float64")
    export(tmp_path / "run", "2", tmp_path / "model")
    said, run = about(tmp_path / "model"), again(tmp_path / "run")
    inputs, targets = samples(run, "2")
    outputs = program(tmp_path / "model")(inputs)
    [row] = [row for row in clients(tmp_path / "run") if row["client"] == "2"]
    assert (outputs[:, 0] - targets).square().mean().item() == pytest.approx(float(row["loss"]), rel=1e-9)
    assert (said["task"], said["classes"], said["test"]["accuracy"]) == ("regression", None, None)
    assert (said["input"]["dtype"], said["normalization"]["where"]) == ("float64", "none")


def test_clients_exported_together_and_alone_have_the_same_model(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedper")
    export(tmp_path / "run", "all", tmp_path / "all")
    export(tmp_path / "run", "3", tmp_path / "alone")
    together, alone = (load_file(path / "model.safetensors") for path in (tmp_path / "all/3", tmp_path / "alone"))
    other = load_file(tmp_path / "all/4/model.safetensors")
    assert all(torch.equal(together[name], alone[name]) for name in alone)
    assert not torch.equal(other["head.weight"], alone["head.weight"])
    for name in "34":
        check_client(tmp_path / "run", tmp_path / "all" / name, name)


def test_a_client_without_all_prototypes_is_deployed_with_its_head(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedproto", rounds=1, clients_per_round=1)
    served = {name: about_class(tmp_path / "run", name) for name in "01234"}
    for kind in ("NearestPrototype", "Sequential"):
        name = next(name for name in served if served[name] == kind)
        export(tmp_path / "run", name, tmp_path / kind)
        check_client(tmp_path / "run", tmp_path / kind, name)


def about_class(folder: Path, name: str) -> str:
    run = again(folder)
    [cohort] = run.served([run.built.data.names.index(name)])
    return type(run.config.method.deployed(cohort)).__name__


def test_a_stopped_run_is_exported_as_it_was_and_goes_on_unharmed(tmp_path: Path) -> None:
    config = small("fedavg-ft", rounds=4)
    seen: list[int] = []
    first = Run(config, tmp_path / "run", watch=lambda line: seen.append(1), stop=lambda: len(seen) == 2)
    assert first.execute() is None
    export(tmp_path / "run", "0", tmp_path / "early")
    run = again(tmp_path / "run")
    scores = run.built.loop.evaluate(2).personalized
    assert about(tmp_path / "early")["round"] == 2
    assert accuracy(program(tmp_path / "early")(samples(run, "0")[0]), samples(run, "0")[1]) == scores.accuracies[0]
    assert Run(config, tmp_path / "run").execute(resume=True) is not None
    export(tmp_path / "run", "0", tmp_path / "late")
    assert about(tmp_path / "late")["round"] == 4
    check_client(tmp_path / "run", tmp_path / "late", "0")


# What the files are.


def test_the_programs_run_where_tailorfl_is_not(finished: Path, tmp_path: Path) -> None:
    """Of each kind of model one: a narrow network, prototypes, an ensemble."""
    runs = {"heterofl": finished, "fedproto": tmp_path / "fedproto", "ppfe": tmp_path / "ppfe"}
    for method, folder in runs.items():
        if folder != finished:
            execute(folder, method)
        export(folder, "1", tmp_path / f"{method}-model")
        torch.save(samples(again(folder), "1"), tmp_path / f"{method}-model/samples.pt")
    code = """
import sys
sys.modules["tailorfl"] = None
import torch
for model in sys.argv[1:]:
    inputs, targets = torch.load(f"{model}/samples.pt")
    outputs = torch.export.load(f"{model}/model.pt2").module()(inputs)
    print((outputs.argmax(1) == targets).sum().item() / len(targets))
"""
    models = [f"{method}-model" for method in runs]
    command = [sys.executable, "-c", code, *models]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [float(line) for line in done.stdout.split()] == [
        about(tmp_path / model)["test"]["accuracy"] for model in models
    ]


def test_the_program_takes_any_number_of_raw_images(finished: Path, tmp_path: Path) -> None:
    export(finished, "2", tmp_path / "model")
    run, loaded = again(finished), program(tmp_path / "model")
    inputs, _ = samples(run, "2")
    assert inputs.dtype == torch.uint8
    together = loaded(inputs)
    assert together.shape == (len(inputs), 10)
    torch.testing.assert_close(torch.cat([loaded(image[None]) for image in inputs]), together)


def test_no_sample_of_a_client_is_in_the_files(finished: Path, tmp_path: Path) -> None:
    export(finished, "0", tmp_path / "model")
    arguments, _ = torch.export.load(tmp_path / "model/model.pt2").example_inputs
    assert [tensor.any().item() for tensor in arguments] == [False]
    assert str(Path.cwd()).encode() not in (tmp_path / "model/model.pt2").read_bytes()


def test_the_description_says_what_goes_in_what_comes_out_and_what_it_costs(finished: Path, tmp_path: Path) -> None:
    costs = []
    for name, width in (("0", 8), ("1", 4), ("2", 2)):
        export(finished, name, tmp_path / name)
        said = about(tmp_path / name)
        costs.append(said["cost"]["model"])
        assert costs[-1]["multiply_adds"] == 64 * width + width * 10
        assert costs[-1]["parameters"] == 64 * width + width + width * 10 + 10
        assert said["cost"]["network"] == {"parameters": 610, "bytes": 2440, "multiply_adds": 592}
    data = again(finished).built.data
    assert (said["method"], said["network"], said["client"], said["run"]) == ("heterofl", "mlp", "2", "mine")
    assert (said["round"], said["task"], said["classes"]) == (3, "classification", list(data.classes))
    assert (said["input"]["dtype"], said["input"]["shape"]) == ("uint8", ["batch", 1, 8, 8])
    assert (said["output"]["dtype"], said["output"]["shape"]) == ("float32", ["batch", 10])
    assert said["normalization"] == {"where": "inside", "mean": data.mean.tolist(), "std": data.std.tolist()}


def test_a_client_that_never_trained_has_a_model_too(finished: Path, tmp_path: Path) -> None:
    [new] = load_partition(finished / "partition.safetensors").new_clients
    export(finished, str(new), tmp_path / "model")
    check_client(finished, tmp_path / "model", str(new))


def test_folders_of_clients_are_safe_and_differ() -> None:
    names = ["a/b", "a-b", "A b", "..", "../up", "", "Ünal", "a-b-2"]
    found = folder_names(names)
    assert len({name.casefold() for name in found}) == len(names)
    assert all(name and "/" not in name and not name.startswith(".") for name in found)
    assert folder_names(["0", "Oak", "p.1"]) == ["0", "Oak", "p.1"]


def test_a_run_of_a_device_that_is_not_here_is_exported_on_the_processor(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({**settings, "device": "cuda:99"}))
    export(tmp_path / "run", "1", tmp_path / "model")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(settings))
    check_client(tmp_path / "run", tmp_path / "model", "1")


# What is refused, and what stays.


def test_a_client_that_is_not_there_is_refused_with_those_that_are(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine has no client 'x'; allowed: 0, 1, 2, 3, 4, or all$"):
        export(finished, "x", tmp_path / "model")
    execute(tmp_path / "many", clients=14, samples_per_client=4, rounds=1)
    with pytest.raises(UserError, match=r"allowed: 0, 1, .*, 11, \.\.\. \(14 names\), or all$"):
        export(tmp_path / "many", "14", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none holds no run \(config.yaml is missing\)"):
        export(tmp_path / "none", "0")
    assert not (tmp_path / "none").exists()


def test_runs_in_a_folder_that_is_none_are_named_and_a_seed_with_what_it_is_of(tmp_path: Path) -> None:
    execute(tmp_path / "both/fedper/seed-0", rounds=1)
    for folder in (tmp_path / "both", tmp_path / "both/fedper"):
        with pytest.raises(UserError, match=r"config.yaml is missing\); allowed: .*/both/fedper/seed-0$"):
            export(folder, "0")
    export(tmp_path / "both/fedper/seed-0", "0", tmp_path / "model")
    assert json.loads((tmp_path / "model/model.json").read_text())["run"] == "both/fedper/seed-0"


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    for path in sorted((tmp_path / "run/checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match=r"run has no checkpoint yet; allowed: 'tailor run --resume"):
        export(tmp_path / "run", "0")
    assert not (tmp_path / "run/export").exists()


def test_an_export_that_is_there_is_replaced_only_by_force(finished: Path, tmp_path: Path) -> None:
    export(finished, "0", tmp_path / "model")
    with pytest.raises(UserError, match=r"model exists; allowed: another --out, --force"):
        export(finished, "1", tmp_path / "model")
    assert about(tmp_path / "model")["client"] == "0"
    export(finished, "1", tmp_path / "model", force=True)
    assert about(tmp_path / "model")["client"] == "1"
    export(finished, "0", tmp_path / "models/0")
    export(finished, "all", tmp_path / "models", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "models"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("beside", ["notes.txt", "more/notes.txt"])
def test_force_replaces_nothing_but_an_export(finished: Path, tmp_path: Path, beside: str) -> None:
    export(finished, "0", tmp_path / "mine/0")
    (tmp_path / "mine" / beside).parent.mkdir(exist_ok=True)
    (tmp_path / "mine" / beside).write_text("keep me")
    with pytest.raises(UserError, match="mine is not an export; --force replaces only an export"):
        export(finished, "all", tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / beside).read_text() == "keep me"


def test_an_export_that_fails_leaves_what_was_there(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(finished, "0", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(torch.export, "save", full)
    with pytest.raises(OSError, match="full"):
        export(finished, "1", tmp_path / "model", force=True)
    with pytest.raises(OSError, match="full"):
        export(finished, "all", tmp_path / "models")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_a_run_that_is_replaced_takes_its_exports_along(tmp_path: Path) -> None:
    execute(tmp_path / "run")
    assert export(tmp_path / "run", "0") == tmp_path / "run/export/0"
    Run(small(lr=0.02), tmp_path / "run").execute(force=True)
    assert not (tmp_path / "run/export").exists()


def test_a_method_that_predicts_otherwise_and_deploys_the_network_is_refused(tmp_path: Path) -> None:
    execute(tmp_path / "run", "test_study_export:Vote")
    with pytest.raises(UserError, match=r"Vote cannot be exported: it has a 'predict' of its own, and no 'deployed'"):
        export(tmp_path / "run", "0")


@pytest.mark.parametrize("method", methods())
def test_every_method_says_what_is_deployed(method: str) -> None:
    check_deployable(methods()[method], method)


def test_a_network_that_cannot_be_traced_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="tailorfl")  # the command says more, and may have run before
    execute(tmp_path / "run", network="test_study_export:Untraceable", network_options={})
    capfd.readouterr()
    with pytest.raises(UserError, match=r"^the model of client '0' cannot be made a torch.export program: .+$"):
        export(tmp_path / "run", "0", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert capfd.readouterr() == ("", "")


def test_the_command_says_what_it_wrote(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, status in ((["--client", "1"], 0), (["--client", "1"], 2), (["--client", "nobody"], 2), ([], 2)):
        monkeypatch.setattr(sys, "argv", ["tailor", "export", str(finished), *arguments, "--out", "model"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == status
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "client 1: 310 parameters (51 %), 296 multiply-adds a sample (50 %) of mlp",
        "written: model",
    ]
    assert [line.split(": ")[1].split(";")[0] for line in said.err.splitlines()] == [
        "model exists",
        f"{finished} has no client 'nobody'",
        "Missing option '--client'.",
    ]
