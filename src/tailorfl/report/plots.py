"""The plots of results: how clients are served, over rounds and each by itself, and what that cost."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean

from tailorfl.report.inside import INSIDE
from tailorfl.report.marks import (
    MOST,
    Axis,
    Band,
    Bars,
    HeatMap,
    Line,
    Numbers,
    Plot,
    Points,
    Scale,
    drawn,
    over_seeds,
    short,
    thinned,
    ticks,
)
from tailorfl.report.results import Entry, Results
from tailorfl.report.runs import ClassCounts, ClientResult, RunResult, groups_of, number
from tailorfl.report.swept import over_settings
from tailorfl.study.tables import UNITS, largest_unit

MOST_DOTS = 1500  # points of a scatter plot, all methods together
MOST_DETAILS = 4  # entries of one method that are shown from inside, the best
LONGEST_KEY = 60  # letters of a label in a plot's key, which names a file
A_DOT = "A dot a client, a larger one for several at the same place"
BASELINES = ("fedavg", "local")  # the first that is there is what others are set against


def plots_of(results: Results, most: int = MOST) -> list[Plot]:
    """All plots of what was found, panel by panel; lines have at most so many points."""
    styles = {label: place for place, label in enumerate(results.labels)}
    return _unique(plot for panel in results.panels for plot in _panel(results, panel, styles, most))


def _unique(plots: Iterable[Plot]) -> list[Plot]:
    """No two of one name, which is that of a file: labels may differ in signs only."""
    found: dict[str, Plot] = {}
    for plot in plots:
        made, number = plot, 1
        while made.name in found:
            number += 1
            made = replace(plot, key=f"{plot.key}-{number}")
        found[made.name] = made
    return list(found.values())


def _panel(results: Results, panel: str, styles: Mapping[str, int], most: int) -> Iterator[Plot]:
    entries, scale = results.of(panel), Scale(results.regression, most)
    several = len(entries) > 1
    plots = (replace(plot, legend=several) for plot in Drawing(entries, styles, scale, results.swept).all())
    for plot in (*plots, *_inside(entries, scale)):
        if plot.marks:
            yield replace(plot, panel=panel)


@dataclass(frozen=True)
class Drawing:
    """Plots of entries that belong together, such as those of one comparison."""

    entries: Sequence[Entry]
    styles: Mapping[str, int]
    scale: Scale
    swept: tuple[str, ...] = ()  # keys

    def style(self, entry: Entry) -> int:
        return self.styles[entry.label]

    def all(self) -> Iterator[Plot]:
        yield over_settings(self.entries, self.scale, self.swept)
        yield self.over_rounds()
        if len(self.entries) > 1:
            yield self.global_model()
        yield self.sorted_clients()
        yield self.before_after()
        yield self.against_baseline()
        yield self.heat_map()
        yield self.traffic()
        yield self.time()
        yield self.training_loss()
        yield self.groups()

    # Over rounds.

    def over_rounds(self) -> Plot:
        if len(self.entries) == 1:
            lines = self._all_curves(self.entries[0])
        else:
            lines = [self._curve(entry, f"personalized_{self.scale.what}", bands=True) for entry in self.entries]
        bands = "" if self.scale.regression else " The lighter band holds four fifths of the clients."
        seeds = " The darker band is one standard deviation over seeds." if self._several_seeds else ""
        about = f"Each client's own model on its own test rows, mean over clients.{bands}{seeds}"
        return self._rounds("accuracy", f"{self.scale.what.capitalize()} over rounds", about, lines, self.scale.label)

    def global_model(self) -> Plot:
        lines = [self._curve(entry, f"global_{self.scale.what}") for entry in self.entries]
        about = "The one model that the server has, on the same test rows; only of methods that have one."
        return self._rounds(
            "global", f"{self.scale.what.capitalize()} of the global model", about, lines, self.scale.label
        )

    def training_loss(self) -> Plot:
        lines = [self._curve(entry, "loss", unit=1.0) for entry in self.entries]
        about = "Mean over the local steps of a round's clients."
        return self._rounds("training-loss", "Training loss", about, lines, "loss")

    @property
    def _several_seeds(self) -> bool:
        return any(len(entry.runs) > 1 for entry in self.entries)

    def _rounds(self, key: str, title: str, about: str, lines: Iterable[Line], label: str) -> Plot:
        """Nothing where no entry has two rounds: dots without a course are in the summary."""
        marks = drawn(lines)
        course = any(sum(value is not None for value in line.y) > 1 for line in marks)
        return Plot(key, title, about, Axis("round", whole=True), Axis(label), marks if course else ())

    def _all_curves(self, entry: Entry) -> list[Line]:
        """Of one entry alone: its personalized models, its global one, and others that were tested beside them."""
        own = [self._curve(entry, f"personalized_{self.scale.what}", bands=True, name="personalized")]
        known = {"global": "global model", "new_client": "new clients", "joining": "late clients"}
        if not self.scale.regression:
            known |= {"worst_decile": "worst tenth of clients", "training": "on training rows"}
        known |= {name: f"{name.replace('_', ' ')} model" for name in self._others(entry.first)}
        for place, (key, name) in enumerate(known.items(), start=1):
            line = self._curve(entry, f"{key}_{self.scale.what}", name=name)
            own.append(replace(line, style=place))
        return own

    def _others(self, run: RunResult) -> list[str]:
        """Further models of a client that a method evaluates."""
        ending = f"_{self.scale.what}"
        not_models = {"personalized", "global", "validation", "new_client", "joining", "training", "worst_decile"}
        not_models |= {"group_mean", *(key.removesuffix(ending) for key in (run.measures[0] if run.measures else ()))}
        line = run.evaluated[-1] if run.evaluated else {}
        names = [key.removesuffix(ending) for key in line if key.endswith(ending)]
        return [name for name in names if name not in not_models]

    def _curve(
        self,
        entry: Entry,
        key: str,
        bands: bool = False,
        unit: float | None = None,
        name: str = "",
    ) -> Line:
        """The mean over seeds, with a band over clients and one over seeds."""
        unit = self.scale.unit if unit is None else unit
        of = partial(_by_round, entry.runs)
        found = of(key)
        rounds = thinned(sorted(found), self.scale.most)
        middle: Numbers = [unit * fmean(found[at]) for at in rounds]
        around: list[Band] = []
        if bands and not self.scale.regression and (low := of("accuracy_p10")) and (high := of("accuracy_p90")):
            ends = [[unit * fmean(side[at]) if at in side else None for at in rounds] for side in (low, high)]
            around.append(Band("80 % of the clients", *ends))
        if bands and len(entry.runs) > 1:
            around.append(over_seeds([[unit * value for value in found[at]] for at in rounds]))
        place = 0 if name else self.style(entry)
        return Line(name or entry.label, place, [float(at) for at in rounds], middle, tuple(around))

    # Clients.

    def sorted_clients(self) -> Plot:
        lines = []
        for entry in self.entries:
            served = [(value, client.name) for run in entry.runs for client, value in self._values(run)]
            served.sort(key=lambda pair: pair[0])
            places = thinned(range(len(served)), self.scale.most)
            share = [100 * (place + 0.5) / len(served) for place in places]
            values: Numbers = [self.scale.unit * served[place][0] for place in places]
            names = tuple(served[place][1] for place in places)
            lines.append(Line(entry.label, self.style(entry), share, values, text=names, dots=len(places) <= 60))
        order = "from the best served to the worst" if self.scale.regression else "from the worst served to the best"
        seeds = "; the clients of all seeds together" if self._several_seeds else ""
        about = f"Every client after the last round, {order}{seeds}."
        x = Axis("share of clients, %", 0, 100)
        return Plot(
            "clients", f"{self.scale.what.capitalize()} of each client", about, x, Axis(self.scale.label), drawn(lines)
        )

    def _values(self, run: RunResult) -> Iterator[tuple[ClientResult, float]]:
        for client in run.served:
            value = client.loss if self.scale.regression else client.accuracy
            if value is not None:
                yield client, value

    def before_after(self) -> Plot:
        clouds = []
        for entry in self.entries:
            pairs = [
                (client.global_accuracy, client.accuracy, client.name)
                for run in entry.runs
                for client in run.served
                if client.global_accuracy is not None and client.accuracy is not None
            ]
            if any(before != after for before, after, _ in pairs):  # else nothing is personalized
                clouds.append(self._cloud(entry, pairs))
        about = f"{A_DOT}: above the line are those whom their own model serves better than the global one."
        axes = Axis("accuracy, global model, %"), Axis("accuracy, own model, %")
        return Plot(
            "personalization", "Before against after personalization", about, *axes, tuple(clouds), diagonal=True
        )

    def against_baseline(self) -> Plot:
        """Methods without a global model beside another method that served the same clients."""
        base = next((entry for name in BASELINES for entry in self.entries if entry.method == name), None)
        clouds = []
        for entry in self.entries if base else ():
            has_global = any(client.global_accuracy is not None for run in entry.runs for client in run.served)
            if base and entry is not base and not has_global and not self.scale.regression:
                pairs = [pair for run in entry.runs for pair in _paired(run, base.runs)]
                clouds += [self._cloud(entry, pairs)] if pairs else []
        name = base.label if base else ""
        about = f"{A_DOT}: above the line are those who are served better than by {name}."
        axes = Axis(f"accuracy with {short(name)}, %"), Axis("accuracy, %")
        return Plot("baseline", f"Each client against {name}", about, *axes, tuple(clouds), diagonal=True)

    def _cloud(self, entry: Entry, pairs: Sequence[tuple[float, float, str]]) -> Points:
        there: dict[tuple[float, float], list[str]] = {}
        for before, after, name in pairs:
            there.setdefault((before, after), []).append(name)
        places = sorted(there, key=lambda place: -len(there[place]))  # small ones on top of large ones
        chosen = thinned(places, MOST_DOTS // len(self.entries))
        x, y = ([self.scale.unit * place[side] for place in chosen] for side in (0, 1))
        names = [there[place] for place in chosen]
        text = tuple(own[0] if len(own) == 1 else f"{len(own)} clients" for own in names)
        return Points(entry.label, self.style(entry), x, y, text, tuple(map(len, names)))

    def heat_map(self) -> Plot:
        known = [(entry, run) for entry in self.entries for run in entry.runs if run.classes]
        counts = known[0][1].classes if known else None
        alike = all(run.classes == counts for _, run in known)
        where = "" if alike or not known else f" Shown is {known[0][0].label}, seed {known[0][1].seed}; others differ."
        marks = (self._class_map(counts),) if counts else ()
        cut = f" {len(marks[0].columns)} of {len(counts.clients)} clients." if marks and counts else ""
        cut = cut if marks and counts and len(marks[0].columns) < len(counts.clients) else ""
        about = f"Training rows that each client has of each class.{cut}{where}"
        return Plot("classes", "Clients by classes", about, Axis("client"), Axis("class"), marks)

    def _class_map(self, counts: ClassCounts) -> HeatMap:
        clients, classes = (thinned(range(len(of)), self.scale.most) for of in (counts.clients, counts.classes))
        values: list[Numbers] = [[float(counts.train[client][label]) for client in clients] for label in classes]
        columns = ticks([counts.clients[client] for client in clients])
        rows = ticks([counts.classes[label] for label in classes])
        return HeatMap("training rows", columns, rows, values, low=0.0)

    # Costs.

    def traffic(self) -> Plot:
        key = f"personalized_{self.scale.what}"
        found = [(entry, _by_traffic(entry.runs, key)) for entry in self.entries]
        unit = largest_unit([int(size) for _, points in found for size, _, _ in points] or [0])
        lines = []
        for entry, points in found:
            chosen = thinned(points, self.scale.most)
            x, y = [size / 1000**unit for size, _, _ in chosen], [self.scale.unit * value for _, value, _ in chosen]
            text = tuple(f"round {at}" for _, _, at in chosen)
            lines.append(Line(entry.label, self.style(entry), x, list[float | None](y), text=text))
        about = "What had been sent up and down by all clients when they were evaluated."
        title = f"Traffic against {self.scale.what}"
        return Plot("traffic", title, about, Axis(f"traffic, {UNITS[unit]}"), Axis(self.scale.label), drawn(lines))

    def time(self) -> Plot:
        alone = len({entry.method for entry in self.entries}) == 1  # then labels need not name the method
        names = [entry.label.removeprefix(f"{entry.method}, ") if alone else entry.label for entry in self.entries]
        labels = ticks([name.replace(", ", ",\n") for name in names])  # a line for each setting
        bars = []
        for place, (key, name) in enumerate((("seconds_training", "training"), ("seconds_evaluation", "evaluation"))):
            seconds = [fmean(number(run.figures.get(key)) or 0.0 for run in entry.runs) for entry in self.entries]
            bars.append(Bars(name, place, labels, list[float | None](seconds)))
        marks = tuple(bars) if any(value for bar in bars for value in bar.y) else ()
        about = "Wall-clock time of a run" + (", mean over seeds." if self._several_seeds else ".")
        return Plot("time", "Time", about, Axis(""), Axis("seconds"), marks, stacked=True)

    def groups(self) -> Plot:
        """In a federation of groups: how well each is served."""
        found = {entry.label: _by_group(entry.runs) for entry in self.entries}
        names = tuple(dict.fromkeys(name for groups in found.values() for name in groups))
        labels = ticks(names)
        bars = [
            Bars(
                entry.label,
                self.style(entry),
                labels,
                [self._percent(own.get(name)) for name in names],
            )
            for entry in self.entries
            if (own := found[entry.label])
        ]
        about = "Clients' own models, mean over each group."
        return Plot("groups", "Accuracy by group", about, Axis(""), Axis("accuracy, %"), tuple(bars))

    def _percent(self, value: float | None) -> float | None:
        return None if value is None else 100 * value


def _inside(entries: Sequence[Entry], scale: Scale) -> Iterator[Plot]:
    """What single methods have of their own, of the first seed; of many entries of a method only the best."""
    made = [(entry, [plot for make in INSIDE for plot in make(scale, entry.first) if plot.marks]) for entry in entries]
    found = [(entry, plots) for entry, plots in made if plots]
    for entry, plots in found:
        alike = sorted((other for other, _ in found if other.method == entry.method), key=partial(_rank, scale))
        if entry not in alike[:MOST_DETAILS]:
            continue
        cut = f" Shown are the {MOST_DETAILS} best of {len(alike)}." if len(alike) > MOST_DETAILS else ""
        of = entry.label + (f", seed {entry.first.seed}" if len(entry.runs) > 1 else "")
        for plot in plots:
            key = f"{plot.key}-{entry.label[:LONGEST_KEY]}"
            yield replace(plot, key=key, title=f"{of}: {plot.title}", about=f"{plot.about}{cut}")


def _rank(scale: Scale, entry: Entry) -> float:
    """The lower the better clients are served, by validation data where there are any."""
    for data in ("validation", "personalized"):
        values = [number(run.figures.get(f"{data}_{scale.what}")) for run in entry.runs]
        if there := [value for value in values if value is not None]:
            return fmean(there) if scale.regression else -fmean(there)
    return inf


def _by_round(runs: Sequence[RunResult], key: str) -> dict[int, list[float]]:
    """A figure of the rounds that have it, of each seed."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run.rounds:
            value = number(line.get(key))
            if value is not None:
                found.setdefault(line["round"], []).append(value)
    return found


def _by_group(runs: Sequence[RunResult]) -> dict[str, float]:
    """The mean over seeds."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in groups_of(run.figures).items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def _by_traffic(runs: Sequence[RunResult], key: str) -> list[tuple[float, float, int]]:
    """Bytes so far, figure and round; means over seeds."""
    sizes: dict[int, list[float]] = {}
    for run in runs:
        total = 0.0
        for line in run.rounds:
            total += (number(line.get("bytes_up")) or 0.0) + (number(line.get("bytes_down")) or 0.0)
            if number(line.get(key)) is not None:
                sizes.setdefault(line["round"], []).append(total)
    values = _by_round(runs, key)
    return [(fmean(sizes[at]), fmean(values[at]), at) for at in sorted(sizes) if at in values]


def _paired(run: RunResult, base: Sequence[RunResult]) -> list[tuple[float, float, str]]:
    """The accuracies of the same clients with the baseline and with this run, of the same seed."""
    other = next((one for one in base if run.is_like(one)), None)
    before = {client.name: client.accuracy for client in other.served} if other else {}
    pairs = [(before.get(client.name), client.accuracy, client.name) for client in run.served]
    return [(was, now, name) for was, now, name in pairs if was is not None and now is not None]
