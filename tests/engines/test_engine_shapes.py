"""Prefill and decode engines of unequal tensor parallel size: hand-offs and conversations both ways, by each path, with
deaths and flipped bits. Equal answers, and nothing leaks.

Not part of a normal run (``-m slow``): two ranks more than there are cores.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import model_shapes
import pytest
import tiny_models
from engine_client import Driver, driving, random_tokens, with_sources
from engine_fixtures import ENGINE_FLAGS, SHORT, TESTS_ON_PATH, start_missing
from faults import VARIABLE, FaultFile
from test_cache_kinds_engines import KINDS
from test_node_store_models import off

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

pytestmark = pytest.mark.slow
BLOCK = 32
TOLERANCE = 5e-3  # of logprobs of the models with random weights
LENGTHS = (33, 161, 200, 700, 1900)  # all but one with a partial last block


class Shapes(NamedTuple):
    one: Engine
    two: Engine  # of two ranks
    path: str  # that pulls take: "mapped" or "staged"
    faults: dict[str, FaultFile]


@pytest.fixture(scope="module", params=["mapped", "staged"])
def engines(request, model_path, log_dir, plain) -> Iterator[Shapes]:
    made, faults = [], {}
    pulls = {"mapped": "auto", "staged": "nixl"}[request.param]  # pages of other heads are never read as they lie
    for name, ranks in (("one", 1), ("two", 2)):
        name = f"{request.param}-{name}"
        faults[name] = FaultFile(log_dir / f"{name}.faults")
        # Two ranks and their peer on two cores: an answer may take long.
        extra = {**SHORT, "endpoint_port": free_port(), "same_node_pulls": pulls, "lookup_timeout": 5.0}
        kv = {**kvtier(extra), "kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
        env = {**TESTS_ON_PATH, VARIABLE: str(log_dir / f"{name}.faults")}
        made.append(
            Engine(model_path, name=name, kv=kv, tensor_parallel=ranks, log_dir=log_dir, env=env, **ENGINE_FLAGS)
        )
    start_missing([*made, plain])
    yield Shapes(*made, request.param, faults)
    kill_all(made)


@pytest.fixture
async def shapes(engines, plain) -> AsyncIterator[tuple[Shapes, Driver]]:
    start_missing(engines[:2])
    async with driving(plain) as driver:
        yield engines, driver
        for faults in engines.faults.values():
            faults.set()
        await driver.until_idle(*engines[:2], seconds=25)
        for engine in engines[:2]:
            inspection = await driver.inspect(engine)
            assert (inspection.violations, inspection.leases, inspection.held_leases) == (0, 0, 0), inspection


async def transfers(driver: Driver, engine: Engine, path: str, kind: str = "ok") -> float:
    """Ended copies from mapped memory, or pulls by NIXL, of this engine; and that there are none of the other path."""
    await driver.ask(engine, [300, 301], 1)  # counters leave with the next step
    names = ["vllm:kvtier_fetches_total", "vllm:kvtier_pulls_total"]
    mine, other = names if path == "mapped" else reversed(names)
    assert await driver.metric(engine, other) == 0
    return await driver.metric(engine, mine, f'kind="{kind}"')


async def failures(driver: Driver, engine: Engine) -> float:
    await driver.ask(engine, [300, 301], 1)
    return await driver.metric(engine, "vllm:kvtier_integrity_failures_total")


async def handed_off(driver: Driver, p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    """A hand-off that is pulled whole, partial last block included; the answer's tokens."""
    _, reply = await driver.hand_off(p, d, prompt, 40)
    assert (reply.pulled, reply.report["pulled_from"]) == (len(prompt), p.kv_address), reply.report
    await driver.assert_right(reply, prompt, (p.name, d.name, len(prompt)))
    return reply.tokens


async def test_handoff_and_next_turn_between_unequal_sizes(shapes):
    engines, driver = shapes
    for p, d in ((engines.one, engines.two), (engines.two, engines.one)):
        before = await transfers(driver, d, engines.path)
        for length in LENGTHS:
            prompt = random_tokens(random.Random(f"{p.name} {length}"), length)
            answer = await handed_off(driver, p, d, prompt)
            # The next turn: the prefill engine pulls what the decode engine generated, and what it has of the prompt by
            # then.
            longer = prompt + answer + random_tokens(random.Random(length), 30)
            reply = await driver.prefill(p, longer, with_sources(d))
            held = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
            assert reply.report["local_tokens"] + reply.pulled == held and reply.pulled >= BLOCK, reply.report
            await driver.assert_right(reply, longer, (p.name, d.name, length))
        assert await transfers(driver, d, engines.path) == before + len(LENGTHS)
        assert await failures(driver, d) == await failures(driver, p) == 0


@pytest.mark.parametrize("kind, pulls", [("hybrid", "auto"), ("hybrid", "nixl"), ("mla", "auto")])
async def test_handoff_of_other_kinds_of_cache_between_unequal_sizes(make_engine, model_path, log_dir, kind, pulls):
    """Windows: several groups, and blocks that are not there. MLA: ranks hold the same, so NIXL reads it as it lies."""
    shape = {"hybrid": model_shapes.HYBRID, "mla": model_shapes.MLA}[kind]
    model = model_shapes.write(shape, log_dir / "models" / kind, model_path)
    extra = {**SHORT, "lookup_timeout": 5.0, "same_node_pulls": pulls, "pull_threshold": 1}
    flags = {"model": model, "args": ("--dtype", "float32")}
    one = make_engine("one", extra, **flags)
    two = make_engine("two", extra, tensor_parallel=2, **flags)
    start_missing([one, two])
    async with driving(one) as driver:
        for p, d in ((one, two), (two, one)):
            for length in (33, 200, 391):
                prompt = random_tokens(random.Random(f"{kind} {p.name} {length}"), length)
                answers = [(await driver.hand_off(p, d, prompt, 6, cache_salt=salt))[1] for salt in ("a", "b")]
                # With windows the last token is left out, which without is read and then computed again.
                pulled = length - 1 if kind == "hybrid" else length
                assert [reply.pulled for reply in answers] == [pulled] * 2, answers[0].report
                if kind == "hybrid":  # see ``test_models`` for MLA on CPUs
                    answers.append(await driver.ask(p, prompt, 6, cache_salt="fresh"))
                for other in answers[1:]:
                    assert off(answers[0], other, TOLERANCE) < TOLERANCE, (p.name, length)
            path = {("hybrid", "auto"): "mapped"}.get((kind, pulls), "staged")
            assert await transfers(driver, d, path) == 6 and await failures(driver, d) == 0
        await driver.until_idle(one, two)


@pytest.mark.parametrize("pulls", ["auto", "nixl"])
@pytest.mark.parametrize(
    ("kind", "block", "args"), [("gdn", 640, ("--dtype", "bfloat16")), ("mamba2", 384, KINDS["mamba2"].flags)]
)
async def test_handoff_of_states_between_unequal_sizes(make_engine, model_path, log_dir, kind, block, args, pulls):
    """Each rank has the states of its own heads. Short convolutions: the tiny model has one head of attention, which
    vLLM does not divide, see ``test_state_slices``."""
    rounding = KINDS[kind].rounding
    model = tiny_models.build(kind, log_dir / "models" / f"{kind}-{pulls}", model_path)
    extra = {**SHORT, "lookup_timeout": 10.0, "handshake_timeout": 10.0, "handoff_seconds": 30.0, "lease_seconds": 10.0}
    extra |= {"same_node_pulls": pulls, "pull_threshold": 1}
    flags = {"model": model, "block_size": block, "args": args}
    one = make_engine("one", extra, **flags)
    two = make_engine("two", extra, tensor_parallel=2, **flags)
    start_missing([one, two])
    async with driving(one) as driver:
        for p, d in ((one, two), (two, one)):
            for length in (block // 2, block + 30, 2 * block + 1):
                prompt = random_tokens(random.Random(f"{kind} {p.name} {length}"), length)
                _, reply = await driver.hand_off(p, d, prompt, 8, cache_salt="a")
                assert reply.pulled == length - 1, reply.report
                want = await driver.ask(d, prompt, 8, cache_salt="b")
                assert off(reply, want, rounding) < rounding, (p.name, length)
            path = {"auto": "mapped", "nixl": "staged"}[pulls]
            assert await transfers(driver, d, path) == 3 and await failures(driver, d) == 0
        await driver.until_idle(one, two)


async def test_many_handoffs_at_once_between_unequal_sizes(shapes):
    engines, driver = shapes
    rng = random.Random("at once")
    pairs = [(engines.one, engines.two), (engines.two, engines.one)]
    prompts = [random_tokens(rng, rng.randrange(40, 600)) for _ in range(8)]
    for prompt in prompts:
        await driver.truth(prompt, 40)
    await asyncio.gather(*(handed_off(driver, *pairs[n % 2], prompt) for n, prompt in enumerate(prompts)))


@pytest.mark.parametrize("kind", ["pages", "checksums"])
async def test_flipped_bit_in_unequal_source_is_recomputed(shapes, kind):
    engines, driver = shapes
    for p, d in ((engines.one, engines.two), (engines.two, engines.one)):
        faults = engines.faults[p.name]
        before, flips = await failures(driver, d), faults.happened(kind)
        faults.set(corrupt=kind)
        prompt = random_tokens(random.Random(f"{kind} {p.name}"), 333)
        _, reply = await driver.hand_off(p, d, prompt, 8)
        faults.set()
        assert faults.happened(kind) > flips and reply.pulled < len(prompt), reply.report
        await driver.assert_right(reply, prompt, (kind, p.name))
        assert await failures(driver, d) > before


@pytest.mark.parametrize("victim", ["source", "reader"])
async def test_death_during_pull_between_unequal_sizes(shapes, victim):
    engines, driver = shapes
    for p, d in ((engines.one, engines.two), (engines.two, engines.one)):
        prompt = random_tokens(random.Random(f"{victim} {p.name}"), 1500)
        prefilled = await driver.prefill(p, prompt)
        if engines.path == "staged":
            engines.faults[d.name].set(hold_after=True)  # the reads are under way until one dies
        asked = asyncio.create_task(driver.ask(d, prompt, 8, prefilled.params))
        await asyncio.sleep(0.1)
        dead, other = (p, d) if victim == "source" else (d, p)
        dead.kill()
        engines.faults[d.name].set()
        if victim == "source":
            await driver.assert_right(await asyncio.wait_for(asked, 60), prompt)
        else:
            await asyncio.gather(asked, return_exceptions=True)
        await driver.assert_right(await driver.ask(other, prompt, 8), prompt)
        start_missing([dead])
        await handed_off(driver, p, d, random_tokens(random.Random(f"after {victim} {p.name}"), 300))


async def test_client_leaving_during_pull_between_unequal_sizes(shapes):
    engines, driver = shapes
    rng = random.Random("leaving")
    for p, d in ((engines.one, engines.two), (engines.two, engines.one)):
        for after in (0.0, 0.02, 0.1):
            prompt = random_tokens(rng, 1500)
            prefilled = await driver.prefill(p, prompt)
            await driver.disconnect(d, prompt, after, prefilled.params)
        await handed_off(driver, p, d, random_tokens(rng, 300))
