"""Answers that a broken or hostile site may give, nodes that come and go, and what the server makes of them."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flower_runs import grid_of, rounds_of, serve_on, small
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from inline_grid import Answer, InlineGrid, honest

from tailorfl.errors import UserError
from tailorfl.flower.checks import RefusedError, check_score
from tailorfl.flower.directory import AGAIN, Directory, Rules
from tailorfl.flower.lock import alone
from tailorfl.flower.outline import Form, Site, outline
from tailorfl.flower.records import FACTS, facts_of, metrics, pack, tensors
from tailorfl.flower.state import SiteState

QUICK = {"clients": 2, "clients_per_round": 2, "rounds": 1, "local_epochs": 1}
DEEP = "[" * 200_000


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites write no models at the end: it takes seconds each."""
    monkeypatch.setattr("tailorfl.flower.server._hand_over", lambda make, folder: None)


def raw(text: str) -> RecordDict:
    return RecordDict({FACTS: ConfigRecord({FACTS: text})})


def instead(kind: str, change: Callable[[RecordDict], RecordDict]) -> Answer:
    """A node that does as it should, and answers one kind of message with something else."""

    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == kind:
            reply.content = change(reply.content)
        return reply

    return answer


def with_facts(content: RecordDict, **facts: Any) -> RecordDict:
    more = {**content.array_records, **content.metric_records}
    return pack({**facts_of(content), **facts}, **more)


def with_numbers(content: RecordDict, name: str, numbers: dict[str, Any]) -> RecordDict:
    more = {**content.array_records, **content.metric_records, name: metrics(numbers)}
    return pack(facts_of(content), **more)


def with_array(content: RecordDict, array: np.ndarray) -> RecordDict:
    answer = content.array_records["answer"]
    more = {**content.metric_records, "answer": ArrayRecord({**answer, next(iter(answer)): Array(array)})}
    return pack(facts_of(content), **more)


TRAINED: list[Callable[[RecordDict], RecordDict]] = [
    lambda content: with_facts(content, archived=5),
    lambda content: raw(DEEP),
    lambda content: raw("[1, 2]"),
    lambda content: RecordDict(),
    lambda content: pack({"error": "line\nline\x1b[2J" + "x" * 10_000}),
    lambda content: with_numbers(content, "numbers", {"samples": [1, 2], "loss": 0.0, "seconds": 0.0}),
    lambda content: with_array(content, np.zeros((16, 64), dtype=np.longdouble)),
]


@pytest.mark.usefixtures("no_models")
def test_answers_to_a_round_that_cannot_be_read_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One run: in each round the same node has another kind of rubbish."""
    config = small("fedper", **{**QUICK, "rounds": len(TRAINED), "evaluate_every": 0})
    changes = iter(TRAINED)
    grid = grid_of(config, tmp_path, {11: instead("train", lambda content: next(changes)(content))})
    assert serve_on(grid) is not None
    lines = rounds_of(tmp_path / "flower")
    assert [(line["answered"], line["refused"]) for line in lines] == [(1, ["1"])] * len(TRAINED)
    assert all(len(text) < 1000 and text.isprintable() for text in caplog.messages)


SCORE = {"samples": 1, "correct": 1, "loss": 0.0}
EVALUATED: list[Callable[[RecordDict], RecordDict]] = [
    lambda content: raw(DEEP),
    lambda content: pack({}),  # no score at all
    lambda content: with_numbers(content, "score.test", {**SCORE, "samples": -1}),
    lambda content: with_numbers(content, "measures", {}),  # ppfe measures beta
]
ADDED: list[Callable[[RecordDict], RecordDict]] = [
    lambda content: with_numbers(content, "score.name", SCORE),
    lambda content: with_numbers(content, "other.personalized", SCORE),
    lambda content: with_numbers(content, "measures", {"beta": 0.5, "round": 99.0, "answered": 7.0}),
]


@pytest.mark.usefixtures("no_models")
def test_reports_that_cannot_be_read_are_refused_and_counted(tmp_path: Path) -> None:
    config = small("ppfe", **{**QUICK, "rounds": len(EVALUATED) + len(ADDED)})
    changes = iter(EVALUATED + ADDED)
    grid = grid_of(config, tmp_path, {11: instead("evaluate", lambda content: next(changes)(content))})
    assert serve_on(grid) is not None
    lines = rounds_of(tmp_path / "flower")
    assert [line.get("untested") for line in lines] == [["1"]] * len(EVALUATED) + [None] * len(ADDED)
    # What nobody asked for changes nothing.
    assert [(line["round"], line["answered"]) for line in lines] == [(k + 1, 2) for k in range(len(lines))]
    head, *rows = (tmp_path / "flower" / "measures.csv").read_text().splitlines()
    assert head == "round,client,beta"
    assert len(rows) == len(EVALUATED) + 2 * len(ADDED)


@pytest.mark.parametrize(
    "numbers",
    [
        {"samples": 5, "correct": 1, "loss": 1.0},  # fewer rows than it has
        {"samples": 10, "correct": 11, "loss": 1.0},
        {"samples": 10, "correct": float("nan"), "loss": 1.0},
        {"samples": float("nan"), "correct": 0, "loss": 1.0},
        {"samples": 10, "correct": 1, "loss": -1.0},
        {"samples": 10, "correct": 1},
    ],
)
def test_scores_that_cannot_be_true(numbers: dict[str, float]) -> None:
    with pytest.raises(RefusedError):
        check_score(numbers, 10)
    assert check_score({"samples": 10, "correct": 3, "loss": float("nan")}, 10)  # of a model that diverged


FORM = Form("features", (2,), 2, "00")


def site(name: str = "clinic", **facts: Any) -> dict[str, Any]:
    return {**Site(name, 20, 0, 5, 2, FORM).facts(), **facts}


class Names(InlineGrid):
    """Nodes that only say who they are: ``told`` is what each of them says, None for one that says nothing."""

    told: dict[int, dict[str, Any] | str | None]

    def __init__(self, told: dict[int, dict[str, Any] | str | None]) -> None:
        super().__init__({}, {node: {} for node in told})
        self.told = told
        self.answers = dict.fromkeys(range(100), self._tell)

    def _tell(self, message: Message, context: Context) -> Message | None:
        told = self.told[message.metadata.dst_node_id]
        if told is None:
            return None
        content = raw(told) if isinstance(told, str) else pack({"site": told, "archived": []})
        return Message(content, reply_to=message)


def look(directory: Directory) -> None:
    directory.look()
    for reply in directory.grid.pull_messages(directory.waiting):
        directory.hear(reply)


@pytest.mark.parametrize(
    "told",
    [
        site(train=float("nan")),
        site(train=10**15),  # the server could not even count so far
        site(train=-1),
        site(train="20"),
        site(train=True),
        site(train=1.5),
        site(held="two"),
        site(partition="first"),
        site(group=-1),
        site(new="no"),
        site(form=None),
        site(form={**vars(FORM), "classes": "many"}),
        site(form={**vars(FORM), "shape": ["a"]}),
        site("../../etc"),
        site(more=1),
        DEEP,
        "[]",
        json.dumps({"site": site(), "archived": None}),
        json.dumps({"archived": []}),
    ],
)
def test_a_site_that_tells_nonsense_does_not_get_in(told: dict[str, Any] | str) -> None:
    directory = Directory(Names({1: told, 2: site("other")}), "fedavg-1", Rules())
    look(directory)
    assert set(directory.node_of) == set(directory.known) == {"other"}


def test_a_group_that_is_not_there_is_refused() -> None:
    sites = [Site.read(site("a")), Site.read(site("b", group=3))]
    with pytest.raises(UserError, match=r"b is of group 3; allowed: 0 to 0"):
        outline(small("fedavg").experiment, sites)


def test_vocabularies_of_one_size_with_other_words_are_refused() -> None:
    forms = [{**vars(FORM), "kind": "text", "vocabulary": 10, "words": words} for words in ("aa", "bb")]
    sites = [Site.read(site(name, form=form)) for name, form in zip("ab", forms, strict=True)]
    with pytest.raises(UserError, match="vocabularies of b and a differ"):
        outline(small("fedavg").experiment, sites)


def test_a_node_takes_the_place_of_another_of_its_name_that_has_gone() -> None:
    grid = Names({1: site(), 2: site()})
    directory = Directory(grid, "fedavg-1", Rules())
    look(directory)
    assert directory.node_of == {"clinic": 2}
    del grid.nodes[2]
    look(directory)
    assert directory.node_of == {"clinic": 1}


def test_a_node_that_cannot_take_part_is_asked_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Its data may have been put in place since; what it says is logged once as long as it is the same."""
    now = [0.0]
    grid = Names({1: json.dumps({"error": "no such file"})})
    directory = Directory(grid, "fedavg-1", Rules(), clock=lambda: now[0])
    for now[0] in (0.0, 1.0, AGAIN - 1, AGAIN + 1, AGAIN + 2):
        look(directory)
    assert [text for text in caplog.messages if "no such file" in text] == ["node 1 cannot take part: no such file"]
    grid.told[1] = site()
    look(directory)
    assert directory.node_of == {}, "not yet"
    now[0] = 2 * AGAIN + 2
    look(directory)
    assert directory.node_of == {"clinic": 1}


def test_a_second_server_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.flower.server.ORPHANED", 0.0)
    grid = grid_of(small("fedavg", **QUICK), tmp_path)
    out = tmp_path / "flower"
    with (
        alone(out / "federation" / ".server.lock"),
        pytest.raises(UserError, match=r"another run is under way in .*'flwr stop'"),
    ):
        serve_on(grid)
    assert not (out / "config.yaml").exists()


def test_who_waits_for_a_lock_gets_it_when_it_is_free(tmp_path: Path) -> None:
    held, order = alone(tmp_path / "lock"), list[str]()
    held.__enter__()

    def wait() -> None:
        with alone(tmp_path / "lock", wait=30):
            order.append("second")

    waiting = threading.Thread(target=wait)
    waiting.start()
    order.append("first")
    held.__exit__(None, None, None)
    waiting.join(30)
    assert order == ["first", "second"]


def test_a_node_that_died_before_it_said_who_it_is_is_asked_again() -> None:
    grid = Names({1: None})
    directory = Directory(grid, "fedavg-1", Rules())
    look(directory)
    del grid.nodes[1]
    look(directory)
    grid.nodes[1], grid.told[1] = {}, site()  # known by its key, it has its old number
    look(directory)
    assert directory.node_of == {"clinic": 1}


def test_a_site_may_be_mended_before_the_experiment_begins_and_not_after() -> None:
    grid = Names({1: site()})
    directory = Directory(grid, "fedavg-1", Rules())
    look(directory)
    for node, closed, expected in ((2, False, {"clinic": 2}), (3, True, {})):
        grid.nodes, grid.told[node] = {node: {}}, site(form={**vars(FORM), "classes": 2 + node})
        directory.closed = closed
        look(directory)
        assert directory.node_of == expected


@pytest.mark.usefixtures("no_models")
def test_a_site_that_starts_again_under_its_old_number_is_asked_again(tmp_path: Path) -> None:
    """As nodes with keys do. Flower says that the message is lost, before or after the node is missed."""
    grid = grid_of(small("fedper", **{**QUICK, "evaluate_every": 0}), tmp_path, deadline=60)
    left: list[int] = []

    def leaves(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type == "train" and len(left) < 2:
            left.append(1)
            if len(left) == 2:
                grid.nodes = {10: grid.nodes[10]}
                return None
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        return honest(message, context)

    present = grid.get_node_ids

    def back_later() -> Any:
        found = list(present())
        grid.nodes.setdefault(11, {"partition": 1})
        return found

    grid.answers[11], grid.get_node_ids = leaves, back_later  # type: ignore[method-assign]
    assert serve_on(grid) is not None
    [line] = rounds_of(tmp_path / "flower")
    assert line["answered"] == 2
    assert not {"missing", "refused"} & set(line)


@pytest.mark.usefixtures("no_models")
def test_an_orphan_that_lost_its_place_does_not_speak_for_the_site(tmp_path: Path) -> None:
    grid = grid_of(small("fedper", **{**QUICK, "evaluate_every": 0}), tmp_path, deadline=60)
    orphans: list[str] = []

    def moves(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type == "train" and not orphans:
            grid.nodes[99] = grid.nodes.pop(11)
            orphans.append(message.metadata.message_id)
            grid.answers[99] = after_the_orphan
            return None
        return honest(message, context)

    def after_the_orphan(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            grid.replies[orphans[0]] = reply = Message(pack({"error": "begun again"}), reply_to=message)
            reply.metadata._reply_to_message_id = orphans[0]
        return honest(message, context)

    grid.answers[11] = moves
    assert serve_on(grid) is not None
    [line] = rounds_of(tmp_path / "flower")
    assert (line["answered"], line.get("refused")) == (2, None)


@pytest.mark.usefixtures("no_models")
def test_a_site_that_says_for_ever_that_it_lacks_something_is_refused(tmp_path: Path) -> None:
    grid = grid_of(small("fedavg", **{**QUICK, "evaluate_every": 0}), tmp_path, deadline=60)
    grid.answers[11] = instead("train", lambda content: pack({"lacks": True}))
    assert serve_on(grid) is not None
    assert rounds_of(tmp_path / "flower")[0]["refused"] == ["1"]


@pytest.mark.usefixtures("no_models")
def test_a_round_in_which_all_diverge_goes_on_as_in_the_simulator(tmp_path: Path) -> None:
    grid = grid_of(small("fedavg", **{**QUICK, "evaluate_every": 0}), tmp_path)
    grid.answers = dict.fromkeys((10, 11), instead("train", lambda content: pack({"diverged": True})))
    assert serve_on(grid) is not None
    [line] = rounds_of(tmp_path / "flower")
    assert (line["answered"], line["diverged"]) == (0, ["0", "1"])


@pytest.mark.usefixtures("no_models")
def test_who_joins_later_is_not_asked_in_place_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.flower.federation.REPEATS", 1)
    joining = {"joining_clients": 1, "joining_round": 2}
    config = small("fedavg", **{**QUICK, "rounds": 2, "clients": 3, "clients_per_round": 1, **joining})
    grid = grid_of(config, tmp_path, deadline=0.2, **{"min-answers": 3})
    mute = lambda message, context: None if message.metadata.message_type == "train" else honest(message, context)  # noqa: E731
    grid.answers = dict.fromkeys((10, 11, 12), mute)
    with pytest.raises(UserError, match="0 answers after 1 repeats, 2 are needed"):
        serve_on(grid)
    roll = json.loads((tmp_path / "flower/federation/sites.json").read_text())
    [late] = [site["partition"] for site in roll["sites"] if site["joining"]]
    assert 10 + late not in {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}


def test_a_site_that_was_away_at_the_end_gets_its_model_from_the_next_start(tmp_path: Path) -> None:
    grid = grid_of(small("fedper", **{**QUICK, "evaluate_every": 0}), tmp_path)
    note = tmp_path / "flower/federation/models.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"round": 1, "sites": ["0", "1"]}))  # of a run that was deleted
    grid.answers[11] = instead("evaluate.keep", lambda content: pack({"error": "the disk is full"}))
    assert serve_on(grid) is not None
    assert json.loads(note.read_text())["sites"] == ["0"]
    del grid.answers[11]
    asked = len(grid.sent)
    assert serve_on(grid) is not None
    kept = [m.metadata.dst_node_id for m in grid.sent[asked:] if m.metadata.message_type == "evaluate.keep"]
    assert kept == [11]
    assert json.loads(note.read_text())["sites"] == ["0", "1"]


def test_an_answer_too_large_for_torch_is_a_plain_error() -> None:
    with pytest.raises(ValueError, match=r"longdouble|float128"):
        tensors(ArrayRecord({"weight": Array(np.zeros(2, dtype=np.longdouble))}))


def test_what_is_in_a_sites_files_does_not_leave_it_in_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,state\n40,ill\nJane Doe,well\n")
    grid = grid_of(small("fedavg"), tmp_path)
    grid.nodes[10] = {"client": "clinic", "data": f"csv:{table}"}
    [identity] = grid.push_messages([Message(pack({"experiment": "fedavg-1"}), 10, "query")])
    [reply] = grid.pull_messages([identity])
    assert facts_of(reply.content)["error"] == "clinic: its data cannot be used, its own log says why"
    assert any("Jane Doe" in text for text in caplog.messages)  # it is said at the site


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    state = SiteState.of(tmp_path, "fedper-1", "clinic")
    state.commit(state.begin(1, 1), {"weight": torch.ones(2)})
    left = state.folder / ".round-000002.safetensors.0123"
    left.write_bytes(b"half")
    state.commit(state.begin(1, 2), {"weight": torch.ones(2)})
    assert not left.exists()
    assert state.rounds() == [1, 2]
