"""Names of engines in DNS, which may not answer: then their last addresses stay valid.

Connections are new every few seconds, and all engines would be unavailable.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiohttp

_WAIT_SECONDS = 0.5  # for an answer, before the last one is used; a health probe has few seconds
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)


class _Lookups:
    """The methods of a loop that look up names, in threads of their own: while DNS does not answer, each lookup keeps
    one for up to 40 s, and those of the loop are few, for reloads, too."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(32, "kvtier names")

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> list:
        return await self._run(partial(socket.getaddrinfo, host, port, **options))

    async def getnameinfo(self, address: tuple, flags: int) -> tuple[str, str]:
        return await self._run(partial(socket.getnameinfo, address, flags))

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


_LOOKUPS: Any = _Lookups()


class Resolver(aiohttp.ThreadedResolver):
    """A name without known addresses is waited for, at most ``seconds()``. One that DNS does not have any more is no
    address."""

    def __init__(self, seconds: Callable[[], float]):
        super().__init__(_LOOKUPS)
        self._seconds = seconds
        self._known: dict[tuple, list] = {}
        self._asking: dict[tuple, tuple[asyncio.Task[list], float]] = {}  # and since when

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list:
        name = host, port, family
        if name not in self._asking:
            task = asyncio.create_task(self._ask(name), name=f"resolve {host}")
            task.add_done_callback(lambda task: self._end(name, task))
            self._asking[name] = task, time.monotonic()
        task, began = self._asking[name]
        limit = self._seconds()
        if name in self._known:
            limit = min(limit, max(0.0, began + _WAIT_SECONDS - time.monotonic()))
        await asyncio.wait([task], timeout=limit)
        if name in self._known:
            return self._known[name]
        if not task.done():
            raise TimeoutError(f"DNS does not answer for {host}")
        return task.result()

    async def _ask(self, name: tuple) -> list:
        try:
            self._known[name] = await super().resolve(*name)
        except OSError as error:
            if error.errno in _NO_ADDRESS:
                self._known.pop(name, None)
            raise
        return self._known[name]

    def _end(self, name: tuple, task: asyncio.Task[list]) -> None:
        del self._asking[name]
        if not task.cancelled():
            task.exception()  # calls that wait for it raise it

    async def close(self) -> None:
        tasks = [task for task, _ in self._asking.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
