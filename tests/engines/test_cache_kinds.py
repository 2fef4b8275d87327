"""Conversations on tiny models of each kind of KV cache group: what is loaded, pulled or fetched answers as what is
computed.

The models' answers depend on all of their history (``tiny_models``). Each kind has a negative control: zeroed or
exchanged blocks of one group, changed after their checksums were found right, change the answers.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from altering_connector import VARIABLE
from engine_client import Reply, driving, random_tokens, with_sources
from engine_fixtures import TESTS_ON_PATH, start_missing
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

ANSWER = 8  # tokens


class Kind(NamedTuple):
    """``block``: tokens. ``groups``: that vLLM makes of the layers; so many of these have recurrent ``states``.
    ``tolerance``: rounding moves a logprob by less."""

    block: int
    groups: int
    flags: tuple[str, ...]
    states: int = 0
    tolerance: float = 2e-3

    @property
    def pulls(self) -> bool:
        """Whether a decode engine runs, too. ``test_models`` has the other kinds."""
        return self.states > 0 and self.groups > 1


FLOAT32 = ("--dtype", "float32")
KINDS = {
    "chunked": Kind(64, 4, FLOAT32),
    "gdn": Kind(640, 3, ("--dtype", "bfloat16"), 2, tolerance=0.1),
    "mamba2": Kind(384, 3, (*FLOAT32, "--max-num-batched-tokens", "384"), 2),
    "mamba2-only": Kind(512, 1, (*FLOAT32, "--max-num-batched-tokens", "512", "--enable-prefix-caching"), 1),
    "short-conv": Kind(128, 2, FLOAT32, 1),
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


@pytest.fixture(scope="module", params=KINDS)
def pair(request, model_path, log_dir):
    kind = KINDS[request.param]
    model = tiny_models.build(request.param, log_dir / "models" / request.param, model_path)
    plan = log_dir / f"{request.param}.alter"
    plan.write_text("")
    with runtime_dir() as folder:

        def engine(role: str, kv: dict | None) -> Engine:
            env = {**store_env(folder), **TESTS_ON_PATH, VARIABLE: str(plan)}
            return Engine(
                model, name=f"{request.param}-{role}", kv=kv, block_size=kind.block, args=kind.flags, log_dir=log_dir,
                env=env, ready_seconds=240,
            )  # fmt: skip

        def altering(**options) -> dict:
            extra = {**OPTIONS, "store_size": "512MiB", "load_policy": "always", "endpoint_port": free_port()}
            extra |= {"lookup_timeout": 10, "handshake_timeout": 10, "handoff_seconds": 30, "retain_seconds": 10}
            extra["pull_threshold"] = 1
            named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
            return {**kvtier({**extra, **options}), **named}

        decode = engine("decode", altering(store_write="off"))
        pair = Pair(kind, engine("store", altering()), engine("plain", None), decode, store_in(folder), plan)
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


def off(got: Reply, want: Reply, tolerance: float) -> float:
    """Largest difference of logprobs, as far as the tokens are the same; they part only where two are as good."""
    worst = 0.0
    for a, b, x, y, best in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, want.top, strict=True):
        if a != b:
            return worst if best[0] - best[1] < 2 * tolerance else float("inf")
        worst = max(worst, abs(x - y))
    return worst


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
            assert off(reply, want, tolerance) < tolerance, (turn, len(prompt), reply.report)
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
    assert await kinds.kvtier(pair.engine, "integrity_failures") == 0
    await kinds.until_idle(pair.engine)
    counts = await asyncio.to_thread(pair.store.counts)
    assert (counts.index.leases, counts.index.reservations) == (0, 0)


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
        pair.plan.write_text(plan)
        try:
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        finally:
            pair.plan.write_text("")
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
        pair.plan.write_text(f"exchange {group}")
        try:
            reply = await kinds.ask(pair.engine, prompt, ANSWER, ASKED)
        finally:
            pair.plan.write_text("")
        assert reply.pulled == block, reply.report
        moved.append(off(reply, cold, tolerance))
    assert sum(each > 3 * tolerance for each in moved) == pair.kind.states, moved
    assert sum(each < tolerance for each in moved) == pair.kind.groups - pair.kind.states, moved


# -- prefill and decode engines, and other engines of the node: kinds with recurrent states ---------------------------


@pytest.fixture
def hands_off(pair: Pair) -> Pair:
    if not pair.kind.pulls:
        pytest.skip("attention only: see test_models")
    return pair


async def test_state_kind_is_handed_off_and_pulled_back(kinds, hands_off: Pair):
    """Conversations grow over both engines, one is edited, and a client leaves. A hand-off ends with the state behind
    the last token but one; the next turn goes on behind the last token that the decode engine computed."""
    pair, prefill, decode = hands_off, hands_off.engine, hands_off.decode
    rng = seeded(f"hand-offs {prefill.name}")
    # Decode steps wrote what a prefill writes in the truth: in bfloat16, other numbers.
    block, rounding = pair.kind.block, 1.0 if "bfloat16" in pair.kind.flags else 1e-2
    conversations = [random_tokens(rng, length) for length in (2 * block + 1, block + 30, 3 * block - 40)]
    computed, resumed = [0] * len(conversations), 0  # by the decode engine, of each conversation as it is now
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
            here = first.report["local_tokens"] + first.pulled
            assert here <= max(computed[i], len(prompt) - 1), first.report
            resumed += bool(first.pulled) and here == computed[i]
            computed[i] = len(prompt) + ANSWER - 1
            conversations[i] = prompt + reply.tokens + random_tokens(rng, rng.randrange(1, 60))
            if i == turn:  # in the middle of its answer: the state behind it is of no use
                conversations[i][len(prompt) + 3] ^= 1
    assert resumed >= 3, "turns began where the answer before them ended"
    for engine in (prefill, decode):
        await kinds.flushed(engine)
        assert await kinds.kvtier(engine, "integrity_failures") == 0
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
        other = prompt[: block + 40]
    moved = []
    for plan in ["", *(f"{how.replace('stale', 'exchange')} {group}" for group in range(pair.kind.groups))]:
        await kinds.reset(pair.decode)
        assert (await kinds.hand_off(pair.engine, pair.decode, other, 1))[1].pulled == len(other) - 1
        first = await kinds.prefill(pair.engine, prompt)
        pair.plan.write_text(plan)
        try:
            reply = await kinds.ask(pair.decode, prompt, ANSWER, first.params)
        finally:
            pair.plan.write_text("")
        assert reply.pulled + reply.report["local_tokens"] == len(prompt) - 1, reply.report
        if not plan:
            right = reply
        moved.append(off(reply, right, tolerance))
    wrong = pair.kind.states if how == "stale" else pair.kind.groups
    assert sum(each > 3 * tolerance for each in moved) == wrong, moved
    assert sum(each < tolerance for each in moved) == 1 + pair.kind.groups - wrong, moved


async def test_state_kind_is_fetched_from_an_engine_of_the_node(kinds, hands_off: Pair):
    """Up to the last state that the other engine's prefix cache keeps."""
    pair = hands_off
    rng = seeded(f"fetched {pair.engine.name}")
    block, tolerance = pair.kind.block, pair.kind.tolerance
    fetched = 0
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
    assert await kinds.kvtier(pair.decode, "integrity_failures") == 0


async def test_state_kind_prompt_of_a_dead_prefill_engine_is_computed(kinds, hands_off: Pair):
    """The last test of a kind: its engine ends."""
    pair = hands_off
    prompt = random_tokens(seeded(f"death {pair.engine.name}"), 2 * pair.kind.block + 5)
    first = await kinds.prefill(pair.engine, prompt)
    pair.engine.kill()
    reply = await kinds.ask(pair.decode, prompt, ANSWER, first.params)
    want = await kinds.ask(pair.plain, prompt, ANSWER)
    assert reply.pulled == 0 and off(reply, want, pair.kind.tolerance) < pair.kind.tolerance, reply.report
    await kinds.reset(pair.decode)
    await kinds.until_idle(pair.decode)
