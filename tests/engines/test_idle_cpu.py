"""No thread spins while nothing is under way."""

import asyncio
import random
import time

from engine_client import random_tokens
from engine_fixtures import RETAIN_SECONDS

SECONDS = 10.0


async def test_idle_engine_uses_no_more_cpu_than_without_connector(fleet, driver):
    """To a hundredth of a core, once it pulled, was pulled from, and holds nothing any more."""
    rng = random.Random("idle")
    for _ in range(3):
        prompt = random_tokens(rng, 500)
        _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt)
        assert reply.pulled == 500
        await driver.truth(prompt)
    await driver.until_idle(fleet.prefill, fleet.decode, seconds=RETAIN_SECONDS + 5.0)
    before, began = [engine.cpu_seconds() for engine in fleet], time.monotonic()
    await asyncio.sleep(SECONDS)  # the measurement itself
    seconds = time.monotonic() - began
    p, d, s = (
        (engine.cpu_seconds() - was) / seconds for engine, was in zip(fleet, before, strict=True)
    )
    assert p - s < 0.01 and d - s < 0.01, f"cores used while idle: P {p:.4f}, D {d:.4f}, without connector {s:.4f}"
