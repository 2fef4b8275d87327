"""Engines of one node that share a store: A and B with the connector, and the session's S without.

The first of A and B starts the store in a runtime directory of this session. Its process has no parent here;
``NodeStore`` finds it by its socket, and stops, kills or pauses it for tests.
"""

import asyncio
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_client import Driver, Reply, assert_same, driving, random_tokens
from engine_fixtures import ENGINE_FLAGS, start_missing
from node_events import Follower, publishing
from store_support import RawClient, map_pool, tool_hello
from support import eventually, stop

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.scheduler.planner.load_planner import PROBE_EVERY
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import serves, store_path
from vllm_kvtier.store.memory.client_mapping import PoolMapping

STEP_TOKENS = 512  # long prompts are computed in several steps
ASK_TIMEOUT = 1.0
TRANSFER_TIMEOUT = 10.0
RETAIN_SECONDS = 1.5
# A token's KV in float32 takes 12 KiB, so a block of 32 tokens 97 pages of the store.
SLOT_PAGES = 97
STORE_SIZE = 384 << 20  # more than one PIECE; four times the engines' own caches
OPTIONS = {
    "store_size": STORE_SIZE,
    "store_idle_seconds": 60,
    "lookup_timeout": ASK_TIMEOUT,
    "handshake_timeout": 2.0,
    "transfer_timeout": TRANSFER_TIMEOUT,
    "bidirectional": True,
    "pull_threshold": 16,
    "handoff_seconds": 6.0,
    "retain_seconds": RETAIN_SECONDS,
    "retain_share": 0.2,
}
ASKED = {"kvtier": {}}  # params of a request that only wants to know where its KV came from


class NodeStore:
    """The store at ``path``, started by any process."""

    def __init__(self, path: str):
        self.path = path
        self._own: list[subprocess.Popen] = []

    def counts(self) -> m.Counts:
        with RawClient(self.path, tool_hello()) as tool:
            return tool.stat()

    def until_up(self, seconds: float = 30.0) -> m.Counts:
        """Serving, with all of its memory usable."""

        def up() -> m.Counts | None:
            with suppress(OSError, EOFError):
                counts = self.counts()
                return counts if counts.ready_bytes == counts.pool_bytes else None

        return eventually(up, seconds, f"a store serves {self.path}")

    def serve(self, *options: str, code: str = "") -> None:
        """Start one of this test's own; ``code`` runs before it. While ``alone``, no engine starts another. When it has
        ended, one does at once, as after a store that an engine has started."""
        run = f"import sys; {code or 'pass'}; from vllm_kvtier.store.__main__ import main; sys.exit(main())"
        reader, writer = os.pipe()
        always = ["--socket", self.path, "--log-level=warning", "--idle-seconds=0", f"--ready-fd={writer}"]
        self._own.append(subprocess.Popen([sys.executable, "-c", run, *always, *options], pass_fds=[writer]))
        os.close(reader)
        os.close(writer)
        eventually(lambda: Path(self.path).exists() and serves(self.path), 30)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Prevent engines from starting a store: each sees that another is starting it."""
        fd = os.open(f"{self.path}.start", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @property
    def pid(self) -> int:
        """The process that holds the store's lock; 0 if there is none."""
        with suppress(FileNotFoundError, ValueError):
            pid = int(Path(f"{self.path}.lock").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            return pid if b"vllm_kvtier.store" in command else 0
        return 0

    def processes(self) -> list[int]:
        """All that serve, or mean to serve, this path."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if b"--socket" in words and self.path.encode() in words:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL the store; returns when it is gone."""
        pid = self.pid
        if pid:
            os.kill(pid, signal.SIGKILL)
            for process in self._own:
                if process.pid == pid:
                    process.wait()
            eventually(lambda: self.pid != pid, 10)

    def pause(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def clear(self) -> None:
        with RawClient(self.path, tool_hello()) as tool:
            tool.ask(m.Clear(1))

    @contextmanager
    def memory(self) -> Iterator["Memory"]:
        mapping = map_pool(self.path)
        memory = Memory(mapping)
        try:
            yield memory
        finally:
            del memory.pages  # a view of it keeps the mapping
            mapping.close()


class Memory:
    """The pool that engines read. ``pages``: uint8[pages, PAGE]."""

    def __init__(self, mapping: PoolMapping):
        self.instance = mapping.instance
        self.pages = np.frombuffer(mapping.buffer, np.uint8).reshape(-1, m.PAGE)

    def written(self) -> set[int]:
        """Pages that hold anything, in a pool that was new: memory comes zeroed."""
        return set(np.flatnonzero(self.pages.any(axis=1)).tolist())

    def flip(self, rng: random.Random, page: int) -> tuple[int, int, int]:
        """Flip one bit of a byte that is not zero, hence not of padding. Returns it, for ``flip_back``."""
        at = rng.choice(np.flatnonzero(self.pages[page]).tolist() or [0])
        bit = 1 << rng.randrange(8)
        self.pages[page, at] ^= bit
        return page, at, bit

    def flip_back(self, flipped: tuple[int, int, int]) -> None:
        page, at, bit = flipped
        self.pages[page, at] ^= bit


class Node(NamedTuple):
    first: Engine  # "A": loads whatever the store has, however slow the machine is
    second: Engine  # "B": loads what is expected to arrive before it could be computed
    single: Engine  # "S", without a connector: what it answers greedily is right
    store: NodeStore
    truths: dict

    @property
    def engines(self) -> list[Engine]:
        return [self.first, self.second]


@contextmanager
def runtime_dir() -> Iterator[Path]:
    """Short, because the path of a Unix socket is; and killed with it is the store that serves in it."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    store = store_in(folder)
    try:
        yield folder
    finally:
        store.kill()
        shutil.rmtree(folder)


def store_in(folder: Path) -> NodeStore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        return NodeStore(store_path())


def events_of(store: NodeStore, name: str) -> str:
    """Where an engine of this name publishes its KV events. Their replay is at the name with ``-replay``."""
    return f"ipc://{Path(store.path).parent}/{name}"


def store_env(folder: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(folder), "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="session")
def node(model_path, log_dir, plain) -> Iterator[Node]:
    """Tests leave it as they found it: engines running, and a store serving that they use."""
    with runtime_dir() as folder:
        flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], "--max-num-batched-tokens", str(STEP_TOKENS))}

        store = store_in(folder)

        def engine(name: str, extra: dict) -> Engine:
            kv = kvtier({**OPTIONS, "endpoint_port": free_port(), **extra})
            args = (*flags["args"], *publishing(events_of(store, name), events_of(store, f"{name}-replay")))
            env, mine = store_env(folder), {**flags, "args": args}
            return Engine(model_path, name=f"node-{name}", kv=kv, log_dir=log_dir, env=env, **mine)

        engines = [engine("A", {"load_policy": "always", "sync_load_ms": 10_000}), engine("B", {})]
        start_missing([*engines, plain])
        yield Node(*engines, plain, store, {})
        kill_all(engines)


def wrong_checksums(counters: dict[str, float]) -> float:
    """Blocks that arrived wrong, from whomever. ``counters``: as ``NodeDriver.counters`` reads them."""
    return sum(value for name, value in counters.items() if name.startswith("integrity_failures"))


class NodeDriver(Driver):
    """Requests to engines that use a store; reference answers are requested once."""

    node: Node

    async def truth(self, prompt, max_tokens: int = 8, **body) -> Reply:
        key = tuple(prompt), max_tokens
        if key not in self.node.truths:
            self.node.truths[key] = await super().truth(prompt, max_tokens)
        return self.node.truths[key]

    async def asked(self, engine: Engine, prompt: list[int], max_tokens: int = 8, **body) -> Reply:
        """A right answer, with a report of where its KV came from."""
        reply = await self.ask(engine, prompt, max_tokens, ASKED, **body)
        assert_same(reply, await self.truth(prompt, max_tokens), f"{engine.name}, {len(prompt)} tokens, {reply.report}")
        return reply

    async def reset(self, engine: Engine, external: bool = False) -> None:
        """Reset vLLM's prefix cache; ``external``: and the connector's. vLLM refuses while a block is held."""
        url, params = f"{engine.base_url}/reset_prefix_cache", {"reset_external": external}

        async def done() -> bool:
            response = (await self._http.post(url, params=params)).raise_for_status()
            if response.content:
                return response.json()["success"]
            # 0.25.1 does not say; it does it when no block is held.
            inspection = await self.inspect(engine)
            if inspection.free_blocks != inspection.blocks - 1:
                return False
            (await self._http.post(url, params=params)).raise_for_status()
            return True

        await self.until(done, 25, f"{engine.name} resets its prefix cache")

    async def until_heard(self, engine: Engine, follower: Follower) -> None:
        """The subscription has arrived: what the engine publishes before, the follower does not get."""
        before = follower.heard

        async def heard() -> bool:
            await self.ask(engine, random_tokens(random.Random(os.urandom(8)), 40), 2)
            return follower.heard > before

        await self.until(heard, 30, f"{engine.name} publishes")

    async def stored(
        self, engine: Engine, prompt: list[int], tokens: int | None = None, salt: str = "", seconds: float = 30.0
    ) -> None:
        """The store has the prompt's whole blocks (or these ``tokens``), as this engine says."""
        tokens = len(prompt) // 32 * 32 if tokens is None else tokens

        async def enough() -> bool:
            return (await self.query(engine, prompt, salt)).stored >= tokens

        await self.until(enough, seconds, f"{tokens} of {len(prompt)} tokens are in the store")

    async def loaded(
        self, engine: Engine, prompt: list[int], max_tokens: int = 8, params: dict = ASKED, **body: Any
    ) -> Reply:
        """A right answer to a prompt that KV is loaded for. An engine that measures takes loads for slow where a busy
        machine makes them so, but tries one in so many nevertheless."""
        for _ in range(PROBE_EVERY + 1):
            reply = await self.ask(engine, prompt, max_tokens, params, **body)
            assert_same(reply, await self.truth(prompt, max_tokens), f"{engine.name}: {reply.report}")
            if reply.pulled:
                break
            await self.reset(engine)
        return reply

    async def uses_store(self, engine: Engine, seconds: float = 60.0) -> None:
        """The engine stores and loads again."""
        store, seen = self.node.store, 0

        async def again() -> bool:
            nonlocal seen
            seen += 1
            prompt = random_tokens(seeded(f"uses {engine.name} {seen} {store.pid}"), 100)
            await self.ask(engine, prompt, 1)
            with suppress(AssertionError):
                await self.stored(engine, prompt, seconds=1.0)  # a reset gives up what is not copied yet
            await self.reset(engine)
            return (await self.asked(engine, prompt, 1)).pulled > 0

        await self.until(again, seconds, f"{engine.name} uses the store again")

    async def kvtier(self, engine: Engine, name: str, kind: str = "") -> float:
        return await self.metric(engine, f"vllm:kvtier_{name}_total", f'kind="{kind}"' if kind else "")

    async def counters(self, engine: Engine) -> dict[str, float]:
        """All of ours that are not 0, for stories of what went wrong."""
        text = (await self._http.get(f"{engine.base_url}/metrics")).text
        found = re.findall(r'^vllm:kvtier_(\w+)_total\{.*?kind="(.*?)".*?\} ([\d.e+-]+)$', text, re.M)
        return {f"{name} {kind}".strip(): float(value) for name, kind, value in found}

    async def flushed(self, engine: Engine) -> None:
        """What was counted until now is in the metrics: counters leave with the next step."""
        await self.ask(engine, [300, 301], 1)

    async def nothing_left(self, *engines: Engine) -> m.Counts:
        """No block held, no copy under way, no lease, no reservation, and no slot that belongs to nothing."""
        await self.until_idle(*engines)
        for engine in engines:
            assert (await self.inspect(engine)).copying_blocks == 0

        async def quiet() -> m.Counts | None:
            counts = await asyncio.to_thread(self.node.store.counts)
            held = sum(c.leases + c.reservations for c in counts.clients)
            return counts if held == 0 else None

        counts = await self.until(quiet, 20, "no lease and no reservation in the store")
        index = counts.index
        assert (index.leases, index.leased_entries, index.reservations, index.pinned_entries) == (0, 0, 0, 0), index
        assert index.used_pages == index.entries * SLOT_PAGES, index
        return counts


def seeded(what: object) -> random.Random:
    return random.Random(f"node store {what}")


@pytest.fixture
async def nodes(node) -> AsyncIterator[NodeDriver]:
    async with driving(node.single, NodeDriver) as driver:
        driver.node = node
        yield driver
