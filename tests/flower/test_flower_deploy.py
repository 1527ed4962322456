"""The page on deployment, done as it says: a server and three sites, which are folders of this machine."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tailorfl.flower.ports import answers, free_ports
from tailorfl.flower.processes import environment, marked, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by /proc"),
]
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
SITES = ("north", "east", "south")
FENCE = re.compile(r"^```(\w+) *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDLESS = ("flower-superlink", "tailor flower node")  # commands that run until they are stopped
LIMIT = 900.0  # seconds that any one command may take


@dataclass(frozen=True)
class Command:
    """A line of the page, and where it says that the line is run: server, site, processes, ray."""

    line: str
    where: str


def commands() -> list[Command]:
    """Those of the page in order; without a mark they are the server's."""
    found = []
    for language, info, text in FENCE.findall(PAGE.read_text()):
        where = info.removeprefix("needs=").strip() or "server"
        if language == "bash":
            found += [Command(line, where) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        elif language == "console":
            found += [Command(line[2:], where) for line in text.splitlines() if line.startswith("$ ")]
    return found


@dataclass
class Machines:
    """Folders that stand for machines, and the processes on them."""

    root: Path
    link_port: int
    ray_port: int
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def folder(self, name: str) -> Path:
        found = self.root / name
        found.mkdir(exist_ok=True)
        return found

    def here(self, text: str, machine: str) -> str:
        """What the page says, for this machine: the one place where names of the page become ours."""
        ours = {
            "fl.example.org:8000": f"localhost:{self.link_port}",  # a name, which is not what the server listens on
            "fl.example.org": "localhost",
            "--host 0.0.0.0 --port 8000": f"--host 127.0.0.1 --port {self.link_port}",
            "--port 8001": f"--port {self.ray_port}",
            "127.0.0.1:8001": f"127.0.0.1:{self.ray_port}",
            "/srv/federation": str(self.folder("server")),
            "/data/": f"{self.folder(machine)}/",
            "/var/lib/tailor": str(self.folder(machine) / "state"),
        }
        if machine in SITES:
            ours |= {"--client north": f"--client {machine}", "north.key": f"{machine}.key"}
        for theirs, mine in ours.items():
            text = text.replace(theirs, mine)
        return text

    def run(self, line: str, machine: str, wait: bool = True) -> str:
        """A command to its end, unless it has none or nobody waits for it; what it said."""
        line, log = self.here(line, machine), self.folder(machine) / f"terminal-{len(self.running)}.log"
        program, *words = shlex.split(line)
        path = shutil.which(program, path=sysconfig.get_path("scripts")) or program
        with log.open("wb") as file:
            process = subprocess.Popen(
                [path, *words],
                cwd=self.folder(machine),
                env=environment(str(self.folder(machine)), self.root / "flwr") | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        if wait and not line.startswith(ENDLESS):
            assert process.wait(LIMIT) == 0, f"{line}\n{log.read_text()[-5000:]}"
        return log.read_text()

    def crash(self, machine: str) -> None:
        """All processes of a machine are gone at once."""
        for number in marked(str(self.folder(machine))):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def switch_off(self) -> None:
        """Stop all processes by their ids, those that were started last first; none is left."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        marks = {str(path) for path in self.root.iterdir()} | {f"{self.root / site / 'state'}:{site}" for site in SITES}
        left = [number for mark in marks for number in sweep(mark)]
        assert not any(marked(mark) for mark in marks), f"still running, of those that were left: {left}"


def until(true: Callable[[], bool], what: str, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.2)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    pytest.importorskip("flwr", reason="needs the extra flower")
    one, other = free_ports(2)
    found = Machines(tmp_path, one, other)
    try:
        yield found
    finally:
        found.switch_off()


def write_patients(path: Path, seed: int, turn: float) -> None:
    """Patients who fall ill by a rule of the site's own."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(60, 2))
    ill = values @ [np.cos(turn), np.sin(turn)] > 0
    lines = [f"{a:.3f},{b:.3f},{'ill' if label else 'well'}" for (a, b), label in zip(values, ill, strict=True)]
    path.write_text("\n".join(["pressure,glucose,state", *lines]) + "\n")


def hand_out(machines: Machines) -> None:
    """The authority's certificate and each site's own key, as the table of the page says."""
    certs = machines.folder("server") / "certs"
    for number, site in enumerate(SITES):
        folder = machines.folder(site)
        shutil.copy(certs / "ca.crt", folder)
        shutil.copy(certs / "nodes" / site / f"{site}.key", folder)
        write_patients(folder / "patients.csv", number, number * np.pi / 2)


def write_connections(machines: Machines) -> None:
    """What ``flwr`` knows of servers: the entries of the page."""
    entries = [text for _, info, text in FENCE.findall(PAGE.read_text()) if info == "file=config.toml"]
    home = machines.root / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(machines.here("\n".join(entries), "server"))


def start(command: Command, machines: Machines) -> None:
    """Run a command on all machines that it is for; a server is waited for until it answers."""
    for machine in SITES if command.where == "site" else (command.where,):
        machines.run(command.line, machine)
    if "--simulation" in command.line:
        url = f"http://127.0.0.1:{machines.ray_port}/health"
        until(lambda: answers(url), "the SuperLink does not answer")
    elif command.line.startswith("flower-superlink"):
        url, ca = f"https://127.0.0.1:{machines.link_port}/health", machines.folder("server") / "certs" / "ca.crt"
        until(lambda: answers(url, ca), "the SuperLink does not answer")


def rounds(run: Path) -> list[int]:
    path = run / "rounds.jsonl"
    return [json.loads(line)["round"] for line in path.read_text().splitlines()] if path.is_file() else []


def test_three_sites_as_the_page_says_and_the_server_crashes_once(machines: Machines) -> None:
    write_connections(machines)
    run, to_do = machines.folder("server") / "run", [c for c in commands() if c.where in ("server", "site")]
    for command in to_do[:-1]:
        start(command, machines)
        if command.line.startswith("tailor flower certs"):
            hand_out(machines)
    submit = to_do[-1].line
    assert submit.startswith("flwr run")
    machines.run(submit, "server", wait=False)
    until((run / "checkpoints" / "round-000001").is_dir, "there is no first round", LIMIT)
    machines.crash("server")
    for command in to_do:  # as the page says: the SuperLink, the keys, the run, and nothing at the sites
        if command.line.startswith(("flower-superlink", "flwr supernode")):
            start(command, machines)
    said = machines.run(submit, "server")
    assert "going on in" in said
    assert "round 1:" not in said
    assert rounds(run) == [1, 2, 3]
    rows = {row["client"]: row for row in csv.DictReader((run / "clients.csv").open())}
    assert sorted(rows) == sorted(SITES)
    for site in SITES:
        [model] = (machines.folder(site) / "state").glob(f"fedper-*/{site}/model")
        about = json.loads((model / "model.json").read_text())
        assert about["test"]["accuracy"] == pytest.approx(float(rows[site]["accuracy"]))
        assert torch.export.load(model / "model.pt2").module()(torch.zeros(5, 2)).shape == (5, 2)


def test_trial_as_the_page_says(machines: Machines) -> None:
    for command in commands():
        if command.where == "processes":
            assert "results: " in machines.run(command.line, "processes")
    assert rounds(machines.folder("processes") / "runs" / "trial") == [1, 2, 3]


@pytest.mark.skipif(not find_spec("ray"), reason="needs ray")
def test_virtual_clients_as_the_page_says(machines: Machines) -> None:
    write_connections(machines)
    for command in commands():
        if command.where == "ray":
            start(command, machines)
    assert rounds(machines.folder("ray") / "runs" / "virtual") == [1, 2]
