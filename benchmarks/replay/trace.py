"""Request traces in Mooncake's format: read, cut down to one GPU, and turned into prompts.

A line is a request: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, one per block of
512 prompt tokens. Equal ids are equal prefixes. Traces have no text, so that each id gets tokens of its own.
Source: the Mooncake project, https://github.com/kvcache-ai/Mooncake (FAST'25 traces).
"""

import json
import lzma
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serve.conversations import Conversation, Turn, tokens

BLOCK = 512  # prompt tokens of an id
# Of all requests, and at least so many: ids that more of them have are system prompts, which sessions share.
COMMON, COMMON_REQUESTS = 0.02, 8


class NoTrace(RuntimeError):
    """A file is not in Mooncake's format, or has no request."""


@dataclass(frozen=True)
class Request:
    """``time``: seconds after the first request; ``prompt``, ``output``: tokens."""

    time: float
    prompt: int
    output: int
    ids: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """In order of time. ``path``: JSON lines, compressed if its name ends in .xz. Raises NoTrace or OSError."""
    found = []
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids = tuple(row["hash_ids"])
                found.append(Request(row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"]), ids))
            except (ValueError, KeyError, TypeError) as error:
                raise NoTrace(f"{path}, line {number} is no request in Mooncake's format: {error!r}") from error
    if not found:
        raise NoTrace(f"{path} has no request")
    found.sort(key=lambda request: request.time)
    return [replace(request, time=request.time - found[0].time) for request in found]


def sessions(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that share more than a system prompt, in the order of their first ones. A session is known by the first
    id that few requests have: at most COMMON of them."""
    counts = Counter(number for request in requests for number in set(request.ids))
    limit = max(COMMON * len(requests), COMMON_REQUESTS)
    found: dict[object, list[Request]] = defaultdict(list)
    for position, request in enumerate(requests):
        own = next((number for number in request.ids if counts[number] <= limit), None)
        # A prompt that is a system prompt alone is a session of its own.
        found[("alone", position) if own is None else own].append(request)
    return list(found.values())


def sample(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """Whole sessions at random, at least ``count`` requests if there are so many, in order of time: what a session
    finds of its own is as in the trace."""
    every = sessions(requests)
    random.Random(f"{seed} sessions").shuffle(every)
    chosen: list[Request] = []
    for session in every:
        if len(chosen) >= count:
            break
        chosen += session
    return sorted(chosen, key=lambda request: request.time)


def window(requests: Iterable[Request], begin: float, end: float) -> list[Request]:
    """Those from ``begin`` to ``end``, in seconds, with times from ``begin`` on."""
    return [replace(request, time=request.time - begin) for request in requests if begin <= request.time < end]


def scaled(requests: Sequence[Request], lengths: float, longest: int) -> list[Request]:
    """Prompts, their blocks and answers ``lengths`` times as long; prompts are cut so that they and their answers take
    at most ``longest`` tokens."""
    block, out = block_tokens(lengths), []
    for request in requests:
        output = min(max(1, round(request.output * lengths)), longest // 2)
        prompt = min(max(1, round(request.prompt * lengths)), longest - output, len(request.ids) * block)
        out.append(Request(request.time, prompt, output, request.ids[: -(-prompt // block)]))
    return out


def block_tokens(lengths: float) -> int:
    """Tokens of an id if everything is ``lengths`` times as long."""
    return max(1, round(BLOCK * lengths))


def conversations(
    requests: Sequence[Request], lengths: float, rate: float, vocabulary: int, salt: object
) -> list[Conversation]:
    """One turn each, due at the trace's times compressed so that on average ``rate`` requests a second are sent.

    ``requests``: already scaled by ``lengths``. The same ``salt`` makes the same prompts.
    """
    block = block_tokens(lengths)
    made: dict[int, list[int]] = {}
    span = max((request.time for request in requests), default=0.0)
    pace = len(requests) / rate / span if span else 0.0
    out = []
    for number, request in enumerate(requests):
        for known in request.ids:
            if known not in made:
                made[known] = tokens(random.Random(f"{salt} {known}"), block, vocabulary)
        prompt = [token for known in request.ids for token in made[known]][: request.prompt]
        out.append(Conversation(number, [], [Turn(prompt, request.output, request.time * pace)]))
    return out


def facts(requests: Sequence[Request]) -> dict:
    """What a trace is like. ``reused``: share of its blocks that an earlier request had, as a prefix."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        known = next((i for i, number in enumerate(request.ids) if number not in seen), len(request.ids))
        found, total = found + known, total + len(request.ids)
        seen.update(request.ids)
    count = len(requests)
    return {
        "requests": count, "prompt_mean": round(sum(r.prompt for r in requests) / count),
        "prompt_max": max(r.prompt for r in requests),
        "output_mean": round(sum(r.output for r in requests) / count), "reused": round(found / total, 4),
        "minutes": round(requests[-1].time / 60, 1),
    }  # fmt: skip


def write(requests: Sequence[Request], path: Path) -> None:
    """In the same format, with ids counted from 0 in the order in which they are first used."""
    names: dict[int, int] = {}
    with path.open("w") as out:
        for request in requests:
            ids = [names.setdefault(number, len(names)) for number in request.ids]
            row = {"timestamp": round(request.time * 1000), "input_length": request.prompt,
                   "output_length": request.output, "hash_ids": ids}  # fmt: skip
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
