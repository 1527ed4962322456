"""The commands of several runs: ``tailor compare``, ``tailor sweep``, ``tailor reproduce`` and ``tailor gather``."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tailorfl.console import (
    ConfigFile,
    DataDir,
    Loggers,
    Page,
    Quiet,
    Settings,
    err,
    fresh,
    out,
    say,
    show_list,
    show_log,
    split_method,
    stopped,
)
from tailorfl.errors import UserError
from tailorfl.report.commands import show_page

if TYPE_CHECKING:
    from tailorfl.study.cells import Way
    from tailorfl.study.grid import Grid
    from tailorfl.study.plan import Plan
    from tailorfl.study.reproduce import Study

Force = Annotated[bool, typer.Option("--force", help="Replace runs that are there.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="So many runs side by side, each a process.")]
Together = Annotated[
    int,
    typer.Option("--together", min=1, help="So many runs at a time in one process, clients of all in one stack."),
]
Reuse = Annotated[
    list[Path] | None,
    typer.Option("--reuse", help="Take finished runs with the same settings from below this folder; repeatable."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what was stopped or killed.")]


def compare(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="METHOD|KEY=VALUE", help="Methods, then settings; seeds=3 for three.")
    ] = None,
    config: ConfigFile = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The comparison's folder.")] = None,
    data_dir: DataDir = None,
    jobs: Jobs = 1,
    together: Together = 1,
    reuse: Reuse = None,
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
    loggers: Loggers = None,
    page: Page = True,
) -> None:
    """Train several methods on the same federation and set them side by side."""
    from tailorfl.study import compare as comparison
    from tailorfl.study.config import read_settings
    from tailorfl.study.grid import Grid
    from tailorfl.study.tables import lines_table, paired_table, summary_table
    from tailorfl.study.tidy import COMPARISON, CURVES

    show_log(quiet)
    names = [argument for argument in arguments or () if "=" not in argument]
    read = read_settings([argument for argument in arguments or () if "=" in argument], config)
    if not names:
        raise UserError("no method is named; allowed: tailor compare METHOD METHOD ... [key=value ...]")
    lines, seeds = comparison.plan_comparison(names, read)
    folder = _folder(out_dir, resume, "comparison", f"compare-{lines[0].config.experiment.data}", seeds)
    way = way_of(data_dir, resume, force, loggers, jobs, together, reuse)
    grid = Grid(folder, lines, seeds, asked={"methods": names, "settings": read})
    _measure(grid, way, quiet, ["compare", *names, *_settings(arguments, config)])
    if found := grid.measured():
        comparison.write_table([comparison.over_runs(list(runs.values())) for runs in found.values()], folder)
        paired = paired_table(comparison.write_statistics(grid))
        if len(seeds) == 1:
            out.print(summary_table([summary for runs in found.values() for summary in runs.values()]))
        else:
            rows = [([line.title], list(runs.values())) for line, runs in found.items()]
            out.print(lines_table(["method"], rows, seeds))
        if paired:
            out.print("", paired, sep="\n")
        _written(folder, COMPARISON)
        folders = {line.title: [grid.path(line, seed) for seed in runs] for line, runs in found.items()}
        _draw(lambda path: comparison.draw_curves(folders, path), folder / CURVES)
        _page(folder, page)
    _end(grid.failed(), grid.notes)


def sweep(
    method: Annotated[str | None, typer.Argument(help="A method (see 'tailor methods').")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=A,B,C", help="Keys with the values to try, and settings for all; seeds=3."),
    ] = None,
    config: ConfigFile = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The sweep's folder.")] = None,
    data_dir: DataDir = None,
    jobs: Jobs = 1,
    together: Together = 1,
    reuse: Reuse = None,
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
    loggers: Loggers = None,
    page: Page = True,
) -> None:
    """Train a method with every combination of settings and set them side by side."""
    from tailorfl.study import sweep as sweeps
    from tailorfl.study.config import read_settings, shown
    from tailorfl.study.grid import Grid
    from tailorfl.study.tables import lines_table
    from tailorfl.study.tidy import RESULTS, SWEPT

    show_log(quiet)
    (method, pairs), base = split_method(method, settings), read_settings([], config)
    name = method or base.get("method")
    if not name:
        raise UserError("no method is named; allowed: tailor sweep METHOD key=a,b [key=value ...]")
    values = sweeps.read_values(pairs)
    lines, seeds = sweeps.plan_sweep(str(name), values, base)
    folder = _folder(out_dir, resume, "sweep", f"sweep-{name}-{lines[0].config.experiment.data}", seeds)
    way = way_of(data_dir, resume, force, loggers, jobs, together, reuse)
    grid = Grid(folder, lines, seeds, asked={"method": str(name), "values": values, "settings": base})
    _measure(grid, way, quiet, ["sweep", *([method] if method else []), *_settings(pairs, config)])
    if found := grid.measured():
        sweeps.write_statistics(grid)
        keys = sweeps.swept_keys(lines)
        rows = [([shown(one.settings[key]) for key in keys], list(runs.values())) for one, runs in found.items()]
        out.print(lines_table(keys, rows, seeds))
        say(sweeps.choice(grid))
        _written(folder, RESULTS)
        _draw(lambda path: sweeps.draw_sweep(grid, path), folder / SWEPT)
        _page(folder, page)
    _end(grid.failed(), grid.notes)


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="A study, or a recipe's file; without one, all are listed.")
    ] = None,
    settings: Settings = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The folder of the results.")] = None,
    options: Annotated[bool, typer.Option("--options", help="Show the study's options or cells; run nothing.")] = False,
    data_dir: DataDir = None,
    jobs: Jobs = 1,
    together: Together = 1,
    reuse: Reuse = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a study that was stopped or killed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a study that is there.")] = False,
    quiet: Quiet = False,
    loggers: Loggers = None,
    page: Page = True,
) -> None:
    """Measure a figure or table of a paper again."""
    from tailorfl.data.occupied import occupied
    from tailorfl.study import reproduce as studies
    from tailorfl.study.config import read_settings
    from tailorfl.study.loggers import one_store
    from tailorfl.study.plan import check_figures, plan
    from tailorfl.study.recipe import Recipe

    if name is None:
        return show_list(studies.studies_table())
    study, given = studies.find_study(name), read_settings(settings or [])
    if not isinstance(study, Recipe):
        instead = {
            "--resume": "--force to replace it" if resume else "",
            "--reuse": "without it" if reuse else "",
            f"--jobs {jobs}": "1" if jobs > 1 else "",
            f"--together {together}": "1" if together > 1 else "",
        }
        for asked, allowed in instead.items():
            if allowed:
                raise UserError(f"{asked}: {name} is computed in one go; allowed: {allowed}")
        return _compute(name, study, given, out_dir, options, force, quiet)
    show_log(quiet)
    if resume and out_dir is None:
        raise UserError("--resume needs --out, the folder of the study")
    way = way_of(data_dir, resume, force, loggers, jobs, together, reuse)
    planned = plan(study, studies.resumed_options(study, given, out_dir) if resume and out_dir else given)
    if not resume:
        check_figures(planned)
    if options:
        return _show_cells(planned)
    if resume and out_dir:
        studies.check_whole(planned, out_dir)
    folder = out_dir or fresh(study.name)
    if not resume:
        studies.check_folder(folder, force)
    with occupied(folder), one_store(way.loggers, folder):
        _reproduce(name, planned, folder, way, quiet, page)


def _compute(
    name: str, study: "Study", given: dict[str, Any], out_dir: Path | None, options: bool, force: bool, quiet: bool
) -> None:
    """A study that is computed in closed form."""
    from tailorfl.study import reproduce as studies

    if options:
        return show_list(studies.options_table(name, study.options))
    checked = studies.read_options(name, given)
    folder = out_dir or fresh(name)
    studies.check_folder(folder, force)
    with studies.progress(_shown(quiet), name) as show:
        rows = study.run(checked, show)
    written = studies.write(rows, checked, name, folder)
    for table in study.tables(rows, checked):
        out.print(table)
    say(f"results: {written}")
    if picture := study.picture:
        _draw(lambda path: picture(rows, checked, path), written.with_suffix(".png"))


def _show_cells(planned: "Plan") -> None:
    """What a recipe would run, claim, and leaves open."""
    from tailorfl.study.reproduce import cells_table

    recipe = planned.recipe
    show_list(cells_table(planned))
    for claim in recipe.claims:
        say(f"claim: {claim.sentence(recipe)}")
    for one in recipe.open:
        say(f"open: {one}")


def _reproduce(name: str, planned: "Plan", folder: Path, way: "Way", quiet: bool, page: bool) -> None:
    """A study that consists of runs."""
    from tailorfl.study.outcome import TABLE, claim_lines, heading, terminal_tables
    from tailorfl.study.panels import draw
    from tailorfl.study.progress import StopOnInterrupt
    from tailorfl.study.reproduce import measure, picture_of
    from tailorfl.study.tidy import RESULTS

    with StopOnInterrupt(err) as stop:
        outcome = measure(planned, folder, way, _shown(quiet), lambda: stop.wanted)
    if outcome is None:
        stopped(f"tailor reproduce {name} --resume --out {quote(str(folder))}{again(way)}")
    for line in heading(outcome):
        say(line)
    for table in terminal_tables(outcome, out.width):
        out.print(table)
    for line in claim_lines(outcome):
        say(line)
    if not way.force or outcome.summaries:  # else what was there before still is
        _written(folder, TABLE, RESULTS)
    if planned.recipe.kind != "table" and outcome.summaries:
        _draw(lambda path: draw(outcome, path), folder / picture_of(planned))
    if outcome.summaries:
        _page(folder, page)
    _end(outcome.failed(), outcome.notes)


def gather(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="STUDY", help="Folders that 'tailor reproduce' has written.")
    ] = None,
    to: Annotated[
        Path, typer.Option("--to", help="Where they go, and what is there already: NAME.csv, and its page NAME.md.")
    ] = Path("reproduction"),
) -> None:
    """Put the figures of many studies on one page, beside what their papers print."""
    from tailorfl.study import gather as gathering

    table, page = gathering.gather(folders or (), to)
    say(f"figures: {table}")
    say(f"page: {page}")


# What they have in common.


def way_of(
    data_dir: Path | None,
    resume: bool,
    force: bool,
    loggers: Sequence[str] | None,
    jobs: int = 1,
    together: int = 1,
    reuse: Sequence[Path] | None = None,
) -> "Way":
    from tailorfl.study.cells import Way
    from tailorfl.study.loggers import find_logger

    if resume and force:
        raise UserError("--resume goes on with what is there, --force replaces it; allowed: one of the two")
    if reuse and force:
        raise UserError("--reuse takes runs over where none are, --force replaces those; allowed: one of the two")
    if reuse:
        from tailorfl.study.reuse import check_places

        check_places(reuse)
    for name in loggers or ():
        find_logger(name)(Path())  # refused before anything runs
    return Way(data_dir, resume, force, jobs, together, tuple(loggers or ()), tuple(reuse or ()))


def again(way: "Way") -> str:
    """The options that a run which goes on needs again, because they are not stored with it."""
    data = way.data_dir if way.data_dir and os.environ.get("TAILOR_DATA") != str(way.data_dir) else None
    many = {"jobs": way.jobs, "together": way.together}
    return (
        (f" --data-dir {quote(str(data))}" if data else "")
        + "".join(f" --{name} {number}" for name, number in many.items() if number > 1)
        + "".join(f" --reuse {quote(str(place))}" for place in way.reuse)
        + "".join(f" --log {name}" for name in way.loggers)
    )


def _settings(arguments: Sequence[str] | None, config: Path | None) -> list[str]:
    """The settings of a command, as they are typed again."""
    pairs = [argument for argument in arguments or () if "=" in argument]
    return [*pairs, *(["--config", str(config)] if config else [])]


def _folder(out_dir: Path | None, resume: bool, what: str, name: str, seeds: Sequence[int]) -> Path:
    if out_dir is None and resume:
        raise UserError(f"--resume needs --out, the folder of the {what}")
    return out_dir or fresh(f"{name}-seed{seeds[0]}" if len(seeds) == 1 else name)


def _measure(grid: "Grid", way: "Way", quiet: bool, typed: Sequence[str]) -> None:
    """Run all of a grid; if it is stopped, say how to go on: by what was typed."""
    from tailorfl.data.occupied import occupied
    from tailorfl.study.folder import check_writable
    from tailorfl.study.loggers import one_store
    from tailorfl.study.progress import StopOnInterrupt

    check_writable(grid.folder)
    with occupied(grid.folder), one_store(way.loggers, grid.folder), StopOnInterrupt(err) as stop:
        grid.check(way)
        whole = grid.run(way, _shown(quiet), lambda: stop.wanted)
    if not whole:
        stopped(f"tailor {join(typed)} --resume --out {quote(str(grid.folder))}{again(way)}")


def _shown(quiet: bool) -> Console:
    """Where progress is shown: beside the log, so that lines go above a bar instead of through it."""
    return Console(stderr=True, quiet=True) if quiet else err


def _written(folder: Path, *names: str) -> None:
    """The runs are done and their tables are in the folder."""
    say(f"results: {', '.join(str(folder / name) for name in names)}")


def _draw(draw: Callable[[Path], None], path: Path) -> None:
    """Draw a picture where the extra for it is installed."""
    try:
        draw(path)
        say(f"picture: {path}")
    except UserError as missing:
        say(f"no picture: {missing}", err)


def _page(folder: Path, wanted: bool) -> None:
    if wanted:
        show_page(folder)


def _end(failed: Sequence[str], notes: Sequence[str]) -> None:
    """Name what failed at the end, where it is not overlooked; exit status 1 then."""
    for line in notes:
        say(f"note: {line}", err)
    for line in failed:
        say(f"not measured: {line}", err)
    if failed:
        raise typer.Exit(1)
