"""vLLM's own publisher of KV events in this process, for the proxy's tests, and events of prompts."""

import contextlib
import hashlib
import time
from collections.abc import Iterator

import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from vllm_kvtier.devtools.processes import free_port

BLOCK = 4


def hashes(tokens: list[int], salt: str = "salt", seed: str = "seed") -> list[bytes]:
    """Hashes of a prompt's blocks, as an engine of this seed makes them."""
    found, parent = [], f"{seed}/{salt}".encode()
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(parent + repr(tokens[i : i + BLOCK]).encode()).digest()
        found.append(parent)
    return found


def stored(
    tokens: list[int],
    begin: int = 0,
    medium: str = "GPU",
    salt: str = "salt",
    seed: str = "seed",
    lora: str | None = None,
    **more,
) -> BlockStored:
    """The prompt's blocks from number ``begin``."""
    all_hashes = hashes(tokens, f"{lora}{salt}" if lora else salt, seed)
    adapter = (lora,) if lora else ()
    extra = [(*adapter, salt), *[adapter or None] * (len(all_hashes) - 1)]
    return BlockStored(
        block_hashes=all_hashes[begin:],
        parent_block_hash=all_hashes[begin - 1] if begin else None,
        token_ids=tokens[begin * BLOCK : len(all_hashes) * BLOCK],
        block_size=BLOCK,
        lora_id=None,
        medium=medium,
        lora_name=lora,
        extra_keys=extra[begin:],
        **{"group_idx": 0} | more,
    )


def removed(tokens: list[int], begin: int = 0, medium: str = "GPU", seed: str = "seed", **more) -> BlockRemoved:
    return BlockRemoved(hashes(tokens, seed=seed)[begin:], medium, **{"group_idx": 0} | more)


CLEARED = AllBlocksCleared()


class Publisher:
    """An engine's publisher that can be restarted at its addresses. ``replay``: with a replay socket."""

    def __init__(self, replay: bool = True, buffer_steps: int = 10_000):
        self._port, self._replay_port, self._steps = free_port(), free_port() if replay else None, buffer_steps
        self.address = f"127.0.0.1:{self._port}"
        self.replay = f"127.0.0.1:{self._replay_port}" if replay else None
        self._publisher: ZmqEventPublisher | None = None

    def start(self) -> "Publisher":
        replay = f"tcp://*:{self._replay_port}" if self._replay_port else None
        deadline = time.monotonic() + 10
        while True:
            try:
                self._publisher = ZmqEventPublisher(0, f"tcp://*:{self._port}", replay, buffer_steps=self._steps)
                return self
            except zmq.ZMQError:  # libzmq gives the old socket's address back on a thread of its own
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def publish(self, *events) -> None:
        """Returns when the batch has its number, is sent and can be replayed: the publisher has a thread for that."""
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))
        self._publisher._event_queue.join()

    def skip(self, count: int = 1) -> None:
        """Lose batches, for good: their numbers are used, and neither subscribers nor the replay have them."""
        for _ in range(count):
            next(self._publisher._seq_gen)

    def stop(self) -> None:
        if self._publisher is not None:
            self._publisher.shutdown()
            self._publisher = None


@contextlib.contextmanager
def publishing(**options) -> Iterator[Publisher]:
    publisher = Publisher(**options).start()
    try:
        yield publisher
    finally:
        publisher.stop()
