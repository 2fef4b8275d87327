"""Requests that decode while something else is measured: the time between their tokens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from tiers import JSON, PeerFailed


class Decodes:
    """Requests that decode until stopped, with the time of each of their tokens."""

    def __init__(self, client: httpx.Client, bodies: list[bytes]):
        """``bodies``: of streamed completions, one a request."""
        self._client, self._stop = client, threading.Event()
        self.times: list[list[float]] = [[] for _ in bodies]
        self._pool = ThreadPoolExecutor(len(bodies))
        self._done = [self._pool.submit(self._read, *each) for each in zip(self.times, bodies, strict=True)]

    def _read(self, times: list[float], body: bytes) -> None:
        with self._client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if self._stop.is_set():
                    return  # closes the connection: vLLM aborts the request

    def flowing(self) -> None:
        """Until each has given a few tokens."""
        while min(map(len, self.times)) < 8:
            for done in self._done:
                if done.done():
                    done.result()
                    raise PeerFailed("a decode ended early: too few tokens asked for?")
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        for done in self._done:
            done.result()
        self._pool.shutdown()

    def gaps(self, inside: list[tuple[float, float]] | None = None, outside: bool = False) -> list[float]:
        """Between consecutive tokens; only those that touch one of the spans, or none of them."""
        found = []
        for times in self.times:
            for a, b in zip(times[4:], times[5:], strict=False):
                touches = any(a < end and b > begin for begin, end in inside or [])
                if inside is None or touches != outside:
                    found.append((b - a) * 1000)
        return found
