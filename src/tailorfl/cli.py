"""The command ``tailor``."""

import inspect
import os
import re
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tailorfl import __version__
from tailorfl.commands import again, compare, gather, reproduce, sweep, way_of
from tailorfl.console import (
    ConfigFile,
    DataDir,
    Loggers,
    Page,
    Quiet,
    Resume,
    Settings,
    err,
    fresh,
    leave_no_empty_folders,
    out,
    refuse_empty_paths,
    say,
    show_list,
    show_log,
    split_method,
    stopped,
)
from tailorfl.errors import UserError, in_a_line
from tailorfl.flower.commands import flower_app
from tailorfl.report.commands import report, serve, show_page

app = typer.Typer(
    help="Personalized federated learning: every client gets a model of its own.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Datasets: list, inspect, prepare.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of click, or of typer's own copy of it

Force = Annotated[bool, typer.Option("--force", help="Replace a run that is there.")]


@app.callback(invoke_without_command=True)
def tailor(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"tailorfl {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def run(
    method: Annotated[str | None, typer.Argument(help="A method (see 'tailor methods').")] = None,
    settings: Settings = None,
    config: ConfigFile = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder.")] = None,
    data_dir: DataDir = None,
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
    loggers: Loggers = None,
    page: Page = True,
) -> None:
    """Train one method and write the results into a folder."""
    from tailorfl.study.cells import Failure
    from tailorfl.study.config import configure, read_settings
    from tailorfl.study.folder import CONFIG, is_run
    from tailorfl.study.grid import diverged_updates, refused
    from tailorfl.study.progress import StopOnInterrupt
    from tailorfl.study.tables import stage_table, summary_table

    show_log(quiet)
    method, pairs = split_method(method, settings)
    if resume and out_dir is None:
        raise UserError("--resume needs --out, the folder of the run")
    read = read_settings(pairs, config)
    stored = read_settings([], out_dir / CONFIG) if resume and out_dir and is_run(out_dir) else {}
    name = method or read.get("method") or stored.get("method")
    if not name and resume:
        raise UserError(f"{out_dir} holds no run to resume ({CONFIG} is missing)")
    if not name:
        raise UserError("no method is named; allowed: tailor run METHOD, or a line 'method: NAME' in --config")
    checked = configure(str(name), {**(stored if stored.get("method") == name else {}), **read})
    folder = out_dir or fresh(f"{checked.method_name}-{checked.experiment.data}-seed{checked.experiment.seed}")
    way = way_of(data_dir, resume, force, loggers)
    with StopOnInterrupt(err) as stop:
        summary = _run(checked, folder, way, quiet, stop)
    if summary is None:
        stopped(f"tailor run --resume --out {quote(str(folder))}{again(way)}")
    out.print(summary_table([summary]))
    if "stages" in summary:
        out.print(stage_table(summary))
    say(f"results: {folder}")
    if said := diverged_updates(checked.method_name, summary["diverged_updates"]):
        say(f"note: {said}", err)
    if page:
        show_page(folder)
    if isinstance(failed := refused(summary), Failure):
        say(f"tailor: {checked.method_name}: {failed.reason}", err)
        raise typer.Exit(1)


app.command()(compare)
app.command()(sweep)
app.command()(reproduce)
app.command()(gather)
app.command()(report)
app.command()(serve)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    client: Annotated[str, typer.Option("--client", help="A client's name (see clients.csv), or all.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="The model's folder; by default in the run's.")] = None,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
) -> None:
    """Write the model that serves a client, as files that work without tailorfl."""
    from tailorfl.study.export import export as write
    from tailorfl.study.export import in_words

    def show(about: dict[str, Any]) -> None:
        say(in_words(about))

    show_log(quiet=True)
    written = write(folder, client, out_dir, data_dir, force, show)
    say(f"written: {written}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that 'tailor export' has written.")],
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Images, folders, tables, texts, arrays.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="A CSV file for the predictions.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Inputs that are computed at once.")] = 64,
    top: Annotated[
        int | None, typer.Option("--top", min=1, help="The likeliest classes; of a detector: objects an image.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0, max=1, help="Probability of what a detector finds (0.5).")
    ] = None,
) -> None:
    """Run an exported model on files, without a run and its data."""
    from tailorfl.study import predict as predictions

    show_log(quiet=True)
    found = predictions.predict(model, inputs, batch_size, top, threshold)
    if out_file:
        rows = predictions.write_csv(found, out_file, err)
        say(f"written: {out_file} ({rows:,} rows)")
    elif out.is_terminal:
        out.print(predictions.as_table(found))
    else:
        predictions.print_csv(found, err)


@app.command()
def draw(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: detectors, or mixed layers.")],
    client: Annotated[str, typer.Option("--client", help="A client's name (see clients.csv).")],
    picture: Annotated[Path | None, typer.Option("--out", help="A PNG file; by default in the run's folder.")] = None,
    images: Annotated[int, typer.Option("--images", min=1, max=64, help="So many of its test images.")] = 8,
    threshold: Annotated[float, typer.Option("--threshold", min=0, max=1, help="Probability of what is drawn.")] = 0.5,
    what: Annotated[str | None, typer.Option("--what", help="objects or mixing, where a run has both.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Draw the objects that a client's model finds in its test images, or how a method mixed its layers."""
    from tailorfl.data.atomic import check_named
    from tailorfl.study.export import folder_names
    from tailorfl.study.mixing import draw_mixing, has_mixing, read_notes
    from tailorfl.study.picture import draw_detections

    show_log(quiet=True)
    if what not in (None, "objects", "mixing"):
        raise UserError(f"--what {what}: not known; allowed: objects, mixing")
    mixes = what == "mixing" if what else has_mixing(read_notes(folder))
    path = picture or folder / f"{'mixing' if mixes else 'detections'}-{folder_names([client])[0]}.png"
    check_named("--out", path, "PNG")
    if mixes:
        draw_mixing(folder, client, path)
    else:
        draw_detections(folder, client, path, images, threshold, data_dir)
    say(f"picture: {path}")


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="One method, with all its options.")] = None) -> None:
    """List the methods, or the options of one."""
    from tailorfl.methods import find_method
    from tailorfl.methods import methods as all_methods

    if name:
        kind = find_method(name)
        about = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(kind.__doc__ or ""))
        out.print(f"[bold]{name}[/bold]  {escape(about)}\n", highlight=False)
        show_list(_options(kind))
        return
    table = Table("method", Column("paper", no_wrap=True), "what is shared", "idea")
    for known, kind in all_methods().items():
        table.add_row(known, kind.paper, kind.shares, escape(_idea(kind)))
    show_list(table)


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """What data there is, and which of it is in the data folder."""
    from tailorfl.data import SOURCES

    table = Table("data", "what it is", "below the data folder")
    for name, entry in SOURCES.items():
        shown = f"{name}:{entry.argument}" if entry.argument else name
        there = data_dir is not None and all(_present(data_dir, file) for file in entry.files)
        folders = ", ".join(dict.fromkeys(file.split("/")[0] for file in entry.files))
        state = f"{folders}: {'[green]present[/green]' if there else 'missing'}" if entry.files else entry.obtain
        table.add_row(shown, entry.description, state)
    show_list(table)


@data_app.command("inspect")
def data_inspect(
    settings: Settings = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw clients by classes as a PNG.")] = None,
) -> None:
    """Divide a dataset among clients and show who has what."""
    from tailorfl.data import describe, draw_counts, shade_counts
    from tailorfl.data.atomic import check_named
    from tailorfl.study.build import load_data
    from tailorfl.study.config import configure, read_settings

    read = read_settings(settings or [], config)
    experiment = configure(str(read.get("method", "fedavg")), read).experiment
    if picture:
        named = (experiment.data, *(group.data or "" for group in experiment.groups))
        check_named("--picture", picture, "PNG", _paths_of(*named))
    data = load_data(experiment, data_dir)
    out.print(describe(data))
    out.print(shade_counts(data), highlight=False, soft_wrap=True)
    if picture:
        draw_counts(data, picture)
        say(f"picture: {picture}")


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="A dataset (see 'tailor data list').")],
    settings: Settings = None,
    data_dir: DataDir = None,
    to: Annotated[Path | None, typer.Option("--to", help="Also write it as one file, for data=file:PATH.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many training samples in it.")] = None,
) -> None:
    """Download a dataset into the data folder where it is missing; pack it into one file if asked to."""
    from rich.progress import DownloadColumn, Progress

    from tailorfl.data import DOWNLOADS, download, save_source
    from tailorfl.data.atomic import check_named
    from tailorfl.study.build import read_source
    from tailorfl.study.config import configure, read_settings

    if to:
        check_named("--to", to, "safetensors", _paths_of(name))
    if name in DOWNLOADS:
        if data_dir is None:
            raise UserError(f"no data folder to put {name} into; allowed: --data-dir FOLDER, or TAILOR_DATA=FOLDER")
        with Progress(*Progress.get_default_columns(), DownloadColumn(), console=err) as bar:
            tasks: dict[str, Any] = {}

            def show(file: str, done: int, total: int | None) -> None:
                if file not in tasks:
                    tasks[file] = bar.add_task(file, total=total)
                bar.update(tasks[file], completed=done)

            download(name, data_dir, show)
    source = read_source(configure("fedavg", {**read_settings(settings or []), "data": name}).experiment, data_dir)
    out.print(f"{name}: {source.train_size:,} training and {source.test_size:,} test samples", highlight=False)
    if to:
        save_source(source, to, limit)
        say(f"written: {to}; use it as data=file:{to}")


def main() -> None:
    """Run the command; bad input is one line on stderr and exit status 2."""
    try:
        command = typer.main.get_command(app)
        refuse_empty_paths(command)
        sys.exit(command(standalone_mode=False))
    except UserError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(in_a_line(error))
    except USAGE_ERROR as error:
        _refuse(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        err.print("stopped")
        sys.exit(130)
    finally:
        leave_no_empty_folders()


def _refuse(message: str) -> NoReturn:
    if message:  # none where the help was printed instead
        say(f"tailor: {message}", err)
    sys.exit(2)


def _run(checked: Any, folder: Path, way: Any, quiet: bool, stop: Any) -> dict[str, Any] | None:
    """One run with a bar; a fault of the code or the machine is one line, and the rest in a file."""
    from tailorfl.study.cells import Cell, Failure, execute
    from tailorfl.study.progress import RunProgress

    # One console for the bar and the log: lines then go above the bar instead of through it.
    shown = Console(stderr=True, quiet=True) if quiet else err
    with RunProgress(shown, checked.method_name, checked.experiment.rounds) as progress:
        result = execute(Cell(checked.method_name, checked, folder), way, progress, lambda: stop.wanted)
    if isinstance(result, Failure):
        if result.refused:
            raise UserError(result.reason)
        say(f"tailor: {result.reason}", err)
        raise typer.Exit(1)
    return result


def _idea(kind: Any) -> str:
    """The first line of what a method says of itself, without the paper."""
    return re.sub(r" \([^()]*\d{4}\)", "", inspect.cleandoc(kind.__doc__ or "").partition("\n")[0])


def _options(kind: Any) -> Table:
    from tailorfl.study.config import Experiment

    table = Table("key", "default", "meaning", title="options of the method, then of every experiment")
    for fields in (kind.model_fields, Experiment.model_fields):
        for key, info in fields.items():
            table.add_row(key, str(info.default), info.description or "")
        table.add_section()
    return table


def _paths_of(*names: str) -> list[Path]:
    """The files and folders that sources are read from, of those that are named by one."""
    return [Path(path) for path in (name.partition(":")[2] for name in names) if path]


def _present(folder: Path, pattern: str) -> bool:
    pattern = pattern.replace("<alphabet>", "*").replace("<character>", "*")
    return any(folder.glob(pattern)) or any(folder.glob(f"{pattern}.gz")) or os.path.exists(folder / pattern)
