"""The proxy's index of KV events equals a plain model of the engine, for any stream of events; and after lost batches,
restarts and replays the subscriber's index equals that of one that missed nothing."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from kv_event_publisher import BLOCK, CLEARED, hashes, removed, stored

from vllm_kvtier.proxy.kv_events import messages
from vllm_kvtier.proxy.kv_events.index import BlockIndex, PromptTokens
from vllm_kvtier.proxy.kv_events.messages import Tier
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks
from vllm_kvtier.proxy.kv_events.subscriber import EventSubscriber

# Prompts that share beginnings, and blocks of equal tokens after different ones.
PROMPTS = [[a] * BLOCK + [b] * BLOCK + [a] * BLOCK for a in (1, 2) for b in (1, 2, 3)]
MEDIA = [("GPU", None), ("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("EXTERNAL", "REMOTE"), ("STORAGE", "REMOTE")]
ADAPTERS = [None, "ada"]

prompts = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 2), st.sampled_from(ADAPTERS))
steps = st.one_of(
    st.tuples(st.just("stored"), prompts, st.sampled_from(MEDIA)),
    st.tuples(st.just("removed"), prompts, st.sampled_from(MEDIA)),
    st.just(("cleared", None, None)),
)


def event_of(step):
    kind, prompt, medium = step
    if kind == "cleared":
        return CLEARED
    tokens, begin, adapter = prompt
    more = {"medium": medium[0], "locality": medium[1]}
    event = stored(tokens, begin, lora=adapter, **more)
    if kind == "stored":
        return event
    gone = removed(tokens, begin, **more)
    gone.block_hashes = event.block_hashes
    return gone


class Model:
    """The blocks in each tier, by hash."""

    def __init__(self):
        self.tiers = [set() for _ in MEDIA]

    def apply(self, step) -> None:
        kind, prompt, medium = step
        if kind == "cleared":
            self.tiers[0].clear()
            return
        tokens, begin, adapter = prompt
        blocks = hashes(tokens, f"{adapter}salt" if adapter else "salt")[begin:]
        (self.tiers[MEDIA.index(medium)].update if kind == "stored" else self._remove(medium))(blocks)

    def _remove(self, medium):
        return self.tiers[MEDIA.index(medium)].difference_update

    def prefix(self, tokens, adapter) -> list[int]:
        found, on_gpu = [0] * len(MEDIA), True
        for each in hashes(tokens, f"{adapter}salt" if adapter else "salt"):
            places = [i for i, tier in enumerate(self.tiers) if each in tier and (i or on_gpu)]
            if not places:
                break
            on_gpu &= places[0] == 0
            found[places[0]] += BLOCK
        return found


def views(index: BlockIndex) -> list[list[int]]:
    return [index.prefix(PromptTokens(p, "salt", a or "base")) for p, a in itertools.product(PROMPTS, ADAPTERS)]


@given(st.lists(st.lists(steps, max_size=4), max_size=20), st.integers(3, 1000))
def test_index_equals_model(batches, capacity):
    shared = SharedBlocks()
    index, small, model = BlockIndex(1000, shared), BlockIndex(capacity), Model()
    seen_adapter = False
    for batch in batches:
        events = messages.decode(msgspec.msgpack.encode([0.0, [event_of(step) for step in batch], 0])).events
        index.apply(events)
        small.apply(events)
        for step in batch:
            model.apply(step)
            seen_adapter |= step[0] == "stored" and step[1][2] is not None
        assert len(small) <= capacity and all(0 <= count <= capacity for count in small.counts)
    assert index.counts == [len(tier) for tier in model.tiers]
    for (tokens, adapter), found in zip(itertools.product(PROMPTS, ADAPTERS), views(index), strict=True):
        if adapter is None or seen_adapter:
            assert found == model.prefix(tokens, adapter)
    for known, found in zip(views(index), views(small), strict=True):
        assert sum(found) <= sum(known), "a full index knows less, never more"
    assert len(shared) == len(model.tiers[Tier.CLUSTER] | model.tiers[Tier.OBJECTS])
    index.clear()
    assert len(shared) == 0


class Replaying(EventSubscriber):
    """A subscriber whose publisher is the list ``log``; its replay answers with the last ``kept`` batches."""

    def __init__(self, log: list, kept: int):
        super().__init__(None, "x:1", "x:2", BlockIndex(1000))
        self.log, self._kept = log, kept

    async def _replay_once(self) -> bool:
        begin = 0 if self._next is None else self._next - 1
        frames = [each for each in self.log[-self._kept :] if int.from_bytes(each[1], "big") >= begin]
        answers = iter([*frames, [b"", b"\xff" * 8, b""]])

        async def receive() -> list[bytes]:
            return next(answers)

        return await self._take_replay(receive)


async def _deliver(batches, kept) -> tuple[Replaying, Replaying]:
    log: list = []
    lossy, whole = Replaying(log, kept), Replaying(log, 1000)
    clock = itertools.count(1)
    for step, is_lost, restarts in batches:
        if restarts:
            log.clear()
        frames = [b"", len(log).to_bytes(8, "big"), msgspec.msgpack.encode([float(next(clock)), [event_of(step)], 0])]
        log.append(frames)
        await whole.on_message(frames)
        if not is_lost:
            await lossy.on_message(frames)
            await lossy.on_message(frames)  # and once more, as after a replay
    return lossy, whole


@given(st.lists(st.tuples(steps, st.booleans(), st.just(False)), max_size=30))
async def test_subscriber_with_replay_misses_nothing(batches):
    lossy, whole = await _deliver([*batches, (("cleared", None, None), False, False)], kept=1000)
    assert views(lossy.index) == views(whole.index) and lossy.counts["lost"] == 0
    assert lossy.index.counts == whole.index.counts


@given(st.lists(st.tuples(steps, st.booleans(), st.just(False)), max_size=30), st.integers(1, 5))
async def test_subscriber_with_short_replay_goes_on(batches, kept):
    """What was lost may be wrong; what comes again is right."""
    again = [(("stored", (tokens, 0, None), MEDIA[0]), False, False) for tokens in PROMPTS]
    lossy, whole = await _deliver([*batches, *again], kept)
    for tokens in PROMPTS:
        prompt = PromptTokens(tokens, "salt", "base")
        assert lossy.index.prefix(prompt) == whole.index.prefix(prompt) == [3 * BLOCK, 0, 0, 0, 0]
