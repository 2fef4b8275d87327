"""Whether the client itself is the bottleneck: how late its event loop is, and how busy its process.

Every answer's events are stamped by one loop; what it is late by is the most that our own work has put into a
measured time. ``floor.py`` is the other test of it: the same load on a server whose times are known.
"""

import asyncio
import time
from contextlib import suppress

from .stats import percentiles

TICK_SECONDS = 0.005


class Meters:
    """``async with Meters() as meters: ...; meters.result()``"""

    def __init__(self) -> None:
        self._late: list[float] = []
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

    def result(self) -> dict:
        """``busy``: processor time as a share of the time that passed; ``late_ms``: of the loop."""
        return {
            "busy": round(self._cpu / self._wall, 3) if self._wall else 0.0,
            "late_ms": percentiles(self._late, scale=1000.0, digits=2) if self._late else None,
        }
