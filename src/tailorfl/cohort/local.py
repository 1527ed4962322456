"""Options of local training that have the same name and meaning for every method."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tailorfl.cohort.optimizer import Optimizer


class LocalTraining(BaseModel):
    """How a client trains in a round."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    local_epochs: int = Field(5, ge=1, description="passes over a client's data in a round")
    local_steps: int | None = Field(None, ge=1, description="steps of a client in a round, in place of local_epochs")
    batch_size: int = Field(10, ge=0, description="samples a step; 0 is the full batch")
    lr: float = Field(0.01, gt=0, description="learning rate of the clients in the first round")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="the clients' optimizer")
    momentum: float = Field(0.5, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty in the clients' steps")
    decay: Literal["all", "weights"] = Field("all", description="what decays: all, or matrices and kernels only")
    own_classes: bool = Field(False, description="leave out classes that a client has no training data of")
    lr_schedule: Literal["constant", "cosine", "step"] = Field("constant", description="learning rate over the rounds")
    lr_warmup: int = Field(0, ge=0, description="rounds in which the learning rate rises linearly from 0")
    lr_milestones: tuple[int, ...] = Field((), description="step schedule: rounds after which the rate falls")
    lr_factor: float = Field(0.1, gt=0, le=1, description="step schedule: what the rate is multiplied with")

    def local_optimizer(self) -> Optimizer:
        return Optimizer(self.optimizer, self.momentum, self.weight_decay, self.decay)

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round; rounds count from 1."""
        if round <= self.lr_warmup:
            return self.lr * round / self.lr_warmup
        if self.lr_schedule == "cosine":
            past = (round - 1 - self.lr_warmup) / max(1, rounds - self.lr_warmup)
            return self.lr * (1 + math.cos(math.pi * past)) / 2
        if self.lr_schedule == "step":
            return self.lr * self.lr_factor ** sum(round > milestone for milestone in self.lr_milestones)
        return self.lr
