"""Between stores of different nodes: the messages, authentication, what is leased, and the tier as the server has
it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import block_hashes_of, items_of
from support import Clock

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.options import Address, NodeOptions
from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import HASH_BYTES, MAX_HASH_BLOCKS, PAGE, PIECE_BYTES, GroupShape
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.nodes import tier as nodes_tier
from vllm_kvtier.store.tiers.nodes.lease_table import NodeLeaseTable
from vllm_kvtier.store.tiers.nodes.tier import NodesTier
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, READY, TierContext
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.decoding import only

NAMESPACE_ID = b"a space 16 bytes"
GROUP = GroupShape(hash_blocks_per_block=1, slot_pages=4)
POOL = 64 << 20
BLOCK_HASHES = block_hashes_of((8, "x"))


def an_ask(block_hashes: bytes = BLOCK_HASHES, start: int = 0, id: int = 0) -> w.LookupRequest:
    return w.LookupRequest(id, NAMESPACE_ID, 16, [GROUP], block_hashes, start, 2.0)


# -- the wire ---------------------------------------------------------------------------------------------------------

FROM_CLIENT = [w.Hello("me"), an_ask(), w.Reading(True), w.Release(3), w.Ping()]
FROM_SERVER = [
    w.Welcome("you", "agent", 1 << 47, POOL),
    w.Refused("no"),
    w.LookupHit(1, 2, 8, [[4, 8, 12]], b"metadata"),
    w.LookupMiss(1, promotable=3),
    w.PromotionStatus(1, 5, 0.5),
    w.Pong(),
]


@pytest.mark.parametrize("decode, messages", [(w.decode_from_client, FROM_CLIENT), (w.decode_from_server, FROM_SERVER)])
def test_node_tier_messages_round_trip(decode, messages):
    for message in messages:
        assert decode(w.encode(message)) == message
    with pytest.raises(msgspec.DecodeError):
        decode(b"")
    for frames in ([], [b"", b""]):
        with pytest.raises(msgspec.DecodeError):
            only(frames)


def test_node_tier_requests_are_bounded():
    for bad in (
        an_ask(bytes((MAX_HASH_BLOCKS + 1) * HASH_BYTES)),
        msgspec.structs.replace(an_ask(), groups=[]),
        msgspec.structs.replace(an_ask(), groups=[GROUP] * 65),
        msgspec.structs.replace(an_ask(), namespace_id=b"short"),
        msgspec.structs.replace(an_ask(), hash_block_size=0),
        w.Release(-1),
        w.Hello("x" * 300),
        w.Hello("x", shared=["x" * 300]),
        w.Hello("x", shared=["x"] * 9),
        msgspec.structs.replace(an_ask(), wait_seconds=-1.0),
        msgspec.structs.replace(an_ask(), wait_seconds=1e9),
    ):
        with pytest.raises(msgspec.DecodeError):
            w.decode_from_client(w.encode(bad))
    for bad in (
        w.LookupHit(1, 2, 3, [[-4]]),
        w.LookupHit(1, 2, 3, [[]] * 65),
        w.Welcome("i", "a", -1, POOL),
        w.PromotionStatus(1, -1, 0.0),
    ):
        with pytest.raises(msgspec.DecodeError):
            w.decode_from_server(w.encode(bad))


@given(st.binary(max_size=200), st.sampled_from(FROM_CLIENT + FROM_SERVER), st.integers(0, 300), st.integers(0, 255))
def test_node_tier_any_bytes_decode_or_raise(noise, message, at, byte):
    frame = bytearray(w.encode(message))
    frame[at % len(frame)] = byte
    for data in (noise, bytes(frame), bytes(frame[: at % len(frame)])):
        for decode in (w.decode_from_client, w.decode_from_server):
            try:
                decode(data)
            except msgspec.DecodeError:
                continue


def test_node_tier_invalid_lease_request_is_refused():
    assert not w.request_error(BLOCK_HASHES, 0, [GROUP])
    assert w.request_error(BLOCK_HASHES[:-1], 0, [GROUP])
    assert w.request_error(BLOCK_HASHES, 9, [GROUP])
    assert w.request_error(BLOCK_HASHES, 2, [GROUP, GroupShape(4, 1)])


@pytest.mark.parametrize(
    "offer, words",
    [
        (w.LookupHit(1, 2, 4, [[4, 8, 12, 16]]), ""),
        (w.LookupHit(1, 0, 4, [[4, 8, 12, 16]]), "hash blocks"),
        (w.LookupHit(1, 2, 0, [[]]), "hash blocks"),
        (w.LookupHit(1, 2, 9, [[4] * 9]), "hash blocks"),
        (w.LookupHit(1, 2, 4, [[4, 8, 12]]), "3 slots for 4"),
        (w.LookupHit(1, 2, 4, [[4, 8, 12, 16]] * 2), "2 groups"),
        (w.LookupHit(1, 2, 4, [[4, 0, 12, 16]]), "missing"),
        (w.LookupHit(1, 2, 4, [[4, 8, 12, POOL // PAGE - 3]]), "beyond"),
        (w.LookupHit(1, 2, 4, [[4, 8, 12, 1 << 40]]), "beyond"),
    ],
)
def test_node_tier_hit_errors_are_detected(offer, words):
    fault = w.hit_error(offer, BLOCK_HASHES, 0, [GROUP], POOL)
    assert words in fault and bool(words) == bool(fault)


def test_node_tier_slot_across_pieces_is_refused():
    offer = w.LookupHit(1, 2, 1, [[PIECE_BYTES // PAGE - 1]])
    assert "crosses" in w.hit_error(offer, BLOCK_HASHES, 0, [GROUP], 4 * PIECE_BYTES)


def test_node_tier_hit_of_windowed_group_omits_slots():
    offer = w.LookupHit(1, 2, 8, [[0, 0, 0, 0, 0, 0, 4, 8], [12, 16]])
    groups = [GroupShape(1, 4, window=32), GroupShape(4, 2)]
    assert not w.hit_error(offer, BLOCK_HASHES, 0, groups, POOL)
    named = w.slots_by_name(offer, BLOCK_HASHES, 0, groups)
    assert named == {
        (0, BLOCK_HASHES[6 * HASH_BYTES : 7 * HASH_BYTES]): 4,
        (0, BLOCK_HASHES[7 * HASH_BYTES :]): 8,
        (1, BLOCK_HASHES[3 * HASH_BYTES : 4 * HASH_BYTES]): 12,
        (1, BLOCK_HASHES[7 * HASH_BYTES :]): 16,
    }


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "ho st:1", "a:b:1", "[::1]", "x/y:1"]
)
def test_node_tier_invalid_address_raises(text):
    assert Address.parse(text) is None


def test_node_addresses_are_parsed():
    assert str(Address.parse("[::1]:80")) == "[::1]:80" and Address.parse("[::1]:80").loopback
    assert Address.parse("node-1.x:7400") == Address("node-1.x", 7400)


def test_node_tier_beyond_loopback_needs_cluster_key(tmp_path):
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


# -- leasing ----------------------------------------------------------------------------------------------------------


class Lender:
    def __init__(self):
        self.clock = Clock()
        pool = SlotPool(POOL // PAGE, PIECE_BYTES // PAGE)
        pool.grow(POOL // PAGE)
        self.index = Index(pool, None, self.clock, IndexLimits(lease_seconds=60))
        self.index.connect(1, 16, [GROUP])
        slots = self.index.reserve(1, NAMESPACE_ID, b"", *items_of(BLOCK_HASHES[: 6 * HASH_BYTES]), 1 << 40)
        self.index.commit(1, slots)
        self.lease_table = NodeLeaseTable(self.index, -1)

    def lend(self, asker=7, id=1, groups=(GROUP,), block_hashes=BLOCK_HASHES, start=0) -> m.LeaseReply:
        answers = []
        request = m.LeaseRequest(id, asker, "them", 16, list(groups), NAMESPACE_ID, block_hashes, start)
        self.handle(request, answers.append)
        return answers[0]

    def handle(self, message, answer=None):
        self.lease_table.handle(message, answer)

    @property
    def leases(self) -> int:
        return self.index.stats().leases


def test_node_tier_lease_is_granted_and_released():
    lender = Lender()
    lent = lender.lend()
    assert (lent.num_hash_blocks, len(lent.slots[0])) == (6, 6) and lender.leases == 1
    lender.handle(m.Return(8, lent.lease))  # another request's
    assert lender.leases == 1
    lender.handle(m.Return(7, lent.lease))
    lender.handle(m.Return(7, lent.lease))
    assert lender.leases == 0 and len(lender.lease_table) == 0


def test_node_tier_lease_ends_with_client_process_or_deadline():
    lender = Lender()
    lender.lend(7), lender.lend(7), lender.lend(8)
    lender.handle(m.Left(7))
    assert lender.leases == 1
    lender.lease_table.end()
    assert lender.leases == 0 and len(lender.lease_table) == 0
    lender.lend(7)
    lender.clock.now += 61
    lender.index.tick()
    assert lender.leases == 0


def test_node_tier_lease_of_mismatched_groups_or_hashes_is_refused():
    lender = Lender()
    assert lender.lend(groups=[GroupShape(2, 4)]).lease == 0  # the space has other groups here
    assert lender.lend(block_hashes=block_hashes_of((8, "y"))).lease == 0
    assert lender.lend(block_hashes=BLOCK_HASHES[:-1]).lease == 0
    assert lender.lend(groups=[]).lease == 0
    for pages in range(1, 40):
        lender.lend(groups=[GroupShape(1, pages)])
    assert len(lender.lease_table._clients[7]) <= 16


# -- the tier, without a tier process ------------------------------------------------------------------------------


class FakeMover:
    def __init__(self, kind, options, context, user, open_seconds, backoff=None):
        self.options, self.on_message, self.on_up, self.on_down = (
            options, user.process_message, user.process_up, user.process_down,
        )  # fmt: skip
        self.state, self.reason, self.restarts, self.timeouts, self._id = "opening", "", 0, 0, 0
        self.sent, self.requests = [], []

    def up(self):
        self.state = READY
        self.on_up(m.Opened(False))

    def down(self):
        self.state = BACKOFF
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

    def back_off(self, reason):
        self.state, self.reason = BACKOFF, reason


class Tiered:
    def __init__(self, nodes="localhost:1"):
        self.lender, self.clock = Lender(), Clock()
        context = TierContext(0, POOL, None, self.clock, make_process=FakeMover)
        self.tier = NodesTier(context, {"nodes": nodes, "shared": "ours"}, self.lender.lease_table)
        self.tier_process = self.tier._tier_process
        self.tier_process.up()
        self.found, self.read = [], []

    def find(self, nodes=(), block_hashes=BLOCK_HASHES):
        want = Want(NAMESPACE_ID, 16, [GroupShape(1, 4)], block_hashes, 0, tuple(nodes))
        self.tier.find(want, self.found.append)
        return want

    def read_from(self, store: str) -> None:
        """``BLOCKS``, which that store has."""
        self.find()
        self.tier_process.answer(token=4, num_hash_blocks=6, store=store)
        self.tier.read(self.found[-1], BLOCKS, self.read.append)
        self.tier_process.answer(good=[True, True])


BLOCKS = [
    Block(NAMESPACE_ID, 0, BLOCK_HASHES[:HASH_BYTES], bytes(HASH_BYTES), b"", 4, 4),
    Block(NAMESPACE_ID, 0, BLOCK_HASHES[HASH_BYTES : 2 * HASH_BYTES], b"", b"", 8, 4),
]


def test_node_tier_find_read_release():
    t = Tiered()
    t.find()
    assert t.tier_process.requests[0][0].block_hashes == BLOCK_HASHES and t.tier_process.options["shared"] == "ours"
    t.tier_process.answer(token=5, num_hash_blocks=6)
    t.tier.read(t.found[0], BLOCKS, t.read.append)
    assert t.tier.reading
    t.tier_process.answer(good=[True, False])
    assert t.read == [[True, False]] and not t.tier.reading
    t.tier.release(t.found[0])
    assert t.tier_process.sent == [m.Release(5)]
    counts = t.tier.counts()
    assert (counts.found_blocks, counts.read_blocks, counts.read_bytes, counts.read_failures) == (6, 1, 4 * PAGE, 1)


def test_node_tier_reports_promotion_on_another_node_first():
    t = Tiered()
    told = []
    t.tier.on_promotion_status = lambda want, num_hash_blocks, seconds: told.append((want, num_hash_blocks, seconds))
    want = t.find()
    before = t.tier.latency()
    t.clock.now += 0.1
    t.tier_process.on_message(m.PromotionStatus(t.tier_process.requests[0][0].id, 6, 3.0))
    learned = t.tier.latency()
    assert told == [(want, 6, 3.0)] and learned > before
    t.clock.now += 3.0
    t.tier_process.on_message(m.PromotionStatus(t.tier_process.requests[0][0].id, 8, 0.5))
    t.clock.now += 1.0
    t.tier_process.answer(token=5, num_hash_blocks=8)
    # The time of another node's disk does not make a question to other nodes a matter of seconds.
    assert t.tier.latency() == learned and t.found[0].num_hash_blocks == 8
    t.tier_process.on_message(m.PromotionStatus(1, 8, 0.5))  # it has been answered
    assert len(told) == 2 and t.tier_process.state == READY


def test_node_tier_discarded_blocks_are_not_announced():
    t = Tiered()
    told = []
    t.tier.on_promotion_status = lambda want, num_hash_blocks, seconds: told.append(num_hash_blocks)
    t.read_from("bad")
    t.tier.discard(*BLOCKS[1].name)
    t.find()
    for store in ("bad", "another"):
        t.tier_process.on_message(m.PromotionStatus(t.tier_process.requests[0][0].id, 6, 3.0, store))
    assert told == [1, 6]


def test_node_tier_without_peers_misses():
    t = Tiered(nodes="")
    t.find()
    assert t.found[0].num_hash_blocks == 0 and not t.tier_process.requests
    t.find(nodes=["localhost:5"])
    assert t.tier_process.requests[0][0].nodes == ["localhost:5"]


def test_node_tier_ignores_ids_of_dead_tier_process():
    t = Tiered()
    t.find()
    t.tier_process.answer(token=5, num_hash_blocks=6)
    t.find()
    t.lender.lend()
    t.tier_process.down()
    assert t.found[1].num_hash_blocks == 0 and t.lender.leases == 0
    t.tier_process.up()
    t.tier.read(t.found[0], BLOCKS, t.read.append)
    t.tier.release(t.found[0])
    assert t.read == [[False, False]] and not t.tier_process.sent and not t.tier_process.requests


def test_node_tier_discarded_block_is_not_found_again_in_the_store_that_had_it():
    t = Tiered()
    t.read_from("bad")
    t.tier.discard(*BLOCKS[1].name)
    t.find()
    t.tier_process.answer(token=5, num_hash_blocks=6, store="bad")
    assert t.found[-1].num_hash_blocks == 1 and t.tier.counts().discarded_blocks == 1
    t.find()
    t.tier_process.answer(token=6, num_hash_blocks=6, store="another")
    assert t.found[-1].num_hash_blocks == 6, "a good copy"
    t.tier.discard(*BLOCKS[0].name)
    t.find()
    t.tier_process.answer(token=7, num_hash_blocks=6, store="bad")
    assert t.found[-1].num_hash_blocks == 0 and t.tier_process.sent == [m.Release(7)]


def test_node_tier_blocks_of_this_store_or_another_tier_are_no_nodes_fault():
    t = Tiered()
    t.tier.discard(*BLOCKS[0].name)
    t.read_from("store")
    assert t.found[0].num_hash_blocks == 6 and not t.tier.counts().discarded_blocks


def test_node_tier_remembered_origins_are_bounded(monkeypatch):
    monkeypatch.setattr(nodes_tier, "MAX_ORIGINS", 1)
    t = Tiered()
    t.read_from("store")
    assert list(t.tier._origins) == [BLOCKS[1].name]


def test_node_tier_answers_lease_requests_and_stops_on_unexpected_message():
    t = Tiered()
    t.tier_process.on_message(m.LeaseRequest(9, 7, "them", 16, [GROUP], NAMESPACE_ID, BLOCK_HASHES, 0))
    assert t.tier_process.sent[0].num_hash_blocks == 6 and t.tier.counts().extra["leases_out"] == 1
    t.tier_process.on_message(m.Kept([]))
    assert "Kept" in t.tier.counts().reason
    t.tier.write(BLOCKS, t.read.append)
    assert (
        t.read == [[False, False]]
        and not t.tier.writable
        and not t.tier.has(NAMESPACE_ID, 0, BLOCK_HASHES[:HASH_BYTES])
    )


def test_node_tier_state_is_that_of_the_listed_stores():
    t = Tiered()

    def shown(errors: dict):
        t.tier_process.on_message(m.ListedNodes(errors))
        counts = t.tier.counts()
        assert counts.nodes == errors
        return counts.state, counts.reason

    assert t.tier.counts().state == "opening"
    assert shown({"a:1": None, "b:1": None}) == ("opening", "")
    assert shown({"a:1": None, "b:1": "it refuses"}) == ("opening", "")
    assert shown({"a:1": "", "b:1": None}) == ("ready", "")
    assert shown({"a:1": "", "b:1": "it refuses"}) == ("ready", "1 of 2 nodes answer: b:1: it refuses")
    silent = {f"{name}:1": "it is silent" for name in "abcdef"}
    assert shown({"a:1": "no", "b:1": "it refuses"}) == ("unavailable", "0 of 2 nodes answer: a:1: no; b:1: it refuses")
    assert shown(silent)[1].endswith("d:1: it is silent; and 2 more")
    assert shown({"a:1": "", "b:1": ""}) == shown({}) == ("ready", ""), "a list with this store alone lacks none"
    t.tier_process.down()
    assert t.tier.counts().state == "unavailable" and not t.tier.counts().nodes
    t.tier_process.up()
    assert t.tier.counts().state == "opening", "a new process knows none"
