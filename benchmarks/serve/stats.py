"""Percentiles, and what a pass comes to. Plain dictionaries, as they are written: times in milliseconds."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .load import Record

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as numpy's default. ``values``: not empty, in any order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> dict[str, float]:
    """With mean and maximum."""
    found = {name: percentile(values, share) for name, share in SHARES.items()}
    found |= {"mean": statistics.fmean(values), "max": max(values)}
    return {name: round(value * scale, digits) for name, value in found.items()}


def milliseconds(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return percentiles(known, scale=1000.0) if known else None


def summary(records: Sequence[Record], seconds: float) -> dict:
    """Of one pass, or of several whose ``seconds`` are added up. Failed requests are in ``errors`` alone."""
    good = [record for record in records if not record.error]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    kinds: dict[str, int] = defaultdict(int)
    for record in records:
        if record.error:
            kinds[record.error] += 1
    return {
        "requests": len(good),
        "errors": len(records) - len(good),
        "error_kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])[:5]),
        "seconds": round(seconds, 3),
        "ttft_ms": milliseconds(r.ttft for r in good),
        "itl_ms": milliseconds(r.itl for r in good),
        "latency_ms": milliseconds(r.latency for r in good),
        "longest_gap_ms": milliseconds(r.longest_gap for r in good if r.output_tokens > 1),
        "late_ms": milliseconds(r.late for r in records),
        # Of turns after the first: those whose history another target has, and those asked where it is.
        "ttft_moved_ms": milliseconds(r.ttft for r in good if r.moved),
        "ttft_stayed_ms": milliseconds(r.ttft for r in good if r.moved is False),
        "ttft_moved_found_ms": milliseconds(r.ttft for r in good if r.moved and r.found),
        "ttft_stayed_found_ms": milliseconds(r.ttft for r in good if r.moved is False and r.found),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": round(len(good) / seconds, 3) if seconds else None,
        "output_tokens_per_s": round(output / seconds, 2) if seconds else None,
        "total_tokens_per_s": round((prompt + output) / seconds, 2) if seconds else None,
        "turns": by_turn(good),
    }


def by_turn(good: Iterable[Record]) -> list[dict]:
    """TTFT by turn, the first is 0."""
    turns: dict[int, list[Record]] = defaultdict(list)
    for record in good:
        turns[record.turn].append(record)
    return [
        {
            "turn": turn,
            "requests": len(records),
            "prompt_tokens": round(statistics.fmean(r.prompt_tokens for r in records), 1),
            "ttft_ms": milliseconds(r.ttft for r in records),
        }
        for turn, records in sorted(turns.items())
    ]


def interval(values: Sequence[float], seed: int = 3) -> tuple[float, float] | None:
    """90 % of the medians of samples drawn with replacement; None of fewer than three."""
    if len(values) < 3:
        return None
    rng = random.Random(seed)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(500)]
    return percentile(medians, 0.05), percentile(medians, 0.95)
