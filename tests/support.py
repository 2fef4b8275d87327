"""Waiting for other threads, and fakes of vLLM's objects that the scheduler connector uses."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import Phase

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters

# Where all of an example follows from one seed, a smaller seed is no simpler example.
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


class Uncontained(Containment):
    """Does not contain exceptions, so that an unexpected one fails the test."""

    def __init__(self) -> None:
        super().__init__(Counters())

    def failed(self, where: str) -> None:
        raise  # noqa: PLE0704 - it is called where an exception is handled


def eventually(predicate: Callable[[], Any], seconds: float = 10.0, what: str = "") -> Any:
    """The first true value of ``predicate``; fails after ``seconds``. For state that another thread changes."""
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or predicate}"
        time.sleep(0.002)


def descriptors() -> Counter[str]:
    """What this process's open descriptors lead to. ``descriptors() <= before``: nothing opened since is left; what
    other threads close meanwhile does not matter."""
    links: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links[os.readlink(f"/proc/self/fd/{name}")] += 1
    return links


def descriptors_of_processes() -> int:
    """How many descriptors of processes this process has open."""
    return sum(count for link, count in descriptors().items() if "pidfd" in link)


def stop(pid: int) -> None:
    """SIGSTOP. Returns when all threads stand still: where cores are busy they go on until the first has a turn."""
    os.kill(pid, signal.SIGSTOP)

    def still() -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:
            return False  # a thread ended meanwhile
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    eventually(still, what=f"process {pid} stands still")


def interruptible() -> None:
    """``preexec_fn`` of a process that is to be sent SIGINT or SIGHUP: what a shell starts in the background, or nohup,
    ignores them, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Clock:
    """A clock that the test moves."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def step_output(scheduled: dict[str, int], new: Iterable[tuple] = (), cached: Iterable[tuple] = ()) -> SimpleNamespace:
    """What of a SchedulerOutput tells of tables. ``scheduled``: tokens by request. ``new``: (request, block ids of each
    group, tokens computed) of those that the runner does not know; ``cached``: (request, new block ids of each group,
    tokens computed, whether it was preempted) of those that it does."""
    cached = list(cached)
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=n, block_ids=b, num_computed_tokens=c) for n, b, c in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[c[0] for c in cached],
            new_block_ids=[c[1] if any(c[1]) else None for c in cached],
            num_computed_tokens=[c[2] for c in cached],
            resumed_req_ids={c[0] for c in cached if c[3]},
        ),
        num_scheduled_tokens=scheduled,
    )


class FakeBlock:
    def __init__(self, pool: "FakePool", block_id: int):
        self._pool, self.block_id, self.ref_cnt = pool, block_id, 0

    @property
    def block_hash(self) -> bytes | None:
        """As vLLM has it: the hash and the group it is cached for."""
        keys = (key for key, block in self._pool.cached.items() if block == self.block_id)
        return next((block_hash + group.to_bytes(4, "big") for block_hash, group in keys), None)


class FakePool:
    """vLLM's ``BlockPool`` as far as it is used here, with reference counts that must never go below zero."""

    def __init__(self, num_blocks: int, hash_block_size: int):
        self.hash_block_size, self.num_gpu_blocks = hash_block_size, num_blocks
        self.blocks = [FakeBlock(self, i) for i in range(num_blocks)]
        self.cached: dict[tuple[bytes, int], int] = {}  # (hash, group) -> block id
        self.oldest = dict.fromkeys(range(1, num_blocks))  # free ids as vLLM hands them out: longest free first

    def touch(self, blocks) -> None:
        for block in blocks:
            assert block.block_id, "the null block is never pinned"
            block.ref_cnt += 1
            self.oldest.pop(block.block_id, None)

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed more often than it was taken"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.oldest[block.block_id] = None

    def free_ids(self) -> list[int]:
        return [b.block_id for b in self.blocks if b.ref_cnt == 0 and b.block_id]

    def get_num_free_blocks(self) -> int:
        return len(self.free_ids())

    def get_cached_block(self, block_hash: bytes, groups: list[int]):
        found = [self.cached.get((bytes(block_hash), g)) for g in groups]
        return None if None in found else [self.blocks[i] for i in found]

    def take(self, block_id: int) -> int:
        """Hand a free block out anew: what it cached is evicted."""
        block = self.blocks[block_id]
        assert block.ref_cnt == 0
        block.ref_cnt = 1
        self.oldest.pop(block_id, None)
        for key in [k for k, b in self.cached.items() if b == block_id]:
            del self.cached[key]
        return block_id


@cache
def _hasher(hash_block_size: int):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name("sha256_cbor")
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(hash_block_size, function)


def make_request(
    request_id: str, tokens: list[int], hash_block_size: int, params: dict | None = None, salt: str | None = None,
    media: list | None = None,
):  # fmt: skip
    """A real vLLM request with its block hashes. ``media``: vLLM's MultiModalFeatureSpec of each."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=64, extra_args={"kv_transfer_params": params} if params else None)
    fields = dict(cache_salt=salt, block_hasher=_hasher(hash_block_size), arrival_time=0.0, mm_features=media)
    return Request(request_id, list(tokens), sampling, None, **fields)
