"""FedBN: FedAvg whose clients keep their norm layers."""

import logging
from typing import ClassVar, Literal

from pydantic import Field

from tailorfl.exchange.messages import Server
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Network

log = logging.getLogger(__name__)


class FedBN(FedAvg):
    """Norm layers stay home (Li et al., FedBN: Federated Learning on Non-IID Features, ICLR 2021).

    A client trains the received layers and its own norm layers together, sends all but these, and is evaluated with
    the received layers between its own norms. With ``batch_norm=shared``, or on a network without norm layers, it is
    FedAvg; with ``batch_norm=local-statistics`` only the running statistics stay (SiloBN).
    """

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al. 2021"
    shares: ClassVar[str] = "all but the norm layers"

    batch_norm: Literal["shared", "local", "local-statistics"] = Field(
        "local", description="norm layers: kept by the client, shared like others (FedAvg), or only statistics kept"
    )

    def start(self, network: Network) -> Server:
        if not network.norm:
            log.warning("fedbn: network %s has no norm layers that could stay; this is FedAvg", network.name)
        return super().start(network)
