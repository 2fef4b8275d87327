"""Engines tell the store which blocks lie in their own caches, and a lookup names those who have the chain."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from store_support import EVERYTHING, SPACE, RawClient, chain_of, engine_hello, items_of, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.store import client as client_module
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.directory import SWEEP, Directory, sought
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.records import BadRequest, Found
from vllm_kvtier.store.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor

CHAIN = chain_of((12, "a"))
FAMILY, OTHER = b"family 1", b"family 2"
MIX = b"\x01mixmix\xff"


def keys_of(chain: bytes, stride: int = 1) -> list[bytes]:
    hashes = [chain[at : at + 16] for at in range(0, len(chain), 16)][stride - 1 :: stride]
    return [bytes(a ^ b for a, b in zip(each[:8], MIX, strict=True)) for each in hashes]


class Engine(RawClient):
    """An engine that is present; ``company`` collects what it is told of the others."""

    def __init__(self, path: str, name: str, family: bytes = FAMILY, *keys: bytes):
        super().__init__(path, engine_hello(name))
        self.company: list[int] = []
        self.present(name, family)
        self.has(*keys)

    def present(self, name: str, family: bytes = FAMILY, port: int = 7000) -> None:
        self.tell(m.Present(family, "127.0.0.1", port, name))

    def has(self, *added: bytes, gone: tuple[bytes, ...] = ()) -> None:
        """Everybody knows on return."""
        self.tell(m.Resident(b"".join(added), b"".join(gone)))
        self.stat()

    def hear(self):
        while isinstance(reply := super().hear(), m.Company):
            self.company.append(reply.others)
        return reply

    def told(self) -> list[int]:
        self.stat()  # answered behind what it was told before
        return self.company

    def find(self, chain: bytes = CHAIN, start: int = 0, stride: int = 1, mix: bytes = MIX) -> m.Found:
        return self.ask(m.Lookup(1, SPACE, chain, start, EVERYTHING, mix=mix, stride=stride))

    def holders(self, *args, **options) -> list[tuple[str, int]]:
        return [(holder.instance, holder.units) for holder in self.find(*args, **options).holders]


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


# -- company ----------------------------------------------------------------------------------------------------


def test_everybody_knows_how_many_others_there_are(enter):
    one = enter("one")
    assert one.told() == [0], "at once, also alone"
    two = enter("two")
    assert (one.told(), two.told()) == ([0, 1], [1])
    three = enter("three")
    assert (one.told(), two.told(), three.told()) == ([0, 1, 2], [1, 2], [2])
    two.close()
    eventually(lambda: (one.told(), three.told()) == ([0, 1, 2, 1], [2, 1]))


def test_families_do_not_see_each_other(enter):
    one, two = enter("one", FAMILY, *keys_of(CHAIN)), enter("two", OTHER, *keys_of(CHAIN))
    assert (one.told(), two.told()) == ([0], [0])
    assert one.holders() == two.holders() == []
    three = enter("three", OTHER)
    assert (one.told(), two.told(), three.told()) == ([0], [0, 1], [1])
    assert three.holders() == [("two", 12)]


def test_whoever_presents_itself_anew_is_told_again_and_nobody_else(enter):
    one, two = enter("one", FAMILY, *keys_of(CHAIN)), enter("two")
    one.present("one, renamed", port=7001)
    assert (one.told(), two.told()) == ([0, 1, 1], [1])
    assert two.find().holders == [m.Holder("127.0.0.1", 7001, "one, renamed", 12)], "its blocks are still there"
    one.present("one", OTHER)
    assert (one.told(), two.told()) == ([0, 1, 1, 0], [1, 0])
    assert two.holders() == []
    one.present("one", FAMILY)
    assert two.told() == [1, 0, 1] and two.holders() == [], "its keys were another family's meanwhile"


def test_only_engines_that_say_so_are_company(server, enter):
    with RawClient(server.path, engine_hello("silent")) as silent:
        one = enter("one", FAMILY, *keys_of(CHAIN))
        assert one.told() == [0]
        answer = silent.ask(m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING, mix=MIX))
        assert isinstance(answer, m.Found) and answer.holders == [], "of which family should they be?"
        assert silent.stat().directory == m.DirectoryCounts(1, 12)


# -- holders ----------------------------------------------------------------------------------------------------


def test_those_who_have_most_come_first(enter):
    keys = keys_of(CHAIN)
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
    assert reader.holders(chain_of((12, "another"))) == []
    assert reader.find(mix=b"").holders == [], "not asked for"


def test_equals_are_named_in_turn(enter):
    reader = enter("reader")
    for name in "abcd":
        enter(name, FAMILY, *keys_of(CHAIN))
    enter("short", FAMILY, *keys_of(CHAIN)[:1])
    first = [reader.holders()[0] for _ in range(8)]
    assert sorted(first[:4]) == [(name, 12) for name in "abcd"] and first[4:] == first[:4]


def test_blocks_of_several_units(enter):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(CHAIN, 4)[:2])
    assert reader.holders(stride=4) == [("holder", 8)]
    assert reader.holders(start=4, stride=4) == [("holder", 8)]
    assert reader.holders(start=8, stride=4) == []
    assert reader.holders(CHAIN[: 7 * 16], stride=4) == [("holder", 4)], "half a block is none"
    assert reader.holders(start=5, stride=4) == [("holder", 8)], "the whole block that has unit 5"
    assert reader.holders(stride=1) == reader.holders(stride=5) == reader.holders(stride=1 << 16) == []
    holder.has(*keys_of(CHAIN, 4)[2:])
    assert reader.holders(stride=4) == [("holder", 12)]


def test_what_is_gone_is_not_named(enter):
    keys = keys_of(CHAIN)
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys)
    holder.has(gone=(keys[5], keys[5], b"neverhad"))
    assert reader.holders() == [("holder", 5)]
    assert reader.stat().directory == m.DirectoryCounts(2, 11)
    holder.has(keys[5], keys[5])
    assert reader.holders() == [("holder", 12)]
    holder.has(keys[0], gone=(keys[0],))
    assert reader.holders() == [], "first added, then gone"


def test_one_that_begins_anew_has_nothing_else(server, enter):
    """As after a time alone, in which it did not say what went."""
    reader, keys = enter("reader"), keys_of(CHAIN)
    holder = enter("holder", FAMILY, *keys, os.urandom(8 * 2 * SWEEP))
    rival = enter("rival", FAMILY, *keys[:8])
    assert reader.holders() == [("holder", 12), ("rival", 8)]
    holder.tell(m.Resident(b"".join(keys[:5]), keys[4], anew=True))
    assert holder.told() == [1, 2], "company it was all the time"
    assert reader.holders() == [("rival", 8), ("holder", 4)]
    assert reader.stat().directory == m.DirectoryCounts(3, 12)
    eventually(lambda: not server._company._sweeping, what="all is forgotten")
    (family,) = server._company._directory._families.values()
    assert len(family.masks) == 8 and family.taken == family.present
    rival.tell(m.Resident(b"", b"", anew=True))
    rival.stat()
    assert reader.holders() == [("holder", 4)]


def test_holders_are_named_beside_what_memory_has(server, enter):
    reader, _ = enter("reader"), enter("holder", FAMILY, *keys_of(CHAIN)[:4])
    nothing = reader.find()
    assert (nothing.lease, nothing.units, [h.units for h in nothing.holders]) == (0, 0, [4])
    reader.store(CHAIN[: 6 * 16])
    both = reader.find()
    assert both.lease and both.units == 6 and [h.units for h in both.holders] == [4]


def test_an_answer_that_waits_names_who_has_it_by_then(server, enter, monkeypatch):
    asked = []
    monkeypatch.setattr(server.lower, "lookup", lambda client, want, limit, patience, answer: asked.append(answer))
    reader = enter("reader")
    reader.tell(m.Lookup(5, SPACE, CHAIN, 0, EVERYTHING, patience=60.0, mix=MIX))
    early = enter("early", FAMILY, *keys_of(CHAIN))
    enter("late", FAMILY, *keys_of(CHAIN)[:3])
    early.close()
    eventually(lambda: reader.stat().directory.holders == 2)
    server.reactor.call_soon(lambda: asked[0](Found(0, 0, [[]]), None))
    assert [(holder.instance, holder.units) for holder in reader.hear().holders] == [("late", 3)]


def test_an_engine_alone_again_is_still_known(enter):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(CHAIN))
    reader.close()
    eventually(lambda: holder.told() == [1, 0])
    assert holder.stat().directory == m.DirectoryCounts(1, 12)
    assert enter("next").holders() == [("holder", 12)]


# -- what a connection leaves behind --------------------------------------------------------------------------


DIES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from store_support import RawClient, engine_hello
from vllm_kvtier.store import messages as m
client = RawClient(sys.argv[2], engine_hello("mortal"))
client.tell(m.Present(b"family 1", "127.0.0.1", 7000, "mortal"))
client.tell(m.Resident(bytes.fromhex(sys.argv[3]), b""))
print("there", flush=True)
time.sleep(60)
"""


def test_whoever_dies_is_not_named_any_more(server, enter):
    reader = enter("reader")
    arguments = [str(Path(__file__).parents[1]), server.path, b"".join(keys_of(CHAIN)).hex()]
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


def test_nobody_inherits_what_one_who_left_had(server, enter):
    """Its keys are forgotten in parts, and its number is given anew only then."""
    reader, keys = enter("reader"), keys_of(CHAIN)
    leaver = enter("leaver", FAMILY, *keys, os.urandom(8 * 3 * SWEEP))
    assert reader.stat().directory == m.DirectoryCounts(2, 3 * SWEEP + 12)
    leaver.close()
    heirs = [enter(f"heir {n}") for n in range(3)]
    assert reader.holders() == [] and reader.stat().directory == m.DirectoryCounts(4, 0)
    eventually(lambda: not server._company._sweeping, what="all is forgotten")
    assert [len(family.masks) for family in server._company._directory._families.values()] == [0]
    heirs[0].has(*keys[:2])
    assert reader.holders() == [("heir 0", 2)]


# -- bounds and nonsense ----------------------------------------------------------------------------------------


def test_too_many_blocks_cost_the_connection(server, enter):
    server._company._directory._limit = 20
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(CHAIN))
    holder.has(*keys_of(CHAIN), os.urandom(8 * 8))
    assert reader.stat().directory.keys == 20
    refused = holder.ask(m.Resident(os.urandom(8), b""))
    assert isinstance(refused, m.Refused) and "21 resident blocks" in refused.reason and holder.ended()
    eventually(lambda: reader.stat().directory == m.DirectoryCounts(1, 0))
    assert reader.holders() == []


@pytest.mark.parametrize(
    "nonsense",
    [
        m.Resident(bytes(9), b""),
        m.Resident(b"", bytes(7)),
        m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING, mix=bytes(7)),
        m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING, mix=bytes(9)),
        m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING, patience=9.0, mix=bytes(1)),
        m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING, mix=MIX, stride=0),
        m.Lookup(1, SPACE, CHAIN, 13, EVERYTHING, mix=MIX),
        m.Lookup(1, SPACE, CHAIN + b"x", 0, EVERYTHING, mix=MIX),
        m.Present(bytes(7), "h", 1, "i"),
        m.Present(FAMILY, "h", 0, "i"),
        m.Present(FAMILY, "h", 65536, "i"),
        m.Company(3),
        b"\xc1",
    ],
)
def test_nonsense_costs_its_sender_the_connection_and_its_blocks(enter, nonsense):
    reader, holder = enter("reader"), enter("holder", FAMILY, *keys_of(CHAIN))
    assert reader.holders() == [("holder", 12)]
    assert isinstance(holder.ask(nonsense), m.Refused) and holder.ended()
    eventually(lambda: reader.told() == [0, 1, 0])
    assert reader.holders() == []


def test_blocks_of_nobody_knows_whom_are_refused(server):
    with RawClient(server.path, engine_hello()) as client:
        assert "where to ask" in client.ask(m.Resident(bytes(8), b"")).reason
    for kind in ("tool", "worker"):
        with RawClient(server.path, m.Hello("x", 1, kind)) as client:
            assert kind in client.ask(m.Present(FAMILY, "h", 1, "i")).reason


def test_there_may_be_more_holders_than_bits_in_a_word():
    directory = Directory()
    for client in range(200):
        directory.present(client, FAMILY, "h", 1, f"{client}")
        directory.update(client, b"".join(keys_of(CHAIN)[: client % 12]), b"")
    question = sought(CHAIN, 0, MIX, 1)
    longest = {directory.holders(200 - 1, question)[0].instance for _ in range(16)}
    assert longest == {f"{client}" for client in range(11, 199, 12)}
    for client in range(0, 200, 2):
        directory.leave(client)
    assert not directory.sweep()
    assert directory.holders(1, question)[0].units == 11
    assert [each.units for each in directory.holders(1, sought(CHAIN, 9, MIX, 1))] == [11, 11, 11]


def test_a_refused_update_changes_nothing():
    directory = Directory(limit=12)
    directory.present(1, FAMILY, "h", 1, "reader")
    directory.present(2, FAMILY, "h", 1, "holder")
    directory.update(2, b"".join(keys_of(CHAIN)[:11]), b"")
    for added, gone in [(b"".join(keys_of(CHAIN)) + bytes(8), b""), (bytes(3), b""), (b"", keys_of(CHAIN)[0] + b"x")]:
        with pytest.raises(BadRequest):
            directory.update(2, added, gone)
        assert directory.counts() == m.DirectoryCounts(2, 11)
    assert directory.holders(1, sought(CHAIN, 0, MIX, 1))[0].units == 11


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


def test_clients_find_each_other(connect):
    seen = []
    one = connect("one", on_change=lambda: seen.append(one.company))
    two = connect("two")
    keys = b"".join(keys_of(CHAIN, 2))
    assert one.company == 0 and not two.resident(keys, b""), "nobody would know where to ask"
    one.present(FAMILY, "127.0.0.1", 7001, "one")
    two.present(FAMILY, "127.0.0.1", 7002, "two")
    eventually(lambda: one.company == two.company == 1)
    assert seen[-1] == 1
    assert two.resident(keys, b"")
    assert outcome(two.stat()).directory == m.DirectoryCounts(2, 6)
    found = outcome(one.lookup(SPACE, CHAIN, 0, EVERYTHING, mix=MIX, stride=2))
    assert found.holders == [m.Holder("127.0.0.1", 7002, "two", 12)]
    assert outcome(one.lookup(SPACE, CHAIN, 0, EVERYTHING)).holders == []
    assert two.resident(b"", keys[8:]) and two.resident(b"", b"")
    outcome(two.stat())
    found = outcome(one.lookup(SPACE, CHAIN, 0, EVERYTHING, patience=5.0, mix=MIX, stride=2))
    assert [holder.units for holder in found.holders] == [2]
    two.close()
    eventually(lambda: one.company == 0 and seen[-1] == 0)
    assert two.company == 0 and not two.resident(keys, b"")


def test_much_is_told_in_parts_in_the_same_order(connect, monkeypatch):
    monkeypatch.setattr(client_module, "RESIDENT_BYTES", 8 * 1000)
    one, two = connect("one"), connect("two")
    one.present(FAMILY, "h", 1, "one")
    two.present(FAMILY, "h", 1, "two")
    chain = os.urandom(16 * 5500)
    keys = b"".join(keys_of(chain))
    assert two.resident(keys, keys[8 * 5400 :])
    outcome(two.stat())
    found = outcome(one.lookup(SPACE, chain, 0, EVERYTHING, mix=MIX))
    assert [holder.units for holder in found.holders] == [5400]
    assert outcome(one.stat()).directory.keys == 5400
    assert two.resident(keys[: 8 * 2500], b"", anew=True), "anew is only the first part"
    outcome(two.stat())
    found = outcome(one.lookup(SPACE, chain, 0, EVERYTHING, mix=MIX))
    assert [holder.units for holder in found.holders] == [2500]
    assert two.resident(b"", b"", anew=True) and outcome(two.stat()).directory.keys == 0
    many = m.MAX_UNITS + 100
    assert two.resident(os.urandom(8 * many), b"")
    assert outcome(two.stat()).directory.keys == many, "more than one message may have"


def test_after_a_restart_it_presents_itself_anew(server, connect):
    one = connect("one")
    one.present(FAMILY, "h", 1, "one")
    keys = b"".join(keys_of(CHAIN))
    two = connect("two")
    two.present(FAMILY, "h", 1, "two")
    eventually(lambda: one.company == 1)
    old = one.session
    server.stop()
    eventually(lambda: not one.connected)
    assert one.company == 0
    again = make(server.path)
    eventually(lambda: one.connected)
    assert one.session > old and not one.resident(keys, b"") and not one.resident(keys, b"", old)
    one.present(FAMILY, "h", 1, "one", old)
    assert not one.resident(keys, b""), "that was meant for a connection that is gone"
    one.present(FAMILY, "h", 1, "one", one.session)
    assert not one.resident(keys, b"", old) and one.resident(keys, b"", one.session)
    assert outcome(one.stat()).directory == m.DirectoryCounts(1, 12)
    again.stop()


# -- statistics -------------------------------------------------------------------------------------------------


def test_stats_show_the_directory_where_there_is_one(server, enter):
    stats = ["stats", "--socket", server.path]
    with RawClient(server.path, tool_hello()) as tool:
        assert tool.stat().directory == m.DirectoryCounts(0, 0)
    table = CliRunner().invoke(app, stats)
    assert table.exit_code == 0 and "directory" not in table.output
    enter("one", FAMILY, *keys_of(CHAIN))
    lines = [line.split() for line in CliRunner().invoke(app, stats).output.splitlines()]
    assert ["directory", "holders", "1"] in lines and ["directory", "keys", "12"] in lines
    shown = msgspec.json.decode(CliRunner().invoke(app, [*stats, "--json"]).output)
    assert shown["directory"] == {"holders": 1, "keys": 12}


def test_reserving_and_finding_go_on_beside_it(enter):
    """A present engine is an engine like any other."""
    one, two = enter("one"), enter("two", FAMILY, *keys_of(CHAIN))
    groups, hashes, parents = items_of(CHAIN)
    slots = one.ask(m.Reserve(1, SPACE, b"", groups, hashes, parents, EVERYTHING)).slots
    one.tell(m.Commit(slots))
    one.stat()
    assert two.find(mix=b"").slots == [slots]
