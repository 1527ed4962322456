"""The app's folder, and what Flower makes of what we write."""

import ast
import io
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.cli import main
from tailorfl.errors import UserError
from tailorfl.flower.project import RunConfig, experiment_text, node_config, read_run, stored_settings, write_app
from tailorfl.study.config import configure

NASTY = 'a "quoted" C:\\data\n"""three\'\'\' é \t\x7f \\u0041\n\nlast "'


def written(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def test_app_holds_the_complete_experiment_and_every_key(tmp_path: Path) -> None:
    config = configure("fedper", {"clients": 7, "lr": 0.01})
    write_app(tmp_path, RunConfig(experiment_text(config), "/runs/one", nodes=3, deadline=30.5))
    found = written(tmp_path)["tool"]["flwr"]["app"]["config"]
    assert yaml.safe_load(found.pop("experiment")) == config.flat()
    assert found == {
        "out": "/runs/one", "state": "", "nodes": 3, "wait": 600.0, "deadline": 30.5, "min-answers": 1,
        "max-update-norm": 0.0, "max-samples": 0,
    }  # fmt: skip
    settings = stored_settings(tmp_path)
    assert configure(settings.pop("method"), settings) == config


def test_app_asks_for_no_dependencies_and_names_both_sides(tmp_path: Path) -> None:
    write_app(tmp_path, RunConfig("method: fedavg\n", "/run"))
    found = written(tmp_path)
    assert found["project"]["dependencies"] == []
    for side in ("server", "client"):
        module, _, name = found["tool"]["flwr"]["app"]["components"][f"{side}app"].partition(":")
        source = ast.parse((tmp_path / f"{module}.py").read_text())
        assigned = {target.id: ast.unparse(part.value) for part in source.body if isinstance(part, ast.Assign)
                    for target in part.targets if isinstance(target, ast.Name)}  # fmt: skip
        assert assigned[name] == f"apps.{side}_app"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_back_as_it_was(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for one in (text, f"{text}\n{NASTY}"):
            write_app(Path(folder), RunConfig(one, one))
            assert read_run(Path(folder)) == RunConfig(one, one)


def test_folder_of_another_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    with pytest.raises(UserError, match="not of an app"):
        read_run(tmp_path)


@pytest.mark.parametrize("wrong", [{"nodes": -1}, {"wait": float("nan")}, {"min_answers": 0}, {"max_samples": -3}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="allowed: numbers from"):
        RunConfig("method: fedavg", "/run", **wrong)


def test_flower_builds_the_app_without_a_warning(tmp_path: Path) -> None:
    build = pytest.importorskip("flwr.cli.build")
    utils = pytest.importorskip("flwr.cli.config_utils")
    write_app(tmp_path, RunConfig(f"method: fedavg\nnote: |\n  {NASTY!r}\n", "/run"))
    (tmp_path / "secret.csv").write_text("name\n")
    assert utils.load_and_validate(tmp_path / "pyproject.toml")[1] == []
    with zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(tmp_path))) as bundle:
        assert set(bundle.namelist()) == {"pyproject.toml", "server_app.py", "client_app.py", ".info/CONTENT"}
        packed = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert packed["tool"]["flwr"]["app"]["config"] == written(tmp_path)["tool"]["flwr"]["app"]["config"]


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "",
        "two words",
        "folder:/data/a=b c",
        "it's",
        'say "x"',
        "C:\\new\\table",
        "it's C:\\new",
        "x.toml",
        "é",
    ],
)
def test_flower_reads_a_sites_settings_as_they_were(value: str) -> None:
    parse = pytest.importorskip("flwr.common.config").parse_config_args
    entries: dict[str, Any] = {"client": "a-1", "partition": 3, "data": value, "rate": 0.5, "on": True, "state": value}
    assert parse([node_config(entries)]) == entries


@pytest.mark.parametrize("value", ['it\'s "both"', "two\nlines", "bell\x07"])
def test_settings_that_flower_cannot_take_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="data="):
        node_config({"data": value})


Tailor = Callable[..., tuple[int, str]]


@pytest.fixture
def tailor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tailor:
    """The command in an empty folder: its exit status, and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tailor", "flower", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return command


def test_command_writes_an_app_once(tmp_path: Path, tailor: Tailor) -> None:
    (tmp_path / "one.yaml").write_text("method: fedper\nclients: 4\nrounds: 2\n")
    assert tailor("app", "one.yaml", "rounds=3", "--to", "app", "--out", "run") == (0, "")
    run, settings = read_run(tmp_path / "app"), stored_settings(tmp_path / "app")
    assert run.out == str(tmp_path / "run")
    assert (settings["method"], settings["clients"], settings["rounds"]) == ("fedper", 4, 3)
    status, said = tailor("app", "fedavg", "--to", "app")
    assert status == 2
    assert "app exists; allowed" in said
    assert read_run(tmp_path / "app") == run
    assert tailor("app", "fedavg", "--to", "app", "--force") == (0, "")
    assert stored_settings(tmp_path / "app")["method"] == "fedavg"


def test_command_replaces_no_folder_of_somebody_else(tmp_path: Path, tailor: Tailor) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert tailor("app", "fedavg", "--to", "app", "--force")[0] == 2
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["pyproject.toml"]


def test_command_refuses_a_wrong_setting_and_writes_nothing(tmp_path: Path, tailor: Tailor) -> None:
    status, said = tailor("app", "fedper", "clints=3", "--to", "app")
    assert status == 2
    assert "did you mean clients" in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_needs_neither_flower_nor_torch() -> None:
    code = (
        "import sys, tailorfl.cli; print([name for name in ('torch', 'flwr', 'cryptography') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
