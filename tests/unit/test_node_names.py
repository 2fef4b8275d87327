"""Stores found by DNS: names with several addresses, that change, vanish, or are not answered for."""

import socket
import threading

import pytest

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.remote_store import node_names
from vllm_kvtier.remote_store.node_names import NodeNames, resolve
from vllm_kvtier.remote_store.options import MAX_NODES, Address, NodeOptions
from vllm_kvtier.wire.reactor import Reactor

NAME = Address("store.kvtier.svc", 7300)


class Soon:
    """A reactor that calls at once."""

    def call_soon(self, callback):
        callback()


class Dns:
    """``answers``: hosts by name, or the error of getaddrinfo."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def __call__(self, name: Address) -> set[Address]:
        self.asked.append(name)
        answer = self.answers[name.host.partition(".")[0]]
        if isinstance(answer, Exception):
            raise answer
        return {Address(host, name.port) for host in answer}


def names_of(dns: Dns, *names: Address, instance: str = "me") -> tuple[NodeNames, list[set[str]]]:
    seen: list[set[str]] = []
    return NodeNames(Soon(), names or (NAME,), instance, lambda found: seen.append({a.host for a in found}), dns), seen


def test_names_follow_the_addresses_of_a_name():
    dns = Dns(store=["10.0.0.1", "10.0.0.2"])
    names, seen = names_of(dns)
    names.refresh()
    names.refresh()
    assert seen == [{"10.0.0.1", "10.0.0.2"}], "one call"
    dns.answers["store"] = ["10.0.0.2", "10.0.0.3"]
    names.refresh()
    assert seen[1:] == [{"10.0.0.2", "10.0.0.3"}], "10.0.0.1 is dropped"


@pytest.mark.parametrize("error", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_name_without_an_address_stands_for_no_store(error):
    """A headless Service without a ready pod."""
    dns = Dns(store=["10.0.0.1"])
    names, seen = names_of(dns)
    names.refresh()
    dns.answers["store"] = socket.gaierror(error, "none")
    names.refresh()
    assert seen == [{"10.0.0.1"}, set()]


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_AGAIN, "later"), OSError("no network"), TimeoutError()])
def test_names_stay_while_dns_does_not_answer(error, caplog):
    dns = Dns(store=["10.0.0.1"], other=["10.0.1.1"])
    names, seen = names_of(dns, NAME, Address("other.svc", 7300))
    names.refresh()
    dns.answers |= {"store": error, "other": ["10.0.1.2"]}
    names.refresh()
    names.refresh()
    assert seen == [{"10.0.0.1", "10.0.1.1"}, {"10.0.0.1", "10.0.1.2"}]


def test_store_asks_some_of_very_many_and_others_ask_others():
    dns = Dns(store=[f"10.0.{i // 256}.{i % 256}" for i in range(1000)])
    found = {}
    for instance in ("a", "b"):
        names, seen = names_of(dns, instance=instance)
        names.refresh()
        names.refresh()
        (found[instance],) = seen
    assert len(found["a"]) == len(found["b"]) == MAX_NODES
    assert len(found["a"] & found["b"]) < MAX_NODES / 2
    dns.answers["store"].remove(gone := min(found["b"]))
    names.refresh()
    assert len(seen) == 2 and gone not in seen[1], "the others of it stay"
    assert len(found["b"] & seen[1]) == MAX_NODES - 1


def test_resolve_returns_each_address_once(monkeypatch):
    def getaddrinfo(host, port, type):
        rows = [("10.0.0.1", port), ("10.0.0.1", port), ("fd00::1", port, 0, 0)]
        return [(None, type, 6, "", row) for row in rows]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert resolve(NAME) == {Address("10.0.0.1", 7300), Address("fd00::1", 7300)}


def test_names_are_resolved_again_on_a_thread_until_the_reactor_stops(monkeypatch):
    monkeypatch.setattr(node_names, "REFRESH_SECONDS", 0.01)
    reactor, changed = Reactor("test"), threading.Event()
    dns, seen = Dns(store=["10.0.0.1"]), []

    def on_change(found):
        seen.append((threading.current_thread().name, found))
        changed.set()

    names = NodeNames(reactor, (NAME,), "me", on_change, dns)
    names.start()
    reactor.start()
    assert changed.wait(10)
    changed.clear()
    dns.answers["store"] = ["10.0.0.2"]
    assert changed.wait(10)
    (thread,) = [each for each in threading.enumerate() if each.name == "kvtier-dns"]
    reactor.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [("test", (Address("10.0.0.1", 7300),)), ("test", (Address("10.0.0.2", 7300),))]


def test_without_names_there_is_no_thread():
    NodeNames(Reactor("test"), (), "me", lambda found: None).start()
    assert not [each for each in threading.enumerate() if each.name == "kvtier-dns"]


def test_options_tell_names_from_addresses():
    options = {"nodes": "127.0.0.1:7300, dns:localhost:7301,dns:localhost:7301"}
    found = NodeOptions.parse(options)
    assert found.nodes == (Address("127.0.0.1", 7300),) and found.names == (Address("localhost", 7301),)
    for wrong in ("dns:", "dns:store", "dns:store:0", "dns:a b:7300", "dns:[::1]"):
        with pytest.raises(ConfigError, match="is not host:port"):
            NodeOptions.parse({"nodes": wrong})
    with pytest.raises(ConfigError, match="requires a cluster key"):
        NodeOptions.parse({"nodes": "dns:store.kvtier.svc:7300"})
