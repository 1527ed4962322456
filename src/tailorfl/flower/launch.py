"""A federation of Flower's processes: its server, its sites, and a run on them from the first process to the last."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.flower.certs import Certs, make_certs
from tailorfl.flower.lock import alone
from tailorfl.flower.ports import LOOPBACK, answers, check_port, free_ports
from tailorfl.flower.processes import Process, Processes, StopOnSignal, cleared, environment, program
from tailorfl.flower.project import Value, node_config

CONNECTION = "trial"  # the name of the SuperLink in the configuration of the command flwr
START = 120.0  # seconds until a SuperLink answers
# Seconds before a SuperNode is started again, doubled each time. One that was killed is let in again about a minute
# later, when its SuperLink has missed it.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 15.0
SETTLED = 60.0  # seconds after which a SuperNode counts as one that works
# Exit codes of a SuperNode that another try does not change: keys, certificates, addresses, versions.
HOPELESS = {302, 303, 304, 600, 602, 603, 604, 605, 606}


class LaunchError(Exception):
    """A run or a process of Flower failed: a line on it, and the last lines of its log."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tail = list(tail)


@dataclass(frozen=True)
class Link:
    """Where a SuperLink is, and how one speaks to it; without certificates, in the clear."""

    address: str
    ca: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.ca else 'http'}://{self.address}"


@dataclass(frozen=True)
class Site:
    """A SuperNode: its name, what its configuration says, and the key by which the SuperLink knows it."""

    name: str
    config: Mapping[str, Value]
    key: Path | None = None

    def command(self, link: Link, port: int) -> list[str]:
        trust = ["--root-certificates", str(link.ca)] if link.ca else ["--insecure"]
        known = ["--auth-supernode-private-key", str(self.key)] if self.key else []
        listens = ["--host", LOOPBACK, "--port", str(port)]
        settings = ["--node-config", node_config(dict(self.config))]
        return [program("flower-supernode"), *trust, "--superlink", link.address, *listens, *known, *settings]


@dataclass
class Keeper:
    """Keeps one SuperNode running: starts it again, after a pause, when it ends without being asked to."""

    processes: Processes
    site: Site
    link: Link
    say: Callable[[str], None]
    port: int | None = None  # a free one, each time, where none is given
    pause: float = FIRST_PAUSE
    again: float | None = None  # when it is started again
    process: Process | None = field(default=None, init=False)

    def start(self) -> None:
        port = self.port or free_ports(1)[0]
        log = f"supernode-{self.site.name}"
        self.process = self.processes.start(self.site.name, self.site.command(self.link, port), log)
        self.again = None

    def watch(self) -> None:
        """Called now and then. A SuperNode that cannot work is a failure, any other end is not."""
        if self.process is None or (self.again is not None and time.monotonic() >= self.again):
            self.start()
        elif self.again is None and self.process.ended():
            code = self.process.exit_code()
            if code in HOPELESS:
                raise LaunchError(f"{self.site.name}: the SuperNode cannot start (code {code})", self.process.tail())
            if time.monotonic() - self.process.begun > SETTLED:
                self.pause = FIRST_PAUSE
            self.say(f"{self.site.name}: the SuperNode ended ({self._why(code)}); again in {self.pause:.0f} s")
            self.process.end_rest()  # it would otherwise work on beside the next one
            self.again = time.monotonic() + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def _why(self, code: int | None) -> str:
        assert self.process is not None
        if code is not None:
            lines = self.process.written().rpartition(f"Exit Code: {code}")[2].split("\n")
            return f"code {code}: {' '.join(line.strip() for line in lines[1:3])}"
        return f"status {self.process.running.returncode}"


def run_app(
    app: Path,
    sites: Sequence[Site],
    folder: Path,
    stop: StopOnSignal,
    *,
    tls: bool = False,
    port: int | None = None,
    watch: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
    reach: Callable[[Link], Link] = lambda link: link,
) -> None:
    """Run an app on a federation of this machine, from the first process to the last; raises LaunchError if it fails.

    ``folder`` gets ``logs``, ``superlink`` (its database), ``flwr`` (Flower's home) and, with TLS, ``certs``.
    ``watch`` is called a few times a second while the run is under way. ``reach`` says where sites find the SuperLink,
    for example by a proxy that counts what they send.
    """
    folder = folder.absolute()
    link_port = check_port(port) if port else free_ports(1)[0]
    certs = _certificates(folder, sites) if tls else None
    link = Link(f"{LOOPBACK}:{link_port}", certs.ca if certs else None)
    home, mark = folder / "flwr", str(folder)
    surroundings = environment(mark, home, len(sites))
    with ExitStack() as stack:
        stack.enter_context(alone(folder / ".lock"))
        stack.enter_context(cleared(mark))
        write_connection(home, link)

        def group() -> Processes:
            return stack.enter_context(Processes(surroundings, folder / "logs", stop))

        server, nodes, commands = group(), group(), group()
        superlink = _start_superlink(server, link, folder / "superlink", certs)
        if certs:
            register(commands, certs, [site.name for site in sites])
            sites = [Site(site.name, site.config, certs.node_key(site.name)) for site in sites]
        keepers = [Keeper(nodes, site, reach(link), say) for site in sites]
        for keeper in keepers:
            keeper.start()
        run = _ask(commands, "run", str(app), CONNECTION)
        _follow(commands, str(run["run-id"]), superlink, keepers, watch)


def keep_node(
    site: Site, link: Link, folder: Path, stop: StopOnSignal, say: Callable[[str], None], port: int | None = None
) -> None:
    """Keep one SuperNode running until somebody asks to stop, which raises Stopped; its files are below ``folder``."""
    folder = folder.absolute()
    mark = f"{folder}:{site.name}"
    home = Path(os.environ.get("FLWR_HOME") or folder / "flwr")
    with ExitStack() as stack:
        stack.enter_context(alone(folder / f".{site.name}.lock"))
        stack.enter_context(cleared(mark))
        processes = stack.enter_context(Processes(environment(mark, home), folder / "logs", stop))
        keeper = Keeper(processes, site, link, say, port)
        while True:
            keeper.watch()
            stop.pause(0.5)


def _certificates(folder: Path, sites: Sequence[Site]) -> Certs:
    certs = Certs(folder / "certs")
    make_certs(certs.folder, [] if certs.server.exists() else [LOOPBACK, "localhost"], [site.name for site in sites])
    return certs


def write_connection(home: Path, link: Link) -> None:
    """The configuration of the command flwr: which SuperLink there is."""
    trust = f"root-certificates = {json.dumps(str(link.ca))}" if link.ca else "insecure = true"
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{link.address}"\n{trust}\n'
    with whole_file(home / "config.toml") as temporary:
        temporary.write_text(text)


def superlink_command(host: str, port: int, database: Path, certs: Certs | None) -> list[str]:
    """A SuperLink that installs nothing; with certificates, one that takes only sites whose keys it knows."""
    trust = ["--insecure"]
    if certs:
        files = {"--ssl-ca-certfile": certs.ca, "--ssl-certfile": certs.server, "--ssl-keyfile": certs.server_key}
        trust = [*(str(part) for pair in files.items() for part in pair), "--enable-supernode-auth"]
    listens = ["--host", host, "--port", str(port), "--database", str(database)]
    return [program("flower-superlink"), *trust, *listens, "--disable-runtime-dependency-installation"]


def _start_superlink(server: Processes, link: Link, folder: Path, certs: Certs | None) -> Process:
    folder.mkdir(parents=True, exist_ok=True)
    # A run that was cut off must not begin again beside the next one: what lasts is in the run's own folder.
    for old in folder.glob("state.db*"):
        old.unlink()
    host, _, port = link.address.rpartition(":")
    process = server.start("superlink", superlink_command(host, int(port), folder / "state.db", certs))
    until = time.monotonic() + START
    while not answers(f"{link.url}/health", link.ca):
        if process.ended():
            raise LaunchError("the SuperLink ended before it answered", process.tail())
        if time.monotonic() > until:
            raise LaunchError(f"the SuperLink does not answer after {START:.0f} s", process.tail())
        server.stop.pause(0.1)
    return process


def register(commands: Processes, certs: Certs, names: Iterable[str], side_by_side: int = 4) -> None:
    """Make the sites' public keys known to the SuperLink."""
    waiting = list(names)
    running: list[Process] = []
    while waiting or running:
        while waiting and len(running) < side_by_side:
            name = waiting.pop(0)
            key = str(certs.node_public(name))
            command = [program("flwr"), "supernode", "register", key, CONNECTION, "--name", name]
            running.append(commands.start(name, command, f"register-{name}"))
        commands.stop.pause(0.1)
        for process in [one for one in running if one.ended()]:
            running.remove(process)
            if process.running.returncode:
                raise LaunchError(f"{process.name}: its key could not be registered", process.tail())


def _ask(commands: Processes, *arguments: str) -> dict[str, Any]:
    """Run the command flwr to its end; what it answered."""
    process = commands.start(arguments[0], [program("flwr"), *arguments, "--format", "json"], f"flwr-{arguments[0]}")
    while not process.ended():
        commands.stop.pause(0.05)
    text = process.written()
    try:
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    except ValueError:
        raise LaunchError(f"flwr {arguments[0]} failed", process.tail()) from None
    if not found.get("success"):
        why = " ".join(str(found.get("error-message", "it gives no reason")).split())
        raise LaunchError(f"flwr {arguments[0]} failed: {why}")
    return found


def _follow(
    commands: Processes, run: str, superlink: Process, keepers: Sequence[Keeper], watch: Callable[[], None]
) -> None:
    """Wait for a run's end; its log is copied into ``server.log`` meanwhile, and ends when the run does."""
    stream = [program("flwr"), "log", run, CONNECTION, "--stream"]
    log = commands.start("server", stream, "server")
    while True:
        commands.stop.pause(0.2)
        watch()
        if superlink.ended():
            raise LaunchError("the SuperLink ended during the run", superlink.tail())
        for keeper in keepers:
            keeper.watch()
        if log.ended():
            about = _ask(commands, "list", CONNECTION, "--run-id", run)["runs"][0]
            if about["status"].startswith("finished"):
                break
            # The stream broke off, the run did not.
            commands.stop.pause(1.0)
            log = commands.start("server", stream, "server")
    watch()
    if about["status"] != "finished:completed":
        how = about["status"].removeprefix("finished:")
        raise LaunchError(f"the run {how}: {about['status-details']}", log.tail())
