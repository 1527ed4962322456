"""A grid in this process: nodes answer at once, or as a test wants them to. The apps are those that Flower runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from tailorfl.flower.apps import client_app

Answer = Callable[[Message, Context], Message | None]  # None: no answer, ever


def honest(message: Message, context: Context) -> Message:
    return client_app(message, context)


@dataclass
class InlineGrid(Grid):
    """Nodes by their numbers, each with its node configuration and the way in which it answers."""

    run_config: dict[str, Any]
    nodes: dict[int, dict[str, Any]]
    answers: dict[int, Answer] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)  # by the server
    received: list[Message] = field(default_factory=list)  # from nodes
    replies: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What Flower sets in the process of an app; messages cannot be made without.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def context(self, node: int) -> Context:
        return Context(1, node, self.nodes[node], RecordDict(), self.run_config)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            identity = f"message-{len(self.sent)}"
            message.metadata._message_id = identity
            self.sent.append(message)
            node = message.metadata.dst_node_id
            reply = self.answers.get(node, honest)(message, self.context(node))
            if reply is not None:
                reply.metadata._reply_to_message_id = identity
                self.replies[identity] = reply
                self.received.append(reply)
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(identity) for identity in message_ids if identity in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        raise NotImplementedError
