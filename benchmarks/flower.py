"""A federation on this machine, with real processes: what a round costs, and what happens when something dies.

    python benchmarks/flower.py [cost] [node-killed] [link-killed] [silent] [strangers] [--out FOLDER]

Without names all are run, some minutes each. ``cost`` counts bytes by a proxy between the sites and the SuperLink, and
says where the seconds of a round go. The others break something in the middle of a run and compare what comes out with
the simulator: 0 is the same bits. Everything listens on loopback, and nothing is left running.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tailorfl.flower.certs import Certs, make_certs
from tailorfl.flower.launch import LaunchError, Link, Site, register, run_app, superlink_command, write_connection
from tailorfl.flower.ports import LOOPBACK, answers, free_ports
from tailorfl.flower.processes import Processes, StopOnSignal, cleared, environment, marked
from tailorfl.flower.project import RunConfig, experiment_text, write_app
from tailorfl.study.config import Config, configure
from tailorfl.study.folder import FEDERATION
from tailorfl.study.run import Run

SMALL: Mapping[str, Any] = {
    "data": "digits",
    "clients": 2,
    "rounds": 3,
    "local_epochs": 1,
    "evaluate_every": 0,
    "network_options": {"hidden": [16]},
    "engine": "one-by-one",
    "stack_size": 1,  # a client at a time, as sites compute: then the bits are the same
    "device": "cpu",
}


@dataclass
class Trial:
    """An experiment on a federation of processes, and beside it in the simulator."""

    folder: Path
    config: Config
    deadline: float = 600.0
    tls: bool = False
    reach: Callable[[Link], Link] = lambda link: link
    event: Callable[["Trial"], None] = lambda trial: None  # what happens meanwhile; asked a few times a second
    happened: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def execute(self) -> float:
        """Run it, or go on with it; the seconds that took."""
        place, begun = self.run / FEDERATION, time.monotonic()
        clients = self.config.experiment.clients or 0
        settings = RunConfig(experiment_text(self.config), str(self.run), nodes=clients, deadline=self.deadline)
        write_app(place / "app", settings)
        sites = [
            Site(f"node-{k}", {"partition": k, "state": str(place / "nodes" / f"node-{k}")}) for k in range(clients)
        ]
        with StopOnSignal() as stop:
            run_app(place / "app", sites, place, stop, tls=self.tls, reach=self.reach, watch=lambda: self.event(self))
        return time.monotonic() - begun

    def rounds(self) -> list[dict[str, Any]]:
        path = self.run / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def once(self, what: str, action: Callable[[], bool]) -> None:
        """Do something that has not happened yet; it may say that it is too early."""
        if what not in self.happened and action():
            self.happened.append(what)

    def signal(self, number: int, *words: str) -> bool:
        """To the processes of this trial whose command line has these words; whether there was one."""
        found = [one for one in marked(str((self.run / FEDERATION).absolute())) if _says(one, words)]
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        return bool(found)

    def difference(self) -> float:
        """The largest difference to the simulator, of anything that the server or a site has at the end."""
        simulated = self.folder / "simulated"
        if not simulated.exists():
            # With as many threads as a site has: sums of matrix products depend on them, in the last bit.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (self.config.experiment.clients or 1)))
            Run(self.config, simulated).execute()
        server = [_tensors(run, "server.safetensors") for run in (simulated, self.run)]
        return max(_apart(*server), _apart(_tensors(simulated, "clients-*.safetensors"), self._kept()))

    def _kept(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for state in (self.run / FEDERATION / "nodes").glob("*/*/*/"):
            files = sorted(state.glob("round-*.safetensors"))
            found |= {f"{state.name}/{name}": tensor for name, tensor in load_file(files[-1]).items()} if files else {}
        return found


def _says(process: int, words: tuple[str, ...]) -> bool:
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    return all(word in line for word in words)


def _tensors(run: Path, pattern: str) -> dict[str, Tensor]:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {name: tensor for path in newest.glob(pattern) for name, tensor in load_file(path).items()}


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    if set(one) != set(other):
        return float("inf")
    return max((float((one[name].double() - other[name].double()).abs().max()) for name in one), default=0.0)


def small(method: str = "fedper", **settings: Any) -> Config:
    return configure(method, {**SMALL, **settings, "checkpoint_every": 1})


# What a round costs.


class Counter:
    """A proxy on loopback that counts the bytes of both directions."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.up = self.down = 0
        self.server = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.server.accept()
            far = socket.create_connection(self.target)
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._copy, args=(source, sink, way), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(part))
                sink.sendall(part)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def cost(folder: Path) -> dict[str, float]:
    """Bytes and seconds of a round of FedAvg with 1.1 million parameters, two sites."""
    config = small("fedavg", rounds=6, network_options={"hidden": [1000, 1000]})
    counters: list[Counter] = []

    def reach(link: Link) -> Link:
        if not counters:
            counters.append(Counter(link.address))
        return replace(link, address=counters[0].address)

    marks: list[tuple[int, int, int]] = []  # rounds done, bytes up, bytes down

    def event(trial: Trial) -> None:
        done = len(trial.rounds())
        if counters and done > (marks[-1][0] if marks else 0):
            marks.append((done, counters[0].up, counters[0].down))

    trial = Trial(folder, config, reach=reach, event=event)
    trial.execute()
    # Between the first and the last round of which the counts are known: no app to fetch, no evaluation.
    (first, up, down), (last, more_up, more_down) = marks[0], next(m for m in reversed(marks) if m[0] < 6)
    lines = trial.rounds()[first:last]
    shared = sum(line["bytes_up"] for line in lines)
    with (trial.run / "notes.csv").open() as file:
        own = [row for row in csv.DictReader(file) if first < int(row["round"]) <= last]
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tailorfl.flower.apps"], check=True)
    rounds = last - first
    return {
        "bytes of shared parameters, a round": shared / rounds,
        "bytes up, to that": (more_up - up) / shared,
        "bytes down, to that": (more_down - down) / sum(line["bytes_down"] for line in lines),
        "seconds a round": sum(line["seconds"] for line in lines) / rounds,
        "of which a site's own work": sum(float(row["value"]) for row in own) / len(own),
        "to start Python and import torch and Flower": time.monotonic() - begun,
        "difference to the simulator": trial.difference(),
    }


# What goes wrong.


def node_killed(folder: Path) -> dict[str, float]:
    """kill -9 of a SuperNode, and of all that it started, in the middle of the second round."""

    def event(trial: Trial) -> None:
        if trial.rounds():
            trial.once("killed", lambda: trial.signal(signal.SIGKILL, "flower-supernode", "partition=1"))

    trial = Trial(folder, small(), event=event)
    seconds = trial.execute()
    missing = sum(len(line.get("missing", ())) for line in trial.rounds())
    return {
        "killed": len(trial.happened),
        "rounds": len(trial.rounds()),
        "answers missed": missing,
        "seconds": seconds,
        "difference to the simulator": trial.difference(),
    }


def link_killed(folder: Path) -> dict[str, float]:
    """kill -9 of the SuperLink in the middle of a run; then the same command again."""

    def event(trial: Trial) -> None:
        if len(trial.rounds()) == 1:
            trial.once("killed", lambda: trial.signal(signal.SIGKILL, "flower-superlink"))

    trial = Trial(folder, small(), event=event)
    with suppress(LaunchError):
        trial.execute()
    before = len(trial.rounds())
    seconds = trial.execute()
    return {
        "rounds before": before,
        "rounds": len(trial.rounds()),
        "seconds of the second run": seconds,
        "difference to the simulator": trial.difference(),
    }


def silent(folder: Path) -> dict[str, float]:
    """A site that is stopped while it should answer, and goes on after the deadline: missed, then late."""

    def event(trial: Trial) -> None:
        done = len(trial.rounds())
        if done == 1:
            trial.once("stopped", lambda: trial.signal(signal.SIGSTOP, "flower-supernode", "partition=1"))
        if done == 2:
            trial.once("goes on", lambda: trial.signal(signal.SIGCONT, "flower-supernode", "partition=1"))

    trial = Trial(folder, small(rounds=5), deadline=40.0, event=event)  # Flower gives a node up after a minute
    try:
        seconds = trial.execute()
    finally:
        trial.signal(signal.SIGCONT, "flower-supernode")
    lines = trial.rounds()
    return {
        "rounds": len(lines),
        "answers missed": sum(len(line.get("missing", ())) for line in lines),
        "answers that came late": sum(len(line.get("late", ())) for line in lines),
        "answers that counted": sum(line["answered"] for line in lines),
        "seconds": seconds,
    }


def strangers(folder: Path) -> dict[str, float]:
    """A node with a registered key, one whose key nobody registered, and one without TLS: who gets in?"""
    certs = Certs(folder / "certs")
    make_certs(certs.folder, [LOOPBACK, "localhost"], ["friend", "stranger"])
    [port] = free_ports(1)
    link, mark = Link(f"{LOOPBACK}:{port}", certs.ca), str(folder.absolute())
    surroundings = environment(mark, folder / "flwr", 1)
    nodes = {
        "a registered key": (Site("friend", {"partition": 0}, certs.node_key("friend")), link),
        "an unknown key": (Site("stranger", {"partition": 0}, certs.node_key("stranger")), link),
        "no TLS": (Site("open", {"partition": 0}), Link(link.address)),
    }
    with StopOnSignal() as stop, cleared(mark), Processes(surroundings, folder / "logs", stop) as processes:
        processes.start("superlink", superlink_command(LOOPBACK, port, folder / "state.db", certs))
        while not answers(f"{link.url}/health", link.ca):
            stop.pause(0.2)
        write_connection(folder / "flwr", link)
        register(processes, certs, ["friend"])
        return {f"{name}: got in": _gets_in(processes, site, by, stop) for name, (site, by) in nodes.items()}


def _gets_in(processes: Processes, site: Site, link: Link, stop: StopOnSignal, wait: float = 45.0) -> bool:
    process = processes.start(site.name, site.command(link, free_ports(1)[0]))
    until = time.monotonic() + wait
    while "SuperNode ID:" not in process.written() and not process.ended() and time.monotonic() < until:
        stop.pause(0.2)
    return "SuperNode ID:" in process.written()


SCENARIOS: dict[str, Callable[[Path], dict[str, float]]] = {
    "cost": cost,
    "node-killed": node_killed,
    "link-killed": link_killed,
    "silent": silent,
    "strangers": strangers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], help="which; all unless named")
    parser.add_argument("--out", type=Path, help="where runs and logs stay; else they are deleted")
    chosen = parser.parse_args()
    folder = chosen.out or Path(tempfile.mkdtemp())
    try:
        for name in chosen.scenarios or SCENARIOS:
            scenario = SCENARIOS[name]
            print(f"{name}: {(scenario.__doc__ or '').strip()}", flush=True)
            for what, value in scenario(folder / name).items():
                print(f"  {what:45s} {value:,.4g}", flush=True)
    finally:
        if not chosen.out:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
