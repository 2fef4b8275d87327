"""Shows the tiers of an engine's KV blocks, live, from vLLM's KV events.

vLLM reports blocks of the GPU's cache; the connector reports blocks in the node store's memory ("CPU"), on its disk
("STORAGE"), in its bucket ("STORAGE", remote) and in its Mooncake cluster ("EXTERNAL", remote).

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both"}' \
        --kv-events-config '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}'
    python examples/kv_events.py tcp://127.0.0.1:5557

prints a line for each second with changes: blocks by tier, stored and removed blocks. A router would keep one ``View``
per engine and call ``prefix``.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


class View:
    """The blocks of one engine. ``blocks``: by tier, the (hash, KV cache group) of each block."""

    def __init__(self) -> None:
        self.blocks: dict[str, set] = {}
        self.came = self.went = self.missed = 0
        self._after: dict[tuple, bytes | int] = {}  # (hash of what precedes it, tokens) -> hash of a block of group 0
        self._keys: dict[bytes | int, tuple] = {}  # the reverse
        self._sequence: int | None = None

    def hear(self, sequence: int, batch: KVEventBatch) -> None:
        """``sequence``: the number of the batch. After a gap the view is invalid and starts empty."""
        if self._sequence is not None and sequence != self._sequence + 1:
            self.missed += 1
            for memory in (self.blocks, self._after, self._keys):
                memory.clear()
        self._sequence = sequence
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                here = self.blocks.setdefault(_place(event), set())
                gone = {(each, event.group_idx or 0) for each in event.block_hashes} & here
                self.went += len(gone)
                here -= gone
                self._forget(gone)
            elif isinstance(event, AllBlocksCleared):
                self._forget(self.blocks.pop("GPU", set()))  # vLLM's GPU cache

    def prefix(self, tokens: Sequence[int], block_tokens: int) -> dict[str, int]:
        """The tokens of a prompt's prefix (without adapter, images or salt) in each tier."""
        chain, last = [], None
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            last = self._after.get((last, tuple(tokens[start : start + block_tokens])))
            if last is None:
                break
            chain.append((last, 0))
        found = {}
        for place, blocks in self.blocks.items():
            run = next((i for i, each in enumerate(chain) if each not in blocks), len(chain))
            found[place] = run * block_tokens
        return found

    def _stored(self, event: BlockStored) -> None:
        here = self.blocks.setdefault(_place(event), set())
        parent, size = event.parent_block_hash, event.block_size
        for i, each in enumerate(event.block_hashes):
            group = event.group_idx or 0
            self.came += (each, group) not in here
            here.add((each, group))
            plain = not event.extra_keys or event.extra_keys[i] is None
            if group == 0 and plain:
                key = (parent, tuple(event.token_ids[i * size : (i + 1) * size]))
                self._after[key], self._keys[each] = each, key
            parent = each

    def _forget(self, gone: set) -> None:
        """Drop the tokens of blocks that are in no tier any more."""
        for each, group in gone:
            if group == 0 and not any((each, 0) in blocks for blocks in self.blocks.values()):
                self._after.pop(self._keys.pop(each, None), None)

    def __str__(self) -> str:
        places = "  ".join(f"{place} {len(blocks):,}" for place, blocks in sorted(self.blocks.items()))
        return f"{places or 'nothing'}  (+{self.came:,} -{self.went:,}{f', {self.missed} gaps' if self.missed else ''})"


def _place(event: BlockStored | BlockRemoved) -> str:
    remote = getattr(event, "locality", None) == "REMOTE"  # vLLM 0.25.1 does not say
    return f"{event.medium or 'GPU'}{' (remote)' if remote else ''}"


def batches(endpoint: str, topic: str = "", wait: float = 0.2) -> Iterator[tuple[int, KVEventBatch] | None]:
    """(number, batch) as they come; None when nothing came for ``wait`` seconds. Ends never."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.setsockopt(zmq.RCVHWM, 0)  # nothing is dropped here
        socket.connect(endpoint)
        while True:
            if not socket.poll(int(wait * 1000)):
                yield None
                continue
            _, sequence, payload = socket.recv_multipart()
            yield int.from_bytes(sequence, "big"), decoder.decode(payload)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("endpoint", help="of the engine's KV events, as tcp://127.0.0.1:5557")
    parser.add_argument("--topic", default="", help="as in the engine's --kv-events-config")
    parser.add_argument("--batches", type=int, default=0, help="end after so many (0: never)")
    options = parser.parse_args(argv)
    view, heard, shown, before = View(), 0, 0.0, ""
    for got in batches(options.endpoint, options.topic):
        if got is not None:
            view.hear(*got)
            heard += 1
        last = bool(options.batches) and heard >= options.batches
        if (last or time.monotonic() - shown >= 1.0) and str(view) != before:
            shown, before = time.monotonic(), str(view)
            print(f"{time.strftime('%H:%M:%S')}  {before}", flush=True)
        if last:
            break
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
