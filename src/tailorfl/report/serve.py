"""Results in a browser, also while runs train: a folder of runs, read only."""

import hashlib
import html
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tailorfl.data.extras import import_extra
from tailorfl.data.occupied import is_occupied
from tailorfl.errors import UserError
from tailorfl.report.listing import list_runs
from tailorfl.report.page import library, page_data, shell
from tailorfl.report.results import find_runs, read_results
from tailorfl.study.run import CLASSES, CLIENTS, CONFIG, MEASURES, NOTES, ROUNDS, SUMMARY

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
FILES = (CONFIG, ROUNDS, CLIENTS, CLASSES, MEASURES, NOTES, SUMMARY)  # that are read of a run
PURPOSE, EXTRA = "tailor serve", "serve"
# The pages bring their own scripts and styles and load nothing from anywhere else.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'"
)


def make_app(root: Path, hosts: Sequence[str] = LOOPBACK) -> Any:
    """A Starlette application that shows the runs below a folder, to whoever calls it by one of these names.

    It only ever reads, and only files of runs that are found below the folder, links not followed.
    """
    applications = import_extra("starlette.applications", EXTRA, PURPOSE)
    responses = import_extra("starlette.responses", EXTRA, PURPOSE)
    route = import_extra("starlette.routing", EXTRA, PURPOSE).Route
    middleware = import_extra("starlette.middleware", EXTRA, PURPOSE).Middleware
    trusted = import_extra("starlette.middleware.trustedhost", EXTRA, PURPOSE).TrustedHostMiddleware

    def page(text: str) -> Any:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return responses.HTMLResponse(text, headers=headers)

    def changing(request: Any, folders: Sequence[Path], make: Callable[[], Any]) -> Any:
        """What ``make`` gives, as JSON; nothing where the browser has it already."""
        tag = f'"{state_of(folders)}"'
        if request.headers.get("if-none-match") == tag:
            return responses.Response(status_code=304, headers={"ETag": tag})
        text = json.dumps(make(), separators=(",", ":"), allow_nan=False)
        return responses.Response(
            text, media_type="application/json", headers={"ETag": tag, "Cache-Control": "no-store"}
        )

    def index(request: Any) -> Any:
        return page(served(f"Runs: {root.name or root}", "runs.json", "index.js"))

    def runs(request: Any) -> Any:
        found = find_runs(root)
        return changing(request, found, lambda: list_runs(root, found))

    def view(request: Any) -> Any:
        names = request.query_params.getlist("run")
        chosen(root, names)
        return page(served("Results", f"data.json?{urlencode([('run', name) for name in names])}", "page.js"))

    def data(request: Any) -> Any:
        folders = chosen(root, request.query_params.getlist("run"))
        inside = [run for folder in folders for run in find_runs(folder)]
        return changing(request, inside, lambda: {**page_data(read_results(folders)), "home": "/"})

    def plotly(request: Any) -> Any:
        return responses.Response(library(), media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def refuse(request: Any, error: Exception) -> Any:
        return responses.PlainTextResponse(str(error), status_code=404)

    pages = {"/": index, "/runs.json": runs, "/view": view, "/data.json": data, "/plotly.js": plotly}
    return applications.Starlette(
        routes=[route(path, endpoint, methods=["GET"]) for path, endpoint in pages.items()],
        exception_handlers={UserError: refuse},
        middleware=[middleware(trusted, allowed_hosts=list(hosts), www_redirect=False)],
    )


def served(title: str, source: str, script: str) -> str:
    """A page whose data is fetched, and fetched again while it changes."""
    text = shell(title, '<script src="plotly.js"></script>\n' if script == "page.js" else "", script)
    return text.replace("<body>", f'<body data-source="{html.escape(source)}">', 1)


def chosen(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders that a browser asks for: runs below the root, and folders that hold some, and no others."""
    if not names:
        raise UserError("no run is named; allowed: ?run=FOLDER")
    runs = find_runs(root)
    known = {
        path.relative_to(root).as_posix(): path for run in runs for path in (run, *run.parents) if _within(path, root)
    }
    for name in names:
        if name not in known:
            raise UserError(f"there is no run {name!r}")
    return [known[name] for name in dict.fromkeys(names)]


def _within(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def state_of(folders: Iterable[Path]) -> str:
    """Changes whenever a file of one of these runs does, or one that has not ended begins to train or is stopped."""
    return hashlib.sha256(repr([(str(path), _now(path)) for path in folders]).encode()).hexdigest()[:32]


def _now(folder: Path) -> tuple[dict[str, tuple[int, int] | None], bool]:
    """The stamps of a run's files, and whether it trains."""
    files = {name: _stamp(folder / name) for name in FILES}
    return files, files[SUMMARY] is None and is_occupied(folder)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def serve(root: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Answer until Ctrl-C; ``ready`` is told the address once it can be opened."""
    uvicorn = import_extra("uvicorn", EXTRA, PURPOSE)
    library()  # refuse now, not in the browser, where the package for plots is missing
    hosts = LOOPBACK if host in LOOPBACK else ("*",)
    config = uvicorn.Config(make_app(root, hosts), host=host, port=port, log_level="warning", ws="none")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be listened on; allowed: another --port or --host") from error
    with listener:
        name, number = listener.getsockname()[:2]
        ready(f"http://{f'[{name}]' if ':' in name else name}:{number}/")
        uvicorn.Server(config).run(sockets=[listener])
