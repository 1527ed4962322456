"""The command ``tailor flower``: an app, keys, a site, or a whole federation on one machine for a trial."""

import json
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from tailorfl.console import (
    ConfigFile,
    DataDir,
    Page,
    Quiet,
    Resume,
    Settings,
    err,
    fresh,
    out,
    say,
    show_log,
    split_method,
    stopped,
)
from tailorfl.errors import UserError
from tailorfl.report.commands import show_page

if TYPE_CHECKING:
    from tailorfl.study.config import Config

flower_app = typer.Typer(help="Federations of sites that run by themselves, on Flower.", no_args_is_help=True)

APP = "app"  # the folder of a trial's app
SHOWN = 15  # rounds in the table while a run is under way
LIMITS = ("wait", "deadline", "min_answers", "max_update_norm", "max_samples")  # that a trial which goes on keeps
COLUMNS = ("round", "answered", "loss", "accuracy", "seconds")

Experiment = Annotated[
    str | None,
    typer.Argument(metavar="EXPERIMENT", help="A method (see 'tailor methods'), or a YAML file of settings."),
]
Wait = Annotated[
    float | None, typer.Option("--wait", help="Seconds to wait for the sites before the first round (600).")
]
Deadline = Annotated[
    float | None, typer.Option("--deadline", help="Seconds until a round ends without the sites that lack (600).")
]
MinAnswers = Annotated[int | None, typer.Option("--min-answers", help="Answers without which a round is not used (1).")]
MaxNorm = Annotated[
    float | None, typer.Option("--max-update-norm", help="Refuse updates longer than this; 0, the default: none.")
]
MaxSamples = Annotated[
    int | None, typer.Option("--max-samples", help="No site counts for more samples; 0, the default: no limit.")
]


@flower_app.command()
def up(
    experiment: Experiment = None,
    settings: Settings = None,
    config: ConfigFile = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="So many sites; by default all clients.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="With certificates, and keys of the sites.")] = False,
    port: Annotated[int | None, typer.Option("--port", help="Of the SuperLink; by default a free one.")] = None,
    wait: Wait = None,
    deadline: Deadline = None,
    min_answers: MinAnswers = None,
    max_update_norm: MaxNorm = None,
    max_samples: MaxSamples = None,
    data_dir: DataDir = None,
    resume: Resume = False,
    quiet: Quiet = False,
    page: Page = True,
) -> None:
    """Try a federation on this machine: a server and its sites as processes of their own."""
    from tailorfl.flower.ports import check_port
    from tailorfl.flower.processes import program
    from tailorfl.flower.project import PROJECT, RunConfig, experiment_text, read_run, write_app
    from tailorfl.flower.roll import handed_over
    from tailorfl.study.folder import SUMMARY

    show_log(quiet)
    if resume and out_dir is None:
        raise UserError("--resume needs --out, the folder of the run")
    stored = _stored(_place(out_dir) / APP) if resume and out_dir else {}
    checked = _checked(experiment, settings, config, stored)
    folder = (out_dir or fresh(f"{checked.method_name}-flower-seed{checked.experiment.seed}")).absolute()
    if not (resume and (folder / SUMMARY).is_file() and handed_over(folder)):
        _check_folder(folder, resume)
        program("flower-superlink")
        if port is not None:
            check_port(port)
        app = _place(folder) / APP
        before = read_run(app) if resume and (app / PROJECT).is_file() else None
        number = _how_many(checked, nodes or (before.nodes if before else None), data_dir)
        stored = {} if before is None else {name: getattr(before, name) for name in LIMITS}
        limits = stored | _limits(
            wait=wait,
            deadline=deadline,
            min_answers=min_answers,
            max_update_norm=max_update_norm,
            max_samples=max_samples,
        )
        write_app(app, RunConfig(experiment_text(checked), str(folder), nodes=number, **limits))
        _launch(checked, folder, number, tls, port, data_dir, Console(stderr=True, quiet=True) if quiet else err)
    _show(folder, out)
    if page:
        show_page(folder)


def _launch(
    checked: "Config", folder: Path, nodes: int, tls: bool, port: int | None, data_dir: Path | None, shown: Console
) -> None:
    from tailorfl.flower.launch import LaunchError, Site, run_app
    from tailorfl.flower.processes import StopOnSignal, Stopped

    place = _place(folder)
    named: dict[str, Any] = {"data-dir": str(data_dir.absolute())} if data_dir else {}
    sites = [
        Site(name, {"partition": number, "state": str(place / "nodes" / name), **named})
        for number, name in enumerate(f"node-{number}" for number in range(nodes))
    ]
    title = f"{checked.method_name} on {nodes} sites"
    try:
        with StopOnSignal() as stop, RoundTable(shown, title, folder, checked.experiment.rounds) as table:
            table.say(f"starting {nodes} sites; logs: {place / 'logs'}")
            run_app(place / APP, sites, place, stop, tls=tls, port=port, watch=table.watch, say=table.say)
    except LaunchError as failed:
        _fail(failed, f"logs: {place / 'logs'}")
    except Stopped:
        again = f" --data-dir {quote(str(data_dir))}" if data_dir else ""
        stopped(f"tailor flower up --resume --out {quote(str(folder))}{' --tls' if tls else ''}{again}")
    if shown.quiet:
        return
    say(f"all processes stopped; logs: {place / 'logs'}", err)


@flower_app.command()
def app(
    experiment: Experiment = None,
    settings: Settings = None,
    to: Annotated[Path | None, typer.Option("--to", help="The app's folder.")] = None,
    config: ConfigFile = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder, on the server's machine.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Where virtual nodes keep their clients' state.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="Sites to wait for; 0: as many as clients.")] = 0,
    wait: Wait = None,
    deadline: Deadline = None,
    min_answers: MinAnswers = None,
    max_update_norm: MaxNorm = None,
    max_samples: MaxSamples = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an app that is there.")] = False,
) -> None:
    """Write an experiment as a Flower app, for 'flwr run'."""
    from tailorfl.flower.project import PROJECT, RunConfig, experiment_text, read_run, write_app

    if to is None:
        raise UserError("where does the app go? allowed: --to FOLDER")
    checked = _checked(experiment, settings, config, {})
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        if not force:
            raise UserError(f"{to} exists; allowed: another --to, --force to replace an app")
        if not (to / PROJECT).is_file():
            raise UserError(f"{to} is not an app's folder; --force replaces only an app")
        read_run(to)  # an app of ours, or a line that says it is not
    run = (out_dir or to.with_name(f"{to.name}-run")).absolute()
    kept = str(state.absolute()) if state else ""
    limits = _limits(
        wait=wait,
        deadline=deadline,
        min_answers=min_answers,
        max_update_norm=max_update_norm,
        max_samples=max_samples,
    )
    write_app(to, RunConfig(experiment_text(checked), str(run), kept, nodes, **limits))
    say(f"app: {to}; run it with: flwr run {to} NAME --stream")
    say(f"results, on the server's machine: {run}")


@flower_app.command()
def certs(
    to: Annotated[Path, typer.Option("--to", help="The folder of certificates and keys.")],
    hosts: Annotated[list[str] | None, typer.Option("--host", help="A name or IP address of the server.")] = None,
    nodes: Annotated[list[str] | None, typer.Option("--node", help="A site's name.")] = None,
) -> None:
    """Make a certificate authority, the server's certificate, and a key for every site; what is there stays."""
    from tailorfl.flower.certs import make_certs

    written = make_certs(to, hosts or [], nodes or [])
    for path in written:
        say(f"written: {path}")
    if not written:
        say(f"nothing to do: {to} has all of it")


@flower_app.command()
def node(
    superlink: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="Where the server is.")],
    client: Annotated[str, typer.Option("--client", help="This site's name.")],
    state: Annotated[Path, typer.Option("--state", help="A folder for what this site keeps, its logs among it.")],
    data: Annotated[str | None, typer.Option("--data", help="Its data: folder:, csv:, parquet:, file: ...")] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Or a client of the experiment's.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Its group, in an experiment of groups.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1")] = None,
    data_dir: DataDir = None,
    ca: Annotated[Path | None, typer.Option("--root-certificates", help="The certificate of the authority.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This site's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="In the clear, without keys: for trials.")] = False,
    port: Annotated[int | None, typer.Option("--port", help="For its own processes; by default a free one.")] = None,
) -> None:
    """Run a site: a SuperNode that is started again when it ends."""
    from tailorfl.flower.launch import LaunchError, Link, Site, keep_node
    from tailorfl.flower.ports import check_port
    from tailorfl.flower.processes import StopOnSignal, Stopped, program
    from tailorfl.flower.project import check_name, node_config

    program("flower-supernode")
    _check_address(superlink)
    _check_trust(ca, key, insecure)
    if (data is None) == (partition is None):
        raise UserError("where is the site's data? allowed: one of --data and --partition")
    if port is not None:
        check_port(port)
    given = {"client": check_name(client), "data": data, "partition": partition, "state": str(state.absolute())}
    given |= {"group": group, "device": device, "data-dir": str(data_dir.absolute()) if data_dir else None}
    entries: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    node_config(entries)  # what Flower cannot take is refused before anything starts

    tell = partial(say, console=err)
    site = Site(client, entries, key.absolute() if key else None)
    tell(f"{client}: a SuperNode for {superlink}; log: {state / 'logs' / f'supernode-{client}.log'}")
    try:
        with StopOnSignal() as stop:
            keep_node(site, Link(superlink, ca.absolute() if ca else None), state, stop, tell, port)
    except LaunchError as failed:
        _fail(failed, f"log: {state / 'logs'}")
    except Stopped:
        tell(f"{client}: stopped")


class RoundTable:
    """The rounds of a run that writes them into a file: a live table on a terminal, lines elsewhere."""

    def __init__(self, console: Console, title: str, folder: Path, rounds: int) -> None:
        from tailorfl.study.folder import ROUNDS

        self.console, self.title, self.rounds = console, title, rounds
        self.path = folder / ROUNDS
        self.stamp: tuple[int, int] | None = None  # of the file when it was read last
        self.seen: dict[int, str] = {}
        self.seen = self._read()  # those of an earlier start are not news
        self.new: dict[int, dict[str, Any]] = {}
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal and not console.quiet else None

    def __enter__(self) -> "RoundTable":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        say(line, self.console)

    def watch(self) -> None:
        """Show what the file has got since the last time; a round that is run again replaces itself."""
        found = self._read()
        news = {number: line for number, line in found.items() if self.seen.get(number) != line}
        self.seen = found
        for number, line in sorted(news.items()):
            self.new[number] = json.loads(line)
            if not self.live:
                _, answered, loss, accuracy, seconds = self._cells(self.new[number])
                tested = f", accuracy {accuracy}" if accuracy else ""
                self.say(f"round {number} of {self.rounds}: {answered} answered, loss {loss}{tested}, {seconds}")
        if self.live and news:
            self.live.update(self._table(), refresh=True)

    def _read(self) -> dict[int, str]:
        try:
            state = self.path.stat()
            if self.stamp == (state.st_size, state.st_mtime_ns):
                return self.seen
            lines = self.path.read_text().split("\n")[:-1]  # a line without its end is still being written
        except OSError:
            return {}
        self.stamp = (state.st_size, state.st_mtime_ns)
        return {json.loads(line)["round"]: line for line in lines}

    def _table(self) -> Table:
        columns = [Column(name, justify="right") for name in COLUMNS]
        table = Table(*columns, title=f"{self.title}, {self.rounds} rounds")
        for number in sorted(self.new)[-SHOWN:]:
            table.add_row(*self._cells(self.new[number]))
        return table

    def _cells(self, line: dict[str, Any]) -> tuple[str, ...]:
        accuracy = line.get("personalized_accuracy")
        return (
            str(line["round"]),
            f"{line['answered']} of {line['selected']}",
            "-" if line["loss"] is None else f"{line['loss']:.4g}",
            "" if accuracy is None else f"{100 * accuracy:.2f} %",
            f"{line['seconds']:.1f} s",
        )


def _place(folder: Path) -> Path:
    """Where a run's folder has what belongs to its processes, apart from its results."""
    from tailorfl.study.folder import FEDERATION

    return folder / FEDERATION


def _stored(app: Path) -> dict[str, Any]:
    from tailorfl.flower.project import PROJECT, stored_settings

    if not (app / PROJECT).is_file():
        raise UserError(f"{app.parent.parent} holds no run to resume ({app / PROJECT} is missing)")
    return stored_settings(app)


def _checked(
    experiment: str | None, settings: list[str] | None, config: Path | None, stored: dict[str, Any]
) -> "Config":
    """The complete configuration, checked before anything starts."""
    from tailorfl.study.config import configure, read_settings

    experiment, pairs = split_method(experiment, settings)
    read: dict[str, Any] = {}
    if experiment and experiment.endswith((".yaml", ".yml")):
        read, experiment = read_settings([], Path(experiment)), None
    read |= read_settings(pairs, config)
    name = experiment or read.get("method") or stored.get("method")
    if not name:
        raise UserError("no method is named; allowed: METHOD, or a YAML file with a line 'method: NAME'")
    checked = configure(str(name), {**(stored if stored.get("method") == name else {}), **read})
    if stored:
        _check_unchanged(configure(str(stored["method"]), stored), checked)
    return checked


def _check_unchanged(before: "Config", now: "Config") -> None:
    from tailorfl.study.run import forbidden_changes

    changes = forbidden_changes(before, now)
    if changes:
        raise UserError(f"the run cannot be resumed, its configuration changed: {'; '.join(changes)}")


def _check_folder(folder: Path, resume: bool) -> None:
    from tailorfl.study.folder import check_writable

    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; allowed: another --out, --resume to go on")
    check_writable(folder)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UserError(f"--superlink {address}: allowed: HOST:PORT, for example fl.example.org:8000")


def _check_trust(ca: Path | None, key: Path | None, insecure: bool) -> None:
    if insecure and (ca or key):
        raise UserError("--insecure does without certificates and keys; allowed: it, or --root-certificates and --key")
    if not insecure and not ca:
        raise UserError("whom does the site trust? allowed: --root-certificates FILE, or --insecure for trials")
    for option, path in (("--root-certificates", ca), ("--key", key)):
        if path and not path.is_file():
            raise UserError(f"{option} {path}: there is no such file")
    import ssl

    try:
        if ca:
            ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise UserError(f"--root-certificates {ca}: holds no certificate; allowed: ca.crt") from error


def _how_many(checked: "Config", wanted: int | None, data_dir: Path | None) -> int:
    """How many sites; the data is read once, so that it is known to be there before anything starts."""
    from tailorfl.study.build import load_data

    there = load_data(checked.experiment, data_dir).clients
    if wanted is not None and wanted > there:
        raise UserError(f"--nodes {wanted}: the experiment has {there} clients; allowed: 1 to {there}")
    return wanted or there


def _limits(**given: float | None) -> dict[str, Any]:
    """Those that are named; others have their defaults, or stay as they are."""
    return {name: value for name, value in given.items() if value is not None}


def _show(folder: Path, out: Console) -> None:
    from tailorfl.study.cells import Failure
    from tailorfl.study.folder import SUMMARY
    from tailorfl.study.grid import refused
    from tailorfl.study.tables import summary_table

    summary = json.loads((folder / SUMMARY).read_text())
    out.print(summary_table([summary]))
    say(f"results: {folder}")
    if isinstance(failed := refused(summary), Failure):
        say(f"tailor: {summary['method']}: {failed.reason}", err)
        raise typer.Exit(1)


def _fail(failed: Any, where: str) -> None:
    """The last lines of the log that says why, then what failed; exit status 1."""

    for line in failed.tail:
        say(line, err)
    say(f"tailor: {failed}; {where}", err)
    raise typer.Exit(1)
