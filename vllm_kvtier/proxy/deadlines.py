"""``async with time_limit(seconds)``: raises TimeoutError if its body takes longer."""

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
        except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
            raise TimeoutError from error
