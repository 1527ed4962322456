"""The configuration of an experiment: flat keys, checked once, complete and replayable."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from tailorfl.cohort.engine import Mode
from tailorfl.data import Group, PartitionOptions, SourceOptions
from tailorfl.errors import UserError
from tailorfl.federation.selection import Selection
from tailorfl.methods import Method, find_method, methods
from tailorfl.models.initialize import Start

RESERVED = {"method", "seeds"}  # keys of a configuration and of a comparison that are no field of the experiment
OPTIONS = {"data_dir": "--data-dir FOLDER"}  # of commands, which may be taken for keys
LARGEST_SEED = 2**63 - 1  # as tables of numbers have room for


class Experiment(PartitionOptions, SourceOptions):
    """Everything but the method: data, federation, network, evaluation, machine."""

    data: str = Field(
        "digits", description="a source (tailor data list), or csv:, parquet:, folder:, voc:, coco:, file:, hf:"
    )
    augment: str = Field(
        "none",
        description="of training images: flip, crop4, rotate, colour; with boxes expand, sample; once a round",
    )
    pixels: Literal["standard", "unit"] = Field(
        "standard", description="standard: mean 0 and deviation 1 in each channel; unit: from 0 to 1"
    )
    groups: tuple[Group, ...] = Field((), description="groups of clients with other image sizes, classes or sources")
    network: str = Field("auto", description="a network's name, or package.module:Class")
    network_options: dict[str, Any] = Field({}, description="options of the network, for example {hidden: [100]}")
    init: Start = Field("default", description="how weights begin: default, glorot, he, orthogonal, uniform")
    head_init: Start | None = Field(None, description="the same of the last layer; default: as init")
    base_classes: int | None = Field(None, ge=2, description="groups: classes at width 1; default: the most of a group")
    base_size: int = Field(8, ge=1, description="groups: pixels of a network's last feature map, by which it is deep")
    rounds: int = Field(30, ge=1, description="communication rounds")
    clients_per_round: int | float | None = Field(None, gt=0, description="a number, a fraction up to 1.0; default 10")
    selection: Selection = Field("uniform", description="uniform, binomial, or per-group")
    everyone_in: tuple[int, ...] = Field((), description="rounds in which everyone takes part; -1 is the last")
    joining_round: int | None = Field(None, description="the first round of the joining_clients, 2 or later")
    evaluate_every: int = Field(10, ge=0, description="rounds between evaluations; 0: only after the last")
    evaluate_training: bool = Field(False, description="evaluate clients' models on their training rows too")
    metric: Literal["auto", "voc07", "coco"] = Field(
        "auto", description="detection: which mean average precision; auto: coco for coco:PATH, else voc07"
    )
    evaluate_last: int = Field(1, ge=1, description="rounds at the end that are evaluated one and all")
    target_accuracy: float | None = Field(None, gt=0, le=1, description="stop at this validation accuracy")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="of all randomness")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    engine: Mode = Field("auto", description="auto, stacked, one-by-one")
    stack_size: int | None = Field(None, ge=1, description="clients in one stack; default: as many as fit")
    workers: int | None = Field(None, ge=1, description="clients trained side by side on a CPU; default: its cores")
    precision: Literal["float32", "float64", "mixed"] = Field(
        "float32", description="of all computation; mixed: of training passes bfloat16, for speed on a GPU"
    )

    @model_validator(mode="after")
    def _groups_say_how_many(self) -> "Experiment":
        if self.groups and self.clients is not None:
            raise ValueError(f"clients={self.clients}: the groups say how many there are; allowed: one of the two")
        return self

    @field_validator("clients_per_round")
    @classmethod
    def _number_or_fraction(cls, value: int | float | None) -> int | float | None:
        if isinstance(value, float) and value > 1:
            if not value.is_integer():
                raise ValueError("allowed: a whole number, or a fraction up to 1.0")
            return int(value)
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        kind, _, number = value.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
            raise ValueError("allowed: auto, cpu, cuda, cuda:N")
        return value


@dataclass(frozen=True)
class Config:
    """An experiment and the method that runs in it."""

    method_name: str
    experiment: Experiment
    method: Method

    def flat(self) -> dict[str, Any]:
        """All keys with their values, as written to ``config.yaml``."""
        return {
            "method": self.method_name,
            **self.experiment.model_dump(mode="json"),
            **self.method.model_dump(mode="json"),
        }

    def changes(self, other: "Config") -> list[str]:
        """The keys in which another configuration differs, as ``key: was -> is``."""
        mine, theirs = self.flat(), other.flat()
        keys = dict.fromkeys([*mine, *theirs])
        return [f"{key}: {mine.get(key)} -> {theirs.get(key)}" for key in keys if mine.get(key) != theirs.get(key)]


HELD_OUT = 0.1  # of a client's training rows, for methods that ask for it, where nothing is said


def configure(method_name: str, settings: Mapping[str, Any]) -> Config:
    """A checked configuration; every problem in one line."""
    kind = find_method(method_name)
    _check_options(method_name, kind)
    own = {key: value for key, value in settings.items() if key in kind.model_fields}
    rest = {key: value for key, value in settings.items() if key not in kind.model_fields and key != "method"}
    allowed = [*Experiment.model_fields, *kind.model_fields]
    see = f"tailor methods {method_name}"
    problems = [unknown_key(key, method_name, allowed, see) for key in rest if key not in Experiment.model_fields]
    known = {key: value for key, value in rest.items() if key in Experiment.model_fields}
    experiment, method = _checked(Experiment, known, problems), _checked(kind, own, problems)
    if problems or experiment is None or method is None:
        raise UserError("; ".join(problems))
    if method.holds_out() and "validation_fraction" not in settings:
        experiment = experiment.model_copy(update={"validation_fraction": HELD_OUT})
    _check_together(experiment)
    if experiment.groups:
        _check_groups(method_name, method)
    return Config(method_name, experiment, method.completed(experiment.rounds))


def _check_options(method_name: str, kind: type[Method]) -> None:
    """All keys stand side by side: an option called like one of the experiment's would take its value away."""
    taken = [key for key in kind.model_fields if key in Experiment.model_fields or key in RESERVED]
    if taken:
        raise UserError(
            f"method {method_name} has an option {taken[0]!r}, which is a key of every experiment; "
            "allowed: another name for it"
        )


def read_settings(pairs: Sequence[str], file: Path | None = None) -> dict[str, Any]:
    """Settings of a YAML file, and ``key=value`` pairs over them."""
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UserError(f"{pair!r} is not a setting; allowed: key=value")
        check_new(key, given)
        try:
            given[key] = parse_yaml(text)
        except yaml.YAMLError as error:
            raise UserError(f"{key}={text}: not a value ({str(error).splitlines()[0]})") from error
    return {**(_read_yaml(file) if file else {}), **given}


def check_new(key: str, given: Collection[str]) -> None:
    """Refuse a key of the command that is there already: which of its values counts would be a guess."""
    if key in given:
        raise UserError(f"{key} is named twice; allowed: every key once")


def read_config(file: Path) -> Config:
    """The configuration that a run's folder holds."""
    settings = _read_yaml(file)
    if "method" not in settings:
        raise UserError(f"{file} names no method; allowed: a line 'method: NAME'")
    return configure(str(settings["method"]), settings)


def parse_yaml(text: str) -> Any:
    """What a YAML text holds; a YAMLError where a key is there twice."""
    return yaml.load(text, _EachKeyOnce)


class _EachKeyOnce(yaml.SafeLoader):
    """YAML forbids keys that are there twice; yaml takes the last. Those that ``<<`` brings may be replaced."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"{key.value} is named twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def read_yaml(file: Path, what: str) -> Any:
    """What a YAML file holds; ``what`` it is, for the line that refuses one."""
    try:
        return parse_yaml(file.read_text())
    except OSError as error:
        raise UserError(f"{what} {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {file} is not YAML: {' '.join(str(error).split())}") from error


def _read_yaml(file: Path) -> dict[str, Any]:
    found = read_yaml(file, "configuration")
    if not isinstance(found, dict):
        raise UserError(f"configuration {file} holds no settings; allowed: lines of 'key: value'")
    return {str(key): value for key, value in found.items()}


def _checked(kind: type, settings: Mapping[str, Any], problems: list[str]) -> Any:
    try:
        return kind(**settings)
    except ValidationError as error:
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"][:1])
            line = f"{key}={settings.get(key)}: {in_words(problem['msg'])}" if key else in_words(problem["msg"])
            if not key or not any(known.startswith(f"{key}=") for known in problems):
                problems.append(line)
        return None


def in_words(message: str) -> str:
    """What pydantic says of a value, as a user of the command reads it."""
    text = message.removeprefix("Value error, ").replace("a valid tuple", "a list, for example [1, 5]")
    text = text.replace("Tuple should have", "allowed: a list of").replace(" after validation", "")
    text = text.replace("Field required", "a value is missing")
    return f"{text[0].lower()}{text[1:]}"


def unknown_key(key: str, owner: str, allowed: Sequence[str], see: str) -> str:
    """A line on a key that is not there, with keys of like spelling."""
    if key.replace("-", "_") in OPTIONS:
        return f"unknown key {key!r} for {owner}; allowed: the option {OPTIONS[key.replace('-', '_')]} of the command"
    close = difflib.get_close_matches(key, allowed, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else f"see '{see}' for all keys"
    return f"unknown key {key!r} for {owner}; {hint}"


def _check_together(experiment: Experiment) -> None:
    if experiment.target_accuracy is not None and experiment.validation_fraction == 0:
        raise UserError("target_accuracy is read off validation data; set validation_fraction above 0")
    if experiment.joining_clients or experiment.joining_round is not None:
        _check_joining(experiment)
    wrong = [number for number in experiment.everyone_in if not 1 <= abs(number) <= experiment.rounds]
    if wrong:
        raise UserError(f"everyone_in={wrong}: allowed are rounds 1 to {experiment.rounds}, or -1 for the last")


def _check_groups(method_name: str, method: Method) -> None:
    """Whether a method can serve clients with other networks, whose heads are for other classes."""
    if not method.mixed:
        able = (
            f"{name} with personal_layers=1" if _shares_head(kind.model_construct()) else name
            for name, kind in methods().items()
            if kind.mixed
        )
        raise UserError(f"{method_name} cannot serve groups of clients with other networks; allowed: {', '.join(able)}")
    if _shares_head(method):
        raise UserError(f"{method_name}: groups cannot share a head; allowed: personal_layers=1 or more")


def _shares_head(method: Method) -> bool:
    return getattr(method, "personal_layers", None) == 0


def _check_joining(experiment: Experiment) -> None:
    first, rounds = experiment.joining_round, experiment.rounds
    if not experiment.joining_clients:
        raise UserError(f"joining_round={first}: nobody joins then; allowed: it and joining_clients of 1 or more")
    if rounds < 2:
        raise UserError(f"rounds={rounds}: clients cannot join later; allowed: 2 or more with joining_clients")
    if first is None:
        raise UserError(
            f"joining_clients={experiment.joining_clients}: when they join is missing; "
            f"allowed: a joining_round from 2 to {rounds}"
        )
    if not 2 <= first <= rounds:
        raise UserError(f"joining_round={first}: allowed are rounds 2 to {rounds}")


def shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    return "null" if value is None else str(value)
