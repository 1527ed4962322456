"""The commands that show results: ``tailor report`` and ``tailor serve``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tailorfl.console import err, say
from tailorfl.errors import UserError

Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Folders of runs, comparisons, sweeps or studies; finished or not.")
]


def report(
    folders: Folders,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The page; by default report.html in the folder.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="A folder: every plot also as PNG and SVG, in a style fit for a paper."),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "",
) -> None:
    """Write one HTML page with all tables and plots; it opens from disk, without a network."""
    from tailorfl.data.atomic import check_named
    from tailorfl.report.figures import write_figures
    from tailorfl.report.page import write_page
    from tailorfl.report.results import read_results
    from tailorfl.study.folder import PAGE

    results = read_results(folders, title)
    path = out_file or (folders[0] if len(folders) == 1 else Path()) / PAGE
    check_named("--out", path, "HTML")
    if figures and figures.exists() and not figures.is_dir():
        raise UserError(f"--figures {figures} is a file; allowed: a folder")
    write_page(results, path)
    say(f"page: {path}")
    if figures:
        written = write_figures(results, figures)
        say(f"figures: {figures} ({len(written)} files)")


def serve(
    root: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of runs, at any depth.")] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; others than yours see the results.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 8765,
    browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Show the runs of a folder in a browser, also while they train; nothing is changed by it."""
    from tailorfl.report import serve as server

    if not root.is_dir():
        raise UserError(f"{root} is {'not a folder' if root.exists() else 'not there'}; allowed: a folder of runs")

    def ready(address: str) -> None:
        say(f"{root}: {address} (Ctrl-C to stop)")
        if host not in server.LOOPBACK:
            say(f"whoever reaches {host} can read the results", err)
        if browser:
            webbrowser.open(address)

    server.serve(root, host, port, ready)


def show_page(folder: Path) -> None:
    """The page at the end of a command; without the extra for it, the results are there all the same."""
    from tailorfl.report.page import write_page
    from tailorfl.report.results import read_results
    from tailorfl.study.folder import PAGE

    try:
        write_page(read_results([folder]), folder / PAGE)
    except (UserError, OSError) as error:
        return say(f"no page: {error}", err)
    say(f"page: {folder / PAGE}")
