"""Blocking requests on threads, and many blocks a few at a time, for ``object_mover``."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_kvtier.store.lower.objects.clients import Trouble
from vllm_kvtier.store.lower.runner import Host

Done = Callable[[Trouble | None], None]


class Hands:
    """Threads that make blocking calls; what comes of it is told on the reactor's thread."""

    def __init__(self, host: Host, count: int, name: str):
        self._host, self._closed = host, False
        self._threads = ThreadPoolExecutor(count, f"kvtier-{name}")

    def do(self, call: Callable[[], object], done: Callable[[object], None]) -> None:
        """``done(what call returned, or the Trouble that it raised)``; anything else that it raises ends the mover,
        with its class and nothing else in words: its text may be a library's, with who knows what in it."""

        def told() -> None:
            try:
                result = call()
            except Trouble as trouble:
                result = trouble
            except Exception as error:
                self._host.fail(f"a fault in a request: {type(error).__name__}")
                return
            self._host.reactor.call_soon(self._host.guard(lambda: self._closed or done(result)))

        if not self._closed:
            self._threads.submit(told)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class Job:
    """``count`` blocks to move. ``start(i, done)`` begins with block i; ``over(troubles)`` is called once, when none
    is under way any more: None for what is moved, by block. After a trouble no further block is begun: what follows
    a missing block of a chain is of no use, and a server that has failed would have us wait for each."""

    def __init__(self, count: int, start: Callable[[int, Done], None], over: Callable[[list[Trouble | None]], None]):
        self.waiting = deque(range(count))
        self.under_way = 0
        self._troubles: list[Trouble | None] = [None] * count
        self._start, self._over = start, over

    def start_next(self, ended: Callable[[], None]) -> None:
        i = self.waiting.popleft()
        self.under_way += 1

        def done(trouble: Trouble | None) -> None:
            self._troubles[i] = trouble
            self.under_way -= 1
            while trouble is not None and self.waiting:
                self._troubles[self.waiting.popleft()] = trouble
            ended()

        self._start(i, done)

    def settle(self) -> bool:
        if self.waiting or self.under_way:
            return False
        over, self._over = self._over, None
        if over is not None:
            over(self._troubles)
        return True


class Lane:
    """Jobs share ``width``: so many blocks are under way, one of each job in turn, that no short job waits for long
    ones."""

    def __init__(self, width: int):
        self._free, self._jobs = width, deque()

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self.go_on()

    def go_on(self) -> None:
        for job in list(self._jobs):
            if job.settle():
                self._jobs.remove(job)
        while self._free and (job := next((job for job in self._jobs if job.waiting), None)) is not None:
            self._jobs.remove(job)
            self._jobs.append(job)
            self._free -= 1
            job.start_next(self._ended)

    def _ended(self) -> None:
        self._free += 1
        self.go_on()


class Presence:
    """Which objects are there, as seen lately: at most ``limit`` of them, each believed for its time (seconds)."""

    def __init__(self, limit: int, there_seconds: float, absent_seconds: float, clock=time.monotonic):
        self._limit, self._clock = limit, clock
        self._seconds = {True: there_seconds, False: absent_seconds}
        self._seen: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    def get(self, key: str) -> bool | None:
        """None: not known, or no longer."""
        there, until = self._seen.get(key, (None, 0.0))
        return there if there is not None and self._clock() < until else None

    def saw(self, key: str, there: bool) -> None:
        self._seen.pop(key, None)
        self._seen[key] = there, self._clock() + self._seconds[there]
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def __len__(self) -> int:
        return len(self._seen)
