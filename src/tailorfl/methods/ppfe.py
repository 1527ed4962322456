"""PPFE: an ensemble of models that share less and less, each trained on what those before it got wrong."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.cohort import Batch, Cohort
from tailorfl.cohort.boosting import coefficient, reweighted
from tailorfl.cohort.scoring import score
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.ensemble import Combination, Ensemble, combine
from tailorfl.models.network import Layer, Network, Values
from tailorfl.models.reduction import Reduction, parameters
from tailorfl.models.stages import Shrinking, Stage

# Settings by name; an option that is given wins over them.
PAPER: dict[str, Any] = {"reweight": True}
PRESETS: dict[str, dict[str, Any]] = {
    "best": {},
    "paper": PAPER,
    "no-reduction": {**PAPER, "reduction": "none"},
    "m1": {"stages": 2, "personal_depths": (0, 1), "members": "last"},
    "m2": {"stages": 2, "personal_depths": (0, 2), "members": "last"},
    "m3": {"stages": 2, "personal_depths": (0, 3), "members": "last"},
    "wp": {**PAPER, "personal_depths": (0, 1, 1, 1), "reduction": "none"},
    "wpw": {"personal_depths": (0, 1, 1, 1), "reduction": "none", "reweight": False},
}

# Of the rounds, stage by stage. Ours is 130, 15, 10 and 5 of 160: what is shared needs training most.
BEST_SHARES, PAPER_SHARES = (26, 3, 2, 1), (3, 5, 4, 4)


class PPFE(Method):
    """Progressive personalized federated ensembles (Emrani, Najafi, Motahari, 2026).

    "Federated Ensemble Learning with Progressive Model Personalization". Stage 1 is FedAvg. Each further stage keeps
    one more layer with the client, in a network of less capacity, and weighs a client's samples by what the stages
    before got wrong. A client is served by all its stages' models together, each with a weight beta by how well it does
    on the client's data. With one stage it is FedAvg; ``m1`` with ``body_lr`` of ``lr`` is FedAvg followed by FedPer.
    """

    name: ClassVar[str] = "ppfe"
    paper: ClassVar[str] = "Emrani et al. 2026"
    shares: ClassVar[str] = "fewer layers in each stage"
    detectors: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    preset: Literal["best", "paper", "no-reduction", "m1", "m2", "m3", "wp", "wpw"] = Field(
        "best", description="defaults: the best found, the paper's, or of the ablations in its tables 3 to 5"
    )
    stages: int | None = Field(
        None, ge=1, description="models in the ensemble; default 4, or one a round where there are fewer; 1: FedAvg"
    )
    stage_rounds: tuple[int, ...] | None = Field(
        None, description="rounds of each stage; default 26 : 3 : 2 : 1, with other presets the paper's 3 : 5 : 4 : 4"
    )
    personal_depths: tuple[int, ...] | None = Field(
        None, description="layers at the head that stay with the client, stage by stage; default 0, 1, 2, 3"
    )
    full_last_round: bool = Field(True, description="let all clients take part in the last round of a stage")
    reduction: Reduction = Field("svd", description="svd, width, sparse, none: how later stages get smaller")
    ranks: tuple[tuple[int, ...], ...] | None = Field(
        None, description="svd: ranks of the linear layers, a list for each stage from the third on"
    )
    shrinkage: float = Field(0.5, ge=0, description="width: hidden widths of personal layers times stage^-shrinkage")
    sparsity: float = Field(0.3, ge=0, lt=1, description="sparse: share of a personal layer's weights held at zero")
    sparsity_step: float = Field(0.1, ge=0, lt=1, description="sparse: so much more in each newly personal layer")
    body_lr: float = Field(0.001, gt=0, description="learning rate of shared layers after the first stage")
    head_lr: float | None = Field(None, gt=0, description="that of personal layers; default: lr")
    head_epochs: int = Field(0, ge=0, description="epochs of the personal layers on a stage's finished body")
    reweight: bool = Field(False, description="weigh samples by the ensemble's loss from stage to stage")
    boosting_loss: Literal["loss", "zero-one"] = Field("loss", description="what weights and betas are made of")
    weight_cap: float | None = Field(10.0, gt=1, description="largest weight of a sample, the mean being 1; null: none")
    combination: Combination = Field("probabilities", description="what the ensemble adds: probabilities, or logits")
    members: Literal["all", "last"] = Field("all", description="which stages' models serve a client")

    # Options.

    @field_validator("stage_rounds")
    @classmethod
    def _some_rounds(cls, rounds: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if rounds is not None and not (rounds and min(rounds) >= 1):
            raise ValueError("allowed: one or more rounds for each stage")
        return rounds

    @field_validator("personal_depths")
    @classmethod
    def _deeper(cls, depths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if depths is not None and (not depths or depths[0] != 0 or list(depths) != sorted(depths)):
            raise ValueError("allowed: numbers that start with 0 and do not fall, for example [0, 1, 2, 3]")
        return depths

    @field_validator("ranks")
    @classmethod
    def _positive(cls, ranks: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        if ranks is not None and any(rank < 1 for level in ranks for rank in level):
            raise ValueError("allowed: ranks of 1 or more")
        return ranks

    @model_validator(mode="after")
    def _ranks_of_svd(self) -> Self:
        if self.ranks is not None and self.reduction != "svd":
            raise ValueError(f"ranks belong to reduction=svd, and it is {self.reduction}")
        return self

    def completed(self, rounds: int) -> Self:
        """Divide the rounds into stages."""
        if self.stage_rounds is not None and sum(self.stage_rounds) != rounds:
            total = sum(self.stage_rounds)
            raise UserError(
                f"stage_rounds={_listed(self.stage_rounds)}: they are {total} together, and rounds={rounds}; "
                f"allowed: rounds={total}, stages that make {rounds}, or stage_rounds=null"
            )
        lists = (self.stage_rounds, self.personal_depths)
        given = next((len(one) for one in lists if one is not None), len(BEST_SHARES))
        stages = min(given, rounds) if self.stages is None else self.stages
        if rounds < stages:
            raise UserError(f"rounds={rounds}: {stages} stages need a round each; allowed: more rounds, fewer stages")
        depths = self.personal_depths
        if depths is not None and depths == PRESETS[self.preset].get("personal_depths"):
            depths = depths[:stages]  # a preset's are for its own number of stages
        for key, found, expected in (
            ("stage_rounds", self.stage_rounds, stages),
            ("personal_depths", depths, stages),
            ("ranks", self.ranks, max(0, stages - 2)),
        ):
            if found is not None and len(found) != expected:
                which = "one for each stage" + (" from the third on" if key == "ranks" else "")
                raise UserError(f"{key}={_listed(found)}: {len(found)} given, {stages} stages; allowed: {which}")
        shares = BEST_SHARES if self.preset == "best" else PAPER_SHARES
        stage_rounds = self.stage_rounds or divided(rounds, stages, shares)
        return self.model_copy(update={"stages": stages, "stage_rounds": stage_rounds, "personal_depths": depths})

    # Stages.

    @property
    def ends(self) -> tuple[int, ...]:
        """The last round of each stage."""
        assert self.stage_rounds is not None, "`completed` divides the rounds into stages"
        return tuple(accumulate(self.stage_rounds))

    def stage_of(self, round: int) -> int:
        """The stage of a round; both count from 1."""
        return next(number for number, end in enumerate(self.ends, start=1) if round <= end)

    def everyone_in(self) -> frozenset[int]:
        return frozenset(self.ends) if self.full_last_round else frozenset()

    def evaluated_in(self) -> frozenset[int]:
        return frozenset(self.ends)

    def about(self, round: int) -> dict[str, Any]:
        return {"stage": self.stage_of(round)}

    def networks(self, network: Network) -> tuple[Stage, ...]:
        depths = self.depths(network)
        how = (self.reduction, self.ranks, self.shrinkage, self.sparsity, self.sparsity_step)
        return Shrinking(network, depths, *how).stages()

    def network_of(self, client: int, round: int) -> int:
        return self.stage_of(round) - 1

    def depths(self, network: Network) -> tuple[int, ...]:
        """How many layers are personal, stage by stage; by default one more in each, and at least one is shared."""
        most = len(network.layers) - 1
        if not most and len(self.ends) > 1:
            raise UserError(f"ppfe: {network.name} has one layer; allowed: two or more, or stages=1, which is FedAvg")
        if self.personal_depths is None:
            return tuple(min(number, most) for number in range(len(self.ends)))
        if self.personal_depths[-1] > most:
            raise UserError(
                f"personal_depths={_listed(self.personal_depths)}: {network.name} has {most + 1} layers, and one at "
                f"least is shared; allowed: 0 to {most}"
            )
        return self.personal_depths

    # What travels and what stays. A client's own layers of all stages are in its memory.

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(network.personal_layers) if isinstance(network, Stage) else network.layers

    def personal(self, network: Network) -> tuple[str, ...]:
        return ()

    def memory(self, network: Network) -> Values:
        if not isinstance(network, Stage):
            return {}
        entered = network.stages[: network.number]
        own = {_of(stage, name): stage.initial()[name] for stage in entered for name in self._own(stage)}
        like = network.initial()[network.names[0]]
        return {"stage": torch.tensor(1), "beta": like.new_zeros(len(self.ends)), "weights": like.new_ones(1), **own}

    # The server.

    def advance(self, server: Server, network: Network) -> None:
        """At the beginning of a stage: archive the model of the one before, and make the shared layers of the new one.

        Layers that stay what they were go on from where they are, reduced ones from the model of the first stage.
        """
        number = self.stage_of(server.round)
        if number == 1 or server.round - 1 not in self.ends:
            return
        stage = self.networks(network)[number - 1]
        server.archive |= {f"{number - 1}/{name}": tensor.clone() for name, tensor in server.values.items()}
        start, reduced = stage.started(_archived(server.archive, 1)), stage.reduced
        server.values = {n: start[n] if n in reduced else server.values[n] for n in self.shared(stage)}
        going_on = set(server.values) - reduced  # what starts anew has no use for the moments of an optimizer
        server.state = {key: tensor for key, tensor in server.state.items() if key.rpartition("/")[2] in going_on}

    def global_model(self, server: Server, network: Network) -> Values | None:
        """The model of the first stage."""
        values = _archived(server.archive, 1) or server.values
        return values if set(values) >= set(network.names) else None

    # The client.

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        stage = _stage(clients)
        shared = set(self.shared(stage))
        scale = self.rate(clients.round, clients.rounds) / self.lr  # of the schedule
        body, head = (self.lr, self.lr) if stage.number == 1 else (self.body_lr, self.head_lr or self.lr)
        rates = {name: scale * (body if name in shared else head) for name in stage.parameters}
        clients.fit(weights=self._weights(clients), lr=rates)
        self._keep(clients)
        return clients.take(received.tensors)

    def receive(self, clients: Cohort, received: Message) -> None:
        """Bring clients that were away up to this stage, then load the shared layers and the client's own."""
        stage = _stage(clients)
        for number in range(2, stage.number + 1):
            self._enter(clients, number)
        clients.load(received.tensors)
        clients.load({name: clients.memory[_of(stage, name)] for name in self._own(stage)})

    def assemble(self, clients: Cohort) -> None:
        """Weigh the model of this stage as if it ended here."""
        if self.head_epochs and self.evaluate != "received":
            self._tune(clients)
        self._weigh(clients, clients.outputs())

    def finetune(self, clients: Cohort, epochs: int) -> None:
        clients.fit(epochs=epochs, lr=self.lr, weights=self._weights(clients), purpose="finetune")
        self._weigh(clients, clients.outputs())

    def predict(self, clients: Cohort, batch: Batch) -> Tensor:
        number = _stage(clients).number
        if number == 1 or self.members == "last":
            return clients.predict(batch)
        before = [self._model(clients, earlier).predict(batch) for earlier in range(1, number)]
        return self._combined(clients, [*before, clients.predict(batch)])

    def deployed(self, clients: Cohort) -> nn.Module:
        number = _stage(clients).number
        if number == 1 or self.members == "last":
            return super().deployed(clients)
        models = [*(self._model(clients, earlier) for earlier in range(1, number)), clients]
        modules = [self.network_with_values(model) for model in models]
        beta = clients.memory["beta"][0, :number].clone()
        return self.possible(clients, Ensemble(modules, beta, self._how(clients)))

    # Reports.

    def others(self, clients: Cohort) -> Mapping[str, Callable[[Batch], Tensor]]:
        return {"stage": clients.predict}

    def measures(self, clients: Cohort, received: Message) -> Mapping[str, Tensor]:
        return {"beta": clients.memory["beta"][:, _stage(clients).number - 1]}

    def summary(self, network: Network, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A row a stage, as it was after its last round."""
        stages = self.networks(network)
        last = {line["stage"]: line for line in lines if "beta" in line}
        counts = Counter(line["stage"] for line in lines)
        rows = [
            {"stage": stage.number, "rounds": counts[stage.number], **self._row(stage, network, last[stage.number])}
            for stage in stages
            if stage.number in last
        ]
        reached = max(last)
        used = stages[:reached] if self.members == "all" else stages[reached - 1 : reached]
        return {"stages": rows, "inference_parameters": sum(parameters(stage.module) for stage in used)}

    def _row(self, stage: Stage, network: Network, line: Mapping[str, Any]) -> dict[str, Any]:
        whole, shared = parameters(stage.module), stage.size(self.shared(stage))
        return {
            "shared_parameters": shared,
            "personal_parameters": whole - shared,
            "shared_of_original": shared / network.size(),
            "parameters_of_original": whole / network.size(),
            "stage_accuracy": line["stage_accuracy"],
            "stage_loss": line["stage_loss"],
            "ensemble_accuracy": line["personalized_accuracy"],
            "ensemble_loss": line["personalized_loss"],
            "mean_beta": line["beta"],
        }

    # Boosting.

    def _enter(self, clients: Cohort, number: int) -> None:
        """Let the clients who were not yet in a stage conclude the one before and begin it."""
        late = (clients.memory["stage"] < number).nonzero().flatten().tolist()
        if not late:
            return
        part = clients.of(late)
        self._conclude(part, number - 1)
        self._begin(part, number)
        length = clients.samples("train").rows.shape[1]
        for cohort in (clients, part):
            cohort.memory["weights"] = _of_length(cohort.memory["weights"], length)
        for name, tensor in part.memory.items():
            clients.memory[name][late] = tensor

    def _conclude(self, clients: Cohort, number: int) -> None:
        """Weigh the finished model of a stage, and then the samples by what the ensemble up to it gets wrong."""
        model = self._model(clients, number)
        if self.head_epochs:
            self._tune(model)
            self._keep(model)
        outputs = model.outputs()
        self._weigh(model, outputs)
        real = clients.samples("train").real
        weights = self._weights(model)
        before = real.to(clients.memory["beta"]) if weights is None else weights
        clients.memory["weights"] = before
        if self.reweight:
            members = [*(self._model(clients, earlier).outputs() for earlier in range(1, number)), outputs]
            losses = self._losses(clients, self._combined(clients, members) if number > 1 else outputs)
            beta = clients.memory["beta"][:, number - 1].double()
            grown = reweighted(before.double(), losses, beta, real, self.weight_cap)
            clients.memory["weights"] = grown.to(before)

    def _begin(self, clients: Cohort, number: int) -> None:
        """Start the client's own layers of a stage: from the stage before, or reduced from the first stage's model."""
        stage, before = _stage(clients).stages[number - 1], _stage(clients).stages[number - 2]
        start, reduced = stage.started(_archived(clients.archive, 1)), stage.reduced
        for name in self._own(stage):
            kept = name in self._own(before)
            if name in reduced and not (kept and name in stage.norm):  # a client's own norms are not made of weights
                tensor = start[name]
            elif kept:
                tensor = clients.memory[_of(before, name)]
            else:
                tensor = clients.archive[_of(before, name)]
            clients.memory[_of(stage, name)] = tensor.expand_as(clients.memory[_of(stage, name)]).clone()
        clients.memory["stage"] = torch.full_like(clients.memory["stage"], number)

    def _model(self, clients: Cohort, number: int) -> Cohort:
        """The clients with their models of a finished stage."""
        stage = _stage(clients).stages[number - 1]
        own = set(self._own(stage))
        values = {}
        for name in stage.names:
            kept = clients.memory[_of(stage, name)] if name in own else clients.archive[_of(stage, name)]
            values[name] = kept if name in own else kept.expand(len(clients), *kept.shape)
        return replace(clients, network=stage, values=values, round=self.ends[number - 1], losses={})

    def _tune(self, clients: Cohort) -> None:
        """Train the personal layers on the body of their stage, which stays as it is."""
        stage = _stage(clients)
        own = [name for name in self._own(stage) if name in stage.parameters]
        values = {name: tensor.clone() for name, tensor in clients.values.items()}  # norms count what they see
        end = self.ends[stage.number - 1]  # so that it gives the same whenever it is done
        model = replace(clients, values=values, round=end, losses={})
        lr = self.head_lr or self.lr
        model.fit(train=own, epochs=self.head_epochs, lr=lr, weights=self._weights(clients), purpose="tune")
        clients.values |= model.take(own)

    def _keep(self, clients: Cohort) -> None:
        stage = _stage(clients)
        for name in self._own(stage):
            clients.memory[_of(stage, name)] = clients.values[name]

    def _own(self, stage: Stage) -> tuple[str, ...]:
        """The tensors of a stage that stay with the client."""
        return super().personal(stage)

    def _weights(self, clients: Cohort) -> Tensor | None:
        """The samples' weights in a stage, [clients, samples]; None where all weigh the same."""
        if _stage(clients).number == 1 or not self.reweight:
            return None
        return _of_length(clients.memory["weights"], clients.samples("train").rows.shape[1])

    def _weigh(self, clients: Cohort, outputs: Tensor) -> None:
        """Set beta of the model of a stage, by its loss on the samples as they are weighed in that stage."""
        real = clients.samples("train").real
        weights = self._weights(clients)
        weights = real.double() if weights is None else weights.double()
        found = coefficient(self._losses(clients, outputs), weights, real)
        clients.memory["beta"][:, _stage(clients).number - 1] = found.to(clients.memory["beta"])

    def _losses(self, clients: Cohort, outputs: Tensor) -> Tensor:
        """Of each training sample, [clients, samples], float64."""
        targets = clients.data.targets[clients.samples("train").rows]
        hits, losses = score(outputs, targets)
        return (~hits).double() if self.boosting_loss == "zero-one" and clients.data.num_classes else losses

    def _combined(self, clients: Cohort, outputs: Sequence[Tensor]) -> Tensor:
        return combine(outputs, clients.memory["beta"][:, : len(outputs)], self._how(clients))

    def _how(self, clients: Cohort) -> Combination:
        return self.combination if clients.data.num_classes else "logits"


def divided(rounds: int, stages: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Rounds over stages by these shares, one at least for each; where their number differs, the later ones alike."""
    first, whole = shares[0], sum(shares)
    if stages == 1:
        return (rounds,)
    if stages != len(shares):
        shares = (first * (stages - 1), *[whole - first] * (stages - 1))
    ends = [rounds * part / sum(shares) for part in accumulate(shares)]
    last = [min(max(number, round(end)), rounds - stages + number) for number, end in enumerate(ends, start=1)]
    return tuple(end - before for before, end in pairwise([0, *last]))


def _of(stage: Stage, name: str) -> str:
    return f"{stage.number}/{name}"


def _archived(archive: Mapping[str, Tensor], number: int) -> Values:
    """The shared tensors of a finished stage."""
    prefix = f"{number}/"
    return {name.removeprefix(prefix): tensor for name, tensor in archive.items() if name.startswith(prefix)}


def _of_length(tensor: Tensor, length: int) -> Tensor:
    return functional.pad(tensor, (0, length - tensor.shape[1]))


def _stage(clients: Cohort) -> Stage:
    assert isinstance(clients.network, Stage)
    return clients.network


def _listed(values: Iterable[Any]) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in values]
