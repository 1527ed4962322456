"""Results in a browser, also while runs train: a folder of runs, read only."""

import hashlib
import html
import json
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tailorfl.data.extras import import_extra
from tailorfl.errors import UserError
from tailorfl.report.listing import list_runs, stamps_of, state_of, title_of
from tailorfl.report.page import library, page_data, shell
from tailorfl.report.results import find_runs, read_results
from tailorfl.report.runs import links_lead_on
from tailorfl.study.folder import ERROR
from tailorfl.study.tidy import ASKED, OPTIONS, RESULTS

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
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

    class Called:
        """Answers who calls us by one of our names: a page of another site that leads to us by its own does not.

        Starlette's own does not know the names of IPv6, which have colons in them.
        """

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
            known = scope["type"] != "http" or "*" in hosts or re.sub(r":\d+$", "", host) in hosts
            links_lead_on.set(False)  # in this request, and the thread that answers it
            answer = self.app if known else responses.PlainTextResponse("this is not my name", status_code=400)
            await answer(scope, receive, send)

    def page(text: str) -> Any:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return responses.HTMLResponse(text, headers=headers)

    def changing(request: Any, state: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, as JSON; nothing where the browser has it already, which it has in the same state."""
        tag = f'"{hashlib.sha256(repr(state).encode()).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return responses.Response(status_code=304, headers={"ETag": tag})
        text = json.dumps(make(), separators=(",", ":"), allow_nan=False)
        return responses.Response(
            text, media_type="application/json", headers={"ETag": tag, "Cache-Control": "no-store"}
        )

    def index(request: Any) -> Any:
        return page(served(title_of(root), "runs.json", "index.js"))

    def runs(request: Any) -> Any:
        states = {run: state_of(run) for run in find_runs(root)}
        above = sorted({parent for run in states for parent in run.parents if root in parent.parents})
        return changing(request, (states, written(above)), lambda: list_runs(root, states))

    def view(request: Any) -> Any:
        names = request.query_params.getlist("run")
        chosen(root, names)
        return page(served("Results", f"data.json?{urlencode([('run', name) for name in names])}", "page.js"))

    def data(request: Any) -> Any:
        folders = chosen(root, request.query_params.getlist("run"))
        states = {run: state_of(run) for folder in folders for run in find_runs(folder)}
        errors = stamps_of(sorted(file for folder in folders for file in folder.glob(f"*/*/{ERROR}")))
        state = states, written(folders), errors  # also of what has no run
        return changing(request, state, lambda: {**page_data(read_results(folders)), "home": "/"})

    def written(folders: Sequence[Path]) -> Any:
        """The stamps of what a command with several runs wrote there."""
        return stamps_of(folder / name for folder in folders for name in (RESULTS, OPTIONS, ASKED))

    def plotly(request: Any) -> Any:
        return responses.Response(library(), media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def refuse(request: Any, error: Exception) -> Any:
        return responses.PlainTextResponse(str(error), status_code=404)

    pages = {"/": index, "/runs.json": runs, "/view": view, "/data.json": data, "/plotly.js": plotly}
    return applications.Starlette(
        routes=[route(path, endpoint, methods=["GET"]) for path, endpoint in pages.items()],
        exception_handlers={UserError: refuse},
        middleware=[middleware(Called)],
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
        why = (error.strerror or str(error)).partition(" (")[0]  # in brackets the address again
        raise UserError(f"{host}:{port} cannot be listened on: {why}; allowed: another --port or --host") from error
    with listener:
        name, number = listener.getsockname()[:2]
        ready(f"http://{f'[{name}]' if ':' in name else name}:{number}/")
        uvicorn.Server(config).run(sockets=[listener])
