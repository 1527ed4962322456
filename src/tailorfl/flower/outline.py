"""The data of a federation whose rows are elsewhere: how many there are, and of what form."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data import FederatedData
from tailorfl.data.federated import Split
from tailorfl.data.objects import stack_objects
from tailorfl.data.ragged import Ragged
from tailorfl.errors import UserError
from tailorfl.seeding import generator
from tailorfl.study.config import Experiment

MOST = 10**8  # rows that a site may say it has: the server keeps a number for each
ROWS = 64  # made-up rows that an outline has at most, however many the sites have


@dataclass(frozen=True)
class Form:
    """What a network needs to know of data: alike at all sites of a group, else they cannot train together."""

    kind: str
    shape: tuple[int, ...]
    classes: int  # 0 for a regression
    names: str  # a digest of the classes' names in their order
    detection: bool = False
    vocabulary: int = 0
    words: str = ""  # a digest of the vocabulary: the same number must be the same word everywhere
    vectors: bool = False  # whether words have vectors from a file
    metric: str = "voc07"
    columns: str = ""  # a digest of the names of a table's columns: the same place must be the same column everywhere

    @staticmethod
    def of(data: FederatedData) -> "Form":
        return Form(
            kind=data.kind,
            shape=data.input_shape,
            classes=data.num_classes,
            names=_digest(data.classes),
            detection=data.detection,
            vocabulary=len(data.vocabulary),
            words=_digest(data.vocabulary) if data.vocabulary else "",
            vectors=data.vectors is not None,
            metric=data.metric,
            columns=_digest([column.name for column in data.reading.columns]) if data.kind == "features" else "",
        )

    @staticmethod
    def read(found: Any) -> "Form":
        """What a message says; a ValueError or TypeError where it is no form."""
        form = Form(**{**found, "shape": tuple(found["shape"])})
        _check_types(form, str, "kind", "names", "words", "metric", "columns")
        _check_types(form, bool, "detection", "vectors")
        _check_counts(form.classes, form.vocabulary, *form.shape)
        return form


@dataclass(frozen=True)
class Site:
    """What a site tells of itself: counts, and the form of its data."""

    name: str
    train: int
    validation: int
    test: int
    held: int  # classes of which it has training rows
    form: Form
    partition: int | None = None  # of a trial: which client of the experiment's own data it is
    group: int = 0
    new: bool = False  # never trains
    joining: bool = False  # joins late

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(found: Any) -> "Site":
        """What a message says; a ValueError or TypeError where it is no site."""
        site = Site(**{**found, "form": Form.read(found["form"])})
        _check_types(site, str, "name")
        _check_types(site, bool, "new", "joining")
        _check_counts(site.train, site.validation, site.test, site.held, site.group, site.partition or 0)
        return site


def _check_types(found: Form | Site, kind: type, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(found, name), kind):
            raise ValueError(f"{name} is {getattr(found, name)!r:.40}")


def _check_counts(*numbers: Any) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MOST:
            raise ValueError(f"{number!r:.40} is no count; allowed: 0 to {MOST}")


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def ordered(sites: Sequence[Site]) -> list[Site]:
    """Sites in the order of their numbers: that of the partition in a trial, else of their names."""
    trial = [site.partition is not None for site in sites]
    if any(trial) and not all(trial):
        raise UserError("some sites have data of their own and some a partition of the experiment's; allowed: one kind")
    chosen = sorted(sites, key=lambda site: (site.partition or 0, site.name))
    if any(trial) and [site.partition for site in chosen] != list(range(len(chosen))):
        raise UserError(f"partitions of the sites: {[s.partition for s in chosen]}; allowed: 0 to {len(chosen) - 1}")
    return chosen


def outline(experiment: Experiment, sites: Sequence[Site]) -> FederatedData:
    """The data of these sites as far as a server knows them: made-up rows, as many of them as each site has."""
    forms = {site.group: site.form for site in reversed(sites)}
    groups = max(len(experiment.groups), 1)
    for site in sites:
        if site.group >= groups:
            raise UserError(
                f"{site.name} is of group {site.group}; allowed: 0 to {groups - 1}, those of the experiment"
            )
        if site.form.vectors:
            raise UserError(
                "glove: word vectors from a file stay at the sites, and the server starts with others; allowed: none"
            )
        if site.form != forms[site.group]:
            other = next(s for s in sites if s.group == site.group and s.form == forms[site.group])
            raise UserError(_difference(site, other))
    if not experiment.groups:
        return _made_up(experiment, forms[0], sites)
    empty = sorted(set(range(len(experiment.groups))) - set(forms))
    if empty:
        raise UserError(f"groups: number {empty[0]} has no site; allowed: a site for each of {len(experiment.groups)}")
    views = [_made_up(experiment, form, sites, group) for group, form in sorted(forms.items())]
    largest = max(views, key=lambda view: (view.input_shape[-1], view.num_classes))
    whole = replace(
        largest,
        source=" + ".join(view.source for view in views),
        inputs=largest.inputs[:1],
        targets=largest.targets[:1],
        groups=tuple(views),
        group_of=tuple(site.group for site in sites),
    )
    return whole.with_rows(lambda split: _rows(sites, split))


def with_own(whole: FederatedData, own: FederatedData, client: int) -> FederatedData:
    """The outline of a federation, with one client's real data (the only client of ``own``) in place of made-up."""
    group = whole.group_of[client] if whole.groups else None
    part = whole if group is None else whole.groups[group]

    def rows(split: Split) -> Ragged:
        return _placed(own.rows(split).of(0), client, whole.clients)

    new, joining = whole.new_clients, whole.joining_clients
    real = replace(own, source=part.source, names=whole.names, new_clients=new, joining_clients=joining).with_rows(rows)
    if group is None:
        return real
    views = tuple(real if number == group else view for number, view in enumerate(whole.groups))
    return replace(whole, groups=views).with_rows(rows)


def alone(data: FederatedData, client: int) -> FederatedData:
    """The data of one client of a federation, as those of a federation that has no other."""
    part = data.of(client)
    single = replace(part, names=(data.names[client],), new_clients=(), joining_clients=())
    return single.with_rows(lambda split: _placed(part.rows(split).of(client), 0, 1))


def _placed(rows: Tensor, client: int, clients: int) -> Ragged:
    return Ragged.from_clients(rows, torch.full((len(rows),), client), clients)


def _rows(sites: Sequence[Site], split: Split, group: int | None = None) -> Ragged:
    """Made-up rows, as many as each site of a group has, of as many classes as it has."""
    counts = [getattr(site, split) if group in (None, site.group) else 0 for site in sites]
    kinds = [min(max(site.held, 1), ROWS) for site in sites]
    return Ragged.from_lists([np.arange(count) % kind for count, kind in zip(counts, kinds, strict=True)])


def _made_up(experiment: Experiment, form: Form, sites: Sequence[Site], group: int | None = None) -> FederatedData:
    size = min(max(form.classes, 8), ROWS)
    rng = generator(experiment.seed, "outline")
    if form.kind == "image":
        inputs = torch.from_numpy(rng.integers(0, 256, (size, *form.shape), dtype=np.uint8))
    elif form.kind == "text":
        inputs = torch.from_numpy(rng.integers(0, max(form.vocabulary, 1), (size, *form.shape)))
    else:
        inputs = torch.from_numpy(rng.standard_normal((size, *form.shape), dtype=np.float32))
    numbers = torch.arange(size) % max(form.classes, 1)
    if form.detection:
        targets = stack_objects([[[float(label), 0.2, 0.2, 0.8, 0.8, 0.0]] for label in numbers])
    else:
        targets = numbers if form.classes else torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    image = form.kind == "image"
    return FederatedData(
        source=experiment.data if group is None else group_names(experiment)[group],
        kind=form.kind,  # type: ignore[arg-type]
        inputs=inputs,
        targets=targets,
        classes=tuple(map(str, range(form.classes))),
        names=tuple(site.name for site in sites),
        new_clients=tuple(number for number, site in enumerate(sites) if site.new),
        joining_clients=tuple(number for number, site in enumerate(sites) if site.joining),
        train=_rows(sites, "train", group),
        validation=_rows(sites, "validation", group),
        test=_rows(sites, "test", group),
        mean=torch.zeros(form.shape[0]) if image else None,
        std=torch.ones(form.shape[0]) if image else None,
        vocabulary=tuple(map(str, range(form.vocabulary))),
        metric=form.metric,  # type: ignore[arg-type]
    )


def group_names(experiment: Experiment) -> list[str]:
    """By which sites name their group."""
    return [group.name or f"group-{number}" for number, group in enumerate(experiment.groups)]


def _difference(site: Site, other: Site) -> str:
    mine, theirs = asdict(site.form), asdict(other.form)
    what = next(key for key in mine if mine[key] != theirs[key])
    if what in ("vocabulary", "words"):
        return (
            f"the vocabularies of {site.name} and {other.name} differ, each is made from the site's own rows; "
            "allowed: the same words in the same order, as data=file: has them"
        )
    if what in ("names", "classes"):
        return (
            f"the classes of {site.name} and {other.name} differ in name or order; "
            "allowed: the same, which class_names in the experiment sees to"
        )
    if what == "columns":
        return f"the columns of {site.name} and {other.name} differ in name or order; allowed: the same"
    return f"the data of {site.name} have {what} {mine[what]}, those of {other.name} {theirs[what]}; allowed: the same"
