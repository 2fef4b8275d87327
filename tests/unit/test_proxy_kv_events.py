"""The proxy's index of KV events: what it holds, and how it follows vLLM's publisher through gaps and restarts."""

import asyncio
import contextlib
import random
from collections import OrderedDict

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from kv_event_publisher import BLOCK, CLEARED, publishing, removed, stored

from vllm_kvtier.proxy.kv_events import load_costs, messages, subscriber
from vllm_kvtier.proxy.kv_events.index import BlockIndex, PromptTokens
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks
from vllm_kvtier.proxy.kv_events.subscriber import EventSubscriber

A = list(range(100, 100 + 5 * BLOCK))
B = [*A[: 2 * BLOCK], *range(200, 200 + 3 * BLOCK)]  # the first two blocks are those of A
C = list(range(300, 300 + 4 * BLOCK))


def decoded(*events, array: bool = False) -> list:
    """As they arrive."""
    encoded = [_as_array(each) if array else each for each in events]
    batch = messages.decode(msgspec.msgpack.encode([1.0, encoded, 0]))
    assert batch is not None and batch.malformed == 0
    return batch.events


def _as_array(event) -> list:
    """As vLLM encoded events before they were maps."""
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]


def index_of(*events, capacity: int = 1000, array: bool = False) -> BlockIndex:
    index = BlockIndex(capacity)
    index.apply(decoded(*events, array=array))
    return index


def held(index: BlockIndex, tokens: list[int], salt: str = "salt", model: str = "m") -> list[int]:
    """Blocks of the prompt's prefix: GPU, host memory, disk, cluster, objects."""
    return [n // BLOCK for n in index.prefix(PromptTokens(tokens, salt, model))]


# -- the index -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [False, True])
def test_index_finds_prefix_by_tokens(array):
    index = index_of(stored(A), array=array)
    assert held(index, A) == [5, 0, 0, 0, 0]
    assert held(index, [*A, 1, 2]) == [5, 0, 0, 0, 0] and held(index, A[: 3 * BLOCK + 1]) == [3, 0, 0, 0, 0]
    assert held(index, B) == [2, 0, 0, 0, 0] and held(index, C) == [0] * 5
    assert held(index, A, salt="another tenant's") == [0] * 5
    assert len(index) == 5 and index.counts == [5, 0, 0, 0, 0]


def test_index_counts_fastest_tier_after_gpu_prefix():
    index = index_of(stored(A[: 2 * BLOCK]), stored(A, medium="CPU"), stored(A, medium="STORAGE", locality="LOCAL"))
    assert held(index, A) == [2, 3, 0, 0, 0]
    index.apply(decoded(removed(A, 3, "CPU")))
    assert held(index, A) == [2, 1, 2, 0, 0]
    index.apply(decoded(removed(A, 4, "STORAGE", locality="LOCAL"), stored(A, 4, "STORAGE", locality="REMOTE")))
    assert held(index, A) == [2, 1, 1, 0, 1] and index.counts == [2, 3, 4, 0, 1]
    # vLLM takes nothing of its GPU cache behind the first block that it lacks.
    index.apply(decoded(removed(A[: 2 * BLOCK], 1), stored(A, 4)))
    assert held(index, A) == [1, 2, 1, 0, 1]


def test_index_takes_blocks_in_any_order():
    index = index_of(stored(A, 3), stored(A[: 2 * BLOCK], 1))
    assert held(index, A) == [0] * 5
    index.apply(decoded(stored(A[:BLOCK])))
    assert held(index, A) == [2, 0, 0, 0, 0]
    index.apply(decoded(stored(A[: 3 * BLOCK], 2)))
    assert held(index, A) == [5, 0, 0, 0, 0]


def test_index_removes_and_clears():
    index = index_of(stored(A), stored(A, medium="CPU"), stored(C))
    index.apply(decoded(removed(A, 1)))
    assert held(index, A) == [1, 4, 0, 0, 0]
    index.apply(decoded(CLEARED))
    assert held(index, A) == [0, 5, 0, 0, 0] and held(index, C) == [0] * 5 and index.counts == [0, 5, 0, 0, 0]
    index.apply(decoded(removed(A, 0, "CPU"), removed(A, 0, "CPU")))
    assert len(index) == 0 and index.counts == [0] * 5


def test_index_separates_adapters():
    index = index_of(stored(A, lora="ada"), stored(C))
    assert held(index, A, model="ada") == [5, 0, 0, 0, 0]
    assert held(index, A, model="base") == [0] * 5 and held(index, C, model="ada") == [0] * 5
    assert held(index, C, model="base") == [4, 0, 0, 0, 0]


def test_index_ignores_groups_that_do_not_decide_prefixes():
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    index = index_of(stored(A, 4, **window), stored(A[: 2 * BLOCK], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert held(index, A) == [2, 0, 0, 0, 0]
    index.apply(decoded(removed(A, 0, group_idx=0)))
    assert held(index, A) == [2, 0, 0, 0, 0], "another group's"
    index.apply(decoded(removed(A, 0, group_idx=1)))
    assert held(index, A) == [0] * 5


def test_index_ignores_entries_of_prompts_that_end_within_a_block():
    """vLLM stores such an end, of the size of a hash, in the same group, if the group's blocks are larger."""
    half = BLOCK // 2
    end = stored(C[:BLOCK])
    end.token_ids, end.block_size, end.parent_block_hash = C[half:BLOCK], half, b"p" * 32
    index = index_of(end)  # a prompt shorter than a block comes first
    index.apply(decoded(stored(A), end))
    assert held(index, A) == [5, 0, 0, 0, 0]
    index.apply(decoded(stored(C), end))
    assert held(index, A) == [5, 0, 0, 0, 0] and held(index, C) == [4, 0, 0, 0, 0] and not index.incomplete


def test_index_of_blocks_of_two_sizes_is_not_taken_for_complete():
    smaller = stored(C)
    smaller.block_size, smaller.token_ids = BLOCK // 2, C[: len(C) // 2]
    index = index_of(stored(A), smaller)
    assert held(index, A) == [0] * 5 and len(index) == 4 and index.incomplete
    index.apply(decoded(stored(A)))
    assert held(index, A) == [5, 0, 0, 0, 0] and index.incomplete
    index.clear()
    index.invalidate()
    index.apply(decoded(stored(A)))
    assert index.incomplete, "the first event after what was not known does not tell what was before"


def test_index_is_bounded_and_makes_room_for_lost_removals():
    index = index_of(stored(A), stored(C), capacity=6)
    assert len(index) == 6 and index.dropped == 3
    assert held(index, A) == [5, 0, 0, 0, 0] and held(index, C) == [1, 0, 0, 0, 0]
    index.lost_events()
    index.apply(decoded(stored(C)))
    assert held(index, C)[0] >= 3 and len(index) <= 6, "what may be gone does not keep new blocks out"
    for seed in range(50):
        index.apply(decoded(stored(A, seed=str(seed))))
        assert len(index) <= 6


def test_full_index_makes_room_with_the_oldest_blocks_behind_memory():
    """Objects stay for ever, and would keep the blocks of GPUs out for good."""
    shared = SharedBlocks()
    bucket = {"medium": "STORAGE", "locality": "REMOTE"}
    index = BlockIndex(6, shared)
    index.apply(decoded(stored(A, **bucket), stored(A[: 2 * BLOCK], 1, "CPU"), stored(A[:BLOCK])))
    assert index.dropped == 0 and not index.incomplete
    assert isinstance(index._not_in_memory, OrderedDict)  # a dict finds its first item slowly when many were taken
    index.apply(decoded(stored(C)))
    assert held(index, C) == [4, 0, 0, 0, 0] and held(index, A) == [1, 1, 0, 0, 0]
    assert (index.dropped, index.incomplete, index.counts) == (3, True, [5, 1, 0, 0, 2]) and len(shared) == 2
    # All are in memory now: others are not entered, and no block of a bucket displaces them.
    index.apply(decoded(stored(list(range(900, 900 + BLOCK))), stored(list(range(800, 800 + BLOCK)), **bucket)))
    assert (len(index), index.dropped, held(index, C)) == (6, 5, [4, 0, 0, 0, 0])
    index.apply(decoded(removed(C, 0), removed(A[:BLOCK])))  # evicted blocks are the newest that are behind memory
    index.apply(decoded(stored(list(range(900, 900 + 6 * BLOCK)))))
    assert len(index) == 6 and index.counts[0] == 5 and held(index, A) == [0, 0, 0, 0, 0]
    index.clear()
    assert len(shared) == 0 and not index.incomplete and index.counts == [0] * 5
    index.apply(decoded(stored(A)))
    index.invalidate()
    assert len(index) == 0 and index.incomplete


@pytest.mark.parametrize("seed", range(5))
def test_full_index_keeps_its_counts_whatever_comes(seed):
    rng, shared = random.Random(seed), SharedBlocks()
    indexes = [BlockIndex(rng.choice([3, 7, 20]), shared) for _ in range(2)]
    media = [{"medium": "GPU"}, {"medium": "CPU"}, {"medium": "STORAGE", "locality": "LOCAL"},
             {"medium": "STORAGE", "locality": "REMOTE"}, {"medium": "EXTERNAL", "locality": "REMOTE"}]  # fmt: skip
    for _ in range(300):
        index, event = rng.choice(indexes), rng.choice([stored, removed])
        index.apply(decoded(event(rng.choice([A, B, C]), begin=rng.randrange(4), **rng.choice(media))))
        values = index._blocks.values()
        assert len(index) <= index.capacity and len(index._hashes) <= len(index)
        assert index.counts == [sum(value >> tier & 1 for value in values) for tier in range(5)]
        assert sorted(index._not_in_memory) == sorted(h for h, value in index._blocks.items() if not value & 3)
    for index in indexes:
        index.clear()
    assert len(shared) == 0


def test_index_of_engine_with_int_hashes():
    event = stored(A)
    event.block_hashes = [int.from_bytes(each[-8:], "big") for each in event.block_hashes]
    assert held(index_of(event), A) == [5, 0, 0, 0, 0]


def test_index_takes_what_others_say_of_shared_tiers():
    """Of a cluster and of buckets: only if the engine uses such a tier, until no engine has the block there."""
    shared = SharedBlocks()
    one, other, without = (BlockIndex(1000, shared) for _ in range(3))
    cluster, bucket = {"medium": "EXTERNAL", "locality": "REMOTE"}, {"medium": "STORAGE", "locality": "REMOTE"}
    one.apply(decoded(stored(A, **cluster), stored(A[: 2 * BLOCK], 0, "CPU")))
    without.apply(decoded(stored(A[: 3 * BLOCK], 0, "CPU")))
    assert held(one, A) == [0, 2, 0, 3, 0] and held(other, A) == [0] * 5
    other.apply(decoded(stored(B[: 3 * BLOCK]), stored(C, **cluster)))
    assert held(other, A) == [2, 0, 0, 3, 0] and held(other, B) == [3, 0, 0, 0, 0]
    assert held(without, A) == [0, 3, 0, 0, 0] and held(without, C) == [0] * 5
    one.apply(decoded(stored(A, **bucket), removed(A, 3, **cluster)))
    assert held(one, A) == [0, 2, 0, 1, 2] and held(other, A) == [2, 0, 0, 1, 0], "it has had nothing in a bucket"
    other.apply(decoded(stored(A, **cluster), removed(A, 4, **cluster)))
    assert held(one, A) == [0, 2, 0, 1, 2] and held(other, A) == [2, 0, 0, 2, 0]
    one.clear()
    assert held(other, A) == [2, 0, 0, 2, 0] and len(one) == 0
    other.clear()
    assert len(shared) == 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"junk", msgspec.msgpack.encode({"ts": 1}), b"\x91" * 5000])
def test_decode_refuses_what_is_no_batch(payload):
    assert messages.decode(payload) is None


def test_decode_leaves_out_malformed_and_unknown_events():
    short = stored(A)
    short.token_ids = A[:3]
    odd = stored(A)
    odd.block_size = 0
    extra = stored(A)
    extra.extra_keys = [None]
    bad = [short, odd, extra, {"type": "BlockMoved"}, 7, None, ["BlockStored", "x"], {"type": "BlockRemoved"}]
    batch = messages.decode(msgspec.msgpack.encode([1.0, [*bad, stored(C)], None]))
    assert batch.malformed == len(bad) and len(batch.events) == 1


def test_load_shares_are_measured_by_engines():
    page = b"""# HELP x y
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 20.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 200000.0
vllm:kvtier_load_seconds_sum{engine="0",kind="ok"} 1.0
vllm:kvtier_load_seconds_sum{engine="0",kind="failed"} 1.0
vllm:kvtier_loaded_tokens_total{engine="0",kind="host"} 100000.0
"""
    assert shares(page) == (0.0, pytest.approx(0.1), *load_costs.DEFAULT[2:])
    promoted = b"vllm:kvtier_promotion_wait_seconds_sum 8.0\nvllm:kvtier_promotion_wait_tokens_total 200000.0\n"
    assert shares(page + promoted)[2:] == (pytest.approx(0.5),) * 3
    slow = page.replace(b'kind="ok"} 1.0', b'kind="ok"} 99.0')
    assert shares(slow) == (0.0, 1.0, 1.0, 1.0, 1.0), "the engine would compute instead"
    assert shares(b"junk\nvllm:kvtier_load_seconds_sum nan\n") == load_costs.DEFAULT


def shares(page):
    measured = load_costs.Measured()
    measured.read(page)
    return measured.shares


def totals(prefill, load, *, failed=0.0, tokens=100_000):
    """A page of metrics: seconds of each kind, and tokens of both."""
    return f"""vllm:request_prefill_time_seconds_sum{{engine="0"}} {prefill}
vllm:request_prefill_kv_computed_tokens_sum{{engine="0"}} {tokens}
vllm:kvtier_load_seconds_sum{{engine="0",kind="ok"}} {load}
vllm:kvtier_load_seconds_sum{{engine="0",kind="failed"}} {failed}
vllm:kvtier_loaded_tokens_total{{engine="0",kind="host"}} {tokens}
""".encode()


def test_load_costs_are_of_good_loads_since_they_were_last_measured():
    measured = load_costs.Measured()
    for page, host in [
        (totals(0.1, 0.05, tokens=500), 0.1),  # too few: the default
        (totals(10.0, 5.0, failed=30.0), 0.5),
        (totals(20.0, 6.0, failed=60.0, tokens=200_000), 0.1),
        (totals(20.1, 6.1, failed=90.0, tokens=200_500), 0.1),  # too few since
        (totals(30.0, 8.0, failed=90.0, tokens=300_000), 0.2),
        (totals(10.0, 3.0), 0.3),  # it has restarted
        (b"", 0.3),  # no answer
        (totals(20.0, 7.0, tokens=200_000), 0.4),
    ]:
        measured.read(page)
        assert measured.shares[1] == pytest.approx(host)


# -- the subscriber ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def following(publisher, address: str | None = None, replay: str | None = ""):
    context = zmq.asyncio.Context()
    follower = EventSubscriber(
        context, address or publisher.address, publisher.replay if replay == "" else replay, BlockIndex(1000)
    )
    follower.start()
    try:
        yield follower
    finally:
        await follower.aclose()
        context.term()


async def until(condition) -> None:
    with anyio.fail_after(20):
        while not condition():
            await asyncio.sleep(0.005)


async def connected(follower, publisher) -> None:
    """A subscription without replay takes effect some time after the connection is there."""
    with anyio.fail_after(20):
        while not follower.live:
            publisher.publish()
            await asyncio.sleep(0.02)


async def test_subscriber_replays_what_was_published_before_it():
    with publishing() as publisher:
        publisher.publish(stored(A))
        publisher.publish(removed(A, 3))
        async with following(publisher) as follower:
            await until(lambda: follower.counts["replayed"] == 2)
            assert held(follower.index, A) == [3, 0, 0, 0, 0] and not follower.index.incomplete
            publisher.publish(stored(A, 3))
            await until(lambda: held(follower.index, A) == [5, 0, 0, 0, 0])
            assert follower.counts["lost"] == 0


async def test_subscriber_follows_an_engine_at_an_ipv6_address():
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as replay:
        ports = []
        for socket in (events, replay):
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.LINGER, 0)
            ports.append(socket.bind_to_random_port("tcp://[::1]"))
        address, replays = (f"[::1]:{port}" for port in ports)
        async with following(None, address, replays):
            with anyio.fail_after(20):  # it asks there once it is connected to the other
                assert (await replay.recv_multipart())[1:] == [b"", bytes(8)]


async def test_subscriber_goes_on_after_events_that_cannot_be_applied(monkeypatch):
    """Such as extra keys that are nested 600 deep, which decode."""
    apply = BlockIndex.apply

    def fail(index, events):
        monkeypatch.setattr(BlockIndex, "apply", apply)
        raise RecursionError("maximum recursion depth exceeded")

    with publishing() as publisher:
        async with following(publisher) as follower:
            publisher.publish(stored(A))
            await until(lambda: held(follower.index, A)[0] == 5)
            monkeypatch.setattr(BlockIndex, "apply", fail)
            publisher.publish(removed(A, 3))
            await until(lambda: follower.counts["malformed"])
            assert held(follower.index, A)[0] == 0 and follower.index.incomplete, "what it has done is not known"
            publisher.publish(stored(A))
            await until(lambda: held(follower.index, A)[0] == 5)


async def test_subscriber_fills_gap_from_replay():
    with publishing() as publisher:
        async with following(publisher) as follower:
            publisher.publish(stored(A))
            await until(lambda: held(follower.index, A)[0] == 5)
            ignored, apply = [], follower._apply

            def drop(number, batch, outcome="applied"):
                if number in (2, 3) and outcome == "applied":
                    ignored.append(number)
                else:
                    apply(number, batch, outcome)

            follower._apply = drop  # two live batches are lost on the way
            follower._next = 1
            for event in (removed(A, 4), stored(C), removed(A, 2), stored(B)):
                publisher.publish(event)
            await until(lambda: held(follower.index, B)[0] == 5)
            assert held(follower.index, A)[0] == 2 and held(follower.index, C)[0] == 4
            assert ignored and follower.counts["lost"] == 0 and follower.counts["replayed"] >= 2


@pytest.mark.parametrize("replay", [True, False])
async def test_subscriber_goes_on_after_events_lost_for_good(replay):
    with publishing(replay=replay) as publisher:
        async with following(publisher) as follower:
            await connected(follower, publisher)
            publisher.publish(stored(A))
            publisher.skip(3)
            publisher.publish(stored(C))
            await until(lambda: held(follower.index, C)[0] == 4)
            assert held(follower.index, A)[0] == 5 and follower.counts["lost"] == 3
            assert follower.counts["restarts"] == 0 and follower.index.incomplete


async def test_subscriber_replay_buffer_too_short():
    with publishing(buffer_steps=2) as publisher:
        for event in (stored(A), removed(A, 1), stored(B), stored(C)):
            publisher.publish(event)
        async with following(publisher) as follower:
            await until(lambda: held(follower.index, C)[0] == 4)
            assert held(follower.index, B)[0] == 5 and follower.counts["lost"] == 0
            assert follower.index.incomplete, "a system prompt is older than any replay, and is not announced again"


@pytest.mark.parametrize("events_after", [0, 1, 9])
async def test_subscriber_begins_anew_after_restart(events_after):
    """Also if the new process has published more than the old one, or nothing yet."""
    with publishing() as publisher:
        async with following(publisher) as follower:
            publisher.publish(stored(A))
            await until(lambda: held(follower.index, A)[0] == 5)
            publisher.stop()
            publisher.start()
            for _ in range(events_after):
                publisher.publish(stored(C))
            await until(lambda: follower.counts["restarts"] == 1)
            assert held(follower.index, A)[0] == 0
            await until(lambda: held(follower.index, C)[0] == (4 if events_after else 0))
            assert follower.counts["restarts"] == 1 and follower.counts["lost"] == 0


async def test_subscriber_without_replay_begins_anew_at_lower_number():
    with publishing(replay=False) as publisher:
        async with following(publisher) as follower:
            await connected(follower, publisher)
            publisher.skip(1000)  # a long run's
            publisher.publish(stored(A))
            await until(lambda: held(follower.index, A)[0] == 5)
            publisher.stop()
            publisher.start()
            with anyio.fail_after(20):
                while held(follower.index, C)[0] != 4:
                    publisher.publish(stored(C))
                    await asyncio.sleep(0.02)
            assert held(follower.index, A)[0] == 0 and follower.counts["restarts"] == 1


async def test_subscriber_survives_malformed_messages():
    context = zmq.asyncio.Context()
    with context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        async with following(None, f"127.0.0.1:{port}", None) as follower:
            good = msgspec.msgpack.encode([2.0, [stored(A)], 0])
            frames = [[b"", b"x", good], [b""], [b"", (5).to_bytes(8, "big"), b"\xc1"], [b"", b"\xff" * 8, good]]
            while follower.counts["malformed"] < 4:
                for each in frames:
                    await socket.send_multipart(each)
                await asyncio.sleep(0.01)
            await socket.send_multipart([b"", (6).to_bytes(8, "big"), good])
            await until(lambda: held(follower.index, A)[0] == 5)
    context.term()


async def test_subscriber_waits_for_hanging_replay_once(monkeypatch):
    """Live events are applied nevertheless; the replay is not asked for each gap."""
    monkeypatch.setattr(subscriber, "_REPLAY_SECONDS", 0.05)
    context = zmq.asyncio.Context()
    with publishing(replay=False) as publisher, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        async with following(publisher, replay=f"127.0.0.1:{port}") as follower:
            await until(lambda: follower.counts["replay_timeouts"] == 1)
            await connected(follower, publisher)
            for _ in range(5):
                publisher.skip()
                publisher.publish(stored(A))
            await until(lambda: follower.counts["lost"] == 5)
            assert held(follower.index, A)[0] == 5 and follower.counts["replay_timeouts"] == 1
    context.term()


async def test_subscriber_does_not_wait_for_an_endpoint_that_refuses_it(monkeypatch):
    """As one that requires a key: ZMQ then queues no request."""
    monkeypatch.setattr(subscriber, "_REPLAY_SECONDS", 0.05)
    refused = asyncio.Event()

    async def send(socket, frames):
        refused.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(zmq.asyncio.Socket, "send_multipart", send)
    with publishing(replay=False) as publisher:
        async with following(publisher, replay="127.0.0.1:1") as follower:
            await until(lambda: follower.counts["replay_timeouts"] == 1)
    assert refused.is_set()


async def test_two_subscribers_agree_after_one_restarts():
    rng = random.Random(7)
    prompts = [[rng.randrange(3) for _ in range(6 * BLOCK)] for _ in range(12)]

    def steps(count):
        for _ in range(count):
            tokens, medium = rng.choice(prompts), rng.choice(["GPU", "CPU", "STORAGE"])
            publisher.publish((stored if rng.random() < 0.6 else removed)(tokens, 0, medium))

    with publishing() as publisher:
        async with following(publisher) as one:
            async with following(publisher) as two:
                steps(100)
                await until(lambda: one._next == two._next == 100)
            steps(100)  # while the second is away
            async with following(publisher) as two:
                steps(100)
                await until(lambda: one._next == two._next == 300)
                assert [held(one.index, p) for p in prompts] == [held(two.index, p) for p in prompts]
                assert any(sum(held(one.index, p)) for p in prompts)
                assert one.counts["lost"] == two.counts["lost"] == 0
