"""Programs that are started and stopped together, each with a log of its own.

Everything that is started carries a mark in its environment, and so does all that it starts in turn. Processes are
ended by their ids, and only those that carry the mark: nothing stays behind, and nobody else's process is touched.
"""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from tailorfl.errors import UserError
from tailorfl.flower.ports import LOOPBACK

MARK = "TAILOR_FLOWER_MARK"
GRACE = 8.0  # seconds to end in good order; Flower's own limit is 5
LOG_BYTES = 16 * 2**20  # a log that is longer is put aside when its process starts again
TAIL = 20  # lines of a log that are shown


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
