"""kv_transfer_params come from clients: whatever they say, the engine lives and answers right."""

import asyncio
import random
from typing import Any

import msgspec
from engine_client import PREFILL, Refused, random_tokens, with_sources
from engine_fixtures import RETAIN_SECONDS

from vllm_kvtier.devtools.processes import free_port

NAMES = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "transfer_mode",
    "kv_hint",
    "remote_decoder",
    "remote_kv_source",
    "remote_prefiller",
    "kvtier",
    "",
    "\ud800",
)
OWN_NAMES = ("v", "engine_id", "instance", "export", "num_tokens", "digest", "expires_in", "sources")
# No name that a resolver would be asked for: what is wrong must be wrong at once, without a network.
HOSTS = ("127.0.0.1", "127.0.0.1:9", "*", "a;b", "/tmp/x", "[::1]", "::1", "%", "-", "\x00", "\ud800", "", "x" * 300)


def junk(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(9 if depth < 4 else 7):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice((0, 1, -1, 31, 65535, 65536, 2**31, 2**63, 2**64, -(2**63), 10**40))
        case 2:
            return rng.choice((0.0, -0.5, 1e308, 1e-308))
        case 3:
            return rng.choice(("", "a", "0", "true", "\x00", "\ud800", "é" * 40, "x" * 600, "00" * 16, "zz"))
        case 4 | 5 | 6:
            return rng.choice((*HOSTS, 0, None))
        case 7:
            return [junk(rng, depth + 1) for _ in range(rng.randrange(6))]
        case _:
            names = rng.sample((*NAMES, *OWN_NAMES), rng.randrange(5))
            return {name: junk(rng, depth + 1) for name in names}


def nested(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"kvtier": value, "sources": [value]} if i < 8 else {"kvtier": value}
    return value


def spoil(rng: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    """Genuine params with some fields replaced, at the top or among our own."""
    params = {**params, "kvtier": {**(params.get("kvtier") or {})}}
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            params[rng.choice(NAMES)] = junk(rng)
        elif isinstance(params.get("kvtier"), dict):
            params["kvtier"][rng.choice(OWN_NAMES)] = junk(rng)
    return params


def carried(params: dict[str, Any]) -> bool:
    try:
        msgspec.msgpack.encode(params)
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


async def test_any_kv_transfer_params_leave_engines_running_and_correct(fleet, driver):
    rng = random.Random("params")
    prompts = [random_tokens(rng, n) for n in (20, 33, 64, 90)]
    wants = [await driver.truth(prompt, 2) for prompt in prompts]
    limit, refused = asyncio.Semaphore(6), []
    address = {"remote_host": "127.0.0.1", "remote_port": int(fleet.prefill.kv_address.rsplit(":", 1)[1])}
    closed = {"remote_host": "127.0.0.1", "remote_port": free_port()}
    handmade = [
        {"do_remote_prefill": True, **address},  # no export
        {"do_remote_prefill": True, **address, "remote_request_id": "kvtier/never was"},
        {"do_remote_prefill": True, **closed, "remote_request_id": "kvtier/no such request"},
        {"do_remote_prefill": True, "do_remote_decode": True, **address, "remote_request_id": "kvtier/both"},
        {"do_remote_decode": True, **address, "remote_request_id": "kvtier/me"},  # names itself
        {"do_remote_decode": True, "kvtier": {"sources": [{"host": "127.0.0.1", "port": free_port()}] * 50}},
        {"do_remote_decode": True, "kvtier": nested(60)},
        {"kvtier": nested(200)},
        {},
    ]

    async def one(number: int) -> None:
        async with limit:
            prompt, want = prompts[number % len(prompts)], wants[number % len(prompts)]
            engine = rng.choice(fleet[:2])
            if number < 2 * len(handmade):
                params = handmade[number // 2]
            else:
                genuine = rng.choice((PREFILL, with_sources(fleet.decode), await offered(prompt)))
                params = spoil(rng, genuine)
            try:
                reply = await asyncio.wait_for(driver.ask(engine, prompt, 2, params), 20)
            except Refused as refusal:
                # What vLLM's server cannot carry to its engine (msgpack has no such value) it answers with 500 itself.
                assert 400 <= refusal.status < 500 or not carried(params), f"{refusal} for {params}"
                refused.append(refusal)
            else:
                assert reply.tokens == want.tokens, params

    async def offered(prompt: list[int]) -> dict[str, Any]:
        return (await driver.prefill(fleet.prefill, prompt)).params

    await asyncio.gather(*(one(number) for number in range(140)))
    assert len(refused) < 50, f"most params should reach the connector: {refused[0]}"
    assert fleet.prefill.running and fleet.decode.running
    fresh = random_tokens(rng, 100)
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, fresh)
    assert reply.pulled == 100
    await driver.assert_right(reply, fresh)
    await driver.until_idle(fleet.prefill, fleet.decode, seconds=RETAIN_SECONDS + 5.0)
