"""A store's process sends events of labelled blocks to the readers of a namespace, and to no other client."""

import os

import pytest
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, items_of, tool_hello
from support import eventually

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import event_feed as event_feed_module
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor

OTHER = b"another 16 bytes"
BLOCK_HASHES = block_hashes_of((10, "a"))
NAMES = [BLOCK_HASHES[at : at + m.HASH_BYTES] for at in range(0, len(BLOCK_HASHES), m.HASH_BYTES)]


@pytest.fixture
def server(tmp_path):
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="1MiB"))
    server.start()
    eventually(lambda: server.memory.ready == server.memory.usable)
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with RawClient(server.path, engine_hello()) as client:
        yield client


class Listener:
    """The events that a RawClient got: by block, (places, label)."""

    def __init__(self, client: RawClient, *namespaces: bytes):
        self.client, self.view, self.namespaces = client, {}, set()
        client.send(m.Follow(list(namespaces)))

    def hear(self) -> m.Changes:
        changes = self.client.hear()
        assert isinstance(changes, m.Changes)
        if changes.anew:
            self.view = {name: each for name, each in self.view.items() if name[0] != changes.namespace_id}
        self.namespaces.add(changes.namespace_id)
        for i, group in enumerate(changes.groups):
            name = changes.namespace_id, group, changes.hashes[i * m.HASH_BYTES : (i + 1) * m.HASH_BYTES]
            self.view[name] = changes.places[i], changes.labels[i]
            if not changes.places[i]:
                assert not changes.labels[i]
                del self.view[name]
        self.client.send(m.ChangesAck())
        return changes

    def until(self, names: list[bytes], namespace_id: bytes = NAMESPACE_ID) -> None:
        while {name[2] for name in self.view if name[0] == namespace_id} != set(names):
            self.hear()


def label(client: RawClient, names: list[bytes], namespace_id: bytes = NAMESPACE_ID) -> None:
    client.send(m.Labels(namespace_id, [0] * len(names), b"".join(names), [b"label " + name for name in names]))


def test_event_feed_subscriber_gets_snapshot_and_changes(server, client):
    listener = Listener(client, NAMESPACE_ID)
    assert listener.hear() == m.Changes(NAMESPACE_ID, True, [], b"", [], []), "nothing is there yet"
    slots = client.reserve(BLOCK_HASHES)
    label(client, NAMES)
    client.send(m.Commit(slots))
    listener.until(NAMES)
    assert listener.view[NAMESPACE_ID, 0, NAMES[3]] == (1, b"label " + NAMES[3])
    client.send(m.Discard(NAMESPACE_ID, 0, NAMES[4], slots[4]))
    listener.until(NAMES[:4] + NAMES[5:])
    with RawClient(server.path, tool_hello()) as tool:
        tool.ask(m.Clear(1))
    listener.until([])
    assert server.changes.labelled == (0, 0)


def test_event_feed_late_subscriber_gets_bounded_snapshot(server, client, monkeypatch):
    monkeypatch.setattr(event_feed_module, "BATCH_BLOCKS", 3)
    first = Listener(client, NAMESPACE_ID)
    first.hear()
    label_after(client)
    first.until(NAMES)
    with RawClient(server.path, engine_hello("later")) as later:
        second = Listener(later, NAMESPACE_ID)
        sizes = []
        while len(second.view) < len(NAMES):
            sizes.append(len(second.hear().groups))
        assert sizes == [3, 3, 3, 1] and second.view == first.view


def label_after(client: RawClient, namespace_id: bytes = NAMESPACE_ID) -> None:
    groups, hashes, parents = items_of(BLOCK_HASHES)
    client.send(m.Reserve(2, namespace_id, b"", groups, hashes, parents, EVERYTHING))
    slots = next(reply for reply in iter(client.hear, None) if isinstance(reply, m.Reserved)).slots
    client.send(m.Commit([slot for slot in slots if slot > 0]))
    label(client, NAMES, namespace_id)


def test_event_feed_sends_only_joined_namespaces(server, client):
    """Nor can any process label blocks there."""
    with RawClient(server.path, engine_hello("stranger")) as stranger:
        listener = Listener(stranger, OTHER)
        listener.hear()
        mine = Listener(client, NAMESPACE_ID)
        mine.hear()
        label_after(client)
        mine.until(NAMES)
        label(stranger, NAMES)
        label_after(stranger, OTHER)
        listener.until(NAMES, OTHER)
        assert listener.namespaces == {OTHER} and mine.namespaces == {NAMESPACE_ID}
        assert all(name[0] == OTHER for name in listener.view)


def test_event_feed_unsubscribed_client_gets_nothing(server, client):
    client.send(m.Follow([NAMESPACE_ID, OTHER]))
    first = client.hear().namespace_id
    client.send(m.ChangesAck())
    assert {first, client.hear().namespace_id} == {NAMESPACE_ID, OTHER}
    label_after(client)  # waits behind what was not answered
    client.send(m.Follow([OTHER]))
    client.send(m.ChangesAck())
    client.stat()  # anything of it would have come before this
    label_after(client, OTHER)
    listener = Listener.__new__(Listener)
    listener.client, listener.view, listener.namespaces = client, {}, set()
    listener.until(NAMES, OTHER)
    assert listener.namespaces == {OTHER}


def test_event_feed_skips_unlabelled_blocks(server, client):
    client.store(BLOCK_HASHES)
    listener = Listener(client, NAMESPACE_ID)
    assert listener.hear().groups == []
    label(client, [*NAMES[:2], b"never was stored"])
    listener.until(NAMES[:2])


def test_event_feed_message_is_pending_until_acknowledged(server, client, monkeypatch):
    """Meanwhile much may happen: of all that one message tells what is so in the end."""
    client.send(m.Follow([NAMESPACE_ID]))
    first = client.hear()
    assert first.anew
    slots = client.reserve(BLOCK_HASHES)
    label(client, NAMES)
    client.send(m.Commit(slots))
    for name, slot in zip(NAMES[5:], slots[5:], strict=True):
        client.send(m.Discard(NAMESPACE_ID, 0, name, slot))
    client.stat()  # had anything been sent, it would have come before this
    client.send(m.ChangesAck())
    told = client.hear()
    places = {told.hashes[i * m.HASH_BYTES : (i + 1) * m.HASH_BYTES]: told.places[i] for i in range(len(told.groups))}
    assert {name for name, place in places.items() if place} == set(NAMES[:5])


def test_event_feed_slow_subscriber_restarts_with_snapshot(server, client, monkeypatch):
    """Its queue is bounded: what is lost is not its contents but its order."""
    monkeypatch.setattr(event_feed_module, "MAX_WAITING", 4)
    client.send(m.Follow([NAMESPACE_ID]))
    client.hear()
    slots = client.reserve(BLOCK_HASHES)
    label(client, NAMES)
    client.send(m.Commit(slots))
    client.stat()
    follower = next(iter(server.changes._followers.values()))
    assert sum(map(len, follower.waiting.values())) <= 4
    client.send(m.ChangesAck())
    listener = Listener.__new__(Listener)
    listener.client, listener.view, listener.namespaces = client, {(NAMESPACE_ID, 0, b"what it had"): (1, b"")}, set()
    assert listener.hear().anew
    listener.until(NAMES)


def test_event_feed_is_for_engines_only(server):
    for message in (m.Follow([NAMESPACE_ID]), m.Labels(NAMESPACE_ID, [], b"", []), m.ChangesAck()):
        with RawClient(server.path, tool_hello()) as tool:
            assert isinstance(tool.ask(message), m.Refused)


def test_event_feed_inconsistent_label_list_is_refused(server, client):
    client.send(m.Follow([NAMESPACE_ID]))
    client.hear()
    client.send(m.Labels(NAMESPACE_ID, [0, 0], NAMES[0], [b"x"]))
    assert isinstance(client.hear(), m.Refused)


def test_event_feed_namespace_of_other_groups_is_refused(server, client):
    client.store(BLOCK_HASHES)
    with RawClient(server.path, engine_hello("of another shape", pages=8)) as other:
        other.send(m.Follow([NAMESPACE_ID]))
        assert isinstance(other.hear(), m.Refused)


def test_event_feed_labels_outlive_their_subscriber(server, client):
    Listener(client, NAMESPACE_ID).hear()
    label_after(client)
    client.close()
    eventually(lambda: not server.changes._followers)
    with RawClient(server.path, engine_hello("restarted")) as again:
        Listener(again, NAMESPACE_ID).until(NAMES)


def test_event_feed_client_receives_and_acknowledges(server):
    """As an engine has it; also after the connection ended and came again."""
    reactor, told = Reactor("test"), []
    client = StoreClient(reactor, server.path, m.Hello("e", os.getpid(), "engine", 16, [m.GroupShape(1, 4)]))
    client.on_changes = told.append
    client.start()
    reactor.start()
    try:
        eventually(lambda: client.connected)
        client.follow([NAMESPACE_ID])
        eventually(lambda: told)
        pending = client.reserve(NAMESPACE_ID, b"", *items_of(BLOCK_HASHES), EVERYTHING)
        eventually(lambda: pending.outcome)
        client.label(NAMESPACE_ID, [0] * len(NAMES), b"".join(NAMES), [b"label"] * len(NAMES))
        client.commit(pending.outcome.slots)
        eventually(lambda: sum(len(each.groups) for each in told) == len(NAMES))
        session = client.session
        client.follow([OTHER], session + 1)  # not of this connection: not sent
        gone = client.clear()
        eventually(lambda: gone.outcome)
        eventually(lambda: sum(each.places.count(0) for each in told) == len(NAMES))
        assert {each.namespace_id for each in told} == {NAMESPACE_ID}
    finally:
        reactor.stop()
