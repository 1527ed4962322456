"""Processes: started, started again, and none left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tailorfl import cli
from tailorfl.errors import UserError
from tailorfl.flower import launch
from tailorfl.flower.commands import RoundTable
from tailorfl.flower.launch import Keeper, LaunchError, Link, Site, run_app
from tailorfl.flower.lock import alone
from tailorfl.flower.ports import check_port, free_ports
from tailorfl.flower.processes import Processes, StopOnSignal, Stopped, cleared, environment, marked, sweep
from tailorfl.flower.project import RunConfig, read_run
from tailorfl.study.folder import FEDERATION

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by /proc")

# Ignores SIGTERM, and starts one that does too, in a session of its own.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "it never happens"
        time.sleep(0.02)


@pytest.fixture
def stop() -> StopOnSignal:
    return StopOnSignal()


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    sweep(str(tmp_path), 0)


@needs_proc
def test_nothing_stays_behind_not_even_what_ignores_signals(tmp_path: Path, stop: StopOnSignal, mark: str) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    with cleared(mark), Processes(environment(mark), tmp_path, stop) as processes:
        process = processes.start("stubborn", [sys.executable, str(script), "with a child"])
        until(lambda: process.written().count("ready") == 2)
        assert len(marked(mark)) == 2
        processes.end(grace=0.2)
        assert process.ended()
    assert marked(mark) == []


@needs_proc
def test_what_a_killed_command_left_is_ended_first(tmp_path: Path, stop: StopOnSignal, mark: str) -> None:
    processes = Processes(environment(mark), tmp_path, stop)
    left = processes.start("left", [sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment(f"{mark}-2"))
    until(lambda: marked(mark) == [left.id])
    with cleared(mark):
        until(left.ended)
        assert other.poll() is None  # another mark, another's process
    other.kill()
    other.wait()


def test_those_started_last_end_first(tmp_path: Path, stop: StopOnSignal, mark: str) -> None:
    order = tmp_path / "order"
    script = (
        "import signal, sys, time\n"
        "def end(*_): open(sys.argv[2], 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(600)"
    )
    with Processes(environment(mark), tmp_path, stop) as server, Processes(environment(mark), tmp_path, stop) as nodes:
        started = [group.start(name, [sys.executable, "-c", script, name, str(order)])
                   for group, name in ((server, "a"), (nodes, "b"))]  # fmt: skip
        until(lambda: all("ready" in process.written() for process in started))
    assert order.read_text() == "ba"


def test_stop_is_heard_where_it_is_asked_for(stop: StopOnSignal) -> None:
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.heard == 1)
        with pytest.raises(Stopped):
            stop.pause(60)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_port_that_is_taken_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: the port is taken"):
            check_port(port)
    with pytest.raises(UserError, match="from 1 to 65535"):
        check_port(70000)
    ports = free_ports(30)
    assert len(set(ports)) == 30
    assert [check_port(port) for port in ports] == ports


def test_one_command_at_a_time_in_a_folder(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with alone(lock), pytest.raises(UserError, match="in use"), alone(lock):
        pass
    with alone(lock):
        pass


def test_environment_finds_this_pythons_commands_and_keeps_loopback_from_proxies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = environment("mark", tmp_path, nodes=1000)
    assert found["PATH"].split(os.pathsep)[1:] == ["/usr/bin"]
    assert found["NO_PROXY"] == "example.org,127.0.0.1"
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_HOME"], found["OMP_NUM_THREADS"]) == ("0", str(tmp_path), "1")


def supernode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A stand-in for the command flower-supernode."""
    script = tmp_path / "flower-supernode"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(launch, "program", lambda name: str(tmp_path / name))


def test_site_that_ends_is_started_again_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: StopOnSignal, mark: str
) -> None:
    supernode(tmp_path, monkeypatch, 'echo "Exit Code: 305"; echo "could not connect"; exit 1')
    said: list[str] = []
    with Processes(environment(mark), tmp_path, stop) as processes:
        keeper = Keeper(processes, Site("a", {}), Link("127.0.0.1:1"), said.append, pause=0.05)
        for times in (1, 2, 3):
            until(lambda: (keeper.watch(), len(said) >= times)[1])  # noqa: B023
    assert "code 305: could not connect" in said[0]
    assert keeper.pause == pytest.approx(0.4)
    assert (tmp_path / "supernode-a.log").read_text().count("305") >= 3


def test_site_that_cannot_work_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: StopOnSignal, mark: str
) -> None:
    supernode(tmp_path, monkeypatch, 'echo "Exit Code: 302"; echo "no key"; exit 1')
    with Processes(environment(mark), tmp_path, stop) as processes:
        keeper = Keeper(processes, Site("a", {}), Link("127.0.0.1:1"), lambda line: None)
        with pytest.raises(LaunchError, match=r"a: the SuperNode cannot start \(code 302\)") as failed:
            until(lambda: keeper.watch() is not None)
    assert "no key" in failed.value.tail


def test_site_is_told_whom_to_trust_and_who_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "program", lambda name: name)
    site = Site("a", {"client": "a", "data": "folder:/my scans"}, tmp_path / "a.key")
    command = site.command(Link("fl.example.org:8000", tmp_path / "ca.crt"), 9000)
    assert "--insecure" not in command
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options == {
        "--root-certificates": str(tmp_path / "ca.crt"),
        "--superlink": "fl.example.org:8000",
        "--host": "127.0.0.1",
        "--port": "9000",
        "--auth-supernode-private-key": str(tmp_path / "a.key"),
        "--node-config": "client='a' data='folder:/my scans'",
    }
    assert "--insecure" in Site("a", {}).command(Link("localhost:8000"), 9000)


def round_line(number: int, **more: float) -> str:
    line = {"round": number, "answered": 2, "selected": 3, "loss": 0.5, "seconds": 1.25} | more
    return json.dumps(line) + "\n"


def test_rounds_are_shown_once_each_and_those_of_before_not_at_all(tmp_path: Path) -> None:
    console = Console(record=True, force_terminal=False, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    rounds = tmp_path / "rounds.jsonl"
    rounds.write_text(round_line(1) + round_line(2))
    with RoundTable(console, "fedper", tmp_path, 4) as table:
        table.watch()
        rounds.write_text(round_line(1))  # the second is run again
        table.watch()
        rounds.write_text(round_line(1) + round_line(2, personalized_accuracy=0.5) + round_line(3)[:9])
        table.watch()
        table.watch()
    assert console.export_text() == "round 2 of 4: 2 of 3 answered, loss 0.5, accuracy 50.00 %, 1.2 s\n"


def test_rounds_are_a_table_on_a_terminal(tmp_path: Path) -> None:
    console = Console(record=True, force_terminal=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    with RoundTable(console, "fedper", tmp_path, 4) as table:
        (tmp_path / "rounds.jsonl").write_text(round_line(1) + round_line(2, personalized_accuracy=0.25))
        table.watch()
    shown = console.export_text()
    assert re.search(r"2 │\s+2 of 3 │\s+0.5 │\s+25.00 % │\s+1.2 s", shown)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "fedper", "clints=3", "--out", "run"), "did you mean clients"),
        (("up", "--resume"), "--resume needs --out"),
        (("up", "fedavg", "--deadline", "0", "--out", "run"), "deadline=0.0: allowed: numbers above 0"),
        (("app", "fedavg", "--deadline", "-1", "--to", "run"), "deadline=-1.0: allowed: numbers above 0"),
        (("up", "--resume", "--out", "run"), "holds no run to resume"),
        (("up", "fedavg", "--out", "."), "exists; allowed"),
        (("node", "--superlink", "nowhere", "--client", "a", "--state", "s", "--insecure"), "allowed: HOST:PORT"),
        (("node", "--superlink", "h:80", "--client", "a", "--state", "s", "--data", "csv:x"), "whom does the site"),
        (("node", "--superlink", "h:80", "--client", "a", "--state", "s", "--insecure"), "one of --data and"),
        (
            ("node", "--superlink", "h:80", "--client", "a", "--state", "s", "--root-certificates", "mine"),
            "certificate",
        ),
        (("node", "--superlink", "h:80", "--client", "a/b", "--state", "s", "--insecure", "--partition", "1"), "name"),
    ],
)
def test_command_refuses_in_one_line_and_starts_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tailor", "flower", *arguments])
    monkeypatch.setattr("tailorfl.flower.commands.show_log", lambda quiet: None)
    monkeypatch.setattr("tailorfl.flower.processes.program", lambda name: name)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_trial_that_goes_on_keeps_its_limits_and_lets_sites_write_models_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tailorfl.flower.processes.program", lambda name: name)
    for name in ("show_log", "_show", "show_page"):
        monkeypatch.setattr(f"tailorfl.flower.commands.{name}", lambda *given: None)
    monkeypatch.setattr("tailorfl.flower.commands._launch", lambda checked, folder, *given: launched.append(folder))

    def up(*arguments: str) -> RunConfig:
        monkeypatch.setattr(sys, "argv", ["tailor", "flower", "up", *arguments, "--out", "my run"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return read_run(tmp_path / "my run" / FEDERATION / "app")

    begun = up("fedavg", "clients=3", "--nodes", "2", "--deadline", "77", "--min-answers", "2", "--max-samples", "500")
    assert (begun.deadline, begun.min_answers, begun.max_samples, begun.wait) == (77, 2, 500, 600)
    assert up("--resume") == begun
    assert replace(up("--resume", "--deadline", "5"), deadline=77) == begun
    assert len(launched) == 3
    place = tmp_path / "my run" / FEDERATION
    site = {"name": "a", "train": 1, "validation": 0, "test": 1, "held": 1}
    form = {"kind": "features", "shape": [2], "classes": 2, "names": ""}
    roll = {"experiment": "x", "term": 1, "sites": [{**site, "form": form}]}
    (place / "sites.json").write_text(json.dumps(roll))
    (tmp_path / "my run/summary.json").write_text("{}")
    up("--resume")
    assert len(launched) == 4, "the run has ended, and no site has its model"
    (place / "models.json").write_text('{"round": 3, "sites": ["a"]}')
    up("--resume")
    assert len(launched) == 4


PROJECT = """
[project]
name = "tiny"
version = "1.0.0"
description = "a tiny app"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "tailorfl"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
nodes = 2
fail = {fail}
"""

SERVER = """
import json, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.2)
    asked = [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=node, message_type="query") for node in nodes]
    answers = [json.loads(answer.content["c"]["config"]) for answer in grid.send_and_receive(asked, timeout=120)]
    print("ANSWERS", json.dumps(sorted(answers, key=lambda one: one["partition"])), flush=True)
    if context.run_config["fail"]:
        raise RuntimeError("asked to fail")
"""

CLIENT = """
import json
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    return Message(RecordDict({"c": ConfigRecord({"config": json.dumps(dict(context.node_config))})}), reply_to=message)
"""

SITES = [Site(f"site-{number}", {"partition": number, "data": "folder:/my scans"}) for number in range(2)]


def tiny(folder: Path, fail: bool = False) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT.format(fail=str(fail).lower()))
    (folder / "server_app.py").write_text(SERVER)
    (folder / "client_app.py").write_text(CLIENT)
    return folder


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("tls", [False, True])
def test_app_runs_on_a_federation_of_this_machine(tmp_path: Path, stop: StopOnSignal, tls: bool) -> None:
    pytest.importorskip("flwr")
    run_app(tiny(tmp_path / "app"), SITES, tmp_path / "out", stop, tls=tls)
    log = (tmp_path / "out/logs/server.log").read_text()
    answers = json.loads(re.findall(r"ANSWERS (.*)", log)[0])
    assert answers == [{"partition": number, "data": "folder:/my scans"} for number in range(2)]
    assert marked(str(tmp_path / "out")) == []


@pytest.mark.slow
@needs_proc
def test_run_that_fails_says_why(tmp_path: Path, stop: StopOnSignal) -> None:
    pytest.importorskip("flwr")
    with pytest.raises(LaunchError, match=r"the run failed: .*asked to fail") as failed:
        run_app(tiny(tmp_path / "app", fail=True), SITES, tmp_path / "out", stop)
    assert "RuntimeError: asked to fail" in failed.value.tail
    assert marked(str(tmp_path / "out")) == []


QUICK = ("clients=2", "clients_per_round=2", "samples_per_client=20", "rounds=2", "local_epochs=1", "device=cpu")


@pytest.mark.slow
@needs_proc
def test_up_stops_all_on_sigterm_and_goes_on_later(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    command = [sys.executable, "-m", "tailorfl", "flower", "up"]
    rest = ["checkpoint_every=1", "evaluate_every=0", "--out", "run"]
    mark = str(tmp_path / "run" / "federation")
    running = subprocess.Popen([*command, "fedper", *QUICK, *rest], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "run" / "rounds.jsonl").is_file() or running.poll() is not None, 300)
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130, said
    assert "go on with: tailor flower up --resume" in said
    assert marked(mark) == []
    again = subprocess.run([*command, "--resume", "--out", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    rounds = [json.loads(line)["round"] for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert rounds == [1, 2]
    assert "results:" in again.stdout
    assert marked(mark) == []


@pytest.mark.slow
@needs_proc
def test_node_starts_again_when_it_is_killed_and_stops_on_sigterm(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    port = free_ports(1)[0]  # nobody listens there: the SuperNode waits for its SuperLink
    options = [
        "--superlink",
        f"127.0.0.1:{port}",
        "--client",
        "a",
        "--state",
        "state",
        "--partition",
        "0",
        "--insecure",
    ]
    command = [sys.executable, "-m", "tailorfl", "flower", "node", *options]
    mark = f"{tmp_path / 'state'}:a"

    def supernodes() -> list[int]:
        return [
            number for number in marked(mark) if b"flower-supernode" in Path(f"/proc/{number}/cmdline").read_bytes()
        ]

    said = tmp_path / "said"
    with said.open("w") as errors:
        running = subprocess.Popen(command, cwd=tmp_path, stderr=errors)
    until(lambda: len(marked(mark)) >= 2)  # it, and its worker
    first = supernodes()
    os.kill(first[0], signal.SIGKILL)
    until(lambda: "the SuperNode ended (status -9); again in 2 s" in said.read_text())
    until(lambda: bool(set(supernodes()) - set(first)))
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 0
    assert marked(mark) == []
