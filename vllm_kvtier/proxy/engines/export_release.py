"""Release exports of prefill engines that no decode engine will pull."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.messages.transfer_params import Export

logger = get_logger(__name__)

ReleaseCall = Callable[[Export], Awaitable[None]]

_RELEASE_SECONDS = 5.0  # a release that is lost costs blocks until the export expires


class ExportReleaser:
    """Releases exports in the background, each within a deadline.

    A failure is harmless because the export expires at the engine. Only the first is logged as a warning.
    """

    def __init__(self, call: ReleaseCall):
        self._call = call
        self._under_way: set[asyncio.Task[None]] = set()
        self._warned = False
        self.released = 0

    def schedule(self, export: Export) -> None:
        """Start the release; returns at once, so that it can be called while a request is cancelled."""
        task = asyncio.create_task(self._release(export), name="release export")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _release(self, export: Export) -> None:
        try:
            async with time_limit(_RELEASE_SECONDS):
                await self._call(export)
            self.released += 1
        except Exception as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            logger.log(
                level,
                "kvtier: proxy: release of an export at %s:%d failed (%s: %s); the export expires later; "
                "more failures are logged at level debug",
                export.host,
                export.port,
                type(error).__name__,
                error,
            )

    async def aclose(self) -> None:
        """Wait for the releases under way; each has a deadline."""
        if self._under_way:
            await asyncio.wait(self._under_way)
