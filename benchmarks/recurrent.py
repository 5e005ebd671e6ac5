"""Rows of recurrent nets: our scan compared with `torch.nn.RNN` and `LSTM`, and with a loop over words in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, ratios, time_calls
from benchmarks.limits import measure_limit

BATCH, WORDS, WIDTH, RUNS = 64, 128, 64, 15
CELLS: dict[str, type[nn.RNN] | type[nn.LSTM]] = {"rnn": nn.RNN, "lstm": nn.LSTM}


def rnn_forward() -> list[Figure]:
    """The forward pass of an RNN of one slice, 64 wide, for 64 sentences of 128 words, with equal weights: our scan;
    `torch.nn.RNN`, whose loop is in C++; and the same equation as a loop over words in Python."""
    return _measure_forward("rnn")


def lstm_forward() -> list[Figure]:
    """The same for an LSTM."""
    return _measure_forward("lstm")


def lstm_training() -> list[Figure]:
    """Forward and backward pass of the LSTM, for the gradients of all its weights."""
    calls = {name: _with_gradients(call) for name, call in _create_calls("lstm").items()}
    return _measure_calls("lstm", calls)


def _measure_forward(cell: str) -> list[Figure]:
    """Return the figures of the forward passes of a cell."""
    with torch.inference_mode():
        return _measure_calls(cell, _create_calls(cell))


def _measure_calls(cell: str, calls: Mapping[str, Callable[[], object]]) -> list[Figure]:
    """Return the figures of calls that are compared."""
    actual, fused, loop = time_calls(calls, RUNS, warm=2).values()
    return [
        figure("net.module()", actual, "s"),
        figure(f"torch.nn.{cell.upper()}", fused, "s"),
        figure("a loop in Python", loop, "s"),
        figure(f"ratio to torch.nn.{cell.upper()}", ratios(actual, fused), "", target=3.0),
        figure("ratio to the loop", ratios(actual, loop), ""),
        *measure_limit(calls["ours"], actual),
    ]


def _create_calls(cell: str) -> dict[str, Callable[[], Tensor]]:
    """Return calls of ours, torch's and the loop, with equal weights and results."""
    torch.manual_seed(0)
    peer = CELLS[cell](WIDTH, WIDTH, batch_first=True)
    net = bt.recurrent(WIDTH, cell=cell, readout=None)
    module = net.replace(bt.models.weights_of(peer, net=net)).module().eval()
    x = torch.randn(BATCH, WORDS, WIDTH)
    step = _step_rnn if cell == "rnn" else _step_lstm
    calls = {"ours": lambda: module(x), "fused": lambda: peer(x)[0], "loop": lambda: _run_loop(peer, x, step)}
    with torch.inference_mode():
        for call in calls.values():
            torch.testing.assert_close(call(), peer(x)[0], rtol=1e-5, atol=1e-5)
    return calls


def _with_gradients(call: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a call with its backward pass."""
    return lambda: call().sum().backward()


State = tuple[Tensor, Tensor]


def _run_loop(peer: nn.RNN | nn.LSTM, x: Tensor, step: Callable[[Tensor, State], State]) -> Tensor:
    """Run a loop over words; `W x + b` of all words is computed before it."""
    W, U, bias = peer.weight_ih_l0, peer.weight_hh_l0, peer.bias_ih_l0 + peer.bias_hh_l0
    h = cell = x.new_zeros(len(x), WIDTH)
    states = []
    for inputs in functional.linear(x, W, bias).unbind(1):
        h, cell = step(inputs + h @ U.mT, (h, cell))
        states.append(h)
    return torch.stack(states, 1)


def _step_rnn(raw: Tensor, state: State) -> State:
    """Return the next state of an RNN."""
    return raw.tanh(), state[1]


def _step_lstm(raw: Tensor, state: State) -> State:
    """Return the next state of an LSTM."""
    i, f, g, o = raw.chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell
