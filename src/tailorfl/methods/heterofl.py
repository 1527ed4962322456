"""HeteroFL: clients of different width train leading slices of one wide model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor, nn

from tailorfl.cohort import Batch, Client, Cohort
from tailorfl.cohort.objective import class_losses
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values
from tailorfl.models.scaling import Scaling, Size
from tailorfl.models.slicing import narrowed, slices


@dataclass(frozen=True)
class Scaler:
    """Divides a layer's outputs by the width ratio, as a forward hook."""

    ratio: float

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        return outputs / self.ratio


def masked_cross_entropy(client: Client, batch: Batch) -> Tensor:
    """The cross-entropy with the outputs of classes that the client lacks held at zero."""
    return batch.mean(class_losses(client.predict(batch) * client.own["present"], batch.targets))


class MaskedOutputs(nn.Module):
    """A network whose outputs for classes that its client lacks are zero."""

    present: Tensor

    def __init__(self, network: nn.Module, present: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("present", present)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs * self.present


class HeteroFL(Method):
    """A slice of one model for each client (Diao, Ding, Tarokh, HeteroFL, ICLR 2021).

    "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients". A client's model
    is the leading slice of the server's in every hidden width; an element of the server's model is the average over the
    clients that hold it. Hidden outputs of a narrow model are divided by its ratio (the paper's scaler), and outputs of
    classes that a client lacks are held at zero (its masked cross-entropy). In place of the paper's static batch norm
    clients keep statistics of their own. Each client is evaluated with the slice of its width; the global model is the
    full-width one. In a federation of groups all networks have the same ``stages``, each as wide as it takes to have as
    many parameters as ScalableFL's, and ``widths`` and ``scale`` have no effect. With ``widths=[1.0]``,
    ``mask_classes=false`` and ``batch_norm=shared`` it is FedAvg.
    """

    name: ClassVar[str] = "heterofl"
    paper: ClassVar[str] = "Diao et al. 2021"
    shares: ClassVar[str] = "a slice of all layers"
    mixed: ClassVar[bool] = True

    widths: tuple[float, ...] = Field(
        (1.0, 0.5, 0.25), description="width ratios; client c has the one at place c modulo their number; 1.0: FedAvg"
    )
    stages: int | None = Field(
        None, ge=1, description="groups: stages of every network, as wide as ScalableFL's are large; the deepest's"
    )
    scale: bool = Field(True, description="divide hidden outputs by the client's width ratio")
    mask_classes: bool = Field(
        True, description="hold the outputs of classes that a client lacks at zero; no effect on detectors"
    )
    personal_layers: int = Field(0, ge=0, description="layers at the head that stay with the client")
    batch_norm: Literal["shared", "local", "local-statistics"] = Field(
        "local-statistics", description="norm layers: shared like others, kept by the client, or only their statistics"
    )

    @field_validator("widths")
    @classmethod
    def _ratios(cls, widths: tuple[float, ...]) -> tuple[float, ...]:
        if not widths or not all(0 < ratio <= 1 for ratio in widths):
            raise ValueError("allowed: one or more numbers above 0, up to 1")
        return widths

    @property
    def ratios(self) -> tuple[float, ...]:
        """The distinct widths, one network each."""
        return tuple(dict.fromkeys(self.widths))

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(self.personal_layers)

    def networks(self, network: Network) -> tuple[Network, ...]:
        return tuple(network if ratio == 1 else self._narrow(network, ratio) for ratio in self.ratios)

    def sizes(self, scaling: Scaling) -> tuple[Size, ...]:
        return scaling.matched(self.stages or max(size.stages for size in scaling.sizes()))

    def network_of(self, client: int, round: int) -> int:
        return self.ratios.index(self.widths[client % len(self.widths)])

    def broadcast(self, server: Server) -> Message:
        return Message()

    def individual(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        return slices(server.values, self.shared(network), network.module, len(clients))

    def global_model(self, server: Server, network: Network) -> Values | None:
        # Without a client of full width, some of the model never trains.
        return super().global_model(server, network) if 1.0 in self.widths else None

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        self._fit(clients)
        return clients.take(self.shared(clients.network))

    def finetune(self, clients: Cohort, epochs: int) -> None:
        self._fit(clients, epochs=epochs, lr=self.lr, purpose="finetune")

    def predict(self, clients: Cohort, batch: Batch) -> Tensor:
        outputs = clients.predict(batch)
        return outputs * self._present(clients)[:, None] if self._masks(clients) else outputs

    def deployed(self, clients: Cohort) -> nn.Module:
        module = self.network_with_values(clients)
        if self._masks(clients):
            module = MaskedOutputs(module, self._present(clients)[0])
        return self.possible(clients, module)

    def _fit(self, clients: Cohort, **how: Any) -> None:
        if self._masks(clients):
            clients.fit(masked_cross_entropy, own={"present": self._present(clients)}, **how)
        else:
            clients.fit(**how)

    def _masks(self, clients: Cohort) -> bool:
        return self.mask_classes and clients.data.num_classes > 0 and not clients.data.detection

    def _present(self, clients: Cohort) -> Tensor:
        """1 where a client has a class, else 0, [clients, classes]; a client without data may have any."""
        counts = clients.class_counts()
        present = (counts > 0) | (counts.sum(1, keepdim=True) == 0)
        return present.to(next(iter(clients.values.values())).dtype)

    def _narrow(self, network: Network, ratio: float) -> Network:
        module = narrowed(network.module, ratio)
        for name, layer in module.named_modules():
            if self.scale and isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
                full = network.module.get_parameter(f"{name}.weight")
                if len(layer.weight) < len(full):
                    layer.register_forward_hook(Scaler(ratio))
        return Network(module, f"{network.name} of width {ratio:g}", network.device, network.mixed)
