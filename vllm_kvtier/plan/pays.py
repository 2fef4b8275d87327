"""From which prompt length on loading is done before computing would be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvtier.errors import KVTierError

SHORTEST_LATENCY = 1e-3  # seconds from asking to the first byte, of a store on this node: asking, placing, launching


@dataclass(frozen=True)
class Prefill:
    """Seconds to compute a prompt: linear interpolation of the measurements, from 0 and beyond the last."""

    points: tuple[tuple[int, float], ...]  # (tokens, seconds), growing

    @classmethod
    def parse(cls, text: str) -> "Prefill":
        """``12000``: tokens a second; or ``2048:0.055,8192:0.226``: seconds by length. Raises KVTierError."""
        try:
            if ":" not in text:
                rate = float(text)
                points = [(1_000_000, 1_000_000 / rate)] if rate > 0 else []
            else:
                pairs = (pair.split(":") for pair in text.split(","))
                points = sorted((int(tokens), float(seconds)) for tokens, seconds in pairs)
        except ValueError:
            points = []
        if not points or any(n <= 0 or s <= 0 for n, s in points):
            raise KVTierError(
                f"prefill {text!r}: give tokens a second (12000), or seconds by length (2048:0.055,8192:0.226)"
            )
        return cls(tuple(points))

    def seconds(self, tokens: int) -> float:
        before = (0, 0.0)
        for at, point in enumerate(self.points):
            if tokens <= point[0] or at == len(self.points) - 1:
                slope = (point[1] - before[1]) / max(1, point[0] - before[0])
                return before[1] + slope * (tokens - before[0])
            before = point
        raise AssertionError("a prefill has at least one point")


@dataclass(frozen=True)
class Link:
    """``rate``: bytes/s; ``latency``: seconds before the first of them; ``shared``: all ranks go through it."""

    rate: float
    latency: float = SHORTEST_LATENCY
    shared: bool = False


def parse_rate(text: str) -> float:
    """Bytes a second from ``25GB/s``, ``1.7GB`` or a number. Raises KVTierError."""
    word = text.strip().lower().removesuffix("/s")
    factors = {"tb": 1e12, "gb": 1e9, "mb": 1e6, "kb": 1e3, "b": 1.0, "": 1.0, "gib": 1 << 30, "mib": 1 << 20}
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        rate = float(number) * factors[word[len(number) :].strip()]
    except (ValueError, KeyError):
        rate = 0.0
    if rate <= 0:
        raise KVTierError(f"a rate of {text!r}: give 25GB/s, 800MB/s or bytes a second")
    return rate


def load_seconds(links: Sequence[tuple[Link, float]], tokens: int) -> float:
    """``links``: (link, bytes a token through it), which follow one another piece by piece: the slowest decides."""
    latency = sum(link.latency for link, _ in links)
    return latency + max(tokens * nbytes / link.rate for link, nbytes in links)


def break_even(links: Sequence[tuple[Link, float]], prefill: Prefill, block: int, longest: int) -> int | None:
    """The shortest prompt, in whole blocks, from which loading is faster than computing up to ``longest``; None if
    there is none."""

    def pays(blocks: int) -> bool:
        return load_seconds(links, blocks * block) < prefill.seconds(blocks * block)

    # Loading takes something for nothing, and computing ever longer a token: they cross once, or never.
    low, high = 0, max(1, longest // block)
    if not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * block


def from_bench(figures: Mapping) -> dict[str, float]:
    """Bytes/s of "memory" and "disk", as far as ``kvtier bench --json`` measured them."""
    found = {}
    for row in figures.get("rows", []):
        if row.get("name") == "load" and row.get("bench") == "copy":
            found["memory"] = row["bytes_per_second"]
        if row.get("name") == "read" and row.get("bench") == "disk":
            found["disk"] = max(row["bytes_per_second"], found.get("disk", 0.0))
    return found
