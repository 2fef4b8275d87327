"""Recorded request traces in Mooncake's format.

A line of the file is a request; its ``hash_ids`` name its prompt's blocks (512 tokens each in Mooncake's), equal ids
for equal prefixes; ``timestamp`` is in milliseconds.
"""

import itertools
import json
import lzma
from pathlib import Path
from typing import Any

from vllm_kvtier.errors import KVTierError

TOKENS = 512  # a block of Mooncake's traces
Requests = list[tuple[float, list[int]]]  # (seconds, block ids) of each


def read(path: Path) -> Requests:
    """JSON lines, .xz or plain. Raises KVTierError for a file that is no such trace."""
    try:
        opened = lzma.open(path, "rt") if path.suffix == ".xz" else path.open()
        with opened as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        requests = [(float(row.get("timestamp", 0)) / 1000, [_folded(i) for i in row["hash_ids"]]) for row in rows]
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"a line has no {error}" if isinstance(error, KeyError) else error
        raise KVTierError(f"{path} is not a trace (JSON lines with hash_ids, as Mooncake's): {words}") from error
    requests = [request for request in requests if request[1]]
    if not requests:
        raise KVTierError(f"{path} holds no request with blocks")
    return requests


def _folded(number: Any) -> int:
    """Without a sign, which hashes may have: negative ids are those of a benchmark's scans."""
    return int(number) % (1 << 64)


def ideal(requests: Requests) -> float:
    """Share of blocks that a cache without limit would find."""
    seen: set[int] = set()
    hits = 0
    for _, ids in requests:
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, ids))
        seen.update(ids)
    return hits / sum(len(ids) for _, ids in requests)
