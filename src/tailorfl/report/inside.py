"""Plots of what single methods have of their own: stages, mixed layers, forgetting, slices of a network."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from tailorfl.report.marks import Axis, Band, Bars, HeatMap, Line, Numbers, Plot, Scale, drawn, thinned, ticks
from tailorfl.report.runs import Notes, RunResult, groups_of, number
from tailorfl.study.mixing import WAYS, frozen_layers, has_mixing


def _stages(scale: Scale, run: RunResult) -> Iterator[Plot]:
    """PPFE: how well each stage serves alone and with those before it, what it shares, and the betas of clients."""
    if stages := _listed(run, "stages", "stage"):
        labels = tuple(f"stage {row['stage']}" for row in stages)

        def bars(name: str, key: str, place: int, unit: float) -> Bars:
            values = [number(row.get(key)) for row in stages]
            return Bars(name, place, labels, [None if value is None else unit * value for value in values])

        marks = (
            bars("alone", f"stage_{scale.what}", 0, scale.unit),
            bars("ensemble up to it", f"ensemble_{scale.what}", 1, scale.unit),
        )
        about = "The model of each stage alone, and the ensemble of the stages up to it, after the stage's last round."
        yield Plot("stages", "stages", about, Axis(""), Axis(scale.label), marks)
        sizes = bars("shared", "shared_parameters", 0, 1.0), bars("personal", "personal_parameters", 1, 1.0)
        about = "Parameters of each stage's network that travel, and those that stay with the client."
        yield Plot("stage-sizes", "what stages share", about, Axis(""), Axis("parameters"), sizes, stacked=True)
    stage_of = {line["round"]: stage for line in run.rounds if (stage := number(line.get("stage"))) is not None}
    lines = []
    for place, stage in enumerate(dict.fromkeys(stage_of.values())):
        rows = [row for row in run.measures if stage_of.get(number(row["round"])) == stage]
        lines.append(_measured(rows, "beta", f"stage {stage:g}", place, "round", scale.most))
    about = (
        "The weight of the running stage's model in each client's ensemble: mean, and a band of 80 % of the clients."
    )
    yield Plot("betas", "betas", about, Axis("round", whole=True), Axis("beta"), drawn(lines))


def _mixing(scale: Scale, run: RunResult) -> Iterator[Plot]:
    """pMixFed: the share of the global layer in a client's, by layer and round, the mix factors, and frozen layers."""
    notes: Notes = run.notes
    if not has_mixing(notes):
        return
    rounds = thinned(sorted(notes), scale.most)
    axes = Axis("round"), Axis("layer, from the base")
    for way, name in WAYS.items():
        layers = 1 + max(
            (
                int(key.split("_")[1])
                for c in notes.values()
                for note in c.values()
                for key in note
                if _degree(key, way)
            ),
            default=0,
        )
        values: list[Numbers] = [
            [_mean(note.get(f"{way}_{layer}") for note in notes[at].values()) for at in rounds]
            for layer in range(1, layers)
        ]
        heat = HeatMap(
            "share of the global layer", tuple(map(str, rounds)), tuple(map(str, range(1, layers))), values, 0, 1
        )
        about = f"On {name}: how much of a layer is the global one, mean over the clients of a round."
        yield Plot(f"mix-{way}", f"mixed layers, {name}", about, *axes, (heat,) if layers > 1 else ())
    lines = []
    for place, (way, name) in enumerate(WAYS.items()):
        known = {at: [note[f"mu_{way}"] for note in notes[at].values() if f"mu_{way}" in note] for at in rounds}
        lines.append(_spread(name, place, {at: values for at, values in known.items() if values}, scale.most))
    about = "The factor by which layers are mixed: mean, and a band of 80 % of the round's clients."
    yield Plot("mix-factors", "mix factors", about, Axis("round", whole=True), Axis("μ", 0, 1), drawn(lines))
    frozen = frozen_layers({at: notes[at] for at in rounds})
    line = Line("layers", 0, [float(at) for at in frozen], list(frozen.values()))
    about = "Layers of a client that nothing global is mixed into, mean over the clients of a round."
    yield Plot("mix-frozen", "frozen layers", about, Axis("round", whole=True), Axis("layers", 0), (line,))


def _degree(key: str, way: str) -> bool:
    return key.startswith(f"{way}_") and key.split("_")[1].isdigit()


def _forgetting(scale: Scale, run: RunResult) -> Iterator[Plot]:
    """PFPS-LWC: how clients are served after rounds away, by the body received, after recall, and by their own last."""
    if not run.measures or "rounds_away" not in run.measures[0]:
        return
    names = {"received": "body just received", "recalled": "after recall", "kept": "client's own last body"}
    for key, column, title, axis, along in (
        ("forgetting", "rounds_away", "forgetting", "rounds away", "all evaluations together, by rounds away"),
        ("forgetting-rounds", "round", "forgetting over rounds", "round", "round by round"),
    ):
        lines = [
            _measured(run.measures, f"{kind}_{scale.what}", name, place, column, scale.most, scale.unit, band=False)
            for place, (kind, name) in enumerate(names.items())
        ]
        about = f"Clients with the body they just received, after recall, and with their own last body: means, {along}."
        yield Plot(key, title, about, Axis(axis, whole=True), Axis(scale.label), drawn(lines))


def _slices(scale: Scale, run: RunResult) -> Iterator[Plot]:
    """ScalableFL and others in a federation of groups: who has how much of the global network, and learns how fast."""
    by_round = {line["round"]: groups_of(line) for line in run.evaluated}
    names = dict.fromkeys(name for groups in by_round.values() for name in groups)
    lines = []
    for place, name in enumerate(names):
        rounds = thinned([at for at, groups in by_round.items() if name in groups], scale.most)
        lines.append(Line(name, place, [float(at) for at in rounds], [100 * by_round[at][name] for at in rounds]))
    about = "Clients' own models, mean over each group."
    yield Plot(
        "groups-rounds", "groups over rounds", about, Axis("round", whole=True), Axis("accuracy, %"), drawn(lines)
    )
    groups = [one for one in _listed(run, "group_networks", "group", "clients") if isinstance(one.get("layers"), dict)]
    if not groups:
        return
    layers = tuple(groups[0]["layers"])
    rows = ticks([f"{one['group']} ({one['clients']})" for one in groups])
    shares: list[Numbers] = [[number(one["layers"].get(layer)) for layer in layers] for one in groups]
    heat = HeatMap("share of the global layer", layers, rows, [[_times(100, v) for v in row] for row in shares], 0, 100)
    about = "How much of each layer of the global network, in %, the network of a group has; in brackets its clients."
    shared = any(number(one.get("shared_parameters")) for one in groups)  # else there is no global network
    marks = (heat,) if layers and shared else ()
    yield Plot("slices", "slices of groups", about, Axis("layer, from the base"), Axis(""), marks)
    sizes = [
        Bars(name, place, rows, [number(one.get(key)) for one in groups])
        for place, (name, key) in enumerate((("shared", "shared_parameters"), ("all", "parameters")))
    ]
    about = "Parameters of each group's network, and those of them that travel."
    yield Plot("group-sizes", "networks of the groups", about, Axis(""), Axis("parameters"), tuple(sizes))


def _listed(run: RunResult, key: str, *needed: str) -> list[dict[str, Any]]:
    """The entries of a list in the summary that have what is needed; none where somebody changed the file."""
    found = (run.summary or {}).get(key)
    entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [one for one in entries if all(name in one for name in needed)]


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _measured(
    rows: Iterable[Mapping[str, str]],
    column: str,
    name: str,
    style: int,
    along: str,
    most: int,
    unit: float = 1.0,
    band: bool = True,
) -> Line:
    """The mean over clients of what a method measures, by the round or by another number of theirs."""
    found: dict[int, list[float]] = {}
    for row in rows:
        at, value = number(row[along]), number(row.get(column))
        if at is not None and value is not None:
            found.setdefault(int(at), []).append(unit * value)
    return _spread(name, style, dict(sorted(found.items())), most, band)


def _spread(name: str, style: int, found: Mapping[int, list[float]], most: int, band: bool = True) -> Line:
    places = thinned(list(found), most)
    y: Numbers = [fmean(found[at]) for at in places]
    ends = [[float(np.quantile(found[at], share)) for at in places] for share in (0.1, 0.9)]
    bands = (Band("80 % of the clients", *map(list[float | None], ends)),) if band else ()
    text = tuple(f"{len(found[at])} clients" for at in places)
    return Line(name, style, [float(at) for at in places], y, bands, text)


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


INSIDE: tuple[Callable[[Scale, RunResult], Iterator[Plot]], ...] = (_stages, _mixing, _forgetting, _slices)
