"""Flower's processes: started, watched, restarted and stopped, each with a log of its own.

Everything that is started carries a mark in its environment, and so does all that it starts in turn. Processes are
ended by their ids, and only those that carry the mark: nothing stays behind, and nobody else's process is touched.
"""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError
from tailorfl.flower.certs import Certs, make_certs
from tailorfl.flower.lock import alone
from tailorfl.flower.project import Value, node_config

LOOPBACK = "127.0.0.1"
MARK = "TAILOR_FLOWER_MARK"
CONNECTION = "trial"  # the name of the SuperLink in the configuration of the command flwr
GRACE = 8.0  # seconds to end in good order; Flower's own limit is 5
START = 120.0  # seconds until a SuperLink answers
LOG_BYTES = 16 * 2**20  # a log that is longer is put aside when its process starts again
TAIL = 20  # lines of a log that are shown
PORTS = range(20000, 32768)  # below those that systems give to outgoing connections
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


class Stopped(KeyboardInterrupt):
    """Somebody asked the command to stop."""


class StopOnSignal:
    """Turns Ctrl-C and SIGTERM into a wish to stop, which is asked for where all is in order; a context manager."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.heard = 0

    def __enter__(self) -> "StopOnSignal":
        # What is ignored stays so: nohup, and jobs in the background of a script.
        heard = [number for number in self.SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard += 1

    def check(self) -> None:
        if self.heard:
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Sleep, unless somebody asks to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))
        self.check()


@dataclass
class Process:
    """A program that runs in a session of its own, and writes into a log."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            os.replace(self.log, self.log.with_name(f"{self.log.name}.1"))
        self.begun = time.monotonic()
        with self.log.open("ab") as file:
            self.from_byte = file.tell()
            # A session of its own: Ctrl-C reaches the command, which then ends things in order.
            self.running = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def id(self) -> int:
        return self.running.pid

    def ended(self) -> bool:
        return self.running.poll() is not None

    def written(self) -> str:
        """What it wrote since it started, without colours."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.from_byte)
                text = file.read()[-(2**20) :].decode(errors="replace")
        except OSError:
            return ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def tail(self, lines: int = TAIL) -> list[str]:
        """The last lines that say something."""
        return [line for line in self.written().splitlines() if line.strip(" :") not in ("", "INFO")][-lines:]

    def exit_code(self) -> int | None:
        """Flower's own code, which says more than the exit status."""
        found = re.findall(r"Exit Code: (\d+)", self.written())
        return int(found[-1]) if found else None

    def signal(self, number: int) -> None:
        """To the process and what it started in its session; a leader that is not waited for keeps its id."""
        if self.running.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.id, number)

    def end_rest(self) -> None:
        """End at once what it started in its session, once it is gone itself."""
        for number in marked(self.environment.get(MARK, "")):
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(number) == self.id:
                    os.kill(number, signal.SIGKILL)


class Processes:
    """Processes that are stopped together; a context manager. Nested ones are stopped in reverse order."""

    def __init__(self, environment: Mapping[str, str], logs: Path, stop: StopOnSignal) -> None:
        self.environment, self.logs, self.stop = environment, logs, stop
        self.started: list[Process] = []

    def start(self, name: str, command: Sequence[str], log: str | None = None) -> Process:
        process = Process(name, command, self.environment, self.logs / f"{log or name}.log")
        self.started = [other for other in self.started if not other.ended()]
        self.started.append(process)
        return process

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self, grace: float = GRACE) -> None:
        """SIGTERM to all at once, SIGKILL to those that are still there after the grace or a second Ctrl-C."""
        for process in self.started:
            process.signal(signal.SIGTERM)
        until = time.monotonic() + grace
        while not all(process.ended() for process in self.started):
            if time.monotonic() > until or self.stop.heard > 1:
                break
            time.sleep(0.05)
        for process in self.started:
            process.signal(signal.SIGKILL)
            process.running.wait()
            process.end_rest()
        self.started = []


def marked(mark: str) -> list[int]:
    """The ids of all processes that carry a mark. Empty where the system has no /proc."""
    if not mark:
        return []
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # A dead process that nobody waited for has no environment any more.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return [number for number in found if number != os.getpid()]


def sweep(mark: str, grace: float = 2.0) -> list[int]:
    """End what still carries a mark, whoever its parent is by now; the ids of what was there."""
    first = marked(mark)
    until = time.monotonic() + grace
    while left := marked(mark):
        number = signal.SIGKILL if time.monotonic() > until else signal.SIGTERM
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        if time.monotonic() > until + grace:
            break
        time.sleep(0.1)
    return first


@contextmanager
def cleared(mark: str) -> Iterator[None]:
    """Nothing that carries the mark is there before, and nothing after."""
    sweep(mark)
    try:
        yield
    finally:
        sweep(mark)


def program(name: str) -> str:
    """The path of one of Flower's commands, first of this Python's."""
    own = Path(sysconfig.get_path("scripts")) / name
    found = str(own) if own.is_file() else shutil.which(name)
    if not found:
        raise UserError(f"the command {name} is missing; install it with: pip install 'tailorfl[flower]'")
    return found


def environment(mark: str, home: Path | None = None, nodes: int = 0) -> dict[str, str]:
    """For Flower's processes: quiet, nothing sent to anybody, its own commands found first.

    A trial of so many nodes on one machine has a home of its own, and shares the processors out.
    """
    found = dict(os.environ) | {
        MARK: mark,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": _without_proxy("NO_PROXY"),  # SuperNodes speak to their own workers over HTTP
        "no_proxy": _without_proxy("no_proxy"),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]),
    }
    if home is not None:
        found["FLWR_HOME"] = str(home)
    if nodes:
        found["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nodes)))
    return found


def _without_proxy(key: str) -> str:
    return ",".join(filter(None, [os.environ.get(key), LOOPBACK]))


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        # As servers do: connections that have just ended do not count.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


def check_port(port: int, option: str = "--port") -> int:
    """A port that is free, or a line that says it is taken."""
    if not 1 <= port <= 65535:
        raise UserError(f"{option} {port}: allowed: ports from 1 to 65535")
    if not is_free(port):
        raise UserError(
            f"{option} {port}: the port is taken, or not for this user; allowed: a free one, or leave it out"
        )
    return port


def free_ports(number: int) -> list[int]:
    """So many different ports that are free now."""
    candidates = random.SystemRandom().sample(PORTS, len(PORTS))
    found = [port for port, _ in zip(filter(is_free, candidates), range(number), strict=False)]
    if len(found) < number:
        raise UserError(f"{number} free ports are needed on {LOOPBACK}; there are {len(found)}")
    return found


def answers(url: str, ca: Path | None = None) -> bool:
    """Whether a server says that it is well; with a CA, one that it vouches for."""
    context = ssl.create_default_context(cafile=ca) if ca else None
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


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
