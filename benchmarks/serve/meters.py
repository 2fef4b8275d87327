"""Whether the client itself is the bottleneck: how late its event loop is, and how busy its process; and how fast
this machine's cores are meanwhile, which on a shared one is not the same from one pass to the next.

Every answer's events are stamped by one loop; what it is late by is the most that our own work has put into a
measured time. ``floor.py`` is the other test of it: the same load on a server whose times are known.
"""

import asyncio
import time
from contextlib import suppress

from .stats import percentiles

TICK_SECONDS = 0.005
CORE_EVERY = 100  # ticks between two looks at how fast a core is
CORE_LOOP = 2000  # rounds of Python's that a look takes: some 0.1 ms


class Meters:
    """``async with Meters() as meters: ...; meters.result()``"""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._loops: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._wall = self._cpu = 0.0

    async def __aenter__(self) -> "Meters":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._late.append(max(0.0, time.perf_counter() - due))
            if len(self._late) % CORE_EVERY == 1:
                self._loops.append(_loop())

    def result(self) -> dict:
        """``busy``: processor time as a share of the time that passed; ``late_ms``: of the event loop; ``core_us``:
        processor time of a fixed piece of Python."""
        return {
            "busy": round(self._cpu / self._wall, 3) if self._wall else 0.0,
            "late_ms": percentiles(self._late, scale=1000.0, digits=2) if self._late else None,
            "core_us": percentiles(self._loops, scale=1e6, digits=1) if self._loops else None,
        }


def _loop() -> float:
    began, x = time.thread_time(), 0
    for i in range(CORE_LOOP):
        x += i * i % 7
    return time.thread_time() - began
