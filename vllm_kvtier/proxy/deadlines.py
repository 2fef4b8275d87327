"""``async with time_limit(seconds)``: raises TimeoutError if its body takes longer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

if sys.version_info >= (3, 11):
    time_limit = asyncio.timeout
else:
    import async_timeout  # comes with aiohttp there

    @asynccontextmanager
    async def time_limit(seconds: float) -> AsyncIterator[None]:
        try:
            async with async_timeout.timeout(seconds):
                yield
        except asyncio.TimeoutError as error:  # not yet Python's own TimeoutError
            raise TimeoutError from error
