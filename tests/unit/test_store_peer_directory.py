"""Engines tell the store which blocks lie in their own caches, and a lookup names those that have the prefix."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, items_of, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.store import client as client_module
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.index.types import BadRequest, Found
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.peer_directory import SWEEP_KEYS, PeerDirectory, directory_query
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor

BLOCK_HASHES = block_hashes_of((12, "a"))
FAMILY, OTHER = b"family 1", b"family 2"
MIX = b"\x01mixmix\xff"


def keys_of(block_hashes: bytes, hash_blocks_per_block: int = 1) -> list[bytes]:
    hashes = [block_hashes[at : at + 16] for at in range(0, len(block_hashes), 16)][
        hash_blocks_per_block - 1 :: hash_blocks_per_block
    ]
    return [bytes(a ^ b for a, b in zip(each[:8], MIX, strict=True)) for each in hashes]


class Engine(RawClient):
    """An engine that is present; ``peer_count`` collects the counts of other engines that it gets."""

    def __init__(self, path: str, name: str, family: bytes = FAMILY, *keys: bytes):
        super().__init__(path, engine_hello(name))
        self.peer_count: list[int] = []
        self.present(name, family)
        self.has(*keys)

    def present(self, name: str, family: bytes = FAMILY, port: int = 7000) -> None:
        self.send(m.Present(family, "127.0.0.1", port, name))

    def has(self, *added: bytes, gone: tuple[bytes, ...] = ()) -> None:
        """Everybody knows on return."""
        self.send(m.Cached(b"".join(added), b"".join(gone)))
        self.stat()

    def hear(self):
        while isinstance(reply := super().hear(), m.PeerCount):
            self.peer_count.append(reply.others)
        return reply

    def told(self) -> list[int]:
        self.stat()  # answered behind earlier messages
        return self.peer_count

    def find(
        self, block_hashes: bytes = BLOCK_HASHES, start: int = 0, hash_blocks_per_block: int = 1, key_mask: bytes = MIX
    ) -> m.Found:
        return self.ask(
            m.Lookup(
                1, NAMESPACE_ID, block_hashes, start, EVERYTHING, key_mask=key_mask,
                hash_blocks_per_block=hash_blocks_per_block,
            )
        )

    def holders(self, *args, **options) -> list[tuple[str, int]]:
        return [(holder.instance, holder.num_hash_blocks) for holder in self.find(*args, **options).holders]


def make(path) -> StoreServer:
    server = StoreServer(str(path), StoreOptions(size="1MiB"))
    server.start()
    eventually(lambda: server.memory.ready == server.memory.usable)
    return server


@pytest.fixture
def server(tmp_path):
    server = make(tmp_path / "s.sock")
    yield server
    server.stop()


@pytest.fixture
def enter(server):
    """Engines that leave after the test, if they have not before."""
    engines = []

    def enter(name: str, family: bytes = FAMILY, *keys: bytes) -> Engine:
        engines.append(Engine(server.path, name, family, *keys))
        return engines[-1]

    yield enter
    for engine in engines:
        engine.close()


# -- other engines-------------------------------------------------------------------------------------------------


def test_directory_engines_know_number_of_peers(enter):
    one = enter("one")
    assert one.told() == [0], "at once, also alone"
    two = enter("two")
    assert (one.told(), two.told()) == ([0, 1], [1])
    three = enter("three")
    assert (one.told(), two.told(), three.told()) == ([0, 1, 2], [1, 2], [2])
    two.close()
    eventually(lambda: (one.told(), three.told()) == ([0, 1, 2, 1], [2, 1]))


def test_directory_separates_compat_ids(enter):
    one, two = enter("one", FAMILY, *keys_of(BLOCK_HASHES)), enter("two", OTHER, *keys_of(BLOCK_HASHES))
    assert (one.told(), two.told()) == ([0], [0])
    assert one.holders() == two.holders() == []
    three = enter("three", OTHER)
    assert (one.told(), two.told(), three.told()) == ([0], [0, 1], [1])
    assert three.holders() == [("two", 12)]


def test_directory_resends_only_to_reconnected_engine(enter):
    one, two = enter("one", FAMILY, *keys_of(BLOCK_HASHES)), enter("two")
    one.present("one, renamed", port=7001)
    assert (one.told(), two.told()) == ([0, 1, 1], [1])
    assert two.find().holders == [m.Holder("127.0.0.1", 7001, "one, renamed", 12)], "its blocks are still there"
    one.present("one", OTHER)
    assert (one.told(), two.told()) == ([0, 1, 1, 0], [1, 0])
    assert two.holders() == []
    one.present("one", FAMILY)
    assert two.told() == [1, 0, 1] and two.holders() == [], "its keys were another family's meanwhile"


def test_directory_lists_only_sharing_engines(server, enter):
    with RawClient(server.path, engine_hello("silent")) as silent:
        one = enter("one", FAMILY, *keys_of(BLOCK_HASHES))
        assert one.told() == [0]
        answer = silent.ask(m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, key_mask=MIX))
        assert isinstance(answer, m.Found) and answer.holders == [], "engines of no kind"
        assert silent.stat().directory == m.DirectoryCounts(1, 12)


# -- holders ----------------------------------------------------------------------------------------------------


def test_directory_orders_holders_by_prefix_length(enter):
    keys = keys_of(BLOCK_HASHES)
    reader = enter("reader", FAMILY, *keys)
    assert reader.holders() == [], "itself it need not ask"
    enter("a", FAMILY, *keys[:3])
    enter("b", FAMILY, *keys[:9])
    enter("c", FAMILY, *keys[1:])
    assert reader.holders() == [("b", 9), ("a", 3)]
    assert reader.holders(start=1) == [("c", 12), ("b", 9), ("a", 3)]
    assert reader.holders(start=3) == [("c", 12), ("b", 9)]
    enter("d", FAMILY, *keys[:10])
    enter("e", FAMILY, *keys[:1])
    assert reader.holders() == [("d", 10), ("b", 9), ("a", 3)], "three at most"
    assert reader.holders(start=12) == []
    assert reader.holders(block_hashes_of((12, "another"))) == []
    assert reader.find(key_mask=b"").holders == [], "not asked for"


def test_directory_equal_holders_are_named_in_rotation(enter):
    reader = enter("reader")
    for name in "abcd":
        enter(name, FAMILY, *keys_of(BLOCK_HASHES))
    enter("short", FAMILY, *keys_of(BLOCK_HASHES)[:1])
    first = [reader.holders()[0] for _ in range(8)]
    assert sorted(first[:4]) == [(name, 12) for name in "abcd"] and first[4:] == first[:4]


def test_directory_blocks_of_several_hash_blocks(enter):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(BLOCK_HASHES, 4)[:2])
    assert reader.holders(hash_blocks_per_block=4) == [("holder", 8)]
    assert reader.holders(start=4, hash_blocks_per_block=4) == [("holder", 8)]
    assert reader.holders(start=8, hash_blocks_per_block=4) == []
    assert reader.holders(BLOCK_HASHES[: 7 * 16], hash_blocks_per_block=4) == [("holder", 4)], "half a block is none"
    assert reader.holders(start=5, hash_blocks_per_block=4) == [("holder", 8)], "the whole block that has unit 5"
    assert (
        reader.holders(hash_blocks_per_block=1)
        == reader.holders(hash_blocks_per_block=5)
        == reader.holders(hash_blocks_per_block=1 << 16)
        == []
    )
    holder.has(*keys_of(BLOCK_HASHES, 4)[2:])
    assert reader.holders(hash_blocks_per_block=4) == [("holder", 12)]


def test_directory_removed_blocks_are_not_named(enter):
    keys = keys_of(BLOCK_HASHES)
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys)
    holder.has(gone=(keys[5], keys[5], b"neverhad"))
    assert reader.holders() == [("holder", 5)]
    assert reader.stat().directory == m.DirectoryCounts(2, 11)
    holder.has(keys[5], keys[5])
    assert reader.holders() == [("holder", 12)]
    holder.has(keys[0], gone=(keys[0],))
    assert reader.holders() == [], "first added, then gone"


def test_directory_snapshot_replaces_older_blocks(server, enter):
    """As after a time alone, in which it did not say what went."""
    reader, keys = enter("reader"), keys_of(BLOCK_HASHES)
    holder = enter("holder", FAMILY, *keys, os.urandom(8 * 2 * SWEEP_KEYS))
    rival = enter("rival", FAMILY, *keys[:8])
    assert reader.holders() == [("holder", 12), ("rival", 8)]
    holder.send(m.Cached(b"".join(keys[:5]), keys[4], anew=True))
    assert holder.told() == [1, 2], "the others were there all the time"
    assert reader.holders() == [("rival", 8), ("holder", 4)]
    assert reader.stat().directory == m.DirectoryCounts(3, 12)
    eventually(lambda: not server._peer_directory._sweeping, what="all is forgotten")
    (family,) = server._peer_directory._directory._groups.values()
    assert len(family.masks) == 8 and family.taken == family.present
    rival.send(m.Cached(b"", b"", anew=True))
    rival.stat()
    assert reader.holders() == [("holder", 4)]


def test_directory_holders_are_returned_with_memory_hit(server, enter):
    reader, _ = enter("reader"), enter("holder", FAMILY, *keys_of(BLOCK_HASHES)[:4])
    nothing = reader.find()
    assert (nothing.lease, nothing.num_hash_blocks, [h.num_hash_blocks for h in nothing.holders]) == (0, 0, [4])
    reader.store(BLOCK_HASHES[: 6 * 16])
    both = reader.find()
    assert both.lease and both.num_hash_blocks == 6 and [h.num_hash_blocks for h in both.holders] == [4]


def test_directory_waiting_answer_names_current_holders(server, enter, monkeypatch):
    asked = []
    monkeypatch.setattr(server.tiers, "lookup", lambda client, want, limit, wait_seconds, answer: asked.append(answer))
    reader = enter("reader")
    reader.send(m.Lookup(5, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, wait_seconds=60.0, key_mask=MIX))
    early = enter("early", FAMILY, *keys_of(BLOCK_HASHES))
    enter("late", FAMILY, *keys_of(BLOCK_HASHES)[:3])
    early.close()
    eventually(lambda: reader.stat().directory.holders == 2)
    server.reactor.call_soon(lambda: asked[0](Found(0, 0, [[]]), None))
    assert [(holder.instance, holder.num_hash_blocks) for holder in reader.hear().holders] == [("late", 3)]


def test_directory_keeps_blocks_of_engine_left_alone(enter):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(BLOCK_HASHES))
    reader.close()
    eventually(lambda: holder.told() == [1, 0])
    assert holder.stat().directory == m.DirectoryCounts(1, 12)
    assert enter("next").holders() == [("holder", 12)]


# -- what a connection leaves behind --------------------------------------------------------------------------


DIES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from store_support import RawClient, engine_hello
from vllm_kvtier.store import protocol as m
client = RawClient(sys.argv[2], engine_hello("mortal"))
client.send(m.Present(b"family 1", "127.0.0.1", 7000, "mortal"))
client.send(m.Cached(bytes.fromhex(sys.argv[3]), b""))
print("there", flush=True)
time.sleep(60)
"""


def test_directory_dead_engine_is_not_named(server, enter):
    reader = enter("reader")
    arguments = [str(Path(__file__).parents[1]), server.path, b"".join(keys_of(BLOCK_HASHES)).hex()]
    process = subprocess.Popen([sys.executable, "-c", DIES, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"
        eventually(lambda: reader.holders() == [("mortal", 12)])
        process.send_signal(signal.SIGKILL)
        eventually(lambda: reader.told()[-1] == 0)
    finally:
        process.kill()
        process.communicate()
    assert reader.holders() == [] and reader.told() == [0, 1, 0]
    assert reader.stat().directory == m.DirectoryCounts(1, 0)


def test_directory_engine_number_reuse_inherits_nothing(server, enter):
    """Its keys are forgotten in parts, and its number is given anew only then."""
    reader, keys = enter("reader"), keys_of(BLOCK_HASHES)
    leaver = enter("leaver", FAMILY, *keys, os.urandom(8 * 3 * SWEEP_KEYS))
    assert reader.stat().directory == m.DirectoryCounts(2, 3 * SWEEP_KEYS + 12)
    leaver.close()
    heirs = [enter(f"heir {n}") for n in range(3)]
    assert reader.holders() == [] and reader.stat().directory == m.DirectoryCounts(4, 0)
    eventually(lambda: not server._peer_directory._sweeping, what="all is forgotten")
    assert [len(family.masks) for family in server._peer_directory._directory._groups.values()] == [0]
    heirs[0].has(*keys[:2])
    assert reader.holders() == [("heir 0", 2)]


# -- bounds and nonsense ----------------------------------------------------------------------------------------


def test_directory_too_many_blocks_disconnect_engine(server, enter):
    server._peer_directory._directory._limit = 20
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(BLOCK_HASHES))
    holder.has(*keys_of(BLOCK_HASHES), os.urandom(8 * 8))
    assert reader.stat().directory.keys == 20
    refused = holder.ask(m.Cached(os.urandom(8), b""))
    assert isinstance(refused, m.Refused) and "21 cached blocks" in refused.reason and holder.ended()
    eventually(lambda: reader.stat().directory == m.DirectoryCounts(1, 0))
    assert reader.holders() == []


@pytest.mark.parametrize(
    "nonsense",
    [
        m.Cached(bytes(9), b""),
        m.Cached(b"", bytes(7)),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, key_mask=bytes(7)),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, key_mask=bytes(9)),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, wait_seconds=9.0, key_mask=bytes(1)),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, key_mask=MIX, hash_blocks_per_block=0),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 13, EVERYTHING, key_mask=MIX),
        m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES + b"x", 0, EVERYTHING, key_mask=MIX),
        m.Present(bytes(7), "h", 1, "i"),
        m.Present(FAMILY, "h", 0, "i"),
        m.Present(FAMILY, "h", 65536, "i"),
        m.PeerCount(3),
        b"\xc1",
    ],
)
def test_directory_malformed_message_disconnects_engine_and_drops_blocks(enter, nonsense):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(BLOCK_HASHES))
    assert reader.holders() == [("holder", 12)]
    assert isinstance(holder.ask(nonsense), m.Refused) and holder.ended()
    eventually(lambda: reader.told() == [0, 1, 0])
    assert reader.holders() == []


def test_directory_blocks_of_unknown_engine_are_refused(server):
    with RawClient(server.path, engine_hello()) as client:
        assert "has not sent Present" in client.ask(m.Cached(bytes(8), b"")).reason
    for kind in ("tool", "worker"):
        with RawClient(server.path, m.Hello("x", 1, kind)) as client:
            assert kind in client.ask(m.Present(FAMILY, "h", 1, "i")).reason


def test_directory_supports_200_holders():
    directory = PeerDirectory()
    for client in range(200):
        directory.present(client, FAMILY, "h", 1, f"{client}")
        directory.update(client, b"".join(keys_of(BLOCK_HASHES)[: client % 12]), b"")
    question = directory_query(BLOCK_HASHES, 0, MIX, 1)
    longest = {directory.holders(200 - 1, question)[0].instance for _ in range(16)}
    assert longest == {f"{client}" for client in range(11, 199, 12)}
    for client in range(0, 200, 2):
        directory.leave(client)
    assert not directory.sweep()
    assert directory.holders(1, question)[0].num_hash_blocks == 11
    assert [each.num_hash_blocks for each in directory.holders(1, directory_query(BLOCK_HASHES, 9, MIX, 1))] == [
        11,
        11,
        11,
    ]


def test_directory_refused_update_changes_nothing():
    directory = PeerDirectory(limit=12)
    directory.present(1, FAMILY, "h", 1, "reader")
    directory.present(2, FAMILY, "h", 1, "holder")
    directory.update(2, b"".join(keys_of(BLOCK_HASHES)[:11]), b"")
    for added, gone in [
        (b"".join(keys_of(BLOCK_HASHES)) + bytes(8), b""),
        (bytes(3), b""),
        (b"", keys_of(BLOCK_HASHES)[0] + b"x"),
    ]:
        with pytest.raises(BadRequest):
            directory.update(2, added, gone)
        assert directory.counts() == m.DirectoryCounts(2, 11)
    assert directory.holders(1, directory_query(BLOCK_HASHES, 0, MIX, 1))[0].num_hash_blocks == 11


# -- the client's end -------------------------------------------------------------------------------------------


@pytest.fixture
def reactor():
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.stop()


@pytest.fixture
def connect(reactor, server):
    def connect(name: str, on_change=None) -> StoreClient:
        client = StoreClient(reactor, server.path, engine_hello(name), on_change=on_change)
        client.start()
        eventually(lambda: client.connected)
        return client

    return connect


def outcome(pending):
    assert pending.wait(10)
    return pending.outcome


def test_directory_clients_find_each_other(connect):
    seen = []
    one = connect("one", on_change=lambda: seen.append(one.peer_count))
    two = connect("two")
    keys = b"".join(keys_of(BLOCK_HASHES, 2))
    assert one.peer_count == 0 and not two.send_cached(keys, b""), "no engine could find it before Present"
    one.present(FAMILY, "127.0.0.1", 7001, "one")
    two.present(FAMILY, "127.0.0.1", 7002, "two")
    eventually(lambda: one.peer_count == two.peer_count == 1)
    assert seen[-1] == 1
    assert two.send_cached(keys, b"")
    assert outcome(two.stat()).directory == m.DirectoryCounts(2, 6)
    found = outcome(one.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, key_mask=MIX, hash_blocks_per_block=2))
    assert found.holders == [m.Holder("127.0.0.1", 7002, "two", 12)]
    assert outcome(one.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).holders == []
    assert two.send_cached(b"", keys[8:]) and two.send_cached(b"", b"")
    outcome(two.stat())
    found = outcome(
        one.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING, wait_seconds=5.0, key_mask=MIX, hash_blocks_per_block=2)
    )
    assert [holder.num_hash_blocks for holder in found.holders] == [2]
    two.close()
    eventually(lambda: one.peer_count == 0 and seen[-1] == 0)
    assert two.peer_count == 0 and not two.send_cached(keys, b"")


def test_directory_large_snapshot_is_split_in_order(connect, monkeypatch):
    monkeypatch.setattr(client_module, "CACHED_BYTES", 8 * 1000)
    one, two = connect("one"), connect("two")
    one.present(FAMILY, "h", 1, "one")
    two.present(FAMILY, "h", 1, "two")
    block_hashes = os.urandom(16 * 5500)
    keys = b"".join(keys_of(block_hashes))
    assert two.send_cached(keys, keys[8 * 5400 :])
    outcome(two.stat())
    found = outcome(one.lookup(NAMESPACE_ID, block_hashes, 0, EVERYTHING, key_mask=MIX))
    assert [holder.num_hash_blocks for holder in found.holders] == [5400]
    assert outcome(one.stat()).directory.keys == 5400
    assert two.send_cached(keys[: 8 * 2500], b"", anew=True), "anew is only the first part"
    outcome(two.stat())
    found = outcome(one.lookup(NAMESPACE_ID, block_hashes, 0, EVERYTHING, key_mask=MIX))
    assert [holder.num_hash_blocks for holder in found.holders] == [2500]
    assert two.send_cached(b"", b"", anew=True) and outcome(two.stat()).directory.keys == 0
    many = m.MAX_HASH_BLOCKS + 100
    assert two.send_cached(os.urandom(8 * many), b"")
    assert outcome(two.stat()).directory.keys == many, "more than one message may have"


def test_directory_engine_resends_after_store_restart(server, connect):
    one = connect("one")
    one.present(FAMILY, "h", 1, "one")
    keys = b"".join(keys_of(BLOCK_HASHES))
    two = connect("two")
    two.present(FAMILY, "h", 1, "two")
    eventually(lambda: one.peer_count == 1)
    old = one.session
    server.stop()
    eventually(lambda: not one.connected)
    assert one.peer_count == 0
    again = make(server.path)
    eventually(lambda: one.connected)
    assert one.session > old and not one.send_cached(keys, b"") and not one.send_cached(keys, b"", old)
    one.present(FAMILY, "h", 1, "one", old)
    assert not one.send_cached(keys, b""), "that was meant for a connection that is gone"
    one.present(FAMILY, "h", 1, "one", one.session)
    assert not one.send_cached(keys, b"", old) and one.send_cached(keys, b"", one.session)
    assert outcome(one.stat()).directory == m.DirectoryCounts(1, 12)
    again.stop()


# -- statistics -------------------------------------------------------------------------------------------------


def test_directory_is_shown_in_stats(server, enter):
    stats = ["stats", "--socket", server.path]
    with RawClient(server.path, tool_hello()) as tool:
        assert tool.stat().directory == m.DirectoryCounts(0, 0)
    table = CliRunner().invoke(app, stats)
    assert table.exit_code == 0 and "directory" not in table.output
    enter("one", FAMILY, *keys_of(BLOCK_HASHES))
    lines = [line.split() for line in CliRunner().invoke(app, stats).output.splitlines()]
    assert ["directory", "holders", "1"] in lines and ["directory", "keys", "12"] in lines
    shown = msgspec.json.decode(CliRunner().invoke(app, [*stats, "--json"]).output)
    assert shown["directory"] == {"holders": 1, "keys": 12}


def test_directory_engine_can_reserve_and_look_up(enter):
    """A present engine is an engine like any other."""
    one, two = enter("one"), enter("two", FAMILY, *keys_of(BLOCK_HASHES))
    groups, hashes, parents = items_of(BLOCK_HASHES)
    slots = one.ask(m.Reserve(1, NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)).slots
    one.send(m.Commit(slots))
    one.stat()
    assert two.find(key_mask=b"").slots == [slots]
