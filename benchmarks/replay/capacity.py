"""Throughput at a fixed p99 of the time to the first token, from levels of load that were measured one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One level of load. ``offered``: what orders the levels, requests a second or sessions; ``p99``: seconds, None
    where a request failed or was left out; ``throughput``: requests a second that were answered."""

    offered: float
    p99: float | None
    throughput: float


@dataclass(frozen=True)
class Capacity:
    """``throughput``: requests a second, None if even the lowest level exceeds the limit; ``at_least``: no level that
    was measured exceeds it."""

    throughput: float | None
    at_least: bool = False


def at_p99(points: Sequence[Point], limit: float) -> Capacity:
    """The most that is answered with a p99 of at most ``limit`` seconds.

    Between the last level within the limit and the one after it, throughput is interpolated over the logarithm of the
    p99, which rises by orders of magnitude once requests queue up.
    """
    ordered = sorted(points, key=lambda point: point.offered)
    within = [point for point in ordered if point.p99 is not None and point.p99 <= limit]
    if not within:
        return Capacity(None)
    best = max(within, key=lambda point: point.throughput)
    beyond = [point for point in ordered if point.offered > within[-1].offered]
    if not beyond:
        return Capacity(best.throughput, at_least=True)
    last, after = within[-1], beyond[0]
    if after.p99 is None or not last.p99 or after.throughput <= last.throughput:
        return Capacity(best.throughput)
    share = (math.log(limit) - math.log(last.p99)) / (math.log(after.p99) - math.log(last.p99))
    between = last.throughput + share * (after.throughput - last.throughput)
    return Capacity(max(best.throughput, between))
