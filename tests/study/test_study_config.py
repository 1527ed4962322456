"""Configurations are checked once, and every problem is said."""

from pathlib import Path

import pytest
import yaml
from study_runs import small

from tailorfl.errors import UserError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.study.build import build
from tailorfl.study.config import configure, read_config, read_settings


def refusal(method: str = "fedper", **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        configure(method, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_key_is_refused_with_what_was_probably_meant() -> None:
    assert "unknown key 'personal_layer' for fedper; did you mean personal_layers" in refusal(personal_layer=2)


def test_a_data_folder_that_is_typed_as_a_key_leads_to_the_option() -> None:
    assert "unknown key 'data_dir' for fedper; allowed: the option --data-dir FOLDER" in refusal(data_dir="/x")
    assert "unknown key 'qqq'" in refusal(qqq=1)


def test_an_option_of_another_method_is_refused() -> None:
    assert "unknown key 'personal_layers' for fedavg" in refusal("fedavg", personal_layers=2)


class Alpha(FedAvg):
    alpha: float = 1.0


class Seeds(FedAvg):
    seeds: int = 3


@pytest.mark.parametrize(("name", "key"), [("Alpha", "alpha"), ("Seeds", "seeds")])
def test_a_method_whose_option_is_called_like_a_key_of_the_experiment_is_refused(name: str, key: str) -> None:
    said = refusal(f"{__name__}:{name}")
    assert f"{name} has an option '{key}', which is a key of every experiment; allowed: another name" in said
    assert "\n" not in said


def test_all_problems_are_said_at_once() -> None:
    said = refusal(rounds=-1, lr="abc", momentun=0.5, personal_layers=-2)
    for part in ("rounds=-1", "lr=abc", "'momentun'", "did you mean momentum", "personal_layers=-2"):
        assert part in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rounds", -1),
        ("rounds", 2.5),
        ("clients_per_round", 0),
        ("clients_per_round", 2.5),
        ("clients_per_round", -0.5),
        ("lr", "abc"),
        ("lr", 0),
        ("momentum", 1.0),
        ("seed", -1),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("engine", "fast"),
        ("selection", "best"),
        ("precision", "float16"),
        ("init", "xavier"),
        ("head_init", "none"),
        ("batch_norm", "odd"),
        ("everyone_in", 1),
        ("everyone_in", [0]),
        ("everyone_in", [31]),
        ("everyone_in", [-31]),
        ("checkpoint_every", 0),
        ("evaluate_every", -1),
        ("target_accuracy", 1.5),
    ],
)
def test_an_impossible_value_is_refused_with_its_key(key: str, value: object) -> None:
    assert refusal(**{key: value}).startswith(f"{key}={value}")


@pytest.mark.parametrize(("settings", "biased"), [({}, False), ({"head_init": "default"}, True)])
def test_all_begins_as_init_says_and_the_head_otherwise_where_that_is_said(
    settings: dict[str, str], biased: bool
) -> None:
    network = build(configure("fedper", {"clients": 4, "network": "mlp", "init": "he", **settings})).network
    initial = network.initial()
    assert not initial[network.layers[0].parameters[-1]].any()
    assert bool(initial[network.layers[-1].parameters[-1]].any()) == biased


def test_a_target_needs_validation_data() -> None:
    assert "validation_fraction" in refusal(target_accuracy=0.5)


@pytest.mark.parametrize(("given", "kept"), [(3, 3), (0.25, 0.25), (1.0, 1.0), (12.0, 12), (None, None)])
def test_clients_per_round_are_a_number_or_a_fraction(given: float | None, kept: float | None) -> None:
    found = configure("fedavg", {"clients_per_round": given}).experiment.clients_per_round
    assert found == kept
    assert type(found) is type(kept)


def test_settings_are_read_as_yaml() -> None:
    read = read_settings(["lr=1e-3", "rounds=8", "network_options={hidden: [4, 2]}", "augment=a=b"])
    assert read == {"lr": "1e-3", "rounds": 8, "network_options": {"hidden": [4, 2]}, "augment": "a=b"}
    assert configure("fedavg", {"lr": read["lr"]}).method.lr == 0.001


@pytest.mark.parametrize("pair", ["rounds", "=3", "rounds:3"])
def test_what_is_no_setting_is_refused(pair: str) -> None:
    with pytest.raises(UserError, match="is not a setting"):
        read_settings([pair])


def test_a_setting_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rounds is named twice; allowed: every key once"):
        read_settings(["rounds=7", "lr=1", "rounds=8"])
    with pytest.raises(UserError, match=r"network_options=.*hidden is named twice"):
        read_settings(["network_options={hidden: 3, hidden: 4}"])
    file = tmp_path / "settings.yaml"
    file.write_text("rounds: 2\nlr: 1\nrounds: 5\n")
    with pytest.raises(UserError, match="rounds is named twice, again in line 3") as caught:
        read_settings([], file)
    assert "\n" not in str(caught.value)


def test_a_template_that_was_not_filled_in_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("lr: {{ lr }}\n")
    for read in (lambda: read_settings([], file), lambda: read_settings(["lr={{ lr }}"])):
        with pytest.raises(UserError, match=r"lr=|settings.yaml") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_keys_that_are_merged_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("a: &a {lr: 1, rounds: 2}\nb: &b {<<: *a, lr: 3}\nc: {<<: *b, rounds: 4}\n")
    assert read_settings([], file)["c"] == {"lr": 3, "rounds": 4}


def test_a_value_that_is_no_yaml_is_refused_with_its_key() -> None:
    with pytest.raises(UserError, match=r"network_options=\{hidden"):
        read_settings(["network_options={hidden: [4"])


def test_a_file_gives_settings_and_the_command_overrides_them(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("method: fedper\nrounds: 9\nlr: 0.5\n")
    assert read_settings(["rounds=4"], file) == {"method": "fedper", "rounds": 4, "lr": 0.5}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"rounds: [1", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- rounds\n", "holds no settings"),
        (b"just words", "holds no settings"),
        (b"", "holds no settings"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "settings.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read_settings([], file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_no_word_is_refused_like_any_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("1: 2\n")
    with pytest.raises(UserError, match="unknown key '1'"):
        configure("fedavg", read_settings([], file))


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_configuration_is_complete_and_comes_back_from_its_file(tmp_path: Path, method: str) -> None:
    config = small(method, everyone_in=[1, -1], clients_per_round=0.5, lr_milestones=[2], lr_schedule="step")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.flat()))
    assert read_config(file) == config
    assert set(config.flat()) == {"method", *type(config.experiment).model_fields, *type(config.method).model_fields}


def test_a_file_without_a_method_is_no_configuration_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rounds: 3\n")
    with pytest.raises(UserError, match="names no method"):
        read_config(tmp_path / "config.yaml")


def test_changes_name_the_keys_with_their_old_and_new_values() -> None:
    assert small().changes(small()) == []
    assert small(rounds=5).changes(small(rounds=6, lr=0.5)) == ["rounds: 5 -> 6", "lr: 0.01 -> 0.5"]
    assert "method: fedper -> local" in small().changes(small("local"))
