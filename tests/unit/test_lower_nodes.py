"""Between stores of different nodes: the wire, who may speak, what is lent, and the tier as the server has it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import chain_of, items_of
from support import Clock

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.lower.mover import READY, SET_ASIDE
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.lending import Lending
from vllm_kvtier.store.lower.nodes.options import Address, NodeOptions
from vllm_kvtier.store.lower.nodes.tier import NodesTier
from vllm_kvtier.store.messages import HASH, MAX_UNITS, PAGE, PIECE, GroupShape
from vllm_kvtier.wire.auth import ClusterKey

SPACE = b"a space 16 bytes"
GROUP = GroupShape(units=1, slot_pages=4)
POOL = 64 << 20
CHAIN = chain_of((8, "x"))


def an_ask(chain: bytes = CHAIN, start: int = 0, id: int = 0) -> w.Ask:
    return w.Ask(id, SPACE, 16, [GROUP], chain, start, 2.0)


# -- the wire ---------------------------------------------------------------------------------------------------------

FROM_ASKER = [w.Hello("me"), an_ask(), w.Reading(True), w.Release(3), w.Ping()]
FROM_SERVER = [
    w.Welcome("you", "agent", 1 << 47, POOL),
    w.Refused("no"),
    w.Offer(1, 2, 8, [[4, 8, 12]], b"metadata"),
    w.Nothing(1, below=3),
    w.Coming(1, 5, 0.5),
    w.Pong(),
]


@pytest.mark.parametrize("decode, messages", [(w.decode_from_asker, FROM_ASKER), (w.decode_from_server, FROM_SERVER)])
def test_messages_survive_the_wire(decode, messages):
    for message in messages:
        assert decode([w.encode(message)]) == message
    for frames in ([], [b"", b""], [b""]):
        with pytest.raises(msgspec.DecodeError):
            decode(frames)


def test_bounds():
    for bad in (
        an_ask(bytes((MAX_UNITS + 1) * HASH)),
        msgspec.structs.replace(an_ask(), groups=[]),
        msgspec.structs.replace(an_ask(), groups=[GROUP] * 65),
        msgspec.structs.replace(an_ask(), space=b"short"),
        msgspec.structs.replace(an_ask(), unit_tokens=0),
        w.Release(-1),
        w.Hello("x" * 300),
        w.Hello("x", objects="x" * 300),
        msgspec.structs.replace(an_ask(), patience=-1.0),
        msgspec.structs.replace(an_ask(), patience=1e9),
    ):
        with pytest.raises(msgspec.DecodeError):
            w.decode_from_asker([w.encode(bad)])
    for bad in (
        w.Offer(1, 2, 3, [[-4]]),
        w.Offer(1, 2, 3, [[]] * 65),
        w.Welcome("i", "a", -1, POOL),
        w.Coming(1, -1, 0.0),
    ):
        with pytest.raises(msgspec.DecodeError):
            w.decode_from_server([w.encode(bad)])


@given(st.binary(max_size=200), st.sampled_from(FROM_ASKER + FROM_SERVER), st.integers(0, 300), st.integers(0, 255))
def test_nonsense_is_refused_and_nothing_worse(noise, message, at, byte):
    frame = bytearray(w.encode(message))
    frame[at % len(frame)] = byte
    for data in (noise, bytes(frame), bytes(frame[: at % len(frame)])):
        for decode in (w.decode_from_asker, w.decode_from_server):
            try:
                decode([data])
            except msgspec.DecodeError:
                continue


def test_an_ask_that_no_asker_asks():
    assert not w.ask_fault(CHAIN, 0, [GROUP])
    assert w.ask_fault(CHAIN[:-1], 0, [GROUP])
    assert w.ask_fault(CHAIN, 9, [GROUP])
    assert w.ask_fault(CHAIN, 2, [GROUP, GroupShape(4, 1)])


@pytest.mark.parametrize(
    "offer, words",
    [
        (w.Offer(1, 2, 4, [[4, 8, 12, 16]]), ""),
        (w.Offer(1, 0, 4, [[4, 8, 12, 16]]), "units"),
        (w.Offer(1, 2, 0, [[]]), "units"),
        (w.Offer(1, 2, 9, [[4] * 9]), "units"),
        (w.Offer(1, 2, 4, [[4, 8, 12]]), "3 slots for 4"),
        (w.Offer(1, 2, 4, [[4, 8, 12, 16]] * 2), "2 groups"),
        (w.Offer(1, 2, 4, [[4, 0, 12, 16]]), "missing"),
        (w.Offer(1, 2, 4, [[4, 8, 12, POOL // PAGE - 3]]), "beyond"),
        (w.Offer(1, 2, 4, [[4, 8, 12, 1 << 40]]), "beyond"),
    ],
)
def test_offers_are_checked(offer, words):
    fault = w.offer_fault(offer, CHAIN, 0, [GROUP], POOL)
    assert words in fault and bool(words) == bool(fault)


def test_no_slot_in_two_pieces():
    offer = w.Offer(1, 2, 1, [[PIECE // PAGE - 1]])
    assert "pieces" in w.offer_fault(offer, CHAIN, 0, [GROUP], 4 * PIECE)


def test_windows_leave_slots_out():
    offer = w.Offer(1, 2, 8, [[0, 0, 0, 0, 0, 0, 4, 8], [12, 16]])
    groups = [GroupShape(1, 4, window=32), GroupShape(4, 2)]
    assert not w.offer_fault(offer, CHAIN, 0, groups, POOL)
    named = w.slots_by_name(offer, CHAIN, 0, groups)
    assert named == {
        (0, CHAIN[6 * HASH : 7 * HASH]): 4,
        (0, CHAIN[7 * HASH :]): 8,
        (1, CHAIN[3 * HASH : 4 * HASH]): 12,
        (1, CHAIN[7 * HASH :]): 16,
    }


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "ho st:1", "a:b:1", "[::1]", "x/y:1"]
)
def test_what_is_no_address(text):
    assert Address.parse(text) is None


def test_addresses():
    assert str(Address.parse("[::1]:80")) == "[::1]:80" and Address.parse("[::1]:80").loopback
    assert Address.parse("node-1.x:7400") == Address("node-1.x", 7400)


def test_only_loopback_without_a_key(tmp_path):
    for options in ({"nodes": "10.0.0.1:1"}, {"node_listen": "0.0.0.0:1"}, {"nodes": "localhost:1,node2:1"}):
        with pytest.raises(ConfigError, match="cluster_key_file"):
            NodeOptions.parse(options)
    parsed = NodeOptions.parse({"nodes": " localhost:1, 127.0.0.1:2,localhost:1", "node_listen": "[::1]:3"})
    assert [str(node) for node in parsed.nodes] == ["localhost:1", "127.0.0.1:2"]
    assert not parsed.allows(Address("node2", 1))
    ClusterKey.create(str(tmp_path / "key"))
    keyed = NodeOptions.parse({"node_listen": "0.0.0.0:1", "cluster_key_file": str(tmp_path / "key")})
    assert keyed.allows(Address("node2", 1))
    for bad in ({"nodes": "node2"}, {"nodes": ",".join(f"localhost:{i}" for i in range(1, 80))}):
        with pytest.raises(ConfigError):
            NodeOptions.parse(bad)
    with pytest.raises(ConfigError):
        NodeOptions.parse({"cluster_key_file": str(tmp_path / "none")})


# -- lending ----------------------------------------------------------------------------------------------------------


class Lender:
    def __init__(self):
        self.clock = Clock()
        pool = SlotPool(POOL // PAGE, PIECE // PAGE)
        pool.grow(POOL // PAGE)
        self.index = Index(pool, None, self.clock, lease_seconds=60)
        self.index.connect(1, 16, [GROUP])
        slots = self.index.reserve(1, SPACE, b"", *items_of(CHAIN[: 6 * HASH]), 1 << 40)
        self.index.commit(1, slots)
        self.lending = Lending(self.index, -1)

    def lend(self, asker=7, id=1, groups=(GROUP,), chain=CHAIN, start=0) -> m.Lent:
        answers = []
        self.handle(m.Lend(id, asker, "them", 16, list(groups), SPACE, chain, start), answers.append)
        return answers[0]

    def handle(self, message, answer=None):
        self.lending.handle(message, answer)

    @property
    def leases(self) -> int:
        return self.index.stats().leases


def test_lent_and_returned():
    lender = Lender()
    lent = lender.lend()
    assert (lent.units, len(lent.slots[0])) == (6, 6) and lender.leases == 1
    lender.handle(m.Return(8, lent.lease))  # somebody else's
    assert lender.leases == 1
    lender.handle(m.Return(7, lent.lease))
    lender.handle(m.Return(7, lent.lease))
    assert lender.leases == 0 and len(lender.lending) == 0


def test_what_is_lent_dies_with_the_asker_the_mover_or_time():
    lender = Lender()
    lender.lend(7), lender.lend(7), lender.lend(8)
    lender.handle(m.Left(7))
    assert lender.leases == 1
    lender.lending.end()
    assert lender.leases == 0 and len(lender.lending) == 0
    lender.lend(7)
    lender.clock.now += 61
    lender.index.tick()
    assert lender.leases == 0


def test_nothing_is_lent_of_what_does_not_fit():
    lender = Lender()
    assert lender.lend(groups=[GroupShape(2, 4)]).lease == 0  # the space has other groups here
    assert lender.lend(chain=chain_of((8, "y"))).lease == 0
    assert lender.lend(chain=CHAIN[:-1]).lease == 0
    assert lender.lend(groups=[]).lease == 0
    for pages in range(1, 40):
        lender.lend(groups=[GroupShape(1, pages)])
    assert len(lender.lending._clients[7]) <= 16


# -- the tier, with a mover that is none ------------------------------------------------------------------------------


class FakeMover:
    def __init__(self, kind, options, pool_fd, pool_bytes, reactor, on_message, on_up, on_down):
        self.options, self.on_message, self.on_up, self.on_down = options, on_message, on_up, on_down
        self.state, self.reason, self.restarts, self.timeouts, self._id = "opening", "", 0, 0, 0
        self.sent, self.requests = [], []

    def up(self):
        self.state = READY
        self.on_up(m.Opened(False))

    def down(self):
        self.state = SET_ASIDE
        self.on_down("it died")
        requests, self.requests = self.requests, []
        for _, on_reply in requests:
            on_reply(None)

    def next_id(self):
        self._id += 1
        return self._id

    def send(self, message):
        self.sent.append(message)
        return True

    def request(self, message, seconds, on_reply):
        self.requests.append((message, on_reply)) if self.state == READY else on_reply(None)

    def answer(self, **fields):
        message, on_reply = self.requests.pop(0)
        kind = m.Located if isinstance(message, m.Look) else m.Moved
        on_reply(kind(message.id, **fields))

    def set_aside(self, reason):
        self.state, self.reason = SET_ASIDE, reason


class Tiered:
    def __init__(self, nodes="localhost:1"):
        self.lender, self.clock = Lender(), Clock()
        self.tier = NodesTier(
            nodes, "", "", self.lender.lending, 0, POOL, None, clock=self.clock, make_mover=FakeMover, objects="ours"
        )
        self.mover = self.tier._mover
        self.mover.up()
        self.found, self.read = [], []

    def find(self, nodes=(), chain=CHAIN):
        want = Want(SPACE, 16, [Shape(1, None, 4)], chain, 0, tuple(nodes))
        self.tier.find(want, self.found.append)
        return want


BLOCKS = [
    Block(SPACE, 0, CHAIN[:HASH], bytes(HASH), b"", 4, 4),
    Block(SPACE, 0, CHAIN[HASH : 2 * HASH], b"", b"", 8, 4),
]


def test_found_read_released():
    t = Tiered()
    t.find()
    assert t.mover.requests[0][0].chain == CHAIN and t.mover.options["objects"] == "ours"
    t.mover.answer(token=5, units=6)
    t.tier.read(t.found[0], BLOCKS, t.read.append)
    assert t.tier.reading
    t.mover.answer(good=[True, False])
    assert t.read == [[True, False]] and not t.tier.reading
    t.tier.release(t.found[0])
    assert t.mover.sent == [m.Release(5)]
    counts = t.tier.counts()
    assert (counts.found_blocks, counts.read_blocks, counts.read_bytes, counts.read_failures) == (6, 1, 4 * PAGE, 1)


def test_what_another_node_brings_up_is_told_before_it_is_found():
    t = Tiered()
    told = []
    t.tier.on_coming = lambda want, units, seconds: told.append((want, units, seconds))
    want = t.find()
    before = t.tier.latency()
    t.clock.now += 0.1
    t.mover.on_message(m.Coming(t.mover.requests[0][0].id, 6, 3.0))
    learned = t.tier.latency()
    assert told == [(want, 6, 3.0)] and learned > before
    t.clock.now += 3.0
    t.mover.on_message(m.Coming(t.mover.requests[0][0].id, 8, 0.5))
    t.clock.now += 1.0
    t.mover.answer(token=5, units=8)
    # What somebody's disk took does not make a question to other nodes a matter of seconds.
    assert t.tier.latency() == learned and t.found[0].units == 8
    t.mover.on_message(m.Coming(1, 8, 0.5))  # it has been answered
    assert len(told) == 2 and t.mover.state == READY


def test_nothing_is_promised_of_what_came_wrong_before():
    t = Tiered()
    told = []
    t.tier.on_coming = lambda want, units, seconds: told.append(units)
    t.tier.discard(SPACE, 0, CHAIN[2 * HASH : 3 * HASH])
    t.find()
    t.mover.on_message(m.Coming(t.mover.requests[0][0].id, 6, 3.0))
    assert told == [2]


def test_nobody_to_ask():
    t = Tiered(nodes="")
    t.find()
    assert t.found[0].units == 0 and not t.mover.requests
    t.find(nodes=["localhost:5"])
    assert t.mover.requests[0][0].nodes == ["localhost:5"]


def test_what_a_dead_mover_named_means_nothing():
    t = Tiered()
    t.find()
    t.mover.answer(token=5, units=6)
    t.find()
    t.lender.lend()
    t.mover.down()
    assert t.found[1].units == 0 and t.lender.leases == 0
    t.mover.up()
    t.tier.read(t.found[0], BLOCKS, t.read.append)
    t.tier.release(t.found[0])
    assert t.read == [[False, False]] and not t.mover.sent and not t.mover.requests


def test_a_block_that_was_wrong_is_not_found_again():
    t = Tiered()
    t.tier.discard(SPACE, 0, CHAIN[2 * HASH : 3 * HASH])
    t.find()
    t.mover.answer(token=5, units=6)
    assert t.found[0].units == 2
    t.tier.discard(SPACE, 0, CHAIN[:HASH])
    t.find()
    t.mover.answer(token=6, units=6)
    assert t.found[1].units == 0 and t.mover.sent == [m.Release(6)]


def test_the_mover_asks_for_others():
    t = Tiered()
    t.mover.on_message(m.Lend(9, 7, "them", 16, [GROUP], SPACE, CHAIN, 0))
    assert t.mover.sent[0].units == 6 and t.tier.counts().extra["leases_out"] == 1
    t.mover.on_message(m.Kept([]))
    assert "Kept" in t.tier.counts().reason
    t.tier.write(BLOCKS, t.read.append)
    assert t.read == [[False, False]] and not t.tier.writable and not t.tier.has(SPACE, 0, CHAIN[:HASH])
