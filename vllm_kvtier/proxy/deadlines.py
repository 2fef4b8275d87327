"""``async with time_limit(seconds)``: raises TimeoutError if its body takes longer.

asyncio's own where Python has it (3.11): 9 us where anyio's takes 21, twice for every piece of a stream.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

if sys.version_info >= (3, 11):
    time_limit = asyncio.timeout
else:

    @asynccontextmanager
    async def time_limit(seconds: float) -> AsyncIterator[None]:
        with anyio.fail_after(seconds):
            yield
