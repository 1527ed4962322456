"""Trainings of several runs as one: clients that are trained alike share a stack, whichever run they belong to."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tailorfl.cohort.objective import Batch, Client, Objective
from tailorfl.cohort.samples import Samples
from tailorfl.cohort.schedule import Schedule
from tailorfl.cohort.training import Training
from tailorfl.data.federated import FederatedData
from tailorfl.models.network import Network, Values
from tailorfl.models.slicing import leading

COMMON = "common to its run: "  # before the name of a tensor that is the same for all clients of a run


@dataclass(frozen=True)
class OfSeveralRuns:
    """An objective whose common tensors are each client's own, because they differ between the runs."""

    objective: Objective
    names: tuple[str, ...]

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        own = dict(client.own)
        common = {name: own.pop(COMMON + name) for name in self.names}
        return self.objective(replace(client, own=own, common=common), batch)


def form(training: Training) -> Hashable:
    """What trainings of one network on the same data must have in common to be joined."""
    return training.rates, training.signature()


@dataclass(frozen=True)
class Joined:
    """Several trainings of one form as one, with copies of all that they change."""

    whole: Training
    parts: tuple[Training, ...]
    places: Tensor  # int64 [clients]: where the clients of the parts, one part after the other, are in the whole

    @staticmethod
    def of(parts: Sequence[Training], network: Network, data: FederatedData) -> "Joined":
        """``network`` and ``data`` are equal to those of each part."""
        order = _from_large_to_small(parts)
        first, names = parts[0], tuple(parts[0].common)
        whole = replace(
            first,
            network=network,
            objective=OfSeveralRuns(first.objective, names) if names else first.objective,
            values={name: _laid([part.values[name] for part in parts], order) for name in first.values},
            samples=_samples([part.samples for part in parts], order, data),
            schedule=_schedule([part.schedule for part in parts], order),
            own={name: _laid([part.own[name] for part in parts], order) for name in first.own} | _common(parts, order),
            common={},
        )
        return Joined(whole, tuple(parts), order.argsort())

    def hand_back(self) -> None:
        """Give every part what its clients were trained to."""
        start = 0
        for part in self.parts:
            places = self.places[start : start + len(part.loss)]
            start += len(part.loss)
            part.loss.copy_(self.whole.loss[places])
            for name, tensor in part.values.items():
                tensor.copy_(self.whole.values[name][places])


def _from_large_to_small(parts: Sequence[Training]) -> Tensor:
    """The order of a cohort: by steps, and by samples where these are equal."""
    steps = torch.cat([part.schedule.steps for part in parts])
    by_size = torch.cat([part.samples.counts for part in parts]).argsort(descending=True, stable=True)
    return by_size[steps[by_size].argsort(descending=True, stable=True)]


def _common(parts: Sequence[Training], order: Tensor) -> Values:
    """What is common to the clients of each part, for each of them."""
    return {
        COMMON + name: _laid(
            [part.common[name].expand(len(part.loss), *part.common[name].shape) for part in parts], order
        )
        for name in parts[0].common
    }


def _samples(parts: Sequence[Samples], order: Tensor, data: FederatedData) -> Samples:
    first = parts[0]
    return replace(
        first,
        data=data,
        rows=_laid([part.rows for part in parts], order),
        counts=_laid([part.counts for part in parts], order),
        weights=None if first.weights is None else _laid([_there(part.weights) for part in parts], order),
        inputs=None if first.inputs is None else _laid([_there(part.inputs) for part in parts], order),
        draws={name: _laid([part.draws[name] for part in parts], order) for name in first.draws},
    )


def _schedule(parts: Sequence[Schedule], order: Tensor) -> Schedule:
    seeds = [seed for part in parts for seed in part.seeds]
    return Schedule(
        _laid([part.positions for part in parts], order, dim=1, empty=-1),
        {name: _laid([part.draws[name] for part in parts], order, dim=1) for name in parts[0].draws},
        _laid([part.steps for part in parts], order),
        tuple(seeds[at] for at in order.tolist()),
        parts[0].whole,
    )


def _laid(tensors: Sequence[Tensor], order: Tensor, dim: int = 0, empty: int = 0) -> Tensor:
    """Tensors one after the other along the clients' dimension, padded to the longest elsewhere, in this order."""
    sizes = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        sizes[dim] = tensor.shape[dim]
        room = tensor if list(tensor.shape) == sizes else tensor.new_full(sizes, empty)
        if room is not tensor:
            leading(room, tensor.shape).copy_(tensor)
        padded.append(room)
    return torch.cat(padded, dim).index_select(dim, order)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
