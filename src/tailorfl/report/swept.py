"""A sweep on the page: how clients are served over the values of a key, and which setting is chosen."""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean

from tailorfl.report.marks import Axis, Line, Plot, Scale, drawn, over_seeds
from tailorfl.report.results import Entry, settings_of, shown
from tailorfl.report.runs import number
from tailorfl.study.panels import logarithmic
from tailorfl.study.sweep import best_of

MOST_TICKS = 12


def swept_keys(entries: Sequence[Entry], named: Sequence[str] = ()) -> list[str]:
    """The keys whose values were tried: those that a sweep names, or else those in which entries of one method differ.

    None where there are several methods, or no grid of settings.
    """
    if len({entry.method for entry in entries}) != 1:
        return []
    if named:
        return list(named)
    settings = [settings_of(entry.first) for entry in entries]
    keys = dict.fromkeys(key for own in settings for key in own)
    differ = [key for key in keys if any(own.get(key) != settings[0].get(key) for own in settings)]
    return differ if len(differ) < len(entries) else []  # two values of each of n keys are 2^n settings


def over_settings(entries: Sequence[Entry], scale: Scale, named: Sequence[str] = ()) -> Plot:
    """A line for each combination of the other keys, and the validation data beside the test where there is none."""
    keys = swept_keys(entries, named)
    along = max(keys, key=lambda key: len(_numbers(entries, key)), default="")
    values = _numbers(entries, along)
    lines = _lines(entries, along, keys, scale) if values else iter(())
    what = scale.what.capitalize()
    about = "Each client's own model after the last round, mean over clients."
    if any(len(entry.runs) > 1 for entry in entries):
        about += " The band is one standard deviation over seeds."
    far = bool(values) and logarithmic(values)
    ticks = tuple(sorted(values)) if len(values) <= MOST_TICKS else ()
    return Plot(
        "settings",
        f"{what} over values of {along}",
        about,
        Axis(along, log=far, ticks=ticks),
        Axis(scale.label),
        drawn(lines),
    )


def _numbers(entries: Sequence[Entry], key: str) -> set[float]:
    """The different values of a key; none where they are no numbers."""
    values = [number(entry.first.config.get(key)) for entry in entries]
    found = {value for value in values if value is not None}
    return set() if None in values else found


def _lines(entries: Sequence[Entry], along: str, keys: Sequence[str], scale: Scale) -> Iterator[Line]:
    rest = [key for key in keys if key != along]
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: number(entry.first.config[along]) or 0.0):
        name = ", ".join(f"{key}={shown(entry.first.config.get(key))}" for key in rest)
        groups.setdefault(name, []).append(entry)
    measures = {"": "personalized"} if rest else {"test": "personalized", "validation": "validation"}
    for style, ((name, own), (model, measure)) in enumerate(product(groups.items(), measures.items())):
        yield _line(name or model, style, own, along, f"{measure}_{scale.what}", scale.unit)


def _line(name: str, style: int, entries: Sequence[Entry], along: str, key: str, unit: float) -> Line:
    found: dict[float, list[float]] = {}
    for entry in entries:
        if values := _figures(entry, key):
            # The same setting may be there twice, in folders of their own.
            found.setdefault(float(entry.first.config[along]), []).extend(unit * value for value in values)
    several = any(len(some) > 1 for some in found.values())
    bands = (over_seeds(list(found.values())),) if several else ()
    return Line(name, style, list(found), [fmean(some) for some in found.values()], bands)


def _figures(entry: Entry, key: str) -> list[float]:
    """Of its runs that have come to something."""
    ended = [run.summary for run in entry.runs if run.summary and run.summary.get("personalized_loss") is not None]
    return [value for value in (number(summary.get(key)) for summary in ended) if value is not None]


def choice_of(entries: Sequence[Entry], regression: bool, named: Sequence[str] = ()) -> str:
    """Which setting serves best on validation data, in a line; empty where that cannot be said."""
    if not swept_keys(entries, named):
        return ""
    seeds = max(len(entry.runs) for entry in entries)
    measure = "validation_loss" if regression else "validation_accuracy"
    found = {entry.label: _figures(entry, measure) for entry in entries}
    return best_of({label: values for label, values in found.items() if len(values) == seeds}, regression)
