"""HostTier over a fake client: whose blocks are interchangeable, who writes what, and what is made of answers."""

import logging

import msgspec
import pytest
from tier_fakes import NAMESPACE, POOL, described, group_view, make_tier

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.offers import NoOffer
from vllm_kvtier.scheduler.tier import HostOffer, _store_options
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.messages import HASH, MAX_UNITS, PAGE, Done
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.slots import PIECE, part_layout, slot_layout

ONE = [(16, None)]
HYBRID = [(32, None), (16, 100)]
CHAIN = [bytes([i]) * 32 for i in range(12)]


def space(groups=ONE, ranks=None, namespace=NAMESPACE, variant=b""):
    return make_tier(groups, ranks, unit=16, namespace=namespace).tier.space(variant)


def one(groups=ONE, **view):
    return space(groups, [described(0, groups, [0] * len(groups), **view)])


# -- spaces --------------------------------------------------------------------------------------------------------


def test_the_same_engine_finds_its_blocks_after_a_restart():
    assert len(space()) == HASH and space() == space() == one()


@pytest.mark.parametrize("physical", [{"heads_first": False}, {"gap": 4096}, {"base": 1 << 40}], ids=str)
def test_where_bytes_lie_on_the_gpu_does_not_matter(physical):
    assert one(**physical) == one()


@pytest.mark.parametrize("field", [f for f in NAMESPACE.__struct_fields__])
def test_every_field_of_the_namespace_matters(field):
    value = getattr(NAMESPACE, field)
    other = msgspec.structs.replace(NAMESPACE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert space(namespace=other) != space()


@pytest.mark.parametrize("logical", [{"layers": 3}, {"heads": 4}, {"inner": 256}, {"kind": "mla"}], ids=str)
def test_what_bytes_mean_matters(logical):
    assert one(**logical) != one()


def test_block_size_window_and_groups_matter():
    all_of_them = [[(16, None)], [(32, None)], [(16, 64)], [(16, 128)], [(16, None), (16, None)], HYBRID]
    assert len({space(groups) for groups in all_of_them}) == len(all_of_them)


def test_the_division_over_ranks_matters():
    divisions = [[0], [0, 1], [0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3]]
    found = {space(ONE, [described(r, ONE, [shard]) for r, shard in enumerate(shards)]) for shards in divisions}
    assert len(found) == len(divisions)


def test_adapters_have_spaces_of_their_own():
    tier = make_tier(ONE, unit=16).tier
    adapters = [i.to_bytes(16, "little") for i in range(3000)]  # more than are remembered
    spaces = [tier.space(a) for a in adapters]
    assert len({*spaces, tier.space(b"")}) == 3001 and spaces == [tier.space(a) for a in adapters]


def test_renew_leaves_all_that_was_stored_behind():
    made = make_tier(ONE, unit=16)
    tier, before = made.tier, (made.tier.space(b""), made.tier.space(b"a" * 16))
    ask = tier.ask(0, CHAIN, b"")
    assert made.client.open[0].asked.space == before[0]
    tier.renew()
    after = tier.space(b""), tier.space(b"a" * 16)
    assert not set(before) & set(after)
    made.client.answer(made.client.open[0], 1, [[1]])
    assert ask.outcome.code == "not stored" and not made.client.held
    tier.renew()
    assert tier.space(b"") not in (*before, *after), "weights may change again"
    assert space() == before[0], "others keep what they have"


# -- parts and writers -----------------------------------------------------------------------------------------------


def test_each_rank_of_tensor_parallelism_has_a_part():
    ranks = [described(r, ONE, [r]) for r in range(4)]
    made = make_tier(ONE, ranks, unit=16)
    part = part_layout(ranks[0].groups[0]).nbytes
    assert made.setup.offsets == [[0], [part], [2 * part], [3 * part]]
    assert made.setup.writes == [[True]] * 4 and made.tier.writers == [{0, 1, 2, 3}]
    [shape] = made.client.hello.groups
    assert (shape.units, shape.window, shape.slot_pages) == (1, None, slot_layout([part] * 4).pages)


def test_replicated_heads_are_kept_once():
    ranks = [described(r, ONE, [r // 2]) for r in range(4)]
    made = make_tier(ONE, ranks, unit=16)
    part = part_layout(ranks[0].groups[0]).nbytes
    assert made.setup.offsets == [[0], [0], [part], [part]]
    assert made.setup.writes == [[True], [False], [True], [False]] and made.tier.writers == [{0, 2}]
    assert made.client.hello.groups[0].slot_pages == slot_layout([part] * 2).pages


def test_mla_is_kept_once_beside_a_group_that_is_divided():
    groups = [(16, None), (16, None)]
    ranks = [
        m.Described(r, (group_view(0, 16, kind="mla", heads=1), group_view(1, 16)), (0, r)) for r in range(3)
    ]
    made = make_tier(groups, ranks, unit=16)
    assert [row[0] for row in made.setup.offsets] == [0, 0, 0]
    assert [row[0] for row in made.setup.writes] == [True, False, False]
    assert made.tier.writers == [{0}, {0, 1, 2}]


def test_pipeline_stages_have_parts_of_their_own_size():
    ranks = [m.Described(r, (group_view(0, 16, layers=1 + 2 * r),), (r,)) for r in range(2)]
    made = make_tier(ONE, ranks, unit=16)
    sizes = [part_layout(rank.groups[0]).nbytes for rank in ranks]
    assert made.setup.offsets == [[0], [sizes[0]]]
    ask = made.tier.ask(0, CHAIN, b"")
    made.client.answer(made.client.open[0], 2, [[8, 64]])
    assert ask.outcome.nbytes == 2 * max(sizes), "the rank with most bytes is through last"


def test_windows_and_larger_blocks_are_told_to_the_store():
    made = make_tier(HYBRID, unit=16)
    assert [(g.units, g.window) for g in made.client.hello.groups] == [(2, None), (1, 100)]
    assert made.client.hello.unit_tokens == 16 and made.client.hello.kind == "engine" and made.client.started
    assert made.setup.path == made.client.path == "/nowhere/store.sock" and made.client.launch is None
    assert m.decode_link(m.encode(made.setup)) == made.setup


def test_a_block_that_fits_no_slot_is_refused_in_words():
    with pytest.raises(ValueError, match="block size"):
        make_tier(ONE, [described(0, ONE, [0], layers=9, inner=PIECE // 256)])


# -- the watermark ---------------------------------------------------------------------------------------------------


def test_only_what_every_rank_reaches_is_used():
    ranks = [described(r, ONE, [r]) for r in range(2)]
    made = make_tier(ONE, ranks, unit=16, connect=False)
    tier, client = made.tier, made.client
    assert tier.limit() == 0 and tier.ask(0, CHAIN, b"") is None
    client.connect("life 1")
    assert tier.limit() == 0
    tier.reached(m.PoolReady(0, "life 1", 100 * PAGE))
    assert tier.limit() == 0, "rank 1 has not said anything"
    tier.reached(m.PoolReady(1, "life 1", 40 * PAGE + 7))
    assert tier.limit() == 40 and tier.instance == "life 1"
    tier.ask(0, CHAIN, b"")
    assert client.open[0].asked.limit == 40
    tier.reached(m.PoolReady(1, "life 1", 200 * PAGE))
    assert tier.limit() == 100


def test_another_life_of_the_store_begins_at_nothing():
    ranks = [described(r, ONE, [r]) for r in range(2)]
    made = make_tier(ONE, ranks, unit=16, reached=50)
    ask = made.tier.ask(0, CHAIN, b"")
    made.client.lose()
    assert made.tier.limit() == 0 and made.tier.instance == "" and made.lost == [1]
    assert isinstance(ask.outcome, NoOffer) and ask.outcome.code == "no store"
    made.client.connect("life 2")
    assert made.tier.limit() == 0, "the workers still have the old memory"
    made.tier.reached(m.PoolReady(0, "life 2", 10 * PAGE))
    assert made.tier.limit() == 0
    made.tier.reached(m.PoolReady(1, "life 2", 20 * PAGE))
    assert made.tier.limit() == 10 and made.tier.instance == "life 2"


def test_a_store_that_is_gone_for_a_moment_is_no_news(caplog):
    made = make_tier(ONE, unit=16)
    with caplog.at_level(logging.INFO, "vllm.kvtier.tier"):
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
    made = make_tier(groups, unit=16, **options)
    ask = made.tier.ask(start, CHAIN, b"")
    return made, ask, made.client.open[0]


def test_an_offer_says_what_the_store_found():
    made, ask, pending = asked(start=32)
    assert ask.outcome is None
    made.client.answer(pending, 6, [[16, 32], [0, 5, 6, 7]])
    offer = ask.outcome
    assert isinstance(offer, HostOffer) and ask.outcome is offer
    assert (offer.start, offer.tokens, offer.blocks, offer.instance) == (32, 96, [[16, 32], [0, 5, 6, 7]], "life 1")
    parts = [part_layout(group_view(g, n, w)).nbytes for g, (n, w) in enumerate(HYBRID)]
    assert offer.nbytes == 2 * parts[0] + 3 * parts[1], "what a window leaves out is not loaded"
    made.tier.release(offer)
    assert not made.client.held


@pytest.mark.parametrize(
    "units, slots",
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
def test_numbers_that_cannot_be_are_refused_and_their_lease_given_back(units, slots):
    made, ask, pending = asked()
    made.client.answer(pending, units, slots)
    assert isinstance(ask.outcome, NoOffer) and ask.outcome.code == "malformed"
    assert not made.client.held


def test_a_slot_that_ends_at_the_watermark_is_within_it():
    made, ask, pending = asked(ONE)
    made.client.answer(pending, 1, [[POOL - made.client.hello.groups[0].slot_pages]])
    assert isinstance(ask.outcome, HostOffer)


@pytest.mark.parametrize("outcome, code", [(Failed("hung"), "no store"), (Done(1, 2), "malformed")])
def test_other_answers(outcome, code):
    made, ask, pending = asked()
    made.client.refuse(pending, outcome)
    assert ask.outcome.code == code


def test_nothing_found():
    made, ask, pending = asked()
    made.client.refuse(pending)
    assert ask.outcome.code == "not stored"
    made, ask, pending = asked(start=32)
    made.client.answer(pending, 2, [[], []])  # a lease on nothing
    assert ask.outcome.code == "not stored" and not made.client.held


@pytest.mark.parametrize("early", [False, True])
def test_a_cancelled_ask_keeps_no_lease(early):
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


def test_chains_longer_than_a_message_may_be():
    made = make_tier(ONE, unit=16)
    chain = [b"h" * 32] * (MAX_UNITS + 10)
    made.tier.touch(chain, b"")
    assert len(made.client.told[-1][2]) == MAX_UNITS * HASH
    assert made.tier.ask(MAX_UNITS * 16, chain, b"") is None
    assert made.tier.ask((MAX_UNITS - 1) * 16, chain, b"") is not None


def test_what_belongs_to_a_connection_is_said_with_it():
    made = make_tier(ONE, unit=16)
    made.tier.commit([5], 3)
    made.tier.abort([6], 3)
    made.tier.discard(b"", 0, CHAIN[0], 7, 3)
    commit, abort, discard = made.client.told
    assert commit == ("commit", [5], 3) and abort == ("abort", [6], 3)
    assert discard == ("discard", made.tier.space(b""), 0, CHAIN[0][:HASH], 7, 3)


def test_a_running_store_without_the_tiers_that_are_asked_for_is_mentioned_once(caplog, tmp_path):
    made = make_tier(ONE, unit=16, store_disk_path=str(tmp_path))
    with caplog.at_level(logging.WARNING, "vllm.kvtier.tier"):
        made.client.connect("another life")
        made.client.connect("and another")
    assert len([record for record in caplog.records if "no tier disk" in record.message]) == 1


def test_a_store_that_an_engine_starts_lets_half_of_it_be_pinned():
    """What an engine holds of its own cache while that is copied is another option."""
    assert _store_options(KVTierConfig(store_hold_share=0.9)).pin_share == StoreOptions().pin_share == 0.5


def test_session_is_the_present_connection_and_none_while_the_store_is_away():
    """What was reserved on another one is nobody's."""
    engine = make_tier([(4, None)])
    assert engine.tier.session == 1
    engine.client.lose()
    assert engine.tier.session == 0
    engine.client.connect("life 1")
    assert engine.tier.session == 2
