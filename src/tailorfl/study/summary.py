"""The figures of a run: a line a round, a row a client, and the summary."""

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tailorfl.data import FederatedData
from tailorfl.data.atomic import whole_file
from tailorfl.federation.evaluation import ClientScores
from tailorfl.federation.rounds import Evaluation, Round
from tailorfl.federation.selection import Latecomers
from tailorfl.methods import Method
from tailorfl.study.build import Built
from tailorfl.study.config import Config


@dataclass
class Totals:
    """What adds up over the rounds, through restarts."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    updates: int = 0  # that counted
    diverged_updates: int = 0
    log_bytes: int = 0  # how far the rounds file reached
    measures_bytes: int = 0  # and that of a method's own measures
    notes_bytes: int = 0  # and that of what it wrote down
    ended: bool = False  # the last round is done; only the summary may be missing

    def add(self, record: Round) -> None:
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.seconds_training += record.seconds
        self.updates += len(record.answered)
        self.diverged_updates += len(record.diverged)
        self.seconds_evaluation += record.evaluation.seconds if record.evaluation else 0.0


def round_line(record: Round, data: FederatedData) -> dict[str, Any]:
    """A round as a line of ``rounds.jsonl``."""
    line: dict[str, Any] = {
        "round": record.number,
        "selected": len(record.selected),
        "answered": len(record.answered),
        "diverged": [data.names[client] for client in record.diverged],
        **{fault: [data.names[client] for client in clients] for fault, clients in record.faults.items()},
        "loss": finite(record.loss),
        "lr": record.lr,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "seconds": round(record.seconds, 6),
    }
    if record.evaluation:
        line |= accuracies(record.evaluation, data.regression)
        line |= client_quantiles(record.evaluation.personalized, data.regression)
        line |= group_accuracies(record.evaluation, data)
        line |= {name: _mean(values.values()) for name, values in record.evaluation.measures.items()}
        line["seconds_evaluation"] = round(record.evaluation.seconds, 6)
    return line


def client_quantiles(scores: ClientScores, regression: bool) -> dict[str, float | None]:
    """The accuracies between which lie those of four fifths of the clients."""
    return {f"accuracy_p{share}": None if regression else scores.quantile(share / 100) for share in (10, 90)}


def _mean(values: Iterable[float]) -> float | None:
    """Over the clients of which there is something to measure."""
    there = [value for value in values if not math.isnan(value)]
    return finite(fmean(there)) if there else None


def shown(value: float) -> float | str:
    """As it stands in a table: nothing where there was nothing to measure."""
    return "" if math.isnan(value) else value


def accuracies(evaluation: Evaluation, regression: bool) -> dict[str, float | None]:
    """The accuracies of one evaluation; a regression has losses only."""

    def accuracy(scores: ClientScores | None) -> float | None:
        return None if scores is None or regression else scores.accuracy

    personalized = evaluation.personalized
    found = {
        "personalized_accuracy": accuracy(personalized),
        "personalized_accuracy_std": None if regression else personalized.spread,
        "worst_decile_accuracy": None if regression else personalized.worst_decile,
        "personalized_loss": personalized.mean_loss,
        "global_accuracy": accuracy(evaluation.common),
        "global_loss": evaluation.common.mean_loss if evaluation.common else None,
        "validation_accuracy": accuracy(evaluation.validation),
        "validation_loss": evaluation.validation.mean_loss if evaluation.validation else None,
        "new_client_accuracy": accuracy(evaluation.new),
        "new_client_loss": evaluation.new.mean_loss if evaluation.new else None,
        "joining_accuracy": accuracy(evaluation.joining),
        "joining_loss": evaluation.joining.mean_loss if evaluation.joining else None,
        "training_accuracy": accuracy(evaluation.training),
        "own_training_loss": evaluation.training.mean_loss if evaluation.training else None,
    }
    found["participation_gap"] = _difference(found["personalized_accuracy"], found["new_client_accuracy"])
    found["out_of_sample_gap"] = _difference(found["training_accuracy"], found["personalized_accuracy"])
    for name, scores in evaluation.others.items():
        found |= {f"{name}_accuracy": accuracy(scores), f"{name}_loss": scores.mean_loss}
    return {key: finite(value) for key, value in found.items()}


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def cold_start(lines: Sequence[dict[str, Any]], late: Latecomers) -> dict[str, float | None]:
    """How well clients that join late were served at the last evaluation before their first round."""
    before = [line for line in lines if line["round"] < late.first and "joining_loss" in line]
    found = before[-1] if before else {}
    return {f"cold_start_{what}": found.get(f"joining_{what}") for what in ("accuracy", "loss")}


def group_accuracies(evaluation: Evaluation, data: FederatedData) -> dict[str, Any]:
    """In a federation of groups: the accuracy of each, and their mean."""
    if not data.groups:
        return {}
    found: dict[str, float | None] = {}
    for number, group in enumerate(data.groups):
        own = {client for client, its in enumerate(data.group_of) if its == number}
        found[group.source] = evaluation.personalized.of(own).accuracy
    tested = [accuracy for accuracy in found.values() if accuracy is not None]
    return {"group_mean_accuracy": sum(tested) / len(tested) if tested else None, "group_accuracies": found}


def group_networks(built: Built[Any], method: Method) -> dict[str, Any]:
    """In a federation of groups: the network of each, and what share of every layer of the global one it has."""
    whole, found = built.network, []
    for number, (group, network) in enumerate(zip(built.data.groups, built.federation.group_networks, strict=True)):
        own = {layer.name: network.size(layer.parameters) for layer in network.layers}
        found.append(
            {
                "group": group.source,
                "clients": built.data.group_of.count(number),
                "input_shape": list(group.input_shape),
                "classes": group.num_classes,
                "parameters": network.size(),
                "shared_parameters": network.size(method.shared(network)),
                "layers": {layer.name: own.get(layer.name, 0) / whole.size(layer.parameters) for layer in whole.layers},
            }
        )
    return {"group_networks": found} if found else {}


def metrics(data: FederatedData) -> dict[str, Any]:
    """Of detectors: which mean average precision their accuracy is, of all or of each group."""
    if not data.detection:
        return {}
    return {"metric": {group.source: group.metric for group in data.groups} if data.groups else data.metric}


def finite(value: float | None) -> float | None:
    """None in place of what JSON has no word for: the loss of a model that diverged."""
    return value if value is not None and math.isfinite(value) else None


def summarize(built: Built[Any], config: Config, totals: Totals, last: Round) -> dict[str, Any]:
    """The summary of a finished run."""
    assert last.evaluation is not None
    network, method = built.network, config.method
    return {
        "method": config.method_name,
        "data": config.experiment.data,
        "network": network.name,
        "seed": config.experiment.seed,
        "rounds": last.number,
        "clients": built.data.clients,
        **accuracies(last.evaluation, built.data.regression),
        **group_accuracies(last.evaluation, built.data),
        **metrics(built.data),
        **group_networks(built, method),
        "training_loss": finite(last.loss),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "parameters": network.size(),
        "shared_parameters": network.size(method.shared(network)),
        "updates": totals.updates,
        "diverged_updates": totals.diverged_updates,
        "seconds_training": round(totals.seconds_training, 3),
        "seconds_evaluation": round(totals.seconds_evaluation, 3),
        "device": str(network.device),
        "machine": machine(network.device),
    }


def machine(device: torch.device) -> str:
    """What the seconds of a run were measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def write_clients(path: Path, data: FederatedData, evaluation: Evaluation, late: Latecomers) -> None:
    """A row a client: its sizes, how well it is served, and its first round.

    A run that reached its target may end before some clients join: they never trained, and are new.
    """
    waiting = late.clients - set(evaluation.personalized.clients)
    strangers = [evaluation.new, evaluation.joining.of(set(waiting)) if evaluation.joining else None]
    first = dict.fromkeys(data.new_clients, "") | dict.fromkeys(late.clients, str(late.first))
    common = {} if evaluation.common is None else dict(_rows(evaluation.common))
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["client", "new", "train", "validation", "test", "accuracy", "loss", "global_accuracy", "joined"]
        writer.writerow(columns)
        for new, scores in ((0, evaluation.personalized), *((1, found) for found in strangers)):
            for client, (accuracy, loss) in _rows(scores) if scores else ():
                sizes = [len(data.rows(split).of(client)) for split in ("train", "validation", "test")]
                shared = "" if client not in common or data.regression else common[client][0]
                served = ["" if data.regression else accuracy, loss, shared]
                writer.writerow([data.names[client], new, *sizes, *served, first.get(client, "1")])


def write_classes(path: Path, data: FederatedData) -> None:
    """A row for each client and class of which it has training rows."""
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "class", "train"])
        counts = data.label_counts().tolist()
        for client, own in enumerate(counts):
            classes = data.of(client).classes
            rows = [(data.names[client], classes[label], rows) for label, rows in enumerate(own) if rows]
            writer.writerows(rows)


def _rows(scores: ClientScores) -> list[tuple[int, tuple[float | str, float | str]]]:
    rows = []
    for client, samples, correct, loss in zip(scores.clients, scores.samples, scores.correct, scores.loss, strict=True):
        rows.append((client, (correct / samples, loss / samples) if samples else ("", "")))
    return rows
