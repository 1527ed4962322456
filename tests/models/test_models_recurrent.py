"""The LSTM of matrix products against torch's own."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from tailorfl.models import LSTM


@pytest.fixture
def pair():
    torch.manual_seed(0)
    torchs = nn.LSTM(5, 7, batch_first=True).double()
    ours = LSTM(5, 7).double()
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_lstm_equals_torchs_in_value_and_gradient(pair):
    ours, torchs = pair
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    out, expected = ours(x), torchs(x)[1][0][0]
    close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in torchs.named_parameters():
        close(ours.get_parameter(name).grad, parameter.grad)


def test_lstm_returns_the_state_after_the_last_real_step(pair):
    ours, torchs = pair
    x, lengths = torch.randn(3, 6, 5, dtype=torch.float64), torch.tensor([6, 2, 4])
    valid = torch.arange(6) < lengths[:, None]
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    close(ours(x, valid), torchs(packed)[1][0][0])
    close(ours(x, valid.double()), ours(x, valid))
    assert ours(x, torch.zeros(3, 6)).eq(0).all()


def test_stacked_lstm_equals_one_by_one(pair):
    ours, _ = pair
    clients = [LSTM(5, 7).double() for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(clients)
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    valid = torch.tensor([[[1, 1, 0, 0], [1, 1, 1, 1]]] * 3)

    def loss(parameters, x, valid):
        return functional_call(ours, parameters, (x, valid)).square().sum()

    stacked = vmap(grad(loss))(parameters, x, valid)
    for index, client in enumerate(clients):
        client(x[index], valid[index]).square().sum().backward()
        for name, parameter in client.named_parameters():
            close(stacked[name][index], parameter.grad)
