"""How many bytes messages take."""

import torch

from tailorfl.exchange.messages import Answers, Message


def test_a_message_takes_its_tensors_and_eight_bytes_a_number() -> None:
    tensors = {"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.float64), "n": torch.zeros(5, dtype=torch.uint8)}
    assert Message(tensors, {"lr": 0.1, "step": 2.0}).bytes == 3 * 4 * 4 + 2 * 8 + 5 + 2 * 8


def test_an_empty_message_takes_nothing() -> None:
    assert Message().bytes == 0


def test_answers_take_what_all_their_clients_send() -> None:
    answers = Answers((4, 9, 2), torch.ones(3, dtype=torch.int64), {"w": torch.zeros(3, 10)}, torch.zeros(3))
    assert answers.bytes == 3 * 10 * 4
    assert answers.only([1]).bytes == 10 * 4
