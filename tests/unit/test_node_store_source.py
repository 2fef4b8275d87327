"""NodeStoreSource over a fake client: whose blocks are interchangeable, which engine stores what, and the use of
answers."""

import logging
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support import make_request
from tier_fakes import NAMESPACE, POOL, FakePending, described, group_view, make_tier

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import GroupLoad
from vllm_kvtier.scheduler.sources.node_store import _store_options
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.protocol import EXISTS, HASH_BYTES, MAX_HASH_BLOCKS, PAGE, Done, Reserved
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.slots import PIECE_BYTES, part_layout, slot_layout

ONE = [(16, None)]
HYBRID = [(32, None), (16, 100)]
BLOCK_HASHES = [bytes([i]) * 32 for i in range(12)]


def namespace_id(groups=ONE, ranks=None, namespace=NAMESPACE, lora_fingerprint=b""):
    return make_tier(groups, ranks, hash_block_size=16, namespace=namespace).tier.namespace_id(lora_fingerprint)


def one(groups=ONE, **view):
    return namespace_id(groups, [described(0, groups, [0] * len(groups), **view)])


# -- spaces --------------------------------------------------------------------------------------------------------


def test_store_namespace_is_stable_over_restart():
    assert len(namespace_id()) == HASH_BYTES and namespace_id() == namespace_id() == one()


@pytest.mark.parametrize("physical", [{"heads_first": False}, {"gap": 4096}, {"base": 1 << 40}], ids=str)
def test_store_namespace_ignores_gpu_addresses(physical):
    assert one(**physical) == one()


@pytest.mark.parametrize("field", [f for f in NAMESPACE.__struct_fields__])
def test_store_namespace_depends_on_every_field(field):
    value = getattr(NAMESPACE, field)
    other = msgspec.structs.replace(NAMESPACE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert namespace_id(namespace=other) != namespace_id()


@pytest.mark.parametrize("logical", [{"layers": 3}, {"heads": 4}, {"inner": 256}, {"kind": "mla"}], ids=str)
def test_store_namespace_depends_on_meaning_of_bytes(logical):
    assert one(**logical) != one()


def test_store_namespace_depends_on_block_size_window_and_groups():
    all_of_them = [[(16, None)], [(32, None)], [(16, 64)], [(16, 128)], [(16, None), (16, None)], HYBRID]
    assert len({namespace_id(groups) for groups in all_of_them}) == len(all_of_them)


def test_store_namespace_depends_on_division_over_ranks():
    divisions = [[0], [0, 1], [0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3]]
    found = {namespace_id(ONE, [described(r, ONE, [shard]) for r, shard in enumerate(shards)]) for shards in divisions}
    assert len(found) == len(divisions)


def test_store_namespace_is_separate_per_adapter():
    tier = make_tier(ONE, hash_block_size=16).tier
    adapters = [i.to_bytes(16, "little") for i in range(3000)]  # more than are remembered
    namespaces = [tier.namespace_id(a) for a in adapters]
    assert len({*namespaces, tier.namespace_id(b"")}) == 3001 and namespaces == [tier.namespace_id(a) for a in adapters]


def test_store_source_new_namespace_hides_stored_blocks():
    made = make_tier(ONE, hash_block_size=16)
    tier, before = made.tier, (made.tier.namespace_id(b""), made.tier.namespace_id(b"a" * 16))
    ask = tier.ask(0, BLOCK_HASHES, b"")
    assert made.client.open[0].asked.namespace_id == before[0]
    tier.renew()
    assert made.client.told == [("leave", before[0])], "of others' namespaces it could unpin nothing any more"
    after = tier.namespace_id(b""), tier.namespace_id(b"a" * 16)
    assert not set(before) & set(after)
    made.client.answer(made.client.open[0], 1, [[1]])
    assert ask.poll().code == "not_in_store" and not made.client.held
    tier.renew()
    assert tier.namespace_id(b"") not in (*before, *after), "weights may change again"
    assert namespace_id() == before[0], "others keep what they have"


def test_store_source_names_its_namespace_before_the_first_request():
    """For the store no engine used it until then, and another's sleep unpinned its blocks."""
    made = make_tier(ONE, hash_block_size=16, connect=False)
    names = [made.tier.namespace_id(b"")]
    assert made.client.named == []
    made.client.connect("life 1")
    made.client.on_change()  # its memory grows
    assert made.client.named == names
    made.tier.renew()
    names.append(made.tier.namespace_id(b""))
    assert made.client.named == names and names[0] != names[1]
    made.client.lose()
    made.client.connect("life 1")
    assert made.client.named == [*names, names[1]], "a namespace is of a connection"


# -- what the store certainly lacks -----------------------------------------------------------------------------------


class Presence:
    def __init__(self, *hashes):
        self.hashes = hashes

    def may_have(self, namespace_id, block_hash):
        return (namespace_id, block_hash) in self.hashes


def test_store_source_lacks_prompt_whose_first_block_is_not_present():
    made = make_tier(HYBRID, hash_block_size=16)
    tier, name = made.tier, made.tier.namespace_id(b"")
    first = HYBRID[0][0] // 16  # hash blocks of a block of the group that needs its whole prefix
    assert HYBRID[0][1] is None and not tier.lacks(BLOCK_HASHES, 0, b""), "a store without a table is asked"
    made.client.presence = Presence((name, BLOCK_HASHES[first - 1]))
    assert not tier.lacks(BLOCK_HASHES, 0, b"")
    assert tier.lacks(BLOCK_HASHES, 0, b"a" * 16), "another adapter's"
    made.client.presence = Presence((name, BLOCK_HASHES[-1]))
    assert tier.lacks(BLOCK_HASHES, 0, b"")
    assert not tier.lacks(BLOCK_HASHES[: first - 1], 0, b""), "too short to tell"
    assert not tier.lacks(BLOCK_HASHES, 0, b"", ("node:1",)), "other nodes may have it"
    for name, value in (("tiers", ("disk",)), ("peer_count", 1)):
        was = getattr(made.client, name)
        setattr(made.client, name, value)
        assert not tier.lacks(BLOCK_HASHES, 0, b""), name
        setattr(made.client, name, was)
    # A cluster key alone makes the tier of other nodes, which no request of this engine names.
    made.client.tiers = made.client.only_named = ("nodes",)
    assert tier.lacks(BLOCK_HASHES, 0, b"") and not tier.promote(BLOCK_HASHES, b"")
    assert not tier.lacks(BLOCK_HASHES, 0, b"", ("node:1",)) and tier.promote(BLOCK_HASHES, b"", ("node:1",))
    made.client.tiers = ("nodes", "disk")
    assert not tier.lacks(BLOCK_HASHES, 0, b"") and tier.promote(BLOCK_HASHES, b"")
    made.client.lose()
    made.client.presence = None
    assert not tier.lacks(BLOCK_HASHES, 0, b"")


# -- parts and writers -----------------------------------------------------------------------------------------------


def test_store_slots_have_a_part_per_tensor_parallel_rank():
    ranks = [described(r, ONE, [r]) for r in range(4)]
    made = make_tier(ONE, ranks, hash_block_size=16)
    part = part_layout(ranks[0].groups[0]).nbytes
    assert made.setup.offsets == [[0], [part], [2 * part], [3 * part]]
    assert made.setup.writes == [[True]] * 4 and made.tier.writers == [{0, 1, 2, 3}]
    [shape] = made.client.hello.groups
    assert (shape.hash_blocks_per_block, shape.window, shape.slot_pages) == (1, None, slot_layout([part] * 4).pages)


def test_store_slots_keep_replicated_heads_once():
    ranks = [described(r, ONE, [r // 2]) for r in range(4)]
    made = make_tier(ONE, ranks, hash_block_size=16)
    part = part_layout(ranks[0].groups[0]).nbytes
    assert made.setup.offsets == [[0], [0], [part], [part]]
    assert made.setup.writes == [[True], [False], [True], [False]] and made.tier.writers == [{0, 2}]
    assert made.client.hello.groups[0].slot_pages == slot_layout([part] * 2).pages


def test_store_slots_keep_mla_once_beside_divided_group():
    groups = [(16, None), (16, None)]
    ranks = [
        m.Described(r, (group_view(0, 16, kind="mla", heads=1), group_view(1, 16)), (0, r)) for r in range(3)
    ]
    made = make_tier(groups, ranks, hash_block_size=16)
    assert [row[0] for row in made.setup.offsets] == [0, 0, 0]
    assert [row[0] for row in made.setup.writes] == [True, False, False]
    assert made.tier.writers == [{0}, {0, 1, 2}] and made.tier.session
    made.tier.reached(m.PoolReady(2, "", 0))  # vLLM failed on this rank: rank 0 may have computed anything
    assert not made.tier.session, "nothing is committed"


def test_store_slots_have_parts_per_pipeline_stage():
    ranks = [m.Described(r, (group_view(0, 16, layers=1 + 2 * r),), (r,)) for r in range(2)]
    made = make_tier(ONE, ranks, hash_block_size=16)
    sizes = [part_layout(rank.groups[0]).nbytes for rank in ranks]
    assert made.setup.offsets == [[0], [sizes[0]]]
    ask = made.tier.ask(0, BLOCK_HASHES, b"")
    made.client.answer(made.client.open[0], 2, [[8, 64]])
    assert ask.poll().nbytes == 2 * max(sizes), "the rank with most bytes is through last"


# -- an engine over several nodes ----------------------------------------------------------------------------------


def spread(shards=(0, 1, 2), nodes=("a", "a", "b"), **options):
    """A source whose ranks are on ``nodes``, all connected; the clients by node."""
    ranks = [m.Described(r, (group_view(0, 16),), (shards[r],), node) for r, node in enumerate(nodes)]
    context = {"config": options["config"]} if options else {}
    made = make_tier(ONE, ranks, hash_block_size=16, connect=False, context=context)
    made.clients = made.tier._joined._clients
    for number, client in enumerate(made.clients):
        client.connect(f"life-{number}")
    for r, node in enumerate(made.setup.nodes):
        assert not made.tier.limit()
        made.tier.reached(m.PoolReady(r, f"life-{node}", (POOL + node) * PAGE))
    assert made.tier.limit() == POOL
    return made


def load_from_stores(made, count=3):
    """A request's LoadJob of ``count`` blocks; its state."""
    pending = made.tier.ask(0, BLOCK_HASHES, b"")
    for number, client in enumerate(made.clients):
        client.answer(client.open[0], count, [[100 * (number + 1) + 5 * i for i in range(count)]])
    request = make_request("r", list(range(16 * count + 1)), 16)
    state = SimpleNamespace(request=request, hit=pending.poll(), num_computed_tokens=0, lora_fingerprint=b"", job=None)
    state.job = made.tier.build_job(state, (list(range(11, 11 + count)),), 16 * count)
    return state


def test_stores_of_several_nodes_have_the_parts_of_their_ranks():
    made = spread()
    part = part_layout(group_view(0, 16)).nbytes
    assert made.setup.offsets == [[0], [part], [0]] and made.setup.nodes == [0, 0, 1]
    assert made.tier.writers == [{0, 1, 2}] and made.setup.launch is None
    assert [c.hello.groups[0].slot_pages for c in made.clients] == [
        slot_layout([part] * count).pages for count in (2, 1)
    ]
    latent = spread(shards=(0, 0, 0))  # all ranks have the same bytes: each node keeps them once
    assert latent.tier.writers == [{0, 2}] and latent.setup.offsets == [[0], [0], [0]]
    assert m.decode_link(m.encode(made.setup)) == made.setup
    together = make_tier(ONE, [m.Described(r, (group_view(0, 16),), (r,), "a") for r in range(3)], hash_block_size=16)
    assert together.tier._joined is None and not together.setup.nodes, "an engine on one node"
    assert together.setup.offsets == [[0], [part], [2 * part]]


def test_store_auto_is_started_on_each_node_with_the_engine_s_options(run_dir):
    options = {"store": "auto", "store_disk_path": "/disk", "store_policy": "arc"}
    made = spread(config=KVTierConfig(**options))
    assert StoreOptions(**made.setup.launch) == _store_options(KVTierConfig(**options))
    assert [client.launch is None for client in made.clients] == [False, True]
    assert m.decode_link(m.encode(made.setup)) == made.setup


def test_load_of_several_nodes_names_the_slots_and_store_of_each():
    made = spread()
    state = load_from_stores(made)
    [load] = state.job.groups
    assert load.slots.tolist() == [100, 105, 110]
    assert load.by_node.tolist() == [[100, 105, 110], [200, 205, 210]]
    assert state.job.instance == "life-0 life-1"
    made.tier.release(state.hit, True)
    assert not any(client.held for client in made.clients)


def test_wrong_block_is_discarded_at_the_node_whose_rank_found_it():
    made = spread()
    state = load_from_stores(made)
    made.tier.on_load_failed(state, LoadResult("r", {12}, "wrong", 0, 0.1, 0.0, [(0, 205)], node=1))
    assert not made.clients[0].told
    [(what, _, group, block_hash, slot, session)] = made.clients[1].told
    assert (what, group, slot, session) == ("discard", 0, 205, made.clients[1].session)
    assert block_hash == bytes(state.request.block_hashes[1])[:HASH_BYTES]


def test_blocks_are_written_where_they_lack():
    """By the ranks of the nodes whose stores lack them, in the order of the blocks."""
    made = spread()
    answers = [FakePending(client.session, deadline=1.0) for client in made.clients]
    for client, answer in zip(made.clients, answers, strict=True):
        client.reserve = lambda *args, answer=answer: answer
    pending = made.tier.reserve(made.tier.namespace_id(b""), b"", [0] * 5, b"", b"")
    for answer, slots in zip(answers, ([3, EXISTS, EXISTS, 6, 9], [4, 8, EXISTS, EXISTS, 12]), strict=True):
        answer.resolve(Reserved(0, slots))
    slots = pending.outcome.slots
    assert slots[2] == EXISTS
    items = [SimpleNamespace(group=0, slot=slot) for slot in slots if slot > 0]
    parts = made.tier.by_writers(items)
    assert [(len(part), ranks) for part, ranks in parts] == [(1, {0, 1, 2}), (1, {2}), (1, {0, 1}), (1, {0, 1, 2})]
    sent = made.tier.slot_array([item.slot for item in items]).tobytes()
    assert np.frombuffer(sent, np.int64).reshape(2, -1).tolist() == [[3, 0, 6, 9], [4, 8, 0, 12]]
    made.tier.commit([slots[0], slots[1]], pending.session)
    made.tier.abort([slots[3], slots[4]], pending.session)
    assert [client.told for client in made.clients] == [
        [("commit", [3], 1), ("abort", [6, 9], 1)], [("commit", [4, 8], 1), ("abort", [12], 1)]
    ]  # fmt: skip


def test_engine_over_several_nodes_uses_no_store_while_one_is_away():
    made = spread()
    pending = made.tier.ask(0, BLOCK_HASHES, b"")
    made.clients[0].answer(made.clients[0].open[0], 2, [[8, 64]])
    made.clients[1].lose()
    assert pending.poll().code == "store_unavailable" and not made.clients[0].held and made.lost == [1]
    assert not made.tier.limit() and not made.tier.session and made.tier.ask(0, BLOCK_HASHES, b"") is None
    made.clients[1].connect("life-2")
    assert not made.tier.limit(), "no worker reaches this one"
    made.tier.reached(m.PoolReady(2, "life-2", POOL * PAGE))
    assert made.tier.limit() == POOL


def test_store_source_sends_windows_and_block_sizes():
    made = make_tier(HYBRID, hash_block_size=16)
    assert [(g.hash_blocks_per_block, g.window) for g in made.client.hello.groups] == [(2, None), (1, 100)]
    assert made.client.hello.hash_block_size == 16 and made.client.hello.kind == "engine" and made.client.started
    assert made.setup.path == made.client.path == "/nowhere/store.sock" and made.client.launch is None
    assert m.decode_link(m.encode(made.setup)) == made.setup


def test_store_source_block_too_large_is_refused_with_sizes():
    with pytest.raises(ValueError, match="block size"):
        make_tier(ONE, [described(0, ONE, [0], layers=9, inner=PIECE_BYTES // 256)])


# -- the watermark ---------------------------------------------------------------------------------------------------


def test_store_source_uses_tokens_that_all_ranks_reach():
    ranks = [described(r, ONE, [r]) for r in range(2)]
    made = make_tier(ONE, ranks, hash_block_size=16, connect=False)
    tier, client = made.tier, made.client
    assert tier.limit() == 0 and tier.ask(0, BLOCK_HASHES, b"") is None
    client.connect("life 1")
    assert tier.limit() == 0
    tier.reached(m.PoolReady(0, "life 1", 100 * PAGE))
    assert tier.limit() == 0, "rank 1 has not reported yet"
    tier.reached(m.PoolReady(1, "life 1", 40 * PAGE + 7))
    assert tier.limit() == 40 and tier.instance == "life 1"
    tier.ask(0, BLOCK_HASHES, b"")
    assert client.open[0].asked.limit == 40
    tier.reached(m.PoolReady(1, "life 1", 200 * PAGE))
    assert tier.limit() == 100


def test_store_source_forgets_state_of_old_store_instance():
    ranks = [described(r, ONE, [r]) for r in range(2)]
    made = make_tier(ONE, ranks, hash_block_size=16, reached=50)
    ask = made.tier.ask(0, BLOCK_HASHES, b"")
    made.client.lose()
    assert made.tier.limit() == 0 and made.tier.instance == "" and made.lost == [1]
    assert ask.poll().code == "store_unavailable"
    made.client.connect("life 2")
    assert made.tier.limit() == 0, "the workers still have the old memory"
    made.tier.reached(m.PoolReady(0, "life 2", 10 * PAGE))
    assert made.tier.limit() == 0
    made.tier.reached(m.PoolReady(1, "life 2", 20 * PAGE))
    assert made.tier.limit() == 10 and made.tier.instance == "life 2"


def test_store_source_short_disconnect_is_not_logged(caplog):
    made = make_tier(ONE, hash_block_size=16)
    with caplog.at_level(logging.INFO, "vllm.kvtier.scheduler.sources.node_store"):
        made.client.lose()
        made.client.connect("life 1")
        for callback in made.later:
            callback()
        assert not caplog.records
        made.client.lose()
        made.later[-1]()
        assert "gone" in caplog.text
        made.client.connect("life 1")
        assert "there again" in caplog.text


# -- answers ---------------------------------------------------------------------------------------------------------


def asked(groups=HYBRID, start=0, **options):
    made = make_tier(groups, hash_block_size=16, **options)
    ask = made.tier.ask(start, BLOCK_HASHES, b"")
    return made, ask, made.client.open[0]


def test_store_source_hit_has_blocks_and_bytes():
    made, ask, pending = asked(start=32)
    assert ask.poll() is None
    made.client.answer(pending, 6, [[16, 32], [0, 5, 6, 7]])
    offer = ask.poll()
    assert offer.found and ask.poll() is offer
    assert (offer.start, offer.tokens, offer.blocks, offer.instance) == (32, 96, [[16, 32], [0, 5, 6, 7]], "life 1")
    parts = [part_layout(group_view(g, n, w)).nbytes for g, (n, w) in enumerate(HYBRID)]
    assert offer.nbytes == 2 * parts[0] + 3 * parts[1], "what a window leaves out is not loaded"
    made.tier.release(offer, True)
    assert not made.client.held


@pytest.mark.parametrize(
    "num_hash_blocks, slots",
    [
        (5, [[16, 32], [1, 2, 3, 4, 5]]),  # ends within a block of the larger group
        (4, [[16, 32]]),
        (4, [[16, 32], [1, 2, 3, 4], [1]]),
        (4, [[16], [1, 2, 3, 4]]),
        (4, [[16, 32], [1, 2, 3, 4, 5]]),
        (4, [[16, 0], [1, 2, 3, 4]]),  # full attention needs every block
        (4, [[16, POOL], [1, 2, 3, 4]]),
        (4, [[16, POOL - 1], [1, 2, 3, 4]]),  # begins below the watermark and ends above it
        (14, [[16] * 7, [1] * 14]),  # more than was asked for
    ],
)
def test_store_source_malformed_hit_is_refused_and_released(num_hash_blocks, slots):
    made, ask, pending = asked()
    made.client.answer(pending, num_hash_blocks, slots)
    assert ask.poll().code == "malformed"
    assert not made.client.held


def test_store_source_slot_ending_at_pool_end_is_accepted():
    made, ask, pending = asked(ONE)
    made.client.answer(pending, 1, [[POOL - made.client.hello.groups[0].slot_pages]])
    assert ask.poll().found


@pytest.mark.parametrize("outcome, code", [(Failed("hung"), "store_unavailable"), (Done(1, 2), "malformed")])
def test_store_source_ignores_unexpected_answers(outcome, code):
    made, ask, pending = asked()
    made.client.refuse(pending, outcome)
    assert ask.poll().code == code


def test_store_source_miss_reports_reason():
    made, ask, pending = asked()
    made.client.refuse(pending)
    assert ask.poll().code == "not_in_store"
    made, ask, pending = asked(start=32)
    made.client.answer(pending, 2, [[], []])  # a lease on nothing
    assert ask.poll().code == "not_in_store" and not made.client.held


@pytest.mark.parametrize("early", [False, True])
def test_store_source_cancelled_lookup_keeps_no_lease(early):
    made, ask, pending = asked()
    if not early:
        made.client.answer(pending, 2, [[16], [1, 2]])
    made.tier.cancel(ask)
    if early:
        made.client.answer(pending, 2, [[16], [1, 2]])
    assert not made.client.held
    made, ask, pending = asked()
    made.tier.cancel(ask)
    made.client.refuse(pending, Failed("gone"))


def test_store_source_truncates_hashes_beyond_message_limit():
    made = make_tier(ONE, hash_block_size=16)
    block_hashes = [b"h" * 32] * (MAX_HASH_BLOCKS + 10)
    made.tier.touch(block_hashes, b"")
    assert len(made.client.told[-1][2]) == MAX_HASH_BLOCKS * HASH_BYTES
    assert made.tier.ask(MAX_HASH_BLOCKS * 16, block_hashes, b"") is None
    assert made.tier.ask((MAX_HASH_BLOCKS - 1) * 16, block_hashes, b"") is not None


def test_store_source_sends_connection_state_on_connect():
    made = make_tier(ONE, hash_block_size=16)
    made.tier.commit([5], 3)
    made.tier.abort([6], 3)
    state = SimpleNamespace(request=make_request("r", list(range(17)), 16), hit=SimpleNamespace(lease=1, session=3))
    state.job = SimpleNamespace(groups=[GroupLoad(0, np.array([5]), np.array([1]), np.array([7]))])
    state.positions = [[0]]
    made.tier.on_load_failed(state, LoadResult("r", {5}, "wrong", 0, 0.1, 0.0, [(0, 7)]))
    commit, abort, discard = made.client.told
    assert commit == ("commit", [5], 3) and abort == ("abort", [6], 3)
    block_hash = bytes(state.request.block_hashes[0])[:HASH_BYTES]
    assert discard == ("discard", made.tier.namespace_id(b""), 0, block_hash, 7, 3)


def test_store_source_running_store_with_other_places_is_logged_once(caplog, tmp_path):
    made = make_tier(
        ONE, hash_block_size=16, store_disk_path=str(tmp_path), store_nodes="127.0.0.1:1, 127.0.0.1:2",
        store_object_url="s3://ours/kv", store_mooncake_master="127.0.0.1:50051", store_mooncake_trusted_network=True,
        connect=False,
    )  # fmt: skip
    made.client.places = {
        "nodes": "127.0.0.1:9", "object_url": "s3://theirs/kv", "mooncake_master": "127.0.0.1:50052",
        "node_listen": "127.0.0.1:7300",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "vllm.kvtier.scheduler.sources.node_store"):
        made.client.connect("another life")
        made.client.connect("and another")
    (message,) = [record.message for record in caplog.records]
    assert f"store_disk_path is not set, not {tmp_path}" in message
    assert "nodes is 127.0.0.1:9, not 127.0.0.1:1, 127.0.0.1:2" in message
    assert "object_url is s3://theirs/kv, not s3://ours/kv" in message
    assert "mooncake_master is 127.0.0.1:50052, not 127.0.0.1:50051" in message
    assert "node_listen" not in message, "an operator's store may have what this engine does not name"
    assert "kill 77" in message


def test_store_source_running_store_with_the_same_places_is_not_logged(caplog, tmp_path):
    places = {"disk_path": str(tmp_path), "nodes": "127.0.0.1:2,127.0.0.1:1", "object_url": "s3://ours/kv/"}
    made = make_tier(
        ONE, hash_block_size=16, store_disk_path=str(tmp_path), store_nodes="127.0.0.1:1, 127.0.0.1:2",
        store_object_url="s3://ours/kv", connect=False,
    )  # fmt: skip
    made.client.places = places
    with caplog.at_level(logging.WARNING, "vllm.kvtier.scheduler.sources.node_store"):
        made.client.connect("another life")
    assert not caplog.records


def test_store_source_started_store_has_default_pin_share():
    """What an engine holds of its prefix cache while that is copied is another option."""
    assert _store_options(KVTierConfig(store_inflight_share=0.9)).pin_share == StoreOptions().pin_share == 0.5


def test_store_source_connection_id_is_zero_while_disconnected():
    """What was reserved on another one is void."""
    engine = make_tier([(4, None)])
    assert engine.tier.session == 1
    engine.client.lose()
    assert engine.tier.session == 0
    engine.client.connect("life 1")
    assert engine.tier.session == 2


def test_options_of_a_store_that_others_start_stop_no_engine():
    """They have no effect, as with a DaemonSet's store."""
    given = {"store_size": "0", "store_policy": "none"}
    assert _store_options(KVTierConfig(store="/run/kvtier/store.sock", **given)) == StoreOptions()
    with pytest.raises(ConfigError, match="option policy"):
        _store_options(KVTierConfig(store_policy="none"))
