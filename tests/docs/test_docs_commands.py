"""The documentation holds: its commands run, its tables match the code, its links lead somewhere."""

import ast
import csv
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from pydantic_core import to_jsonable_python

from tailorfl import cli
from tailorfl.data import DOWNLOADS, PARTITIONS, SOURCES
from tailorfl.errors import UserError
from tailorfl.methods import Method, find_method, methods
from tailorfl.models import networks
from tailorfl.study.build import build
from tailorfl.study.compare import configure_all
from tailorfl.study.config import Experiment, configure, read_config, read_settings
from tailorfl.study.folder import CLIENTS, CONFIG, ROUNDS, SUMMARY
from tailorfl.study.plan import Selection
from tailorfl.study.reproduce import STUDIES, read_options
from tailorfl.study.run import Run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*) *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = ("tailor", "python")


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    needs: str  # what it needs that a test machine may lack; then it is only checked
    refused: str  # the error line that the page shows for it


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, info string and text of each fenced block."""
    for match in FENCE.finditer(page.read_text()):
        yield match[1], match[2].strip(), match[3]


def commands(page: Path) -> list[Command]:
    """The commands of a page: every line of a bash block, the lines after a dollar sign of a console block."""
    found = []
    for language, info, text in blocks(page):
        needs = info.removeprefix("needs=") if info.startswith("needs=") else ""
        lines = text.replace("\\\n", " ").splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            shown = language == "console" and line.startswith("$ ")
            if language == "bash" or shown:
                words = tuple(shlex.split(line.removeprefix("$ "), comments=True))
                refused = after if shown and after.startswith("tailor: ") else ""
                found += [Command(words, needs, refused)] if words and words[0] in OURS else []
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what the pages assume: the examples, a table of hospitals, a folder of photos."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for example in EXAMPLES:
        shutil.copy(example, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAILOR_DATA", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    runpy.run_path(str(tmp_path / "own_data.py"))["write_table"](tmp_path / "hospitals.csv")
    write_photos(tmp_path / "photos")
    yield tmp_path
    for name in set(sys.modules) - before:
        if "." not in name and (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


def write_photos(folder: Path) -> None:
    """Noise of two shades, by three clients."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for client in ("anna", "ben", "cleo"):
        for shade, name in ((60, "dark"), (160, "light")):
            (folder / client / name).mkdir(parents=True)
            for number in range(8):
                pixels = (shade + rng.integers(0, 60, (16, 16))).astype(np.uint8)
                image.fromarray(pixels).save(folder / client / name / f"{number}.png")


def write_files(page: Path, folder: Path) -> None:
    """Blocks with ``file=NAME`` are files that the page's commands use."""
    for _, info, text in blocks(page):
        if info.startswith("file="):
            (folder / info.removeprefix("file=")).write_text(text)


def shortened(command: Command) -> list[str]:
    """Two rounds where the page does not say how many."""
    words = list(command.words)
    trains = words[1] in ("compare", "sweep") or (words[1] == "run" and "--resume" not in words)
    trains = trains and not command.refused
    return [*words, "rounds=2"] if trains and not any(word.startswith("rounds=") for word in words) else words


def execute(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process: a fresh one spends most of its time on importing torch."""
    if words[:3] == ["python", "-m", "pytest"]:
        return int(pytest.main(["-q", "-p", "no:cacheprovider", *words[3:]]))
    program, arguments = (cli.main, words) if words[0] == "tailor" else (None, words[1:])
    monkeypatch.setattr(sys, "argv", arguments)
    try:
        if program:
            program()
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent.absolute()))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_the_page_runs(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page, workplace)
    for command in commands(page):
        if command.needs:
            check(command)
            continue
        status = execute(shortened(command), monkeypatch)
        printed = capsys.readouterr()
        assert status == (2 if command.refused else 0), f"{shlex.join(command.words)}\n{printed.out}{printed.err}"
        assert command.refused in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_the_page_runs_as_written(page: Path, workplace: Path) -> None:
    write_files(page, workplace)
    programs = {"python": [sys.executable], "tailor": [sys.executable, "-m", "tailorfl"]}
    for command in commands(page):
        if not command.needs:
            words = [*programs[command.words[0]], *command.words[1:]]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, cwd=workplace, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == (2 if command.refused else 0), shlex.join(words) + done.stdout + done.stderr


def check(command: Command) -> None:
    """A command that cannot run here: its options, its keys, and the names in it."""
    program, *words = command.words
    if program == "python":
        ast.parse((ROOT / words[0]).read_text())
        return
    group: Any = typer.main.get_command(cli.app)
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    given = group.make_context(group.name, words).params
    arguments = [*(given.get("arguments") or ()), *(given.get("settings") or ())]
    pairs = [word for word in arguments if "=" in word]
    names = [word for word in (given.get("method"), given.get("experiment"), *arguments) if word and "=" not in word]
    settings = read_settings(pairs)
    if group.name == "reproduce":
        read_options(given["name"], settings)
        return
    assert settings.get("data", "digits").split(":")[0] in SOURCES
    if group.name == "prepare":
        assert given["name"] in DOWNLOADS
    configure_all(names or ["fedavg"], settings)


def test_a_typo_in_a_command_that_cannot_run_is_found() -> None:
    good = ("tailor", "compare", "fedavg", "fedper", "data=cifar10", "personal_layers=2", "--data-dir", "data")
    check(Command(good, "cifar10", ""))
    for wrong in (("data=cifar11",), ("lerning_rate=1",), ("rounds=0",), ("--data-folder", "data"), ("fedpar",)):
        with pytest.raises((Exception, SystemExit)):
            check(Command((*good, *wrong), "cifar10", ""))
    up = ("tailor", "flower", "up", "fedper", "clients=2", "--tls")
    check(Command(up, "processes", ""))
    for wrong in (("clints=2",), ("--nods", "2")):
        with pytest.raises((Exception, SystemExit)):
            check(Command((*up, *wrong), "processes", ""))
    check(Command(("tailor", "reproduce", "ppfe/figure3", "seed=1"), "a-minute", ""))
    for name, setting in (("ppfe/figure4", "seed=1"), ("ppfe/figure3", "sead=1")):
        with pytest.raises(UserError):
            check(Command(("tailor", "reproduce", name, setting), "a-minute", ""))


def test_the_pages_have_commands_and_the_two_of_the_set_up_are_targets() -> None:
    assert all(commands(page) for page in PAGES if page.name not in ("architecture.md", "reproduction.md"))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"^\$ make (\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert shown == {"demo", "test"}
    assert shown <= targets


# Tables and the code.


def section(page: str, title: str) -> str:
    """What follows a heading, up to the next of its rank or above."""
    text = (ROOT / page).read_text()
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert match, f"{page} has no section {title!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", re.sub(r"^```.*?^```$", _blank, rest, flags=re.M | re.S), re.M)
    return rest[: end.start()] if end else rest


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, without the heads."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def first_table(text: str) -> str:
    return re.split(r"\n(?!\|)", text[text.find("\n|") + 1 :])[0]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented_keys(text: str) -> dict[str, Any]:
    """Keys with their defaults."""
    return {named(cells[0])[0]: yaml.safe_load(named(cells[1])[0]) for cells in rows(text)}


def defaults(kind: Any) -> dict[str, Any]:
    return {name: to_jsonable_python(info.default) for name, info in kind.model_fields.items()}


@pytest.mark.parametrize(("title", "kind"), [("Experiment", Experiment), ("Method", Method)])
def test_every_key_is_documented_with_its_default(title: str, kind: type) -> None:
    assert documented_keys(section("docs/configuration.md", title)) == defaults(kind)


@pytest.mark.parametrize(("name", "page"), [("ppfe/figure3", "docs/methods/ppfe-synthetic.md")])
def test_every_option_of_a_study_is_documented_with_its_default(name: str, page: str) -> None:
    assert documented_keys(section(page, "Options")) == defaults(STUDIES[name].options)


@pytest.mark.parametrize("name", methods())
def test_every_method_has_a_page_with_its_own_options(name: str) -> None:
    page = ROOT / "docs" / "methods" / f"{name}.md"
    documented, common = documented_keys(first_table(page.read_text().partition("**Options.**")[2])), defaults(Method)
    actual = defaults(find_method(name))
    own = {key: value for key, value in actual.items() if key not in common or common[key] != value}
    assert own.items() <= documented.items(), "options that this method adds or changes"
    assert documented.items() <= actual.items(), "options that the page names"


@cache
def known_keys() -> set[str]:
    own = {key for kind in methods().values() for key in kind.model_fields}
    own |= {key for study in STUDIES.values() for key in study.options.model_fields}
    own |= set(Selection.model_fields)
    return {*Experiment.model_fields, *own, "method", "scale"}  # the last is an option of examples/fedrs.py


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_that_the_page_names_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    inline = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"^([a-z_]+)=[^=\s]", code)}
    used = {word.partition("=")[0] for command in commands(page) for word in command.words[1:] if _setting(word)}
    placeholders = {"key", "clients_pr_round"}  # the second is the mistake that the README shows
    assert inline | used <= known_keys() | placeholders


def _setting(word: str) -> bool:
    return re.match(r"[a-z_]+=", word) is not None


def test_every_source_partition_and_network_is_documented() -> None:
    assert [named(cells[0])[0] for cells in rows(section("docs/data.md", "Sources"))] == list(SOURCES)
    assert [named(cells[0])[0] for cells in rows(section("docs/data.md", "Partitions"))] == list(PARTITIONS)
    found = {named(cells[0])[0]: set(named(cells[1])) for cells in rows(section("docs/configuration.md", "Networks"))}
    assert found == {name: set(entry.options) for name, entry in networks.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = {"clients": 6, "rounds": 2, "new_clients": 1, "validation_fraction": 0.2, "device": "cpu"}
    Run(configure("fedper", settings), folder).execute()
    return folder


def test_every_figure_on_disk_is_documented(finished: Path) -> None:
    page = "docs/configuration.md"
    documented = {title: _names(section(page, title)) for title in (SUMMARY, ROUNDS, CLIENTS)}
    lines = [json.loads(line) for line in (finished / ROUNDS).read_text().splitlines()]
    assert documented[SUMMARY] == set(json.loads((finished / SUMMARY).read_text()))
    assert documented[ROUNDS] == set(lines[-1])
    with (finished / CLIENTS).open() as file:
        assert documented[CLIENTS] == set(csv.DictReader(file).fieldnames or ())
    files = {name.rstrip("/") for cells in rows(_intro(section(page, "Results on disk"))) for name in named(cells[0])}
    assert files == {path.name for path in finished.iterdir()}


def _names(text: str) -> set[str]:
    return {name for cells in rows(text) for name in named(cells[0])}


def _intro(text: str) -> str:
    return text.partition("\n### ")[0]


def test_the_configuration_of_a_run_repeats_it_to_the_bit(finished: Path, tmp_path: Path) -> None:
    Run(read_config(finished / CONFIG), tmp_path / "again").execute()
    assert (tmp_path / "again" / CLIENTS).read_text() == (finished / CLIENTS).read_text()


def test_dependencies_point_the_way_the_table_says() -> None:
    table = {named(cells[0])[0]: set(named(cells[2])) for cells in rows(section("docs/architecture.md", "The house"))}
    everyone = {"console", "errors", "seeding"}
    table["study"] = set(table) - {"study", "report", "flower", "commands", "cli"}  # all of the above
    table["flower"] = set(table) - {"flower", "commands", "cli"}
    package = ROOT / "src" / "tailorfl"
    assert set(table) == {path.stem for path in package.iterdir() if _holds_code(path)} - everyone
    for name, allowed in table.items():
        files = list((package / name).rglob("*.py")) or [package / f"{name}.py"]
        used = {part for file in files for part in imported(file)} - {name} - everyone
        assert used <= allowed, f"{name} imports {used - allowed}"


def _holds_code(path: Path) -> bool:
    return (path / "__init__.py").exists() or (path.suffix == ".py" and not path.stem.startswith("__"))


def imported(file: Path) -> Iterator[str]:
    """The parts of tailorfl that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (module.split(".")[1] for module in modules if module.startswith("tailorfl."))


# Links.


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(there), f"{name_of(page)}: {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", page.read_text()))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert reached == set(PAGES)


# Examples.


def test_own_data_serves_every_hospital_better_by_its_own_head(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["python", "own_data.py", "out"], monkeypatch) == 0
    found = {line.split()[0]: line.split()[1::2] for line in capsys.readouterr().out.splitlines()[1:]}
    means = [np.mean([float(scores[column]) for scores in found.values()]) for column in (0, 1)]
    assert len(found) == 6
    assert means[1] > means[0] + 10


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_fedrs_with_full_outputs_is_fedavg_to_the_bit(workplace: Path, engine: str, momentum: float) -> None:
    def server(method: str, **options: Any) -> dict[str, torch.Tensor]:
        settings = {"clients": 6, "rounds": 3, "device": "cpu", "engine": engine, "momentum": momentum, **options}
        built = build(configure(method, settings))
        assert [record.number for record in built.loop.run()] == [1, 2, 3]
        return built.server.values

    plain, full, restricted = server("fedavg"), server("fedrs:FedRS", scale=1), server("fedrs:FedRS", scale=0.5)
    assert all(torch.equal(plain[name], full[name]) for name in plain)
    assert any(not torch.equal(plain[name], restricted[name]) for name in plain)


def test_fedrs_spares_the_classes_that_a_client_does_not_have(workplace: Path) -> None:
    """One full-batch step of one client, against the gradient written out."""
    settings = {"clients": 1, "classes_per_client": 3, "rounds": 1, "batch_size": 0, "local_epochs": 1, "momentum": 0.0}
    built = build(configure("fedrs:FedRS", {**settings, "scale": 0.3, "precision": "float64", "device": "cpu"}))
    data, module = built.data, built.network.module
    rows = data.train.of(0)
    has = torch.zeros(10, dtype=torch.bool)
    has[data.targets[rows].unique()] = True
    assert has.sum() == 3
    factor = torch.where(has, torch.tensor(1.0).double(), 0.3)
    outputs = module(data.decode(data.inputs[rows])) * factor
    gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(outputs, data.targets[rows]), module.head.bias)[0]
    expected = (module.head.bias - 0.01 * gradient).detach()
    for _ in built.loop.run():
        pass
    torch.testing.assert_close(built.server.values["head.bias"], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("page", "starts", "file"),
    [
        ("README.md", ("class FedPer",), "src/tailorfl/methods/fedper.py"),
        ("docs/new-method.md", ("@dataclass", "class FedRS"), "examples/fedrs.py"),
    ],
)
def test_what_a_page_quotes_is_in_the_file(page: str, starts: tuple[str, ...], file: str) -> None:
    lines = _lines((ROOT / file).read_text())
    quoted = [text for language, _, text in blocks(ROOT / page) if language == "python" and text.startswith(starts)]
    assert len(quoted) == len(starts)
    for text in quoted:
        assert [line for line in _lines(text) if line not in lines and '"""' not in line] == []


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
