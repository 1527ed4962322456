"""FedAvg with fine-tuning: the global model, then some epochs on the client's own data."""

from typing import ClassVar

from pydantic import Field

from tailorfl.methods.fedavg import FedAvg


class FedAvgFT(FedAvg):
    """Fine-tune the global model before use. It is that of FedAvg; what a client learns in fine-tuning is not sent.

    With ``finetune_epochs=0`` it is FedAvg.
    """

    name: ClassVar[str] = "fedavg-ft"
    paper: ClassVar[str] = "McMahan et al. 2017"

    finetune_epochs: int = Field(10, ge=0, description="local epochs before a client's model is evaluated; not kept")
