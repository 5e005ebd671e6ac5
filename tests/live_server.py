"""A server of the live page in a thread, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bnet_transformer as bt
from bnet_transformer.serve.answers import Limits
from bnet_transformer.serve.server import build_server, open_socket
from bnet_transformer.tpm import Categorical
from tests.cases import jitter

WORDS = ["the", "a", "cat", "dog", "sat"]


def build_decoder() -> bt.BNet:
    """A small decoder with a readout of each word."""
    return bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=WORDS, seed=1)


def build_selector() -> bt.BNet:
    """A small net whose heads are states of a selector."""
    return jitter(bt.bayesuvius(6, slices=2, heads=3, observe=Categorical(5)), 0.3)


@contextmanager
def run_live_server(models: dict[str, Any], limits: Limits | None = None) -> Iterator[str]:
    """Run a server in the block; the value is the address of the page with its token."""
    with open_socket(0) as listener:
        server, url = build_server(listener, models, limits or Limits())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield url
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
