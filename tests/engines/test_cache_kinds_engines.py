"""Conversations on tiny models of each kind of KV cache group: what is loaded, pulled or fetched answers as what is
computed.

The models' answers depend on all of their history (``tiny_models``). Each kind has a negative control: zeroed or
exchanged blocks of one group, changed after their checksums were found right, change the answers. Flipped bits, kills,
preemptions and clients that leave do not.
"""

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from engine_client import driving, off, random_tokens, with_sources
from engine_fixtures import TESTS_ON_PATH, start_missing
from faults import ALTER, altered
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

ANSWER, LONG = 8, 24  # tokens
PREEMPTIONS = "vllm:num_preemptions_total"


class Kind(NamedTuple):
    """``block``: tokens. ``groups``: that vLLM makes of the layers; so many of these have recurrent ``states``.
    ``tolerance``: rounding moves a logprob by less. ``blocks``: of the engine's cache, in which ``crowd`` requests have
    room until each needs its third block."""

    block: int
    blocks: int
    crowd: int
    groups: int
    flags: tuple[str, ...]
    states: int = 0
    tolerance: float = 2e-3

    @property
    def rounding(self) -> float:
        """The same where decode steps write what a prefill writes in the truth: in bfloat16, other numbers."""
        return 1.0 if "bfloat16" in self.flags else 1e-2

    @property
    def attention(self) -> bool:
        return self.groups > self.states

    @property
    def pulls(self) -> bool:
        """Whether a decode engine runs, too. ``test_models`` has the other kinds."""
        return self.states > 0 and self.attention


FLOAT32 = ("--dtype", "float32")
KINDS = {
    "chunked": Kind(64, 96, 10, 4, (*FLOAT32, "--max-model-len", "1024")),
    "gdn": Kind(160, 40, 8, 3, ("--dtype", "bfloat16", "--max-num-batched-tokens", "480"), 2, tolerance=0.1),
    "mamba2": Kind(384, 40, 8, 3, (*FLOAT32, "--max-num-batched-tokens", "384"), 2),
    "mamba2-only": Kind(512, 12, 3, 1, (*FLOAT32, "--max-num-batched-tokens", "512", "--enable-prefix-caching"), 1),
    "short-conv": Kind(128, 60, 16, 2, FLOAT32, 1),
}


# Half as many heads with states and twice as many without, or a block would have 640 tokens.
# And no more layers than two in each group.
SMALL = {
    "gdn": {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_key_value_heads": 4},
    "mamba2-only": {"num_hidden_layers": 2},
    "short-conv": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
}


class Pair(NamedTuple):
    """``engine`` also prefills for ``decode``, which stores nothing. ``plan``: of ``altering_connector``."""

    kind: Kind
    engine: Engine
    plain: Engine
    decode: Engine
    store: NodeStore
    plan: Path

    @property
    def engines(self) -> list[Engine]:
        return [self.engine, self.plain] + [self.decode] * self.kind.pulls

    def altered(self, plan: str) -> AbstractContextManager[None]:
        return altered(self.plan, plan)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, model_path, log_dir):
    kind = KINDS[request.param]
    small = SMALL.get(request.param, {})
    model = tiny_models.build(request.param, log_dir / "models" / request.param, model_path, **small)
    plan = log_dir / f"{request.param}.alter"
    plan.write_text("")
    with runtime_dir() as folder:

        def engine(role: str, kv: dict | None, blocks: int | None = None) -> Engine:
            env = {**store_env(folder), **TESTS_ON_PATH, ALTER: str(plan)}
            return Engine(
                model, name=f"{request.param}-{role}", kv=kv, block_size=kind.block, num_blocks=blocks, args=kind.flags,
                log_dir=log_dir, env=env, ready_seconds=240,
            )  # fmt: skip

        def altering(**options) -> dict:
            extra = {**OPTIONS, "store_size": "512MiB", "load_policy": "always", "endpoint_port": free_port()}
            extra |= {"lookup_timeout": 10, "handshake_timeout": 10, "handoff_seconds": 30, "retain_seconds": 10}
            extra["pull_threshold"] = 1
            named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
            return {**kvtier({**extra, **options}), **named}

        decode = engine("decode", altering(store_write="off"))
        stores = engine("store", altering(), kind.blocks)
        pair = Pair(kind, stores, engine("plain", None), decode, store_in(folder), plan)
        try:
            start_missing(pair.engines)
            yield pair
        finally:
            kill_all(pair.engines)


@pytest.fixture
async def kinds(pair: Pair):
    async with driving(pair.plain, NodeDriver) as driver:
        driver.node = Node(pair.engine, pair.engine, pair.plain, pair.store, {})
        yield driver


async def test_cache_kind_conversations_answer_as_a_plain_engine(kinds, pair: Pair):
    """Several at once, that grow, are edited and begin alike; its prefix cache is reset between their turns."""
    rng = seeded(f"conversations {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    more = min(2 * block, 300)  # tokens of a turn at most
    stem, loaded = random_tokens(rng, 3 * block + 7), 0
    conversations = [stem + random_tokens(rng, rng.randrange(1, more)) for _ in range(3)]
    for turn in range(4):
        replies = await asyncio.gather(*(kinds.ask(pair.engine, each, ANSWER, ASKED) for each in conversations))
        for prompt, reply in zip(conversations, replies, strict=True):
            want = await kinds.ask(pair.plain, prompt, ANSWER)
            assert off(reply, want, 2 * tolerance) < 2 * tolerance, (turn, len(prompt), reply.report)  # in a batch
            loaded += reply.pulled
        for prompt in conversations:
            await kinds.stored(pair.engine, prompt, (len(prompt) - 1) // block * block)
        for i, reply in enumerate(replies):
            conversations[i] += reply.tokens + random_tokens(rng, rng.randrange(1, more))
        edited = rng.randrange(3)
        at = rng.randrange(len(conversations[edited]) // 2, len(conversations[edited]))
        conversations[edited][at:] = random_tokens(rng, rng.randrange(1, more))
        await kinds.reset(pair.engine)
    assert loaded > 6 * block, "most of what was known was loaded"
    await kinds.ask(pair.engine, conversations[0], ANSWER, ASKED)  # alone
    await kinds.flushed(pair.engine)
    assert (await kinds.counters(pair.engine)).get("synchronous_loads ok")
    assert await kinds.kvtier(pair.engine, "integrity_failures") == 0
    await settled(kinds, pair)


@pytest.mark.parametrize("how", ["zero", "exchange"])
async def test_cache_kind_altered_blocks_of_any_group_change_the_answer(kinds, pair: Pair, how):
    """Or the conversations prove nothing."""
    rng = seeded(f"altered {pair.engine.name} {how}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt, other = (random_tokens(rng, 5 * block + 9) for _ in range(2))  # two blocks into the second chunk
    cold = await kinds.ask(pair.engine, prompt, ANSWER)
    await kinds.ask(pair.engine, other, 1)
    for each in (prompt, other):
        await kinds.stored(pair.engine, each, 5 * block)
    for plan in ("", *(f"{how} {group}" for group in range(pair.kind.groups)), ""):
        await kinds.reset(pair.engine)
        assert (await kinds.ask(pair.engine, other, 1, ASKED)).pulled == 5 * block
        with pair.altered(plan):
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        assert reply.pulled == 5 * block, reply.report
        moved = off(reply, cold, tolerance)
        assert moved > 3 * tolerance if plan else moved < tolerance, (plan, moved)


async def test_cache_kind_stale_states_change_the_answer(kinds, pair: Pair):
    """The right request's state, of a block before."""
    if not pair.kind.states:
        pytest.skip("attention only")
    rng = seeded(f"stale {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt = random_tokens(rng, 3 * block + 9)
    earlier = prompt[: 2 * block + 9]
    cold = await kinds.ask(pair.engine, prompt, ANSWER)
    await kinds.stored(pair.engine, prompt, 3 * block)
    await kinds.reset(pair.engine)
    await kinds.ask(pair.engine, earlier, 1)
    await kinds.stored(pair.engine, earlier, 2 * block)
    moved = []
    for group in range(pair.kind.groups):
        await kinds.reset(pair.engine)
        assert (await kinds.ask(pair.engine, earlier, 1, ASKED)).pulled == 2 * block
        with pair.altered(f"exchange {group}"):
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        assert reply.pulled == block, reply.report
        moved.append(off(reply, cold, tolerance))
    assert sum(each > 3 * tolerance for each in moved) == pair.kind.states, moved
    assert sum(each < tolerance for each in moved) == pair.kind.groups - pair.kind.states, moved


async def test_cache_kind_flipped_bits_of_any_group_are_found_and_recomputed(kinds, pair: Pair):
    """In a stored block of each group, which is then stored again; of the hand-offs below, as it arrives."""
    rng = seeded(f"flips {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt = random_tokens(rng, 2 * block + 9)
    want = await kinds.ask(pair.plain, prompt, ANSWER)
    await kinds.ask(pair.engine, prompt, 1)
    for plan in ("", *(f"flip {group}" for group in range(pair.kind.groups)), ""):
        await kinds.stored(pair.engine, prompt, 2 * block)
        await kinds.reset(pair.engine)
        await kinds.flushed(pair.engine)
        before = await kinds.kvtier(pair.engine, "integrity_failures")
        with pair.altered(plan):
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        assert off(reply, want, tolerance) < tolerance, (plan, reply.report)
        assert reply.pulled == 0 if plan else reply.pulled == 2 * block, (plan, reply.report)
        await kinds.flushed(pair.engine)
        assert await kinds.kvtier(pair.engine, "integrity_failures") == before + bool(plan)
    await settled(kinds, pair)


async def test_cache_kind_survives_preemptions_leavers_and_a_killed_store(kinds, pair: Pair):
    """More requests than there are blocks for, that all fill a block in their answer: vLLM preempts some, if they
    come at once, whose blocks are loaded anew. Meanwhile clients leave, and then the store dies."""
    rng = seeded(f"preempted {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.rounding
    prompts = [random_tokens(rng, 2 * block - rng.randrange(4, LONG - 4)) for _ in range(pair.kind.crowd)]
    wants = asyncio.gather(*(kinds.ask(pair.plain, prompt, LONG) for prompt in prompts))
    await asyncio.gather(*(kinds.ask(pair.engine, prompt, 1) for prompt in prompts))
    wants = await wants
    for prompt in prompts:
        await kinds.stored(pair.engine, prompt, block)
    before = await kinds.metric(pair.engine, PREEMPTIONS)
    for again, killed in enumerate((False, False, False, True)):
        if again and not killed and await kinds.metric(pair.engine, PREEMPTIONS) > before:
            continue  # on a busy machine requests may come one by one, so that none is preempted
        await kinds.reset(pair.engine)
        asked = [asyncio.create_task(kinds.ask(pair.engine, prompt, LONG, ASKED)) for prompt in prompts]
        left = [kinds.disconnect(pair.engine, each + [300], 0.05 * i, ASKED) for i, each in enumerate(prompts[:3])]
        await asyncio.gather(*left)
        if killed:
            await asyncio.to_thread(pair.store.kill)
        replies = await asyncio.gather(*asked)
        for reply, want in zip(replies, wants, strict=True):
            assert off(reply, want, tolerance) < tolerance, (killed, reply.report)
        assert killed or sum(bool(reply.pulled) for reply in replies) > len(prompts) / 2
    await asyncio.to_thread(pair.store.until_up)
    await settled(kinds, pair)


async def settled(kinds, pair: Pair) -> None:
    """No block, lease or reservation is held, but what is retained until the reset."""
    await kinds.reset(pair.engine)
    await kinds.until_idle(pair.engine)
    counts = await asyncio.to_thread(pair.store.counts)
    assert (counts.index.leases, counts.index.reservations) == (0, 0)


# -- prefill and decode engines, and other engines of the node: kinds with recurrent states ---------------------------


@pytest.fixture
def hands_off(pair: Pair) -> Pair:
    if not pair.kind.pulls:
        pytest.skip("attention only: see test_models")
    return pair


async def test_state_kind_is_handed_off_and_pulled_back(kinds, hands_off: Pair):
    """Conversations grow over both engines, one is edited, and a client leaves. A hand-off ends with the state behind
    the last token but one; the next turn goes on behind the last token that the decode engine computed. That engine
    pulls the states, and of attention only what its own prefix cache lacks.
    """
    pair, prefill, decode = hands_off, hands_off.engine, hands_off.decode
    failures = [await kinds.kvtier(engine, "integrity_failures") for engine in (prefill, decode)]
    rng = seeded(f"hand-offs {prefill.name}")
    block, rounding = pair.kind.block, pair.kind.rounding
    conversations = [random_tokens(rng, length) for length in (2 * block + 1, block + 30, 3 * block - 40)]
    computed, resumed = [0] * len(conversations), 0  # by the decode engine, of each conversation as it is now
    cached = [0] * len(conversations)  # its attention's whole blocks
    for turn in range(3):
        known = with_sources(decode)
        firsts = await asyncio.gather(*(kinds.prefill(prefill, each, known) for each in conversations))
        leaver = await kinds.prefill(prefill, conversations[0] + [300 + turn])
        left = kinds.disconnect(decode, leaver.prompt, 0.1, leaver.params)
        asked = zip(conversations, firsts, strict=True)
        *replies, _ = await asyncio.gather(*(kinds.ask(decode, each, ANSWER, f.params) for each, f in asked), left)
        for i, (first, reply) in enumerate(zip(firsts, replies, strict=True)):
            prompt = conversations[i]
            want = await kinds.ask(pair.plain, prompt, ANSWER)
            assert off(reply, want, rounding) < rounding, (turn, len(prompt), reply.report)
            assert reply.pulled + reply.report["local_tokens"] == len(prompt) - 1, reply.report
            assert reply.report["local_tokens"] >= cached[i], reply.report
            cached[i] = len(prompt) // block * block
            here = first.report["local_tokens"] + first.pulled
            assert here <= max(computed[i], len(prompt) - 1), first.report
            resumed += bool(first.pulled) and here == computed[i]
            computed[i] = len(prompt) + ANSWER - 1
            conversations[i] = prompt + reply.tokens + random_tokens(rng, rng.randrange(1, 60))
            if i == turn:  # in the middle of its answer: the state behind it is of no use
                conversations[i][len(prompt) + 3] ^= 1
    # Of six; fewer where a turn takes as long as blocks are retained.
    assert resumed >= 1, "turns began where the answer before them ended"
    for engine, before in zip((prefill, decode), failures, strict=True):
        await kinds.flushed(engine)
        assert await kinds.kvtier(engine, "integrity_failures") == before
        assert await kinds.kvtier(engine, "pulls", "failed") == 0


async def certain(kinds, pair: Pair, rng, length: int) -> list[int]:
    """A prompt whose answer does not begin with a tie, behind which ``off`` compares nothing."""
    while True:
        prompt = random_tokens(rng, length)
        (best,) = (await kinds.ask(pair.plain, prompt, 1)).top
        if best[0] - best[1] > 10 * pair.kind.tolerance:
            return prompt


@pytest.mark.parametrize("how", ["zero", "exchange", "stale"])
async def test_state_kind_altered_blocks_of_a_hand_off_change_the_answer(kinds, hands_off: Pair, how):
    """Or the conversations prove nothing. A stale state is that of a shorter prompt."""
    pair = hands_off
    rng = seeded(f"altered hand-off {pair.engine.name} {how}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    prompt, other = [await certain(kinds, pair, rng, 2 * block + 30) for _ in range(2)]
    if how == "stale":
        other = prompt[: block - 40]  # fewer blocks of attention, which are not exchanged then
    moved = []
    for plan in ["", *(f"{how.replace('stale', 'exchange')} {group}" for group in range(pair.kind.groups))]:
        await kinds.reset(pair.decode)
        assert (await kinds.hand_off(pair.engine, pair.decode, other, 1))[1].pulled == len(other) - 1
        first = await kinds.prefill(pair.engine, prompt)
        with pair.altered(plan):
            reply = await kinds.ask(pair.decode, prompt, ANSWER, first.params)
        assert reply.pulled + reply.report["local_tokens"] == len(prompt) - 1, reply.report
        if not plan:
            right = reply
        moved.append(off(reply, right, tolerance))
    wrong = pair.kind.states if how == "stale" else pair.kind.groups
    assert sum(each > 3 * tolerance for each in moved) == wrong, moved
    assert sum(each < tolerance for each in moved) == 1 + pair.kind.groups - wrong, moved


async def test_state_kind_flipped_bits_of_a_hand_off_are_found_and_recomputed(kinds, hands_off: Pair):
    pair, decode, tolerance = hands_off, hands_off.decode, hands_off.kind.tolerance
    prompt = random_tokens(seeded(f"flipped hand-off {pair.engine.name}"), pair.kind.block + 30)
    want = await kinds.ask(pair.plain, prompt, ANSWER)
    for group in range(pair.kind.groups):
        await kinds.reset(decode)
        before = await kinds.kvtier(decode, "integrity_failures")
        first = await kinds.prefill(pair.engine, prompt)
        with pair.altered(f"flip {group}"):
            reply = await kinds.ask(decode, prompt, ANSWER, first.params)
        assert reply.pulled == 0 and off(reply, want, tolerance) < tolerance, (group, reply.report)
        await kinds.flushed(decode)
        assert await kinds.kvtier(decode, "integrity_failures") > before


async def test_state_kind_is_fetched_from_an_engine_of_the_node(kinds, hands_off: Pair):
    """Up to the last state that the other engine's prefix cache keeps."""
    pair = hands_off
    rng = seeded(f"fetched {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    fetched, before = 0, await kinds.kvtier(pair.decode, "integrity_failures")
    for length in (2 * block + 9, 3 * block):
        prompt = random_tokens(rng, length)
        await kinds.ask(pair.engine, prompt, 1)
        await kinds.stored(pair.engine, prompt, (length - 1) // block * block)
        await asyncio.to_thread(pair.store.clear)
        reply = await kinds.ask(pair.decode, prompt, ANSWER, ASKED)
        want = await kinds.ask(pair.plain, prompt, ANSWER)
        assert off(reply, want, tolerance) < tolerance, reply.report
        fetched += reply.pulled
    await kinds.flushed(pair.decode)
    assert fetched and await kinds.kvtier(pair.decode, "fetched_tokens") > 0
    assert await kinds.kvtier(pair.decode, "integrity_failures") == before


async def test_state_kind_prompt_of_a_dead_prefill_engine_is_computed(kinds, hands_off: Pair):
    """The last test of a kind: its engine ends."""
    pair = hands_off
    prompt = random_tokens(seeded(f"death {pair.engine.name}"), 2 * pair.kind.block + 5)
    first = await kinds.prefill(pair.engine, prompt)
    pair.engine.kill()
    await asyncio.to_thread(pair.store.clear)
    reply = await kinds.ask(pair.decode, prompt, ANSWER, first.params)
    want = await kinds.ask(pair.plain, prompt, ANSWER)
    assert reply.pulled == 0 and off(reply, want, pair.kind.tolerance) < pair.kind.tolerance, reply.report
    await kinds.reset(pair.decode)
    await kinds.until_idle(pair.decode)
