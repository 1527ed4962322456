"""pFedHN: a hypernetwork on the server makes each client's model from an embedding of the client."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tailorfl.cohort import Cohort
from tailorfl.exchange.aggregation import WEIGHTS, Weighing
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values
from tailorfl.seeding import generator


class PFedHN(Method):
    """Generated models (Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021).

    The server holds an embedding for each client and a perceptron that turns it into the client's parameters. A client
    trains what it is sent and answers with the difference; the server steps along it, pulled back through the
    hypernetwork (the paper's vector-Jacobian product), in the hypernetwork and in the client's embedding. The paper
    takes a step after each client; here a round is one step, the average over its clients. A client is evaluated with
    the parameters made for it, before local training. ``personal_layers=1`` is the paper's pFedHN-PC; with all layers
    personal it is local training.
    """

    name: ClassVar[str] = "pfedhn"
    paper: ClassVar[str] = "Shamsian et al. 2021"
    shares: ClassVar[str] = "all parameters, made for each client"

    embedding_size: int = Field(32, ge=1, description="numbers in a client's embedding")
    hidden_size: int = Field(100, ge=1, description="width of the hypernetwork")
    hidden_layers: int = Field(3, ge=0, description="hidden layers of the hypernetwork; 0: linear in the embedding")
    hyper_lr: float = Field(0.01, gt=0, description="learning rate of the hypernetwork and of the embeddings")
    hyper_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the server's steps; 0: none")
    personal_layers: int = Field(0, ge=0, description="layers at the head that stay with the client; all: local")
    aggregation: Weighing = Field("uniform", description="weights of the clients in a step: uniform, or samples")

    # What travels: parameters. The statistics of norms cannot be generated, and stay with the client.

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(self.personal_layers)

    def shared(self, network: Network) -> tuple[str, ...]:
        return tuple(name for name in super().shared(network) if name in set(network.parameters))

    # The server.

    def start(self, network: Network) -> Server:
        """Every client's first model is the network's initial one: the outputs' biases are its weights.

        Random output layers would give weights of a scale that has nothing to do with the layers that they are for.
        """
        initial = network.initial()
        like = initial[network.parameters[0]]
        seed = _seed(initial)
        values: Values = {}
        inputs = self.embedding_size
        for number in range(self.hidden_layers):
            spread = math.sqrt(2 / inputs)
            drawn = _normal(like, (self.hidden_size, inputs), seed, "hidden", number)
            values |= {f"hidden/{number}/weight": spread * drawn, f"hidden/{number}/bias": drawn.new_zeros(len(drawn))}
            inputs = self.hidden_size
        for name in self.shared(network):
            values[f"output/{name}/weight"] = like.new_zeros(initial[name].numel(), inputs)
            values[f"output/{name}/bias"] = initial[name]
        return Server(values, numbers={"seed": float(seed)})

    def broadcast(self, server: Server) -> Message:
        return Message()

    def individual(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        return self._generate(server.values, self._embeddings(server, clients, network), network)

    def for_evaluation(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        """A client that never took part is served what the mean of the known embeddings gives."""
        embeddings = self._embeddings(server, clients, network)
        # In one order always: a sum's rounding depends on it, and a resumed run must not.
        known = [server.state[name] for name in sorted(server.state) if name.startswith("embedding/")]
        for row, client in enumerate(clients):
            if known and _embedding(client) not in server.state:
                embeddings[row] = torch.stack(known).mean(0)
        return self._generate(server.values, embeddings, network)

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        """One step along the answers, all pulled back through the hypernetwork as it was when they were sent out."""
        sums = {name: torch.zeros_like(tensor) for name, tensor in server.values.items()}
        own: dict[int, Tensor] = {}  # the gradient of each client's embedding
        total = 0.0
        for answer in answers:
            if answer.clients:
                weights = WEIGHTS[self.aggregation](answer)
                found, rows = self._pull_back(server, answer, weights, network)
                own |= dict(zip(answer.clients, rows, strict=True))
                total += float(weights.sum())
                for name, gradient in found.items():
                    sums[name] += gradient
        if not total:
            return
        for client, gradient in sorted(own.items()):
            [before] = self._embeddings(server, [client], network)
            server.state[_embedding(client)] = self._step(server, _embedding(client), before, gradient)
        for name, gradient in sums.items():
            server.values[name] = self._step(server, name, server.values[name], gradient / total)

    def global_model(self, server: Server, network: Network) -> Values | None:
        return None

    # The client.

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        start = {name: clients.values[name].clone() for name in self.shared(clients.network)}
        clients.fit()
        return {name: clients.values[name] - tensor for name, tensor in start.items()}

    # The hypernetwork.

    def _embeddings(self, server: Server, clients: Sequence[int], network: Network) -> Tensor:
        """The embeddings of these clients, [clients, size]; of its own draw where a client has none yet."""
        like = network.module.get_parameter(network.parameters[0])
        seed = int(server.numbers["seed"])
        rows = [
            server.state[_embedding(client)]
            if _embedding(client) in server.state
            else _normal(like, (self.embedding_size,), seed, "embedding", client)
            for client in clients
        ]
        return torch.stack(rows)

    def _generate(self, values: Mapping[str, Tensor], embeddings: Tensor, network: Network) -> Values:
        """The parameters that embeddings give, [clients, ...]."""
        hidden = embeddings
        for number in range(self.hidden_layers):
            weight, bias = values[f"hidden/{number}/weight"], values[f"hidden/{number}/bias"]
            hidden = functional.linear(hidden, weight, bias).relu()
        made = {}
        for name in self.shared(network):
            weight, bias = values[f"output/{name}/weight"], values[f"output/{name}/bias"]
            made[name] = functional.linear(hidden, weight).reshape(len(hidden), *bias.shape) + bias
        return made

    def _pull_back(
        self, server: Server, answer: Answers, weights: Tensor, network: Network
    ) -> tuple[Values, Iterable[Tensor]]:
        """Gradients of half the squared distance from the parameters that were made to what clients made of them.

        Those of the hypernetwork are summed over the clients by weight; each client's embedding has its own.
        """
        given = self._embeddings(server, answer.clients, network).requires_grad_()
        if not answer.tensors:
            return {}, torch.zeros_like(given)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in server.values.items()}
        with torch.enable_grad():
            made = self._generate(leaves, given, network)
        weight = weights.to(given)
        towards = [-torch.einsum("c,c...->c...", weight, answer.tensors[name]) for name in made]
        *found, rows = torch.autograd.grad(list(made.values()), [*leaves.values(), given], towards)
        return dict(zip(leaves, found, strict=True)), rows / weight[:, None]

    def _step(self, server: Server, name: str, tensor: Tensor, gradient: Tensor) -> Tensor:
        """A step of SGD; a velocity is kept where there is momentum."""
        if self.hyper_momentum:
            gradient = self.hyper_momentum * server.state.get(f"momentum/{name}", 0) + gradient
            server.state[f"momentum/{name}"] = gradient
        return tensor - self.hyper_lr * gradient


def _embedding(client: int) -> str:
    return f"embedding/{client}"


def _seed(initial: Values) -> int:
    """A seed of the hypernetwork's own draws that follows the network's initial weights, and so the run's seed."""
    digest = hashlib.blake2b(digest_size=6)
    for tensor in initial.values():
        digest.update(tensor.to("cpu", torch.float32).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _normal(like: Tensor, shape: tuple[int, ...], seed: int, *purpose: str | int) -> Tensor:
    """Standard normal numbers, the same on every device."""
    drawn = generator(seed, "pfedhn", *purpose).standard_normal(shape)
    return torch.from_numpy(drawn).to(like.device, like.dtype)
