"""How many bytes messages take, and what a client is sent only once."""

import torch

from tailorfl.exchange.messages import Answers, Message, Server


def test_a_message_takes_its_tensors_and_eight_bytes_a_number() -> None:
    tensors = {"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.float64), "n": torch.zeros(5, dtype=torch.uint8)}
    assert Message(tensors, {"lr": 0.1, "step": 2.0}).bytes == 3 * 4 * 4 + 2 * 8 + 5 + 2 * 8


def test_an_empty_message_takes_nothing() -> None:
    assert Message().bytes == 0


def test_answers_take_what_all_their_clients_send() -> None:
    answers = Answers((4, 9, 2), torch.ones(3, dtype=torch.int64), {"w": torch.zeros(3, 10)}, torch.zeros(3))
    assert answers.bytes == 3 * 10 * 4
    assert answers.only([1]).bytes == 10 * 4


def test_what_clients_keep_is_not_counted_with_every_message() -> None:
    assert Message({"w": torch.zeros(3)}, archive={"old": torch.zeros(1000)}).bytes == 3 * 4


def test_a_client_is_sent_the_archive_once() -> None:
    server = Server({}, archive={"1/w": torch.zeros(3, 4), "1/b": torch.zeros(2, dtype=torch.float64)})
    assert [server.hand_out(client) for client in (5, 5, 2, 5)] == [64, 0, 64, 0]


def test_what_the_archive_has_grown_by_is_sent_to_each_client_when_it_comes() -> None:
    server = Server({})
    assert server.hand_out(5) == 0
    server.archive |= {"1/w": torch.zeros(10)}
    assert server.hand_out(5) == 40
    server.archive |= {"2/w": torch.zeros(3), "2/b": torch.zeros(1)}
    assert server.hand_out(5) == 12 + 4
    assert server.hand_out(6) == 40 + 12 + 4  # a client that was away is sent all that it lacks
    server.archive |= {"3/w": torch.zeros(2)}
    assert [server.hand_out(client) for client in (5, 6, 5)] == [8, 8, 0]


def test_a_client_that_came_before_there_was_an_archive_costs_nothing() -> None:
    server = Server({"w": torch.zeros(5)}, {"momentum": torch.zeros(5)})
    assert [server.hand_out(client) for client in range(100)] == [0] * 100
    assert server.held == {}


def test_a_server_becomes_what_was_saved() -> None:
    """The object stays the same: a round loop and a method hold it."""
    server = Server({"w": torch.zeros(2)}, archive={"x": torch.zeros(1)}, held={1: 1})
    saved = Server(
        {"v": torch.ones(3)}, {"m": torch.ones(1)}, {"n": 2.0}, {"a": torch.ones(4), "b": torch.ones(2)}, {7: 1}, 12
    )
    loop = [server]
    server.restore(saved)
    assert vars(loop[0]) == vars(saved)
    assert (server.hand_out(7), server.hand_out(1)) == (8, 24)
