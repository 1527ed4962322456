"""pMixFed: each layer of a client's model is a mixture of the global one and its own."""

from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.mixing import LayerMixing, Rule
from tailorfl.models.network import Layer, Network, Values
from tailorfl.models.scaling import Scaling, Size


class PMixFed(LayerMixing):
    """Adaptive layer-wise mixing of global and local models (pMixFed, 2025).

    A client keeps a whole model. When it is asked, it mixes the global layers into its own: all of the base, less and
    less of the layers above, nothing of the head. It trains the result and keeps it. On the way back the server mixes
    what it had into each client's trained layers, most in the base, and averages. How fast the degrees lambda change
    from layer to layer is the mix factor mu. With ``mix=sigmoid`` it depends on the round and on accuracies: a client
    that does better than others listens less. A client that never trained takes the global model whole.
    """

    name: ClassVar[str] = "pmixfed"
    paper: ClassVar[str] = "pMixFed 2025"
    shares: ClassVar[str] = "all layers, mixed by degrees"
    mixed: ClassVar[bool] = True

    mix: Rule = Field("sigmoid", description="how mu is found: by accuracies, fixed, by the round, or random degrees")
    personal_layers: int = Field(0, ge=0, description="layers at the head that stay with the client altogether")

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(self.personal_layers)

    def sizes(self, scaling: Scaling) -> tuple[Size, ...]:
        """Groups with other image sizes have networks of other depths; all have the same width."""
        return tuple(Size(1.0, size.stages) for size in scaling.sizes())

    def train_alone(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit()
        return clients.take(self.shared(clients.network))
