"""Every lossy codec on real engines: what comes back from the store is near, in as few bytes as the codec promises.

In bfloat16, as codecs want it. An engine's answers are compared with its own, computed: the demo model must recall the
codes in its prompt, and logprobs of Python source stay within what the codec was measured to do. Two codecs are
part of a normal run; the others are ``slow``.
"""

import argparse
import asyncio
import difflib
import inspect
import itertools
import math
import statistics
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from engine_client import SYSTEM, Reply, driving, question, random_tokens, told, with_sources
from engine_fixtures import ENGINE_FLAGS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in

from vllm_kvtier import codecs
from vllm_kvtier.cli import inputs
from vllm_kvtier.codecs import Codec
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, start_all
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.wire.slots import PART_ALIGN, REGION_ALIGN, SUM_BYTES, align

BLOCK = 32
LAYERS, HEADS, HEAD = 6, 4, 64  # of the demo model
RAW_BYTES = LAYERS * 2 * HEADS * HEAD * 2 * BLOCK
WIRE = "int8"
AGAIN = " again"  # another engine of this codec
FAST = ("rot4", "int8")
LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
SLOW = [name for name in LOSSY if name not in FAST]
# Engines that run at the same time.
PAIRS = [FAST, *itertools.zip_longest(SLOW[::2], SLOW[1::2], fillvalue=FAST[0])]
EACH = pytest.mark.parametrize(
    "codec", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)], scope="module"
)


class Price(NamedTuple):
    """``logprob``: how far one moves on average, some four times what was measured. ``lost``: of 24 codes."""

    logprob: float
    lost: int = 0


PRICES = {"int8": Price(0.1), "fp8": Price(0.2), "k8v4": Price(0.2), "int4": Price(0.4, 1), "rot4": Price(0.4, 1)}
# Of whatever codec comes after them.
DEFAULT = Price(0.4, 1)


class Layout(NamedTuple):
    """Of a block, counted by hand. ``sum_offset``: where the checksum lies."""

    sum_offset: int

    @property
    def nbytes(self) -> int:
        return align(self.sum_offset + SUM_BYTES, PART_ALIGN)

    @property
    def pages(self) -> int:
        return align(self.nbytes, PAGE) // PAGE


def layout_of(name: str) -> Layout:
    formats = codecs.get(name).formats
    if not formats:
        return Layout(RAW_BYTES)
    at = 0
    for form in (formats["k"], formats["v"]):
        line = form.line(HEAD)
        lines = BLOCK * HEADS * HEAD // line
        at += LAYERS * sum(align(lines * n, REGION_ALIGN) for n in (form.data_bytes(line), form.scale_bytes(line)))
    return Layout(at)


POOL_PAGES = 20 * layout_of(Codec.RAW).pages  # of a small store: room for 20 blocks as they are


class Engines:
    """At most two at a time, one for each codec; all of one node."""

    def __init__(self, model: Path, folder: Path, log_dir: Path):
        self._model, self._folder, self._log_dir = model, folder, log_dir
        self._made: dict[str, Engine] = {}
        self.store = store_in(folder)
        self.table: list[str] = []  # what was measured

    def have(self, *names: str) -> list[Engine]:
        """Running; those that do not are started side by side, and engines that are not named end."""
        for name in names:
            if name not in self._made:
                self._made[name] = self._make(name)
        wanted = [self._made[name] for name in names]
        kill_all([engine for engine in self._made.values() if engine not in wanted])
        start_all([engine for engine in wanted if not engine.running])
        return wanted

    def _make(self, name: str) -> Engine:
        codec = name.removesuffix(AGAIN)
        extra = {
            **OPTIONS,
            "codec": codec,
            "wire_codec": codec,
            "load_policy": "always",
            "store_write": "prompt",  # what the decode engine generates is only to be had from the decode engine
            "endpoint_port": free_port(),
        }
        if name != codec:
            extra |= {"retain_seconds": 8.0, "retain_share": 0.5}  # long enough for a busy machine, and a long talk
        flags = {**ENGINE_FLAGS, "args": ("--dtype", "bfloat16")}
        env = store_env(self._folder)
        name = f"kept-{name}".replace(" ", "-")
        return Engine(self._model, name=name, kv=kvtier(extra), log_dir=self._log_dir, env=env, **flags)

    def kill(self) -> None:
        kill_all(list(self._made.values()))


@pytest.fixture(scope="module")
def engines(demo_model, log_dir) -> Iterator[Engines]:
    with runtime_dir() as folder:
        engines = Engines(demo_model, folder, log_dir)
        yield engines
        engines.kill()
        print("", *engines.table, sep="\n")


class CodedDriver(NodeDriver):
    """Truth is what the engine itself computes: ``asked`` compares nothing."""

    async def asked(self, engine: Engine, prompt: list[int], max_tokens: int = 8, **body) -> Reply:
        return await self.ask(engine, prompt, max_tokens, ASKED, **body)

    async def counts(self, engine: Engine, *names: str) -> list[int]:
        """Our counters, each by its name and, behind a space, its kind."""
        await self.flushed(engine)
        return [int(await self.kvtier(engine, *name.split())) for name in names]

    async def recall(self, engine: Engine, messages: list, names: list[str]) -> list[Reply]:
        """What it says of each code, all at once."""
        asked = ([*messages, {"role": "user", "content": question(name)}] for name in names)
        return await asyncio.gather(*(self.ask(engine, prompt, 20, ASKED, ignore_eos=False) for prompt in asked))


class Kept(NamedTuple):
    codec: str
    engine: Engine
    other: Engine  # of the same node, with another codec
    layout: Layout
    store: NodeStore
    table: list[str]


@pytest.fixture
def kept(engines, codec) -> Kept:
    pair = next(pair for pair in PAIRS if codec in pair)
    running = engines.have(*pair)
    engine, other = running if codec == pair[0] else running[::-1]
    return Kept(codec, engine, other, layout_of(codec), engines.store, engines.table)


@pytest.fixture
async def driver(engines) -> AsyncIterator[CodedDriver]:
    async with driving(None, CodedDriver) as driver:
        driver.node = Node(None, None, None, engines.store, {})
        yield driver


def source() -> str:
    """Python that stays as it is."""
    return "\n".join(map(inspect.getsource, (argparse, difflib, statistics, textwrap)))


class Talk:
    """About so many tokens: codes given in five rounds, with a file to read after each."""

    def __init__(self, rng: Random, tokens: int):
        from vllm_kvtier.quality.recall import NOUNS  # which imports transformers: not where other files are run

        nouns = rng.sample(NOUNS, 20)
        names = [f"{one} {other}" for one, other in zip(nouns[::2], nouns[1::2], strict=True)]
        self.codes = {name: str(rng.randrange(10000, 100000)) for name in names}
        self.names = rng.sample(names, 6)
        self.messages = [SYSTEM]
        text = source()
        for i in range(0, 10, 2):
            new = {name: self.codes[name] for name in names[i : i + 2]}
            at = rng.randrange(len(text) - 10000)
            file = text[at : at + max(0, tokens - 380) * 3 // 5]
            self._say(told(new), "Noted 2 codes.")
            self._say(f"Read this file:\n{file}", "Done reading.")

    def _say(self, user: str, assistant: str) -> None:
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def right(self, replies: list[Reply]) -> list[bool]:
        return [self.codes[name] in reply.text for name, reply in zip(self.names, replies, strict=True)]


def distances(got: Reply, want: Reply) -> list[float]:
    """How far logprobs are from each other, as far as the tokens are the same; where they part, how much worse the
    other one was."""
    found = []
    for a, b, x, y, best in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, want.top, strict=False):
        found.append(abs(x - y) if a == b else best[0] - best[1])
        if a != b:
            break
    return found


@EACH
async def test_codec_round_trip_is_near_and_smaller(kept: Kept, driver):
    engine, price, rng = kept.engine, PRICES.get(kept.codec, DEFAULT), seeded("codecs")
    talks = [Talk(rng, tokens) for tokens in (700, 1100, 1700, 2400)]
    ids = await asyncio.to_thread(inputs.tokenize, engine.base_url, source()[:40000])
    texts = [ids[at : at + length] for at, length in ((100, 400), (3000, 800), (6000, 1100))]

    async def answers() -> tuple[list[bool], list[Reply], list[Reply]]:
        """Which codes are right; what was answered to the first question of each talk, and to the texts."""
        right, first, read = [], [], []
        for talk in talks:
            (reply,) = await driver.recall(engine, talk.messages, talk.names[:1])
            await driver.stored(engine, reply.prompt)  # each by itself: under pressure the newest blocks are not
            right += talk.right([reply, *await driver.recall(engine, talk.messages, talk.names[1:])])
            first.append(reply)
        for text in texts:
            read.append(await driver.asked(engine, text, 12))
            await driver.stored(engine, text)
        return right, first, read

    names = "stored_blocks", "stored_bytes", f"stored_logical_bytes {kept.codec}"
    await driver.reset(engine)  # of what it computed as the other one
    before = await driver.counts(engine, *names)
    right, told_first, read = await answers()
    assert sum(right) >= 0.7 * len(right), "a model that guesses shows nothing"
    computed = told_first + read
    assert not any(reply.pulled for reply in computed)
    await driver.until_idle(engine)
    blocks, *stored = (b - a for a, b in zip(before, await driver.counts(engine, *names), strict=True))
    assert stored == [blocks * kept.layout.nbytes, blocks * RAW_BYTES]
    assert blocks >= sum(len(reply.prompt) // BLOCK for reply in computed)

    names = "loaded_tokens", "loaded_bytes", "loaded_logical_bytes"
    before = await driver.counts(engine, *names)
    await driver.reset(engine)
    right_again, told_again, read_again = await answers()
    loaded = told_again + read_again
    for reply in loaded:
        assert reply.pulled + reply.report["local_tokens"] == len(reply.prompt) // BLOCK * BLOCK, reply.report
    tokens, *moved = (b - a for a, b in zip(before, await driver.counts(engine, *names), strict=True))
    assert tokens >= sum(reply.pulled for reply in loaded) and tokens % BLOCK == 0
    assert moved == [tokens // BLOCK * kept.layout.nbytes, tokens // BLOCK * RAW_BYTES]
    share = sum(reply.pulled for reply in loaded) / sum(len(reply.prompt) for reply in loaded)
    assert share > 0.95

    lost = sum(was and not now for was, now in zip(right, right_again, strict=True))
    recalled, continued = (
        [x for both in zip(*replies, strict=True) for x in distances(*both)]
        for replies in ((told_again, told_first), (read_again, read))
    )
    mean = sum(continued) / len(continued)
    kept.table.append(
        f"{kept.codec:5} {share:.1%} of {sum(len(r.prompt) for r in loaded)} tokens loaded; codes: {sum(right)} of "
        f"{len(right)} computed, {sum(right_again)} loaded, {lost} lost; logprobs differ by {max(recalled):.4f} "
        f"at most in codes, {mean:.4f} on average, {max(continued):.4f} at most in {len(continued)} tokens of source; "
        f"{sum(r.seconds for r in computed):.1f} s computed, {sum(r.seconds for r in loaded):.1f} s loaded"
    )
    print(kept.table[-1])
    assert lost <= price.lost
    assert 0 < mean <= price.logprob and max(continued) <= 8 * price.logprob, "near, and not the same"

    # The same prompts at an engine of the same node that keeps its KV otherwise.
    (reply,) = await driver.recall(kept.other, talks[0].messages, talks[0].names[:1])
    assert reply.pulled == 0 and max(distances(reply, told_first[0])) < 0.1, reply.report


@EACH
async def test_codec_pool_holds_promised_number_of_blocks(kept: Kept, driver):
    """More than fits into a small store, whose pages are then all used, except those that hold no block."""
    store, rng = kept.store, seeded(f"room {kept.codec}")
    room = POOL_PAGES // kept.layout.pages
    with store.alone():
        await asyncio.to_thread(store.kill)
        await asyncio.to_thread(store.serve, f"--size={(POOL_PAGES + 1) * PAGE}")
        await driver.uses_store(kept.engine)
        await driver.reset(kept.engine)
        for _ in range(math.ceil(1.3 * room / 15)):
            prompt = random_tokens(rng, 15 * BLOCK)
            await driver.asked(kept.engine, prompt, 1)
            await driver.stored(kept.engine, prompt)
        index = (await asyncio.to_thread(store.counts)).index
        await asyncio.to_thread(store.kill)
    assert index.evictions > 0 and index.pool_pages == POOL_PAGES + 1
    assert index.used_pages == index.entries * kept.layout.pages
    assert index.entries == room
    kept.table.append(
        f"{kept.codec:5} {index.entries} blocks of {kept.layout.nbytes} bytes where 20 fit as they are: "
        f"{index.entries * BLOCK * (1 << 30) / (POOL_PAGES * PAGE):,.0f} tokens/GiB"
    )
    print(kept.table[-1])


@EACH
async def test_codec_flipped_bit_is_detected_and_block_stored_again(kept: Kept, driver):
    """In the first number, the last scale and the checksum of a block: each time it is computed, and stored anew."""
    engine, store, rng = kept.engine, kept.store, seeded(f"flips {kept.codec}")
    await asyncio.to_thread(store.kill)  # so that the memory is new, and what is written in it known
    await driver.uses_store(engine)
    prompt = random_tokens(rng, 8 * BLOCK + 5)
    names = "integrity_failures", "stored_blocks"
    with store.memory() as memory:
        others = memory.written()
        cold = await driver.asked(engine, prompt, 4)
        await driver.stored(engine, prompt)
        await driver.until_idle(engine)
        pages = sorted(memory.written() - others)
        slots = pages[:: kept.layout.pages]
        assert len(pages) == 8 * kept.layout.pages and slots == [pages[0] + i * kept.layout.pages for i in range(8)]
        for at in (0, kept.layout.sum_offset - 1, kept.layout.sum_offset + SUM_BYTES - 1):
            before = await driver.counts(engine, *names)
            memory.pages[rng.choice(slots) + at // PAGE, at % PAGE] ^= 1 << rng.randrange(8)
            await driver.reset(engine)
            reply = await driver.asked(engine, prompt, 4)
            assert reply.pulled < 8 * BLOCK, reply.report
            assert max(distances(reply, cold)) < 8 * PRICES.get(kept.codec, DEFAULT).logprob
            await driver.stored(engine, prompt)
            after = await driver.counts(engine, *names)
            assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
        await driver.reset(engine)
        assert (await driver.asked(engine, prompt, 4)).pulled == 8 * BLOCK


@pytest.mark.parametrize("names", [FAST, pytest.param((Codec.RAW, FAST[0]), marks=pytest.mark.slow)])
async def test_engines_with_different_codecs_share_no_blocks(engines, driver, names):
    """Pulls between them are refused with a reason, nothing of the other is found in the store, and all is answered."""
    both = engines.have(*names)
    rng, pages = seeded("other codecs"), sum(layout_of(name).pages for name in names)
    await asyncio.gather(*map(driver.reset, both))
    await asyncio.to_thread(engines.store.clear)
    for p, d in (both, both[::-1]):
        prompt = random_tokens(rng, 300)
        _, reply = await driver.hand_off(p, d, prompt)
        assert (reply.pulled, reply.report["local_tokens"], reply.report["computed_tokens"]) == (0, 0, 300)
        await driver.stored(p, prompt)
        await driver.stored(d, prompt)
        want = await driver.ask(p, prompt, cache_salt="fresh")
        await driver.stored(p, prompt, salt="fresh")
        assert max(distances(reply, want)) < 0.2
        assert "(codec and wire_codec) differs" in d.log_path.read_text("utf-8", "replace")
        await driver.reset(d)
        assert (await driver.asked(d, prompt)).pulled == 300 // BLOCK * BLOCK, "its own is there"
    index = (await asyncio.to_thread(engines.store.counts)).index
    # Two prompts of both, and what one of them computed under a salt.
    assert index.used_pages == (2 + 1) * (300 // BLOCK) * pages, index
    await driver.until_idle(*both)


async def test_pulls_use_wire_codec_in_both_directions(engines, driver):
    """There and, in the next turn, back; both keep what they have in a store beside it."""
    p, d = engines.have(WIRE, WIRE + AGAIN)
    rng, layout, moved = seeded("wire"), layout_of(WIRE), []
    failures = [await driver.counts(engine, "integrity_failures", "pulls failed") for engine in (p, d)]
    for tokens in (700, 1500):
        talk = Talk(rng, tokens)
        one, other = talk.names[:2]
        asked = f"<|end|><|user|>{question(other)}<|end|><|assistant|>"
        asked = await asyncio.to_thread(inputs.tokenize, d.base_url, asked)
        before = await driver.counts(d, "pulled_bytes")
        first = [*talk.messages, {"role": "user", "content": question(one)}]
        _, reply = await driver.hand_off(p, d, first, 100)
        assert (reply.pulled, reply.report["pulled_from"]) == (len(reply.prompt), p.kv_address), reply.report
        second = reply.prompt + reply.tokens + asked
        back, again = await driver.hand_off(p, d, second, 20, with_sources(d))
        local, held = (n // BLOCK * BLOCK for n in (len(reply.prompt), len(reply.prompt) + 99))
        what = back.report, await driver.counters(p), await driver.counters(d)
        assert (back.report["local_tokens"], back.pulled) == (local, held - local), what
        assert back.report["pulled_from"] == d.kv_address
        pulled = (await driver.counts(d, "pulled_bytes"))[0] - before[0]
        blocks = math.ceil(len(reply.prompt) / BLOCK) + math.ceil(again.pulled / BLOCK)
        assert 0 <= pulled / blocks - layout.nbytes < PART_ALIGN, "encoded blocks, and nothing else"
        for prompt, code, got in ((first, talk.codes[one], reply), (second, talk.codes[other], again)):
            want = await driver.ask(p, prompt, len(got.tokens), cache_salt=f"fresh {len(got.prompt)}")
            assert (code in got.text) == (code in want.text), (got.text, want.text)
            moved += distances(got, want)
    mean = sum(moved) / len(moved)
    engines.table.append(f"wire {WIRE}: logprobs differ by {mean:.4f} on average, {max(moved):.4f} at most")
    print(engines.table[-1])
    assert 0 < mean < PRICES[WIRE].logprob
    assert failures == [await driver.counts(engine, "integrity_failures", "pulls failed") for engine in (p, d)]
