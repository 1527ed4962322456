"""The two halves of a Flower app: the server's, and the one that every node runs."""

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from tailorfl.flower.node import handle
from tailorfl.flower.server import serve

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    _show()
    serve(grid, context)


@client_app.query()
def hello(message: Message, context: Context) -> Message:
    content = handle(message.content, context, lambda node, facts: node.hello(facts))
    return Message(content, reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    content = handle(message.content, context, lambda node, facts: node.train(facts, message.content))
    return Message(content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    content = handle(message.content, context, lambda node, facts: node.evaluate(facts, message.content))
    return Message(content, reply_to=message)


@client_app.evaluate("common")
def evaluate_common(message: Message, context: Context) -> Message:
    content = handle(message.content, context, lambda node, facts: node.evaluate_common(facts, message.content))
    return Message(content, reply_to=message)


@client_app.evaluate("keep")
def keep_model(message: Message, context: Context) -> Message:
    content = handle(message.content, context, lambda node, facts: node.keep_model(facts, message.content))
    return Message(content, reply_to=message)


def _show() -> None:
    """What the server says goes where Flower's own lines go."""
    logger = logging.getLogger("tailorfl")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
