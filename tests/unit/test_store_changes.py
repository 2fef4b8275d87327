"""A store's process tells who follows a space what becomes of its labelled blocks, and nobody else anything."""

import os

import pytest
from store_support import EVERYTHING, SPACE, RawClient, chain_of, engine_hello, items_of, tool_hello
from support import eventually

from vllm_kvtier.store import changes as changes_module
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor

OTHER = b"another 16 bytes"
CHAIN = chain_of((10, "a"))
NAMES = [CHAIN[at : at + m.HASH] for at in range(0, len(CHAIN), m.HASH)]


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
    """What a RawClient was told: by block, (places, label)."""

    def __init__(self, client: RawClient, *spaces: bytes):
        self.client, self.view, self.spaces = client, {}, set()
        client.tell(m.Follow(list(spaces)))

    def hear(self) -> m.Changes:
        changes = self.client.hear()
        assert isinstance(changes, m.Changes)
        if changes.anew:
            self.view = {name: each for name, each in self.view.items() if name[0] != changes.space}
        self.spaces.add(changes.space)
        for i, group in enumerate(changes.groups):
            name = changes.space, group, changes.hashes[i * m.HASH : (i + 1) * m.HASH]
            self.view[name] = changes.places[i], changes.labels[i]
            if not changes.places[i]:
                assert not changes.labels[i]
                del self.view[name]
        self.client.tell(m.Heard())
        return changes

    def until(self, names: list[bytes], space: bytes = SPACE) -> None:
        while {name[2] for name in self.view if name[0] == space} != set(names):
            self.hear()


def label(client: RawClient, names: list[bytes], space: bytes = SPACE) -> None:
    client.tell(m.Labels(space, [0] * len(names), b"".join(names), [b"label " + name for name in names]))


def test_who_follows_hears_what_is_there_and_what_becomes_of_it(server, client):
    listener = Listener(client, SPACE)
    assert listener.hear() == m.Changes(SPACE, True, [], b"", [], []), "nothing is there yet"
    slots = client.reserve(CHAIN)
    label(client, NAMES)
    client.tell(m.Commit(slots))
    listener.until(NAMES)
    assert listener.view[SPACE, 0, NAMES[3]] == (1, b"label " + NAMES[3])
    client.tell(m.Discard(SPACE, 0, NAMES[4], slots[4]))
    listener.until(NAMES[:4] + NAMES[5:])
    with RawClient(server.path, tool_hello()) as tool:
        tool.ask(m.Clear(1))
    listener.until([])
    assert server.changes.labelled == (0, 0)


def test_who_comes_later_is_told_all_of_it_in_messages_of_bounded_size(server, client, monkeypatch):
    monkeypatch.setattr(changes_module, "BATCH_BLOCKS", 3)
    first = Listener(client, SPACE)
    first.hear()
    label_after(client)
    first.until(NAMES)
    with RawClient(server.path, engine_hello("later")) as later:
        second = Listener(later, SPACE)
        sizes = []
        while len(second.view) < len(NAMES):
            sizes.append(len(second.hear().groups))
        assert sizes == [3, 3, 3, 1] and second.view == first.view


def label_after(client: RawClient, space: bytes = SPACE) -> None:
    groups, hashes, parents = items_of(CHAIN)
    client.tell(m.Reserve(2, space, b"", groups, hashes, parents, EVERYTHING))
    slots = next(reply for reply in iter(client.hear, None) if isinstance(reply, m.Reserved)).slots
    client.tell(m.Commit([slot for slot in slots if slot > 0]))
    label(client, NAMES, space)


def test_nobody_hears_of_a_space_that_it_has_not_joined(server, client):
    """Nor can anybody label blocks there."""
    with RawClient(server.path, engine_hello("stranger")) as stranger:
        listener = Listener(stranger, OTHER)
        listener.hear()
        mine = Listener(client, SPACE)
        mine.hear()
        label_after(client)
        mine.until(NAMES)
        label(stranger, NAMES)
        label_after(stranger, OTHER)
        listener.until(NAMES, OTHER)
        assert listener.spaces == {OTHER} and mine.spaces == {SPACE}
        assert all(name[0] == OTHER for name in listener.view)


def test_who_follows_no_more_hears_no_more(server, client):
    client.tell(m.Follow([SPACE, OTHER]))
    assert {client.hear().space, client.tell(m.Heard()) or client.hear().space} == {SPACE, OTHER}
    label_after(client)  # waits behind what was not answered
    client.tell(m.Follow([OTHER]))
    client.tell(m.Heard())
    client.stat()  # anything of it would have come before this
    label_after(client, OTHER)
    listener = Listener.__new__(Listener)
    listener.client, listener.view, listener.spaces = client, {}, set()
    listener.until(NAMES, OTHER)
    assert listener.spaces == {OTHER}


def test_what_is_not_labelled_is_told_to_nobody(server, client):
    client.store(CHAIN)
    listener = Listener(client, SPACE)
    assert listener.hear().groups == []
    label(client, [*NAMES[:2], b"never was stored"])
    listener.until(NAMES[:2])


def test_a_message_is_under_way_until_it_was_heard(server, client, monkeypatch):
    """Meanwhile much may happen: of all that one message tells what is so in the end."""
    client.tell(m.Follow([SPACE]))
    first = client.hear()
    assert first.anew
    slots = client.reserve(CHAIN)
    label(client, NAMES)
    client.tell(m.Commit(slots))
    for name, slot in zip(NAMES[5:], slots[5:], strict=True):
        client.tell(m.Discard(SPACE, 0, name, slot))
    client.stat()  # had anything been sent, it would have come before this
    client.tell(m.Heard())
    told = client.hear()
    places = {told.hashes[i * m.HASH : (i + 1) * m.HASH]: told.places[i] for i in range(len(told.groups))}
    assert {name for name, place in places.items() if place} == set(NAMES[:5])


def test_who_hears_too_little_begins_anew(server, client, monkeypatch):
    """Its queue is bounded: what is lost is not its contents but its order."""
    monkeypatch.setattr(changes_module, "MOST_WAITING", 4)
    client.tell(m.Follow([SPACE]))
    client.hear()
    slots = client.reserve(CHAIN)
    label(client, NAMES)
    client.tell(m.Commit(slots))
    client.stat()
    follower = next(iter(server.changes._followers.values()))
    assert sum(map(len, follower.waiting.values())) <= 4
    client.tell(m.Heard())
    listener = Listener.__new__(Listener)
    listener.client, listener.view, listener.spaces = client, {(SPACE, 0, b"what it had"): (1, b"")}, set()
    assert listener.hear().anew
    listener.until(NAMES)


def test_only_engines_follow(server):
    for message in (m.Follow([SPACE]), m.Labels(SPACE, [], b"", []), m.Heard()):
        with RawClient(server.path, tool_hello()) as tool:
            assert isinstance(tool.ask(message), m.Refused)


def test_a_label_list_that_does_not_add_up_costs_the_connection(server, client):
    client.tell(m.Follow([SPACE]))
    client.hear()
    client.tell(m.Labels(SPACE, [0, 0], NAMES[0], [b"x"]))
    assert isinstance(client.hear(), m.Refused)


def test_a_space_of_other_groups_cannot_be_joined(server, client):
    client.store(CHAIN)
    with RawClient(server.path, engine_hello("of another shape", pages=8)) as other:
        other.tell(m.Follow([SPACE]))
        assert isinstance(other.hear(), m.Refused)


def test_a_follower_that_leaves_is_forgotten_and_its_labels_stay(server, client):
    Listener(client, SPACE).hear()
    label_after(client)
    client.close()
    eventually(lambda: not server.changes._followers)
    with RawClient(server.path, engine_hello("restarted")) as again:
        Listener(again, SPACE).until(NAMES)


def test_the_client_hears_and_answers(server):
    """As an engine has it; also after the connection ended and came again."""
    reactor, told = Reactor("test"), []
    client = StoreClient(reactor, server.path, m.Hello("e", os.getpid(), "engine", 16, [m.GroupShape(1, 4)]))
    client.on_changes = told.append
    client.start()
    reactor.start()
    try:
        eventually(lambda: client.connected)
        client.follow([SPACE])
        eventually(lambda: told)
        pending = client.reserve(SPACE, b"", *items_of(CHAIN), EVERYTHING)
        eventually(lambda: pending.outcome)
        client.label(SPACE, [0] * len(NAMES), b"".join(NAMES), [b"label"] * len(NAMES))
        client.commit(pending.outcome.slots)
        eventually(lambda: sum(len(each.groups) for each in told) == len(NAMES))
        session = client.session
        client.follow([OTHER], session + 1)  # not of this connection: not sent
        gone = client.clear()
        eventually(lambda: gone.outcome)
        eventually(lambda: sum(each.places.count(0) for each in told) == len(NAMES))
        assert {each.space for each in told} == {SPACE}
    finally:
        reactor.stop()
