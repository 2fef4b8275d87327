"""One prompt at a time on idle engines: time to first token by the source of the prompt's KV.

  computed     none: a new prompt
  same rank    the engine's prefix cache: the same prompt again
  cross rank   another engine's prefix cache: the same prompt, sent to another engine
  host         host memory: the same prompt at its first engine, after all prefix caches were reset

Every repetition has these steps in this order, with a new prompt, starting at another engine; variants alternate within
it. A connector may serve a cross-rank hit from host memory: the engines count tokens by source for each kind, and
repetitions are classified by them. A few tokens at the end are always computed. The first repetitions warm up. Medians
in milliseconds from sending to the first event.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console

from . import counters
from .client import ask, encode
from .control import ServerFailed
from .conversations import tokens
from .passes import Player
from .targets import Target

# Beyond the tokens asked for, which may be whole blocks: less than a block, so that nothing finds it, and there is the
# same left to compute wherever the rest was.
TAIL = 8
KINDS = ("computed", "same rank", "cross rank", "host")


@dataclass
class _Taken:
    """Of one variant, length and kind: seconds, and prompt tokens by source."""

    seconds: list[float] = field(default_factory=list)
    sources: list[dict[str, float]] = field(default_factory=list)


async def probe(
    players: Sequence[Player], lengths: Sequence[int], repeats: int, warmup: int, vocabulary: int, seed: int,
    session: aiohttp.ClientSession, console: Console, done: Callable[[list[dict]], None] = lambda rows: None,
) -> list[dict]:
    """A row for each variant, length and kind; ``done`` gets all rows so far after each length. Raises ServerFailed or
    NoMetrics if a server fails."""
    rng, rows = random.Random(f"{seed} probe"), []
    for length in lengths:
        taken: dict[tuple[str, str], _Taken] = defaultdict(_Taken)
        for repetition in range(warmup + repeats):
            prompt = tokens(rng, length + TAIL, vocabulary)
            turned = repetition % len(players)
            for player in (*players[turned:], *players[:turned]):
                asked = await _one(player, prompt, repetition, session)
                if repetition >= warmup:
                    for kind, (seconds, sources) in asked.items():
                        taken[player.name, kind].seconds.append(seconds)
                        taken[player.name, kind].sources.append(sources)
        new = [_row(player.name, length, kind, taken[player.name, kind]) for player in players for kind in KINDS]
        rows += [row for row in new if row["n"]]
        for player in players:
            parts = [f"{row['kind']} {row['median_ms']:,.1f}" for row in rows if _is(row, player.name, length)]
            text = f"probe, {player.name}, {length:,} tokens: {', '.join(parts)} ms"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        done(rows)
    return rows


def _is(row: dict, variant: str, length: int) -> bool:
    return row["variant"] == variant and row["tokens"] == length


async def _one(
    player: Player, prompt: list[int], repetition: int, session: aiohttp.ClientSession
) -> dict[str, tuple[float, dict[str, float]]]:
    targets = player.running.targets
    home, other = (targets[(repetition + i) % len(targets)] for i in (0, 1))
    steps = [("computed", home), ("same rank", home)]
    if other is not home:
        steps.append(("cross rank", other))
    asked = {}
    for kind, target in steps:
        asked[kind] = await _timed(player, target, prompt, session)
    if all([await player.hands.forget(target) for target in targets]):
        asked["host"] = await _timed(player, home, prompt, session)
    return asked


async def _timed(
    player: Player, target: Target, prompt: list[int], session: aiohttp.ClientSession
) -> tuple[float, dict[str, float]]:
    """Seconds to the first token, and where the prompt's tokens came from. When it returns the engine is idle, and what
    it had to put away is put away."""
    form = player.form
    body = {
        "model": form.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
        **form.body,
    }  # fmt: skip
    encoded = encode(body)
    before, nudged = await counters.read(session, [target]), player.hands.nudged
    reply = await ask(session, f"{target.base_url}/v1/completions", encoded, {**form.headers, **target.headers})
    if reply.error:
        raise ServerFailed(f"{player.name}: {reply.error}")
    after = await player.hands.settle(target)
    sources = counters.tokens(counters.total(counters.difference(before, after)))
    sources["computed"] -= player.hands.nudged - nudged
    return reply.ttft, sources


def _row(variant: str, length: int, kind: str, taken: _Taken) -> dict:
    times = [seconds * 1000 for seconds in taken.seconds]
    row: dict = {"variant": variant, "tokens": length, "kind": kind, "n": len(times)}
    if times:
        row |= {"median_ms": round(statistics.median(times), 2), "min_ms": round(min(times), 2)}
        row |= {"max_ms": round(max(times), 2), "all_ms": [round(t, 2) for t in times]}
        names = {name for sources in taken.sources for name in sources if name != "hit_rate"}
        row["sources"] = {n: round(statistics.fmean(s.get(n, 0) for s in taken.sources)) for n in sorted(names)}
        served = [_most(sources) for sources in taken.sources]
        row["served_by"] = {
            source: {"n": served.count(source), "median_ms": round(statistics.median(some), 2)}
            for source in dict.fromkeys(served)
            if (some := [t for t, by in zip(times, served, strict=True) if by == source])
        }
    return row


def _most(sources: dict[str, float]) -> str:
    """Where most of one prompt came from, in the connector's own words where it has some."""
    known = {name: value for name, value in sources.items() if name not in ("hit_rate", "external")}
    most = max(known, key=known.get)
    return most if known[most] >= sources["external"] else "external"


def verdicts(rows: Sequence[dict]) -> list[dict]:
    """How much later the first token of a cross-rank hit, and of one from host memory, is than a same-rank hit's."""
    found = {(row["variant"], row["tokens"], row["kind"]): row["median_ms"] for row in rows}
    out = []
    for (variant, length, kind), same in found.items():
        if kind == "same rank":
            more = {
                name.replace(" ", "_"): round(found[variant, length, name] / same - 1, 4)
                for name in ("cross rank", "host", "computed")
                if (variant, length, name) in found
            }
            out.append({"variant": variant, "tokens": length, "same_rank_ms": same, **more})
    return out
