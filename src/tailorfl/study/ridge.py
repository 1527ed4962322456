"""The synthetic study of the PPFE paper (section 6.1, figure 3): ridge regression in a federation.

Client k has x ~ N(0, Sigma_k) and y = W_k x + noise (eq. 15), with W_k = (1 - r_p) W_g + r_p W_l(k) (eq. 16). Panel a
has more and more clients, panel b clients that differ more and more. Three ways to serve them are compared:

- Local: the ridge solution of each client.
- FedAvg: the mean of these solutions, for everyone.
- PPFE: T stages. Each fits what the stages before it left over, and a client's model is the sum of its stages.

The paper does not say what a stage is for a model without layers. Here a client solves stage t for the residuals of its
ensemble, exactly; the mean of all solutions is shared, and of its deviation from that mean a client keeps a share. The
share is alpha_t (t - 1) / (T - 1): nothing in stage 1, which is FedAvg, and in later stages ever more of the model,
damped by the complexity alpha_t = alpha^(t - 1), which falls. The penalty falls too: lambda_t = lambda decay^(t - 1).
lambda and alpha are searched on a grid, on validation rows, as lambda is for Local and FedAvg. Another reading is
``personal=coordinates``: alpha_t of the deviation in the last (t - 1) / (T - 1) of the coordinates, none in the others.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from threading import Event
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from rich import box
from rich.table import Table
from torch import Tensor

from tailorfl.data import extras
from tailorfl.seeding import generator
from tailorfl.study.palette import COLOURS

NAME = "ppfe/figure3"
METHODS = ("PPFE", "Local", "FedAvg")
MIXED = "mixed"
VALIDATION_SHARE = 0.2
LARGEST = 300_000_000  # numbers in the inputs or the Gram matrices of one repetition, about 2 GB

Ratio = Annotated[float, Field(ge=0, le=1)]
Point = tuple[str, int, float | str]  # panel, clients, ratio
Row = dict[str, Any]


class Figure3(BaseModel):
    """The options of the study; what the paper leaves open has a default that the documentation names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clients: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        tuple(range(20, 201, 20)), min_length=1, description="panel a: numbers of clients"
    )
    fixed_ratio: Ratio | Literal["mixed"] = Field(0.5, description="panel a: r_p, 0 to 1, or mixed")
    ratios: tuple[Ratio | Literal["mixed"], ...] = Field(
        (*(k / 10 for k in range(11)), "mixed"), min_length=1, description="panel b: r_p, 0 to 1; mixed: drawn, U(0, 1)"
    )
    fixed_clients: int = Field(100, ge=1, description="panel b: clients")
    samples: int = Field(200, ge=5, description="training rows a client, a fifth of them for validation")
    test_samples: int = Field(500, ge=1, description="test rows a client")
    dimension: int = Field(100, ge=1, description="features, d")
    noise: float = Field(0.5, ge=0, description="standard deviation of the noise")
    sigma_g: float | None = Field(None, gt=0, description="deviation of the entries of W_g; default: 1 / sqrt(d)")
    alphas: tuple[float, float] = Field((0.5, 1.5), description="from, to: alpha_k, variance of W_l(k) by W_g's")
    variances: tuple[float, float] = Field((0.5, 1.5), description="from, to: variances of x along Sigma_k's axes")
    stages: int = Field(4, ge=1, le=100, description="stages of PPFE; 1: FedAvg")
    personal: Literal["blend", "coordinates"] = Field("blend", description="what a growing share is personal of")
    decay: float = Field(0.5, gt=0, le=1, description="PPFE: lambda of a stage over that of the stage before")
    penalties: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        tuple(float(f"{10 ** (k / 4):.3g}") for k in range(-12, 9)), min_length=1, description="lambda: what is tried"
    )
    complexities: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1),
        min_length=1,
        description="alpha: what is tried; alpha_t = alpha^(t - 1)",
    )
    repetitions: int = Field(10, ge=1, description="draws of the whole federation")
    seed: int = Field(0, ge=0, description="of all randomness")

    @field_validator("clients", "ratios", "penalties", "complexities")
    @classmethod
    def _rising(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        numbers = [value for value in values if value != MIXED]
        if numbers != sorted(set(numbers)) or MIXED in values[:-1]:
            raise ValueError("allowed: each value once, from small to large, mixed last")
        return values

    @field_validator("alphas", "variances")
    @classmethod
    def _range(cls, values: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= values[0] <= values[1]:
            raise ValueError("allowed: two numbers from 0 on, the larger one last")
        return values

    @model_validator(mode="after")
    def _fits(self) -> "Figure3":
        rows = max(self.samples + self.test_samples, self.dimension)
        if self.most_clients * self.dimension * rows > LARGEST:
            raise ValueError("clients x dimension x samples is too large; allowed: fewer of one of them")
        return self

    @property
    def most_clients(self) -> int:
        return max(*self.clients, self.fixed_clients)

    @property
    def points(self) -> list[Point]:
        """Where the three methods are measured."""
        a: list[Point] = [("a", clients, self.fixed_ratio) for clients in self.clients]
        return a + [("b", self.fixed_clients, ratio) for ratio in self.ratios]


# Data.


@dataclass(frozen=True)
class Rows:
    """The samples of all clients."""

    inputs: Tensor  # [clients, samples, dimension]
    targets: Tensor  # [clients, samples]

    def errors(self, weights: Tensor) -> Tensor:
        """Mean squared error, [clients, *candidates], of weights [clients or 1, dimension, *candidates]."""
        left = product(self.inputs, weights).sub_(self.targets[(..., *[None] * (weights.dim() - 2))])
        return left.square_().mean(1)


class Ridge:
    """The ridge regressions of all clients: one decomposition each, then any penalty and any targets are cheap."""

    def __init__(self, values: Tensor, vectors: Tensor) -> None:
        self.values, self.vectors = values, vectors  # of X^T X / n

    @classmethod
    def of(cls, inputs: Tensor) -> "Ridge":
        values, vectors = torch.linalg.eigh(inputs.mT @ inputs / inputs.shape[1])
        return cls(values.clamp(min=0), vectors)

    def first(self, clients: int) -> "Ridge":
        return Ridge(self.values[:clients], self.vectors[:clients])

    def solve(self, moments: Tensor, penalties: Tensor, before: Tensor | None = None) -> Tensor:
        """The minimizers of mean squared error + penalty * |w|^2, [clients, dimension, penalties, complexities].

        ``moments`` is X^T y / n, [clients, dimension, 1, 1]. With weights ``before``, their residuals are fitted.
        """
        values, along = self.values[..., None, None], product(self.vectors.mT, moments)
        if before is not None:
            along = along - values * product(self.vectors.mT, before)
        return product(self.vectors, along / (values + penalties[:, None]))


def product(matrices: Tensor, stacks: Tensor) -> Tensor:
    """A matrix a client, times a stack of vectors a client: [clients, m, d] x [clients or 1, d, *candidates]."""
    return (matrices @ stacks.flatten(2)).unflatten(2, stacks.shape[2:])


@dataclass(frozen=True)
class Federation:
    """Clients with their training, validation and test rows."""

    ridge: Ridge  # of the training rows
    train: Rows
    validation: Rows
    test: Rows

    @property
    def moments(self) -> Tensor:
        """X^T y / n of the training rows, [clients, dimension, 1, 1]."""
        rows = self.train
        return (rows.inputs.mT @ rows.targets[..., None] / rows.targets.shape[1])[..., None]


@dataclass(frozen=True)
class Repetition:
    """Everything that is drawn in one repetition; all its federations are cut from it, so that they can be compared."""

    shared: Tensor  # W_g, [dimension]
    personal: Tensor  # W_l, [clients, dimension]
    ratios: Tensor  # of the mixed federation, [clients]
    train: Rows  # here and below: its targets are the noise alone, the rest depends on the federation
    validation: Rows
    test: Rows
    ridge: Ridge

    def federation(self, clients: int, ratio: float | str) -> Federation:
        """The first clients, at this personalization ratio."""
        ratios = self.ratios[:clients, None] if ratio == MIXED else float(ratio)
        weights = (1 - ratios) * self.shared + ratios * self.personal[:clients]

        def cut(rows: Rows) -> Rows:
            inputs = rows.inputs[:clients]
            return Rows(inputs, product(inputs, weights[..., None])[..., 0] + rows.targets[:clients])

        return Federation(self.ridge.first(clients), cut(self.train), cut(self.validation), cut(self.test))


def draw(options: Figure3, repetition: int) -> Repetition:
    """Each client has streams of its own: more clients, or more test rows, change nothing of what was there."""
    stream = partial(generator, options.seed, NAME, repetition)
    dimension, clients = options.dimension, range(options.most_clients)
    sigma = 1 / math.sqrt(dimension) if options.sigma_g is None else options.sigma_g
    own = [stream("client", client) for client in clients]
    ratios = _tensor([rng.random() for rng in own])
    alphas = _tensor([rng.uniform(*options.alphas) for rng in own])
    personal = sigma * alphas.sqrt()[:, None] * _tensor([rng.normal(size=dimension) for rng in own])
    axes = torch.linalg.qr(_tensor([rng.normal(size=(dimension, dimension)) for rng in own])).Q
    deviations = _tensor([rng.uniform(*options.variances, dimension) for rng in own]).sqrt()
    spread = deviations[:, :, None] * axes.mT

    def rows(purpose: str, samples: int) -> Rows:
        streams = [stream(purpose, client) for client in clients]
        inputs = _tensor([rng.normal(size=(samples, dimension)) for rng in streams]) @ spread
        return Rows(inputs, _tensor([rng.normal(0, options.noise, samples) for rng in streams]))

    kept = round(VALIDATION_SHARE * options.samples)
    train = rows("train", options.samples - kept)
    validation, test = rows("validation", kept), rows("test", options.test_samples)
    shared = sigma * _tensor(stream("shared").normal(size=dimension))
    return Repetition(shared, personal, ratios, train, validation, test, Ridge.of(train.inputs))


def _tensor(numbers: Any) -> Tensor:
    return torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in numbers])


# Estimators. Each gives its candidates: weights [clients or 1, dimension, penalties, complexities].


def local(federation: Federation, penalties: Tensor) -> Tensor:
    """Every client for itself."""
    return federation.ridge.solve(federation.moments, penalties)


def fedavg(federation: Federation, penalties: Tensor) -> Tensor:
    """The mean of what clients find for themselves."""
    return local(federation, penalties).mean(0, keepdim=True)


def ppfe(federation: Federation, penalties: Tensor, shares: Sequence[Tensor]) -> Tensor:
    """Stage by stage: fit the residuals, share the mean, keep a share of one's deviation from it.

    ``penalties`` is [stages, penalties]; of ``shares`` there is one a stage, [dimension or 1, 1, complexities].
    """
    ridge, moments = federation.ridge, federation.moments
    weights = torch.zeros_like(moments[:1])
    for stage, share in zip(penalties, shares, strict=True):
        own = ridge.solve(moments, stage, before=weights)
        common = own.mean(0, keepdim=True)
        # Where nothing is personal all clients and complexities have one model: it is not copied for each.
        weights = weights + (torch.lerp(common, own, share) if share.any() else common)
    return weights


def falling(options: Figure3) -> Tensor:
    """The penalties of PPFE, [stages, penalties]."""
    return torch.stack([options.decay**stage * _tensor(options.penalties) for stage in range(options.stages)])


def personal_shares(options: Figure3) -> list[Tensor]:
    """What a client keeps of its own in each stage, [dimension or 1, 1, complexities]."""
    complexity, shares = _tensor(options.complexities), []
    for stage in range(options.stages):
        progress = stage / max(1, options.stages - 1)
        if options.personal == "blend":
            covered = torch.full((1, 1, 1), progress, dtype=torch.float64)
        else:
            last = round(progress * options.dimension)
            covered = (torch.arange(options.dimension) >= options.dimension - last).double()[:, None, None]
        shares.append(covered * complexity**stage)
    return shares


@dataclass(frozen=True)
class Fit:
    """The candidate that serves the validation rows best, on average over clients."""

    weights: Tensor  # [clients or 1, dimension]
    penalty: int  # its place among the penalties
    complexity: int
    validation: float


def choose(federation: Federation, candidates: Tensor) -> Fit:
    """The grid search, the same for all methods; it sees no test row."""
    errors = federation.validation.errors(candidates).mean(0)
    penalty, complexity = divmod(int(errors.argmin()), errors.shape[1])
    return Fit(candidates[:, :, penalty, complexity], penalty, complexity, float(errors[penalty, complexity]))


def measure(federation: Federation, options: Figure3) -> list[Row]:
    """The three methods on one federation."""
    penalties = _tensor(options.penalties)
    candidates = {
        "PPFE": lambda: ppfe(federation, falling(options), personal_shares(options)),
        "Local": lambda: local(federation, penalties),
        "FedAvg": lambda: fedavg(federation, penalties),
    }
    rows: list[Row] = []
    for method in METHODS:
        fit = choose(federation, candidates[method]())
        rows.append(
            {
                "method": method,
                "test_mse": float(federation.test.errors(fit.weights[..., None]).mean()),
                "validation_mse": fit.validation,
                "penalty": options.penalties[fit.penalty],
                "complexity": options.complexities[fit.complexity] if method == "PPFE" else "",
            }
        )
    return rows


# The sweeps.


def sweep(options: Figure3, show: Callable[[int, int], None] = lambda done, total: None) -> list[Row]:
    """Both panels: a row for each point, repetition and method."""
    total, done, stop = len(options.points) * options.repetitions, count(1), Event()

    def repeat(number: int) -> list[Row]:
        repetition, rows = draw(options, number), []
        for panel, clients, ratio in options.points:
            if stop.is_set():
                break
            point = {"panel": panel, "clients": clients, "ratio": ratio, "repetition": number}
            rows += [point | row for row in measure(repetition.federation(clients, ratio), options)]
            show(next(done), total)
        return rows

    # One thread a repetition: matrices are small, and sums do not depend on the number of cores.
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(options.repetitions, before), initializer=torch.set_num_threads, initargs=(1,))
    try:
        return [row for rows in pool.map(repeat, range(options.repetitions)) for row in rows]
    finally:
        stop.set()  # after Ctrl-C, or an error in another repetition
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Score:
    """A method at one point, over repetitions."""

    mean: float
    spread: float


def scores(rows: Sequence[Row], panel: str) -> dict[int | float | str, dict[str, Score]]:
    """The points of a panel (clients or ratios) with the score of each method."""
    key = "clients" if panel == "a" else "ratio"
    found: dict[int | float | str, dict[str, list[float]]] = {}
    for row in rows:
        if row["panel"] == panel:
            found.setdefault(row[key], {}).setdefault(row["method"], []).append(row["test_mse"])
    return {
        point: {name: Score(mean(mse), stdev(mse) if len(mse) > 1 else 0.0) for name, mse in methods.items()}
        for point, methods in found.items()
    }


def tables(rows: Sequence[Row], options: Figure3) -> list[Table]:
    """Both panels for the terminal, 80 columns."""
    titles = {
        "a": ("clients", f"panel a: test MSE at r_p = {options.fixed_ratio}"),
        "b": ("r_p", f"panel b: test MSE, {options.fixed_clients} clients"),
    }
    made = []
    for panel, (head, title) in titles.items():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in (head, *METHODS, "PPFE against\nthe better one"):
            table.add_column(column, justify="right", no_wrap=True)
        for point, methods in scores(rows, panel).items():
            better = min(methods["Local"].mean, methods["FedAvg"].mean)
            cells = [f"{methods[name].mean:.4f} ± {methods[name].spread:.4f}" for name in METHODS]
            against = f"{100 * (methods['PPFE'].mean / better - 1):+.1f} %" if better else "-"
            table.add_row(str(point), *cells, against)
        made.append(table)
    return made


# Markers and dashes say the same as colours in print.
LINES = {"PPFE": (COLOURS[0], "o", "-"), "Local": (COLOURS[1], "s", "--"), "FedAvg": (COLOURS[2], "^", "-.")}


def picture(rows: Sequence[Row], options: Figure3, path: Path) -> None:
    """Both panels side by side; bands are one standard deviation over repetitions."""
    with extras.picture(path, (10, 4.2)) as figure:
        left, right = figure.subplots(1, 2)
        _panel(left, scores(rows, "a"), options)
        left.set(xlabel="clients", ylabel="test MSE", title=f"(a) more clients, $r_p$ = {options.fixed_ratio}")
        found = scores(rows, "b")
        _panel(right, {point: methods for point, methods in found.items() if point != MIXED}, options)
        if MIXED in found:
            _mixed(right, found[MIXED])
        title = f"(b) clients that differ more, {options.fixed_clients} clients"
        right.set(xlabel="personalization ratio $r_p$", ylabel="test MSE", title=title)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _panel(axes: Any, found: dict[Any, dict[str, Score]], options: Figure3) -> None:
    points = list(found)
    for name, (colour, marker, dashes) in LINES.items():
        line = [found[point][name] for point in points]
        middle = [score.mean for score in line]
        above = 3 if name == "PPFE" else 2  # where lines meet
        axes.plot(points, middle, dashes, color=colour, marker=marker, ms=5, label=name, zorder=above)
        lower, upper = ([score.mean + sign * score.spread for score in line] for sign in (-1, 1))
        axes.fill_between(points, lower, upper, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(options.noise**2, color="0.4", linestyle=":", label="noise: no method is below")
    axes.grid(alpha=0.3)
    if points:
        axes.set_xticks(points)


def _mixed(axes: Any, methods: dict[str, Score]) -> None:
    """The clients of mixed ratios have no place on the axis: beside it, with bars for bands."""
    ticks = [*axes.get_xticks(), 1.2]
    for number, (name, (colour, marker, _)) in enumerate(LINES.items()):
        place = 1.2 + 0.03 * (number - 1)
        score = methods[name]
        axes.errorbar(place, score.mean, score.spread, color=colour, marker=marker, ms=6, capsize=3)
    axes.axvline(1.1, color="0.7", linewidth=0.8)
    axes.set_xticks(ticks, [*(f"{tick:g}" for tick in ticks[:-1]), MIXED])
