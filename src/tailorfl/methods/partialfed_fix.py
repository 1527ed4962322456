"""PartialFed-Fix: the norm layers and the head are never loaded from the server."""

from typing import ClassVar, Literal

from pydantic import Field

from tailorfl.methods.fedper import FedPer


class PartialFedFix(FedPer):
    """Load all but norm layers and head (Sun et al., PartialFed: Cross-Domain Personalized Learning, NeurIPS 2021).

    The paper starts a client's round from a mixture: some layers are loaded from the server, the others go on from the
    client's own last round. Its fixed strategies choose by hand; this one keeps norm layers and the head, and is
    evaluated with the current layers of the server between them. With ``batch_norm=shared`` it is FedPer, with
    ``personal_layers=0`` FedBN, with both FedAvg.
    """

    name: ClassVar[str] = "partialfed-fix"
    paper: ClassVar[str] = "Sun et al. 2021"
    shares: ClassVar[str] = "all but norm layers and the head"

    batch_norm: Literal["shared", "local", "local-statistics"] = Field(
        "local", description="norm layers: kept by the client, shared like others (FedPer), or only statistics kept"
    )
    personal_layers: int = Field(1, ge=0, description="layers at the head that stay with the client; 0: FedBN")
