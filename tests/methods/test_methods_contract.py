"""What every registered method must do, whatever its idea."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from method_runs import IMAGES, SMALL, differences, federation, run, state, whole_and_resumed

from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.methods import methods
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.config import Experiment, configure

# One gradient step a round takes more rounds, at a higher rate.
SLOW_LEARNERS = {"fedsgd": {"rounds": 30, "lr": 0.2}}

every_method = pytest.mark.parametrize("method", list(methods()))


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A table of clients with very different numbers of rows, one of them with a single row to train on."""
    draws = torch.Generator().manual_seed(0)
    path = tmp_path / "table.csv"
    lines = ["a,b,c,label,who"]
    for name, rows in {"large": 41, "middle": 17, "small": 6, "pair": 2}.items():
        for features in torch.randn(rows, 3, generator=draws).tolist():
            lines.append(",".join([*map(str, features), "yes" if sum(features) > 0 else "no", name]))
    path.write_text("\n".join(lines) + "\n")
    own = {"data": f"csv:{path}", "label_column": "label", "client_column": "who", "partition": "natural"}
    return {**own, "min_samples": 1, "samples_per_client": None, "clients_per_round": 1.0, "validation_fraction": 0.0}


def with_norms(method: str) -> dict[str, Any]:
    """A federation of images, with norm layers in the network where the method can train them."""
    plain = {"network": "cnn", "network_options": {"channels": [4, 4], "hidden": [8]}}
    return IMAGES if methods()[method].statistics else {**IMAGES, **plain}


def listen(built: Built) -> tuple[list[Message], list[list[Answers]]]:
    """Everything that travels in a federation, round by round."""
    train = built.federation.train
    sent: list[Message] = []
    answered: list[list[Answers]] = []

    def overheard(round: int, clients: Sequence[int], message: Message) -> Iterator[Answers]:
        sent.append(message)
        answered.append([])
        for answers in train(round, clients, message):
            answered[-1].append(answers)
            yield answers

    built.federation.train = overheard  # type: ignore[method-assign]
    return sent, answered


@every_method
def test_no_option_of_a_method_hides_a_key_of_the_experiment(method: str) -> None:
    assert not set(methods()[method].model_fields) & set(Experiment.model_fields)


@every_method
def test_a_method_says_what_it_is(method: str) -> None:
    kind = methods()[method]
    assert kind.name == method
    assert kind.paper == "baseline" or re.search(r"[A-Z].* 20\d\d", kind.paper)
    assert kind.shares
    assert kind.__doc__


@every_method
def test_a_method_learns_the_digits(method: str) -> None:
    settings = {"clients_per_round": 6, "local_epochs": 5, "network_options": {"hidden": [16]}}
    rounds = run(federation(method, **settings, **SLOW_LEARNERS.get(method, {"rounds": 8})))
    last = rounds[-1].evaluation
    assert last is not None
    assert last.personalized.accuracy is not None
    assert last.personalized.accuracy > 0.4  # two classes a client; chance is a tenth for a model of all
    assert rounds[-1].loss < 0.7 * rounds[0].loss


@every_method
@pytest.mark.parametrize("partition", ["classes", "table"])
def test_clients_in_a_stack_learn_what_they_learn_one_by_one(method: str, partition: str, table: dict) -> None:
    settings: dict[str, Any] = {"precision": "float64", **(table if partition == "table" else {})}
    together = federation(method, **settings, engine="stacked")
    apart = federation(method, **settings, engine="one-by-one")
    scores = [[record.evaluation.personalized.loss for record in run(built)] for built in (together, apart)]
    found = [state(built) for built in (together, apart)]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-9)
    for one, other in zip(*scores, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), rtol=1e-9, atol=1e-9)


@every_method
def test_the_size_of_the_stacks_does_not_change_the_result(method: str) -> None:
    found = []
    for size in (1, 2, 6):
        built = federation(method, precision="float64", stack_size=size)
        run(built)
        found.append(state(built))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, found[0][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in methods()),
        ("fedavg", {"server_optimizer": "adam", "server_lr": 0.05}),
        ("fedper", {"server_optimizer": "sgd", "server_momentum": 0.9, "lr_schedule": "cosine"}),
    ],
)
def test_a_run_that_was_stopped_and_resumed_ends_like_one_that_was_not(
    method: str, settings: dict, tmp_path: Path
) -> None:
    config = configure(method, {**SMALL, "rounds": 4, "checkpoint_every": 100, **settings})
    summary, resumed = whole_and_resumed(config, tmp_path)
    unlike = {key for key in summary if summary[key] != resumed[key]}
    assert unlike <= {"seconds_training", "seconds_evaluation"}
    assert not differences(last_state(tmp_path / "whole"), last_state(tmp_path / "parted"))


def last_state(folder: Path) -> Values:
    found = newest_checkpoint(folder / "checkpoints", torch.device("cpu"))
    assert found is not None
    return {**found.server.values, **found.server.state, **found.clients}


@every_method
def test_clients_of_very_different_sizes_train_down_to_one_sample(method: str, table: dict) -> None:
    built = federation(method, **table)
    assert sorted(built.data.train.counts.tolist()) == [1, 4, 13, 31]
    rounds = run(built)
    assert [record.answered for record in rounds] == [[0, 1, 2, 3]] * 3
    assert all(tensor.isfinite().all() for tensor in state(built).values())


@every_method
def test_a_client_that_diverges_is_left_out_named_and_counted(
    method: str, table: dict, caplog: pytest.LogCaptureFixture
) -> None:
    built = federation(method, **table)
    ill = built.data.names.index("middle")
    built.data.inputs[built.data.train.of(ill)] = torch.nan
    with caplog.at_level(logging.WARNING):
        rounds = run(built)
    assert [record.diverged for record in rounds] == [[ill]] * 3
    assert all(ill not in record.answered for record in rounds)
    assert all(record.loss is not None and record.loss == record.loss for record in rounds)
    warnings = [record.message for record in caplog.records if "diverged" in record.message]
    assert len(warnings) == 3
    assert all("middle" in message for message in warnings)
    assert all(tensor.isfinite().all() for tensor in state(built).values())


@every_method
def test_a_client_that_diverges_does_not_touch_the_others(method: str, table: dict) -> None:
    beside_ill, beside_healthy = federation(method, **table), federation(method, **table)
    ill = beside_ill.data.names.index("middle")
    beside_ill.data.inputs[beside_ill.data.train.of(ill)] = torch.nan
    learnt = []
    for built in (beside_ill, beside_healthy):
        message = built.loop.message_for_evaluation()
        sent = list(built.federation.train(1, range(4), message))
        rows = [(a, row, client) for a in sent for row, client in enumerate(a.clients) if client != ill]
        found = {f"{client} sends {name}": a.tensors[name][row] for a, row, client in rows for name in a.tensors}
        kept = built.federation.store.flat()
        learnt.append(found | {name: tensor for name, tensor in kept.items() if not name.startswith(f"{ill}/")})
    assert len(learnt[0]) >= 3
    assert learnt[0].keys() == learnt[1].keys()
    for name, tensor in learnt[0].items():
        torch.testing.assert_close(tensor, learnt[1][name], rtol=1e-5, atol=1e-6)


@every_method
def test_a_round_in_which_everybody_diverges_changes_nothing(method: str, table: dict) -> None:
    built = federation(method, **table, rounds=1)
    before = {name: tensor.clone() for name, tensor in state(built).items()}
    built.data.inputs[:] = torch.nan
    [record] = run(built)
    assert (record.answered, record.loss, record.bytes_up) == ([], None, 0)
    assert not differences(state(built), before)


@every_method
def test_new_clients_are_evaluated_and_never_train(method: str) -> None:
    built = federation(method, new_clients=2, clients_per_round=1.0)
    rounds = run(built)
    new = set(built.data.new_clients)
    assert len(new) == 2
    for record in rounds:
        assert not new & set(record.selected)
        assert record.evaluation is not None
        assert record.evaluation.new is not None
        assert set(record.evaluation.new.clients) == new
        assert set(record.evaluation.personalized.clients) == set(range(6)) - new
    assert not new & set(built.federation.store.entries)


@every_method
@pytest.mark.parametrize("batch_norm", ["shared", "local", "local-statistics"])
def test_what_is_personal_never_travels_and_what_travels_is_counted(method: str, batch_norm: str) -> None:
    built = federation(method, **with_norms(method), batch_norm=batch_norm)
    received, answered = listen(built)
    rounds = run(built)
    chosen = built.config.method
    kept_home = {"shared": set(), "local": built.network.norm, "local-statistics": set(built.network.buffers)}
    archived: dict[int, set[str]] = defaultdict(set)  # what a client was sent once, and keeps
    assert len(received) == len(rounds)
    for record, message, answers in zip(rounds, received, answered, strict=True):
        networks = [built.federation.networks[chosen.network_of(c, record.number)] for c in range(built.data.clients)]
        personal = [set(network.names) - set(chosen.shared(network)) for network in networks]
        assert all(kept_home[batch_norm] <= names for names in personal)
        assert not set(message.tensors) & set.intersection(*personal)
        sent = [(client, a.tensors, row) for a in answers for row, client in enumerate(a.clients)]
        for client, tensors, row in sent:
            assert not set(tensors) & personal[client]
            kept = built.federation.store.entries.get(client, {})
            assert set(chosen.personal(networks[client])) <= set(kept)
            home = [tensor for key, tensor in kept.items() if key.split("/")[-1] in personal[client]]
            for name, stack in tensors.items():
                assert not any(is_copy(stack[row], tensor) for tensor in home), f"{name} is personal"
        assert record.bytes_up == sum(stack[row].nbytes for _, tensors, row in sent for stack in tensors.values())
        once = 0
        for client, _, _ in sent:
            once += sum(t.nbytes for name, t in message.archive.items() if name not in archived[client])
            archived[client] |= set(message.archive)
        down = record.bytes_down
        for client, _, _ in sent:  # delivered once more, it is counted once more
            message.to((client,), networks[client])
        assert record.bytes_down - down == down - once - message.bytes * len(sent)


def is_copy(sent: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers, and more than a constant that two tensors may share by chance."""
    return sent.shape == kept.shape and sent.numel() > 1 and len(sent.unique()) > 1 and torch.equal(sent, kept)


@every_method
@pytest.mark.parametrize("moment", ["paper", "received", "finetuned", "trained"])
def test_every_moment_of_evaluation_is_offered_and_leaves_no_trace(method: str, moment: str) -> None:
    built = federation(method, evaluate=moment, new_clients=1, rounds=2)
    run(built)
    before = {name: tensor.clone() for name, tensor in state(built).items()}
    first, second = built.loop.evaluate(2), built.loop.evaluate(2)
    assert first.new is not None
    assert first.new.accuracy is not None
    assert first.personalized.loss.tolist() == second.personalized.loss.tolist()
    assert not differences(state(built), before)


@every_method
def test_a_network_with_norm_layers_is_the_same_stacked_and_one_by_one(method: str) -> None:
    settings = {**with_norms(method), "precision": "float64", "rounds": 2}
    together, apart = (
        federation(method, **settings, engine="stacked"),
        federation(method, **settings, engine="one-by-one"),
    )
    run(together)
    run(apart)
    found = [state(built) for built in (together, apart)]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-7)


@every_method
def test_half_precision_in_training_changes_a_result_by_rounding_only(method: str) -> None:
    """With convolutions and batch norms; what is kept and sent stays in single precision."""
    settings = {**with_norms(method), "rounds": 2, "engine": "stacked"}
    wide, mixed = (federation(method, **settings, precision=precision) for precision in ("float32", "mixed"))
    losses = [[line.loss for line in run(built)] for built in (wide, mixed)]
    assert mixed.network.mixed
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    of_wide, of_mixed = state(wide), state(mixed)
    assert [(name, tensor.dtype) for name, tensor in of_mixed.items()] == [(n, t.dtype) for n, t in of_wide.items()]
    assert differences(of_wide, of_mixed), "it was trained in half precision"


@every_method
def test_a_round_for_which_nobody_is_selected_changes_nothing(method: str) -> None:
    built = federation(method, rounds=1)
    before = {name: tensor.clone() for name, tensor in state(built).items()}
    built.loop.select = lambda number: []
    [record] = run(built)
    assert (record.answered, record.loss, record.bytes_up, record.bytes_down) == ([], None, 0, 0)
    assert not differences(state(built), before)


@every_method
def test_evaluation_changes_nothing(method: str) -> None:
    built = federation(method, finetune_epochs=2)
    run(built)
    before = {name: tensor.clone() for name, tensor in state(built).items()}
    first, second = built.loop.evaluate(3), built.loop.evaluate(3)
    assert not differences(state(built), before)
    assert first.personalized.loss.tolist() == second.personalized.loss.tolist()


@every_method
def test_regression_data_run_or_are_refused(method: str) -> None:
    if methods()[method].classes_only:
        with pytest.raises(UserError, match="needs classes"):
            federation(method, data="synthetic-regression", partition="natural", samples_per_client=None)
        return
    settings = {"data": "synthetic-regression", "partition": "natural", "samples": 60, "samples_per_client": None}
    rounds = run(federation(method, **settings, dimension=5, network="mlp", lr=0.01, rounds=8))
    assert rounds[-1].loss < rounds[0].loss
    assert rounds[-1].evaluation.personalized.mean_loss < rounds[0].evaluation.personalized.mean_loss
