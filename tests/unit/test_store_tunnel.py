"""A store's client over the link of a worker on the store's node, with a real store."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from store_process import Store
from store_support import EVERYTHING, NAMESPACE_ID, block_hashes_of, engine_hello, items_of
from support import eventually, stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import launcher
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.store.protocol import PROTOCOL, Found, Hello, Reserved, encode
from vllm_kvtier.store.tunnel import TunnelClient, TunnelServer
from vllm_kvtier.wire.reactor import Reactor

TIMEOUT = 0.5


@pytest.fixture
def made(tmp_path, monkeypatch):
    """``link``: an event; while it is cleared, frames of both directions wait."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 1.5)
    near, far, link = Reactor("near"), Reactor("far"), threading.Event()
    link.set()
    waiting = []

    def send(reactor, deliver):
        def carry(*frame):
            waiting.append(lambda: reactor.call_soon(lambda: deliver()(*frame)))
            go_on()

        return carry

    def go_on():
        while link.is_set() and waiting:
            waiting.pop(0)()

    launched, store = [], Store(tmp_path)
    ends = {}
    ends["near"] = TunnelClient(near, send(far, lambda: ends["far"].deliver))
    launch = lambda: launched.append(1) or store.start()  # noqa: E731
    ends["far"] = TunnelServer(far, send(near, lambda: ends["near"].deliver), store.path, launch)
    client = StoreClient(near, "far away", engine_hello(), lookup_timeout=TIMEOUT)
    client.dial = ends["near"].dial
    near.start()
    far.start()
    yield SimpleNamespace(
        client=client, store=store, link=link, waiting=waiting, go_on=go_on, launched=launched, ends=ends
    )
    near.stop()
    far.stop()
    store.kill()


def ask(client, hashes):
    pending = client.lookup(NAMESPACE_ID, hashes, 0, EVERYTHING)
    assert pending.wait(10 * TIMEOUT)
    return pending.outcome


def store_and_find(client, name):
    eventually(lambda: client.ready_pages, 30)
    hashes = block_hashes_of((5, name))
    pending = client.reserve(NAMESPACE_ID, b"", *items_of(hashes), EVERYTHING)
    assert pending.wait(10 * TIMEOUT) and isinstance(pending.outcome, Reserved)
    client.commit(pending.outcome.slots, pending.session)
    found = ask(client, hashes)
    assert isinstance(found, Found) and found.slots == [pending.outcome.slots]
    client.release(found.lease)


def test_tunnelled_client_starts_the_store_and_uses_it(made):
    made.client.start()
    eventually(lambda: made.client.connected, 30)
    assert made.launched == [1] and made.client.presence is None
    store_and_find(made.client, "a")
    engines = lambda: [each for each in made.store.counts().clients if each.kind == "engine"]  # noqa: E731
    eventually(lambda: [(each.leases, each.reservations) for each in engines()] == [(0, 0)], 10, "it holds nothing")
    made.client.close()
    eventually(lambda: not engines(), 10)
    assert not made.ends["near"]._streams and not made.ends["far"]._streams


def test_tunnelled_client_that_is_refused_starts_no_store_at_once_again(made):
    made.client._hello = encode(Hello("other", 1, "engine", protocol=PROTOCOL + 1))
    made.client.start()
    eventually(lambda: "protocol" in made.ends["far"]._starter._failure, 30)
    assert made.launched == [1]


def test_tunnelled_client_survives_the_end_and_a_hang_of_the_store(made):
    made.store.start()
    made.client.start()
    eventually(lambda: made.client.connected, 30)
    first = made.client.instance
    made.store.kill()
    eventually(lambda: not made.client.connected, 10)
    assert isinstance(ask(made.client, b""), Failed)
    down = time.monotonic()
    eventually(lambda: made.client.connected, 30)
    assert made.client.instance != first and made.launched == [1]
    assert time.monotonic() - down > 1.0, "its operator could have started it again"
    store_and_find(made.client, "b")
    stop(made.store.process.pid)
    try:
        began = time.monotonic()
        assert isinstance(ask(made.client, b""), Failed) and time.monotonic() - began < 9 * TIMEOUT
    finally:
        os.kill(made.store.process.pid, signal.SIGCONT)
    eventually(lambda: made.client.connected, 30)
    store_and_find(made.client, "c")


def test_tunnelled_client_gives_up_a_link_that_is_silent_and_ignores_what_comes_late(made):
    made.store.start()
    made.client.start()
    eventually(lambda: made.client.connected, 30)
    for cut in range(3):
        made.link.clear()
        assert isinstance(ask(made.client, b""), Failed)
        eventually(lambda: not made.client.connected, 10)
        made.link.set()
        made.go_on()  # frames of closed connections, in both directions
        eventually(lambda: made.client.connected, 30)
        store_and_find(made.client, f"cut {cut}")
    engines = lambda: [each for each in made.store.counts().clients if each.kind == "engine"]  # noqa: E731
    eventually(lambda: len(engines()) == 1, 10)


def test_store_does_not_keep_a_connection_whose_end_a_cut_link_lost(made):
    """Its leases and reservations would hold slots until their deadlines, and it the store and descriptors for good."""
    made.store.start()
    made.client.start()
    eventually(lambda: made.client.connected, 30)
    made.link.clear()
    assert isinstance(ask(made.client, b""), Failed)
    eventually(lambda: len(made.waiting) > 1, 10)  # the lookup, and the end of the connection
    made.waiting.clear()
    made.link.set()
    eventually(lambda: made.client.connected, 30)
    eventually(lambda: [each.kind for each in made.store.counts().clients].count("engine") == 1, 10)
    store_and_find(made.client, "e")


def test_tunnel_whose_store_cannot_be_started_says_so_and_tries_again(made, caplog):
    def launch():
        raise KVTierError("no memory for it")

    made.ends["far"]._starter._launch = launch
    made.client.start()
    eventually(lambda: "no memory for it" in caplog.text, 10)
    made.store.start()
    eventually(lambda: made.client.connected, 30)
    store_and_find(made.client, "d")
