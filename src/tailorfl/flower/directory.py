"""Who is there: which node of Flower's grid is which site."""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid

from tailorfl.errors import UserError
from tailorfl.flower.checks import UNREADABLE, RefusedError, said
from tailorfl.flower.outline import Site
from tailorfl.flower.records import facts_of, pack
from tailorfl.flower.state import check_name

log = logging.getLogger(__name__)

HELLO = "query"
AGAIN = 60.0  # seconds after which a node that cannot take part is asked again: its data may be there now
PATIENCE = 3  # deadlines after which an answer, however late, is no longer waited for


@dataclass(frozen=True)
class Rules:
    """How long the server waits, and what it takes."""

    deadline: float = 600.0  # seconds of a round
    min_answers: int = 1
    max_update_norm: float = 0.0  # 0: none
    max_samples: int = 0  # of a site; 0: no limit
    pause: float = 0.5  # seconds between two looks for answers


@dataclass
class Directory:
    """Which node of the grid is which site.

    Sites keep their names. A node that starts again has a new number, or the old one if Flower knows it by its key.
    """

    grid: Grid
    experiment: str
    rules: Rules
    known: dict[str, Site] = field(default_factory=dict)  # as they said when the experiment began
    node_of: dict[str, int] = field(default_factory=dict)
    archived: dict[str, set[str]] = field(default_factory=dict)  # of each site: what it keeps of the archive
    closed: bool = False  # whether only known sites may take part
    visits: dict[str, int] = field(default_factory=dict)  # how often each site has said who it is
    _asked: dict[str, int] = field(default_factory=dict)  # message: node
    _heard: dict[int, str] = field(default_factory=dict)  # node: site
    _refused: dict[int, tuple[str, float]] = field(default_factory=dict)  # node: why it cannot take part, since when
    clock: Callable[[], float] = time.monotonic

    def look(self) -> None:
        """Ask nodes that have come who they are, and forget those that have gone."""
        present = set(self.grid.get_node_ids())
        gone = {name for name, node in self.node_of.items() if node not in present}
        self.node_of = {name: node for name, node in self.node_of.items() if name not in gone}
        # Where two nodes had one name, the other may now take its place.
        self._heard = {node: name for node, name in self._heard.items() if node in present and name not in gone}
        self._asked = {message: node for message, node in self._asked.items() if node in present}
        self._refused = {node: found for node, found in self._refused.items() if node in present}
        refused = {node for node, (_, since) in self._refused.items() if self.clock() < since + AGAIN}
        strangers = present - set(self._heard) - set(self._asked.values()) - refused
        facts = pack({"experiment": self.experiment})
        sent = [FlowerMessage(facts, node, HELLO, ttl=lifetime(self.rules)) for node in sorted(strangers)]
        for message, identity in zip(sent, self.push(sent), strict=True):
            if identity:
                self._asked[identity] = message.metadata.dst_node_id

    def push(self, messages: Sequence[FlowerMessage]) -> list[str | None]:
        """Hand messages to Flower: their identities, None for one that it did not take."""
        found: list[str | None] = list(self.grid.push_messages(messages)) if messages else []
        if len(found) != len(messages):
            raise UserError("the SuperLink does not take messages of this size; allowed: what its own limits say")
        return found

    @property
    def waiting(self) -> list[str]:
        return list(self._asked)

    def hear(self, reply: FlowerMessage) -> bool:
        """Take in an answer to the question who is there; false for any other answer."""
        node = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            return False
        before, _ = self._refused.pop(node, ("", 0.0))
        try:
            self._enter(node, content(reply))
        except (UserError, *UNREADABLE) as error:
            if why(error) != before:
                log.warning("node %d cannot take part: %s", node, why(error))
            self._refused[node] = why(error), self.clock()
        return True

    def forget(self, name: str) -> None:
        """What a site said of itself holds no longer: it is asked again."""
        self._heard.pop(self.node_of.pop(name, -1), None)

    def _enter(self, node: int, content: RecordDict) -> None:
        facts = facts_of(content)
        if "error" in facts:
            raise RefusedError(said(facts["error"]))
        site, archived = Site.read(facts["site"]), set(map(str, facts["archived"]))
        check_name("client", site.name)
        limit = self.rules.max_samples
        if limit and site.train > limit:
            raise RefusedError(f"{site.name} says that it has {site.train} training rows; max-samples={limit}")
        before = self.known.get(site.name)
        if before is None and self.closed:
            raise RefusedError(f"{site.name} was not there when the experiment began; it may join the next one")
        if before is not None and self.closed and _kind(before) != _kind(site):
            raise RefusedError(f"{site.name} has other data than when the experiment began")
        if site.name in self.node_of:
            log.warning("%s is there twice, or has started again: what came last counts", site.name)
        self.known[site.name] = site
        self.node_of[site.name] = node
        self.archived[site.name] = archived
        self.visits[site.name] = self.visits.get(site.name, 0) + 1
        self._heard[node] = site.name


def _kind(site: Site) -> tuple[Hashable, ...]:
    """What must not change while an experiment runs."""
    return site.form, site.partition, site.group


def lifetime(rules: Rules) -> float:
    """How long Flower keeps a message: beyond the deadline, so that late answers can be counted."""
    return PATIENCE * rules.deadline + 60


def content(reply: FlowerMessage) -> RecordDict:
    if reply.has_error():
        raise RefusedError(problem(reply))
    return reply.content


def problem(reply: FlowerMessage) -> str:
    return f"Flower says: {said(reply.error.reason or f'error {reply.error.code}')}"


def why(error: Exception) -> str:
    """Of an answer that cannot be read; the text of a KeyError is only the key."""
    return f"{said(error)} is missing" if isinstance(error, KeyError) else said(error)


def gather(directory: Directory, nodes: int, wait: float, clock: Callable[[], float] = time.monotonic) -> list[Site]:
    """Wait until so many sites have said who they are."""
    end = clock() + wait
    log.info("waiting for %d sites", nodes)
    while len(directory.node_of) < nodes:
        if clock() > end:
            there = ", ".join(sorted(directory.node_of)) or "none"
            raise UserError(f"{len(directory.node_of)} of {nodes} sites came within {wait:g} s: {there}")
        directory.look()
        for reply in directory.grid.pull_messages(directory.waiting):
            directory.hear(reply)
        if len(directory.node_of) < nodes:
            time.sleep(directory.rules.pause)
    return [directory.known[name] for name in directory.node_of]
