"""What goes wrong on a wire and at sites, and what the server makes of it; nodes in this process."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flower_runs import client_tensors, grid_of, rounds_of, serve_on, server_tensors, simulate, site_tensors, small
from flwr.app import Context, Error, Message
from inline_grid import Answer, InlineGrid, honest

from tailorfl.errors import UserError
from tailorfl.flower.records import arrays, facts_of, metrics, metrics_of, pack, tensors_of
from tailorfl.models.network import Values
from tailorfl.study.build import build

ALL = {"clients_per_round": 4, "local_epochs": 1}


def tampered(change: Callable[[Values, dict[str, float]], None]) -> Answer:
    """A node that trains as it should, and then sends something else."""

    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == "train":
            sent, numbers = tensors_of(reply.content, "answer"), metrics_of(reply.content, "numbers")
            change(sent, numbers)
            facts = facts_of(reply.content)
            reply.content = pack(facts, answer=arrays(sent), numbers=metrics(numbers))
        return reply

    return answer


def silent(message: Message, context: Context) -> Message | None:
    return None if message.metadata.message_type == "train" else honest(message, context)


def nan(sent: Values, numbers: dict[str, float]) -> None:
    next(iter(sent.values())).view(-1)[0] = math.nan


def missing(sent: Values, numbers: dict[str, float]) -> None:
    sent.pop(next(iter(sent)))


def extra(sent: Values, numbers: dict[str, float]) -> None:
    sent["head.secret"] = torch.zeros(3)


def wrong_shape(sent: Values, numbers: dict[str, float]) -> None:
    name = next(iter(sent))
    sent[name] = sent[name][:1]


def wrong_type(sent: Values, numbers: dict[str, float]) -> None:
    name = next(iter(sent))
    sent[name] = sent[name].double()


def too_many(sent: Values, numbers: dict[str, float]) -> None:
    numbers["samples"] = 10**9


def far_off(sent: Values, numbers: dict[str, float]) -> None:
    next(iter(sent.values())).add_(1000)


def endless_loss(sent: Values, numbers: dict[str, float]) -> None:
    numbers["loss"] = math.inf


RUBBISH = [
    (endless_loss, "its training loss is inf"),
    (nan, "is not finite"),
    (missing, "is missing"),
    (extra, "head.secret is not among"),
    (wrong_shape, "has shape"),
    (wrong_type, "is of type"),
    (too_many, "1000000000 training rows"),
    (far_off, "max-update-norm"),
]


@pytest.mark.parametrize(("change", "why"), RUBBISH)
def test_rubbish_is_refused_named_and_not_averaged(
    change: Callable[[Values, dict[str, float]], None], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small("fedper", rounds=1, **ALL)
    grid = grid_of(config, tmp_path, {11: tampered(change)}, **{"max-update-norm": 100.0})
    assert serve_on(grid) is not None
    line = rounds_of(tmp_path / "flower")[0]
    assert (line["answered"], line["refused"]) == (3, ["1"])
    assert any("of 1 is refused" in text and why in text for text in caplog.messages)
    # What the other three make together, without the fourth.
    apart = grid_of(config, tmp_path / "apart", {11: silent}, deadline=0.5)
    serve_on(apart)
    one, other = (server_tensors(run) for run in (tmp_path / "flower", tmp_path / "apart/flower"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_node_that_never_answers_is_missed_and_the_round_closes_without_it(tmp_path: Path) -> None:
    grid = grid_of(small("fedper", rounds=2, **ALL), tmp_path, {12: silent}, deadline=0.5)
    assert serve_on(grid) is not None
    assert [(line["answered"], line["missing"]) for line in rounds_of(tmp_path / "flower")] == [(3, ["2"])] * 2


def test_a_node_that_fails_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(message: Message, context: Context) -> Message:
        failed = message.metadata.message_type == "train"
        return Message(Error(code=1, reason="out of memory"), reply_to=message) if failed else honest(message, context)

    assert serve_on(grid_of(small("fedper", rounds=1, **ALL), tmp_path, {12: failing})) is not None
    assert rounds_of(tmp_path / "flower")[0]["refused"] == ["2"]
    assert any("answer of 2 is refused" in text and "out of memory" in text for text in caplog.messages)


def test_a_round_with_too_few_answers_is_repeated_with_others(tmp_path: Path) -> None:
    config = small("fedavg", rounds=1, clients_per_round=2, local_epochs=1)
    first = simulated_selection(config, tmp_path)
    answers = {10 + client: silent for client in first}
    grid = grid_of(config, tmp_path, answers, **{"min-answers": 2, "deadline": 0.5})
    assert serve_on(grid) is not None
    line = rounds_of(tmp_path / "flower")[0]
    assert line["answered"] == 2
    assert line["missing"] == sorted(map(str, first))
    assert set(trained_on(grid)) == {0, 1, 2, 3}


SCALED = {"rounds": 1, "clients_per_round": 2, "server_optimizer": "sgd", "server_lr": 0.1, "tau": 3, "exact": True}


def trained_on(grid: InlineGrid) -> list[int]:
    """The clients that were asked to train, in that order."""
    return [m.metadata.dst_node_id - 10 for m in grid.sent if m.metadata.message_type == "train"]


def test_who_does_not_answer_a_scaled_round_counts_as_zero(tmp_path: Path) -> None:
    config = small("pflego", **SCALED)
    start = {f"values/{name}": tensor for name, tensor in build(config).server.values.items()}
    first = simulated_selection(config, tmp_path)
    steps = []
    for missing in first:
        grid = grid_of(config, tmp_path / str(missing), {10 + missing: silent}, deadline=0.5)
        assert serve_on(grid) is not None
        assert sorted(trained_on(grid)) == sorted(first)
        after = server_tensors(tmp_path / str(missing) / "flower")
        steps.append({name: after[name] - tensor for name, tensor in start.items()})
    both = server_tensors(tmp_path / "first/flower")
    for name, tensor in start.items():  # who does not answer counts as zero
        assert torch.allclose(both[name] - tensor, steps[0][name] + steps[1][name], atol=1e-6)


def test_nobody_stands_in_for_others_in_a_scaled_round_the_same_are_asked_again(tmp_path: Path) -> None:
    config = small("pflego", **SCALED)
    first = simulated_selection(config, tmp_path)
    asked: list[int] = []

    def at_the_second_time(message: Message, context: Context) -> Message | None:
        asked.extend([0] if message.metadata.message_type == "train" else [])
        return silent(message, context) if len(asked) == 1 else honest(message, context)

    late = {10 + first[0]: at_the_second_time}
    grid = grid_of(config, tmp_path, late, **{"min-answers": 4, "deadline": 0.5})
    assert serve_on(grid) is not None
    assert (sorted(trained_on(grid)[:2]), trained_on(grid)[2:]) == (sorted(first), [first[0]])
    one, other = server_tensors(tmp_path / "first/flower"), server_tensors(tmp_path / "flower")
    assert all(torch.equal(one[name], other[name]) for name in one)


def simulated_selection(config: Any, folder: Path) -> list[int]:
    grid = grid_of(config, folder / "first")
    serve_on(grid)
    return trained_on(grid)


def test_too_few_answers_for_ever_end_the_run_and_it_can_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tailorfl.flower.federation.REPEATS", 1)
    config = small("fedper", rounds=2, **ALL)
    everyone = {10 + client: silent for client in range(4)}
    with pytest.raises(UserError, match="0 answers after 1 repeats"):
        serve_on(grid_of(config, tmp_path, everyone, deadline=0.2))
    assert serve_on(grid_of(config, tmp_path)) is not None
    simulate(config, tmp_path)
    one, other = server_tensors(tmp_path / "simulated"), server_tensors(tmp_path / "flower")
    assert all(torch.equal(one[name], other[name]) for name in one)


class Slow(InlineGrid):
    """The answers of one node to rounds come when the server asks for the next ones."""

    late = 11

    def pull_messages(self, message_ids: Any) -> Any:
        identities = list(message_ids)
        newest = max((int(identity.split("-")[1]) for identity in identities), default=0)
        held = {
            identity: reply
            for identity, reply in self.replies.items()
            if reply.metadata.src_node_id == self.late
            and reply.metadata.message_type == "train"
            and newest - int(identity.split("-")[1]) < 4
        }
        for identity in held:
            del self.replies[identity]
        found = super().pull_messages(identities)
        self.replies |= held
        return found


def test_a_late_answer_is_dropped_and_counted(tmp_path: Path) -> None:
    config = small("fedavg", rounds=2, evaluate_every=0, **ALL)
    honestly = grid_of(config, tmp_path, deadline=0.5)
    grid = Slow(honestly.run_config, honestly.nodes)
    assert serve_on(grid) is not None
    first, second = rounds_of(tmp_path / "flower")
    assert (first["missing"], first.get("late")) == (["1"], None)
    assert second["late"] == ["1"]


def test_a_server_that_is_killed_goes_on_after_the_last_finished_round(tmp_path: Path) -> None:
    """In the middle of a stage too: PPFE's stages span rounds."""
    config = small("ppfe", rounds=6, local_epochs=1, evaluate_every=0)

    class KilledError(Exception):
        pass

    def dying(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and facts_of(message.content)["round"] == 4:
            raise KilledError
        return honest(message, context)

    with pytest.raises(KilledError):
        serve_on(grid_of(config, tmp_path, {10 + client: dying for client in range(1, 4)}))
    assert len(rounds_of(tmp_path / "flower")) == 3
    assert serve_on(grid_of(config, tmp_path)) is not None
    simulate(config, tmp_path)
    for one, other in (
        (server_tensors(tmp_path / "simulated"), server_tensors(tmp_path / "flower")),
        (client_tensors(tmp_path / "simulated"), site_tensors(tmp_path / "state")),
    ):
        assert set(one) == set(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_site_that_starts_again_under_another_number_goes_on_with_its_own_model(tmp_path: Path) -> None:
    config = small("fedper", rounds=3, **ALL)
    grid = grid_of(config, tmp_path)

    def moves(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type == "train" and facts_of(message.content)["round"] == 2:
            grid.nodes[99] = grid.nodes.pop(11)  # killed in the middle of a round, and started again
            return None
        return honest(message, context)

    grid.answers[11] = moves
    assert serve_on(grid) is not None
    simulate(config, tmp_path)
    one, other = client_tensors(tmp_path / "simulated"), site_tensors(tmp_path / "state")
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_site_that_lost_the_archive_is_sent_it_again(tmp_path: Path) -> None:
    config = small("ppfe", rounds=6, local_epochs=1, evaluate_every=0, clients_per_round=4)
    grid, removed = grid_of(config, tmp_path), []

    def forgetful(message: Message, context: Context) -> Message:
        for path in (tmp_path / "state").glob("*/1/archive/*"):
            removed.append(path)
            path.unlink()
        return honest(message, context)

    grid.answers[11] = forgetful
    assert serve_on(grid) is not None
    assert removed
    simulate(config, tmp_path)
    one, other = server_tensors(tmp_path / "simulated"), server_tensors(tmp_path / "flower")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_site_with_other_data_does_not_get_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = tmp_path / "own.csv"
    table.write_text("a,b,label\n" + "".join(f"{k},{-k},{k % 2}\n" for k in range(20)))
    grid = grid_of(small("fedavg", clients=2, clients_per_round=2), tmp_path)
    grid.nodes[11] = {"client": "clinic", "data": f"csv:{table}"}
    with pytest.raises(UserError, match="some sites have data of their own"):
        serve_on(grid)


def test_sites_that_do_not_come(tmp_path: Path) -> None:
    grid = grid_of(small("fedavg"), tmp_path, nodes=5, wait=0.3)
    with pytest.raises(UserError, match=r"4 of 5 sites came within 0\.3 s: 0, 1, 2, 3"):
        serve_on(grid)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deadline": 0}, "deadline=0"),
        ({"min-answers": "many"}, "min-answers='many'"),
        ({"out": ""}, "no folder for the results"),
        ({"rounds": 3}, "unknown key 'rounds'"),
        ({"experiment": "rounds: 3"}, "experiment is missing"),
    ],
)
def test_bad_run_configurations(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        serve_on(grid_of(small("fedavg"), tmp_path, **options))
    assert not (tmp_path / "flower").exists()


def test_what_a_node_sends_is_shared_parameters_and_named_metrics(tmp_path: Path) -> None:
    """Of every method that keeps something: over three rounds nothing that is personal leaves a site."""
    for method in ("fedper", "ditto", "fedrep", "lg-fedavg"):
        config = small(method, local_epochs=1)
        folder = tmp_path / method
        grid = grid_of(config, folder)
        serve_on(grid)
        kept = site_tensors(folder / "state")
        server = {
            name.removeprefix("values/"): tensor.shape for name, tensor in server_tensors(folder / "flower").items()
        }
        for reply in grid.received:
            content = reply.content
            assert set(content.array_records) <= {"answer"}
            for name, tensor in tensors_of(content, "answer").items():
                assert tensor.shape == server[name]
                assert not any(torch.equal(tensor, own) for own in kept.values() if own.shape == tensor.shape)
            assert set(facts_of(content)) <= {"site", "archived", "diverged"}
            for record in content.metric_records:
                named = {"numbers", "score.test", "measures"}
                assert record in named or record.startswith("other.")
                assert all(isinstance(value, int | float) for value in content.metric_records[record].values())


def test_the_log_of_a_quiet_federation_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    serve_on(grid_of(small("fedper", local_epochs=1), tmp_path))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
