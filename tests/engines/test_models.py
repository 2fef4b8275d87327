"""Prefill and decode engines pull from each other, for each kind of KV cache: full attention, windows, MLA, fp8.

Also for machines with GPUs, where more of it can start:

    KVTIER_TEST_GPUS=0,1 python -m pytest tests/engines/test_models.py      (prefill on device 0, decode on 1)

The truth is one engine's own decoding. The prefill engine answers x with tokens t1, t2, ...; then the decode engine is
asked for x + [t1] with the prefill engine's prefill of it, pulls x and computes t1 in a decode step, exactly as the
prefill engine did, so it must say t2, ... with the same logprobs.

Except for MLA on CPUs. There vLLM 0.32 by itself gives the same token of the same prompt logprobs that differ by up to
0.8, in float32, when the prompt is a few tokens longer. What stays the same is the same prompt's prefill, so there the
truth is another pull of it, into other blocks, and that other KV makes the decode engine answer otherwise.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import model_shapes
import pytest
from engine_client import Driver, Reply, driving, random_tokens, with_sources

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, free_port, start_all

GPUS = [int(gpu) for gpu in os.environ.get("KVTIER_TEST_GPUS", "").split(",") if gpu]
RETAIN_SECONDS = 6.0
ANSWER = 6  # tokens


class Case(NamedTuple):
    """``itemsize``: bytes a number of the cache. ``tolerance``: rounding moves a logprob by less than this."""

    shape: model_shapes.Shape
    flags: tuple[str, ...]
    itemsize: int
    tolerance: float

    @property
    def steady(self) -> bool:
        """Whether a prefix's KV does not depend on what follows it."""
        return bool(GPUS) or self.shape is not model_shapes.MLA


def _case(shape: model_shapes.Shape, dtype: str, cache: str = "auto") -> Case:
    flags = ("--dtype", dtype, "--kv-cache-dtype", cache)
    if cache == "fp8":
        return Case(shape, flags, 1, 2e-2 if dtype == "float32" else 0.1)
    return Case(shape, flags, 4, 2e-3) if dtype == "float32" else Case(shape, flags, 2, 0.1)


SHAPES = {"dense": model_shapes.DENSE, "hybrid": model_shapes.HYBRID, "mla": model_shapes.MLA}
SHAPES["chunked"] = model_shapes.CHUNKED
SPARSE = ("hybrid", "chunked")  # vLLM frees blocks while a request runs, and the last token's with them
if GPUS:
    CASES = {f"{n}-{cache}": _case(s, "bfloat16", cache) for n, s in SHAPES.items() for cache in ("auto", "fp8")}
else:
    CASES = {
        "hybrid": _case(model_shapes.HYBRID, "float32"),
        "chunked": _case(model_shapes.CHUNKED, "float32"),
        "mla": _case(model_shapes.MLA, "float32"),
        "dense-fp8": _case(model_shapes.DENSE, "float32", "fp8"),
    }
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] if name == "dense-fp8" and not GPUS else []) for name in CASES]


class Pair(NamedTuple):
    case: Case
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module", params=PARAMS)
def pair(request, model_path, log_dir):
    """Prefill and decode engines of one kind; skipped where vLLM itself cannot start it, with its own words."""
    case = CASES[request.param]
    model = model_shapes.write(case.shape, log_dir / "models" / case.shape.name, model_path)

    def engine(name: str, kv: dict | None, gpu: int) -> Engine:
        gpus = GPUS[gpu : gpu + 1] or GPUS[:1]
        name = f"{request.param}-{name}"
        # Most GPU kernels of MLA know one block size.
        block = 64 if gpus and case.shape is model_shapes.MLA else None
        return Engine(model, name=name, kv=kv, gpus=gpus, block_size=block, args=case.flags, log_dir=log_dir)

    extra = {"bidirectional": True, "pull_threshold": 1, "retain_seconds": RETAIN_SECONDS, "handoff_seconds": 10}
    extra["store"] = "off"
    engines = [engine(n, kvtier({**extra, "endpoint_port": free_port()}), i) for i, n in enumerate("PD")]
    try:
        start_all(engines)
    except ServiceFailed as failure:
        plain = engine("plain", None, 0)
        try:
            with plain:
                pass
        except ServiceFailed as reason:
            pytest.skip(f"vLLM starts no {request.param} here: {_last_error(str(reason))}")
        raise failure  # without the connector it does start
    yield Pair(case, *engines)
    for engine in engines:
        engine.terminate()


def _last_error(story: str) -> str:
    errors = [line for line in story.splitlines() if "Error" in line]
    return (errors or story.splitlines())[0][-300:]


def _with_driver(test: Callable[[Pair, Driver], Awaitable[None]]) -> Callable[[Pair], None]:
    """On an event loop of its own: machines with GPUs need not have pytest-asyncio."""

    def run(pair: Pair) -> None:
        async def main() -> None:
            async with driving(pair.prefill) as driver:
                await test(pair, driver)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def _block(driver: Driver, engine: Engine) -> int:
    """Tokens a block, as the engine itself says: MLA backends have wishes of their own."""
    for block in (16, 32, 64, 128):
        if await driver.metric(engine, "vllm:cache_config_info", f'block_size="{block}"'):
            return block
    raise AssertionError("no block size in the metrics")


def _off(got: Reply, tokens: list[int], logprobs: list[float], tolerance: float) -> float:
    """Largest difference of logprobs, as far as the tokens are the same; they part only where two are as good."""
    worst = 0.0
    for a, b, x, y, best in zip(got.tokens, tokens, got.logprobs, logprobs, got.top, strict=True):
        if a != b:
            return worst if best[0] - best[1] < 2 * tolerance else float("inf")
        worst = max(worst, abs(x - y))
    return worst


async def _hand_off(driver: Driver, pair: Pair, prompt: list[int]) -> tuple[Reply, float]:
    """The decode engine's answer to ``prompt`` and the prefill engine's first token on it, and how far its logprobs are
    from the truth."""
    own = await driver.ask(pair.prefill, prompt, 1 + ANSWER)
    whole = prompt + own.tokens[:1]
    _, reply = await driver.hand_off(pair.prefill, pair.decode, whole, ANSWER)
    tokens, logprobs = own.tokens[1:], own.logprobs[1:]
    if not pair.case.steady:
        _, again = await driver.hand_off(pair.prefill, pair.decode, whole, ANSWER, cache_salt="again")
        tokens, logprobs = again.tokens, again.logprobs
    return reply, _off(reply, tokens, logprobs, pair.case.tolerance)


@_with_driver
async def test_prefill_of_any_length_is_pulled(pair, driver):
    """Of every length that matters: around a block's end, and where a block ends just before the window."""
    block = await _block(driver, pair.prefill)
    window = next((k.window or k.chunk for k in pair.case.shape.layers if k.window or k.chunk), 17)
    rng = random.Random(1)
    lengths = [2, block - 1, 2 * block + 5, 10 * block, 10 * block + 1, 10 * block + 2, 20 * block + 1]
    lengths += [10 * block + window - 1, 10 * block + window, 10 * block + window + 1]
    for length in lengths:
        before = await driver.metric(pair.decode, "vllm:kvtier_pulled_bytes_total")
        reply, off = await _hand_off(driver, pair, random_tokens(rng, length - 1))
        moved = await driver.metric(pair.decode, "vllm:kvtier_pulled_bytes_total") - before
        moved /= 1 if pair.case.steady else 2
        # With windows the last token is left out, which without is read and then computed again.
        pulled = length - 1 if pair.case.shape.name in SPARSE else length
        assert (reply.pulled, reply.report["local_tokens"]) == (pulled, 0), (length, reply.report)
        assert moved == pair.case.shape.pulled_bytes(pulled, block, pair.case.itemsize), (length, block)
        assert off < pair.case.tolerance, (length, off)
    await _assert_sound(driver, pair)


@_with_driver
async def test_different_kv_changes_the_answer(pair, driver):
    """Or all the rest proves nothing: the decode engine computes the same last token both times, on other KV."""
    rng = random.Random(2)
    for at in (0, 150):
        off = 0.0
        for _ in range(3):
            prompt, tail = random_tokens(rng, 200), random_tokens(rng, 8)
            _, one = await driver.hand_off(pair.prefill, pair.decode, prompt + tail, 1)
            prompt[at : at + 48] = random_tokens(rng, 48)
            _, other = await driver.hand_off(pair.prefill, pair.decode, prompt + tail, 1)
            assert min(one.pulled, other.pulled) > 48
            off = max(off, _off(other, one.tokens, one.logprobs, pair.case.tolerance))
        assert off > 3 * pair.case.tolerance, (at, off)


@_with_driver
async def test_concurrent_prefills_are_pulled(pair, driver):
    rng = random.Random(3)
    prompts = [random_tokens(rng, rng.randrange(40, 500)) for _ in range(6)]
    answers = await asyncio.gather(*(_hand_off(driver, pair, prompt) for prompt in prompts))
    for prompt, (reply, off) in zip(prompts, answers, strict=True):
        assert reply.pulled >= len(prompt), reply.report
        # Prompts that are computed together are, to an unsteady model, other prompts.
        assert off < pair.case.tolerance or not pair.case.steady, (len(prompt), off)
    await _assert_sound(driver, pair)


@_with_driver
async def test_next_turn_is_pulled_back_from_decode_engine(pair, driver):
    """The prefill engine lacks what the decode engine generated, and asks the decode engine for it by hash; the decode
    engine then needs only what is new."""
    block = await _block(driver, pair.prefill)
    rng = random.Random(4)
    # Answers that end a little behind a whole block; much further, and vLLM has given up what the prefill engine's
    # window reaches.
    for salt, length in (("a", 5 * block + 3), ("b", 5 * block + 10)):
        prompt = random_tokens(rng, length)
        first, answer = await driver.hand_off(pair.prefill, pair.decode, prompt, 3 * block, cache_salt=salt)
        longer = prompt + answer.tokens + random_tokens(rng, 20)
        sources = with_sources(pair.decode)
        second = await driver.prefill(pair.prefill, longer, sources, cache_salt=salt)
        held = (len(prompt) + 3 * block - 1) // block * block
        resumes = await _resumes(driver, pair)
        if resumes:
            assert second.report["local_tokens"] + second.pulled == held, second.report
            assert second.pulled >= 2 * block
        else:
            assert second.pulled == 0, "P's model cannot go on from a prefix, and would answer without it"
        reply = await driver.ask(pair.decode, longer, ANSWER, second.params, cache_salt=salt)
        assert reply.pulled > 0
        # Under another salt nothing is shared: computed from scratch, by a prefill where the decode engine made a
        # decode step.
        own = await driver.ask(pair.prefill, longer, ANSWER, cache_salt=f"fresh {salt}")
        rounding = pair.case.tolerance if pair.case.itemsize == 4 else 1.0
        assert _off(second, own.tokens[:1], own.logprobs[:1], rounding) <= rounding
        if resumes:
            assert _off(reply, own.tokens, own.logprobs, rounding) <= rounding
    await _assert_sound(driver, pair)


async def _resumes(driver: Driver, pair: Pair) -> bool:
    """On CPUs vLLM computes MLA prompts only in one piece, without a prefix cache."""
    caching = await driver.metric(pair.prefill, "vllm:cache_config_info", 'enable_prefix_caching="False"')
    return not (pair.case.shape.name == "mla" and caching)


@_with_driver
async def test_models_leave_no_lease_or_block(pair, driver):
    await driver.until_idle(pair.prefill, pair.decode, seconds=RETAIN_SECONDS + 10)


async def _assert_sound(driver: Driver, pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert await driver.metric(engine, "vllm:kvtier_integrity_failures_total") == 0
        assert await driver.metric(engine, "vllm:kvtier_pulls_total", 'kind="failed"') == 0


def test_test_models_stay_small_on_disk(log_dir, model_path):
    """They are written anew for each run."""
    for name, shape in SHAPES.items():
        directory: Path = model_shapes.write(shape, log_dir / "small" / name, model_path)
        assert sum(file.stat().st_size for file in directory.iterdir()) < 64 << 20
