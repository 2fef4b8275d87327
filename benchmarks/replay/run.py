"""A run from the command line to what it prints: engines up, levels of load, engines down."""

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from disk_files import allocated
from rich.console import Console
from serve import control, counters, engines
from serve.client import new_session
from serve.control import Hands, ServerFailed
from serve.conversations import Conversation, Turn, tokens
from serve.counters import SOURCES, NoMetrics
from serve.engines import Running
from serve.load import Form, Limits, Load
from serve.meters import Meters
from serve.picture import NoMatplotlib
from serve.progress import Bar, line
from serve.report import machine, versions
from serve.run import COLUMNS, _run
from serve.stats import summary
from serve.variants import Variant
from tiers import GIB

from vllm_kvtier.devtools.processes import ServiceFailed

from . import connectors, hits, options, picture, tables, trace
from .options import Level, Work

HERE = Path(__file__).resolve().parent
SCHEMA = 1
WARM_UP = (64, 1024, 4096)  # tokens of prompts that are not measured
STILL_SECONDS, DISK_SECONDS = 0.6, 8.0  # without a byte more on disk; waited for at most
POLL_SECONDS = 0.1  # there is no event for files that stopped growing


def main(doc: str, argv: list[str] | None = None) -> int:
    """``doc``: what --help begins with."""
    args = options.parse(argv, doc)
    console = Console()
    if not console.is_terminal:  # whose width would be known
        console = Console(width=COLUMNS)
    try:
        if args.draw:
            data = json.loads(args.draw[0].read_text("utf-8"))
            tables.show(console, data)
            for path in args.draw[1:]:
                picture.draw(data, path)
            return 0
        if args.sample_to:
            trace.write(Work(args).sampled, args.sample_to)
            return 0
        return run(args, console)
    except (ServiceFailed, ServerFailed, NoMetrics, trace.NoTrace, ValueError, argparse.ArgumentTypeError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
    except NoMatplotlib as error:
        console.print(str(error), style="yellow")
    return 2


@dataclass
class Result:
    """What a run found so far; on disk after each step, so that a run that is cut off leaves what it had."""

    path: Path | None
    data: dict = field(default_factory=dict)

    def add(self, row: dict | None = None, **facts: object) -> None:
        self.data |= facts
        if row:
            self.data["levels"].append(row)
            self.data["capacity"] = tables.capacities(self.data)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")


def run(args: argparse.Namespace, console: Console) -> int:
    """0, or 1 if a variant answered nothing. What was measured is written however it ends."""
    begun = time.monotonic()
    work = Work(args)
    facts = {"trace": trace.facts(work.sampled), "replayed": trace.facts(work.scaled)} if args.rates else {}
    for name, values in facts.items():
        console.print(f"{name}: {values}", highlight=False, soft_wrap=True)
    for level in work.levels:
        count = sum(len(c.turns) for c in level.conversations)
        console.print(f"{level.workload}, {level.name}: {count} requests; LRU: {level.lru}", highlight=False)
    if args.plan:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="replay-", dir=args.dir))
    try:
        variants = [_variant(text, args, folder) for text in args.compare]
        if len({variant.name for variant in variants}) < len(variants):
            raise argparse.ArgumentTypeError("variants need different names")
        result = Result(args.out, {
            "benchmark": "replay", "schema": SCHEMA, "settings": options.settings(args), "machine": machine(),
            "versions": versions(), "loads": facts, "variants": {}, "left_out": {}, "levels": [], "capacity": [],
            "tokens": {"per_tier": work.tiers(), "bytes": work.per_token},
        })  # fmt: skip
        for group in [[variant] for variant in variants] if args.apart else [variants]:
            _group(group, args, work, result, folder, begun, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tables.show(console, result.data)
    console.print(f"{time.monotonic() - begun:.0f} s in all.")
    if args.plot:
        try:
            picture.draw(result.data, args.plot)
        except NoMatplotlib as error:  # --draw can do it elsewhere
            console.print(str(error), style="yellow")
    return int(not result.data["levels"] or any(not row["requests"] for row in result.data["levels"]))


def _variant(text: str, args: argparse.Namespace, folder: Path) -> Variant:
    name = text.partition("=")[0]
    place = folder / "".join(c if c.isalnum() else "-" for c in name)[:40]
    place.mkdir(exist_ok=True)
    return connectors.named(text, connectors.Sizes(int(args.host_gib * GIB), int(args.disk_gib * GIB), place))


def _group(
    variants: Sequence[Variant], args: argparse.Namespace, work: Work, result: Result, folder: Path, begun: float,
    console: Console,
) -> None:  # fmt: skip
    """Engines up, all levels, engines down."""
    running, failed = _start(variants, args, work)
    for name, reason in failed.items():
        text = f"LEFT OUT: {name}: {reason[:600]}\nIts log is in {args.logs}"
        console.print(text, style="red", markup=False, highlight=False)
    result.add(left_out={**result.data["left_out"], **{name: text[:600] for name, text in failed.items()}})
    unlimited = [place for one in running for place in connectors.unlimited_folders(one.variant)]
    trimmers = [_trimmer(place, int(args.disk_gib * GIB)) for place in unlimited]
    try:
        names = ", ".join(one.variant.name for one in running)
        console.print(f"{names}: up after {time.monotonic() - begun:.0f} s; {args.logs}", highlight=False)
        if running:
            _run(_measure(running, args, work, result, folder, begun + args.seconds, console))
    finally:
        for trimmer in trimmers:
            trimmer.communicate()  # its input ends
        engines.stop(running)


def _start(
    variants: Sequence[Variant], args: argparse.Namespace, work: Work
) -> tuple[list[Running], dict[str, str]]:
    """Engines that are up, and why the others are not. At once on GPUs; on the CPU they would share few cores."""
    needs = work.needs()

    def start(variant: Variant) -> Running | str:
        try:
            return engines.start([variant], args, needs)[0]
        except ServiceFailed as error:
            return str(error)

    with ThreadPoolExecutor(len(variants) if args.gpus else 1) as pool:
        found = dict(zip([v.name for v in variants], pool.map(start, variants), strict=True))
    running = [one for one in found.values() if isinstance(one, Running)]
    return running, {name: text for name, text in found.items() if isinstance(text, str)}


def _trimmer(place: str, nbytes: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(HERE / "trim.py"), place, str(nbytes)], stdin=subprocess.PIPE)


# -- measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Player:
    """A variant with all that is needed to ask it."""

    running: Running
    hands: Hands
    form: Form

    @property
    def name(self) -> str:
        return self.running.variant.name


async def _measure(
    running: Sequence[Running], args: argparse.Namespace, work: Work, result: Result, folder: Path, deadline: float,
    console: Console,
) -> None:  # fmt: skip
    async with new_session(args.timeout) as session:
        players = []
        for one in running:
            model = await control.served_model(session, one.targets[0], {})
            players.append(Player(one, Hands(session, model, {}, work.vocabulary), Form(model)))
        for player in players:
            await _prepare(player, args.longest, work, session, result)
        for number, level in enumerate(work.levels):
            for player in [*players[number % len(players) :], *players[: number % len(players)]]:
                if time.monotonic() > deadline:
                    console.print(f"[yellow]Out of time[/yellow]: left out from {level.name}, {player.name} on.")
                    return
                result.add(await _one(player, level, work, folder, session, console))


async def _prepare(
    player: Player, longest: int, work: Work, session: aiohttp.ClientSession, result: Result
) -> None:
    """Until its memory can be used and its first prompts, which cost more, are over."""
    variant, target = player.running.variant, player.running.targets[0]
    if nbytes := connectors.store_bytes(variant):
        await player.hands.until_usable(target, int(0.99 * nbytes))
    said = [
        Conversation(i, [], [Turn(tokens(random.Random(f"warm {i}"), min(count, longest - 8), work.vocabulary), 8)])
        for i, count in enumerate(WARM_UP)
    ]
    for record in await Load(said, [target], lambda *_: 0, Limits(1), player.form).play(session):
        if record.error:
            raise ServerFailed(f"{player.name} fails at its first requests: {record.error}")
    facts = {
        "vllm": await control.server_version(session, target), "kv_transfer_config": variant.kv,
        "start_seconds": [round(engine.ready_after or 0.0, 1) for engine in player.running.engines],
    }  # fmt: skip
    result.add(variants={**result.data["variants"], player.name: facts})


async def _one(
    player: Player, level: Level, work: Work, folder: Path, session: aiohttp.ClientSession, console: Console
) -> dict:
    targets = player.running.targets
    before, nudged = await player.hands.settle(targets[0]), player.hands.nudged
    title = f"{level.workload}, {level.name}, {player.name}"
    own = [conversation.unplayed() for conversation in level.conversations]
    with Bar(console, title, sum(len(c.turns) for c in own)) as bar:
        load = Load(own, targets, lambda *_: 0, level.limits, player.form, seen=bar.seen)
        async with Meters() as meters:
            records = await load.play(session)
    counted = counters.total(counters.difference(before, await player.hands.settle(targets[0])))
    # What asked for reports meanwhile is not part of the load.
    counted[SOURCES["computed"]] = counted.get(SOURCES["computed"], 0.0) - (player.hands.nudged - nudged)
    found = hits.by_tier(counted, work.per_token)
    row = {
        "variant": player.name, "workload": level.workload, "offered": level.offered,
        **summary(records, load.ended - load.begun),
        "given_up": load.given_up, "left_out": load.left_out, "client": meters.result(), "tokens": found,
        "hits": hits.shares(found), "lru": level.lru, "counters": counted,
    }  # fmt: skip
    console.print(line(title, row), markup=False, highlight=False, soft_wrap=True)
    console.print(f"    {row['hits']}", highlight=False)
    await _disk_still(player, folder)
    return row


async def _disk_still(player: Player, folder: Path) -> None:
    """Until nothing more is written, or for so long: it must not slow the next one down."""
    deadline = time.monotonic() + DISK_SECONDS
    last, since = -1, 0.0
    while time.monotonic() < deadline:
        there = await asyncio.to_thread(allocated, folder)
        if there != last:
            last, since = there, time.monotonic()
        elif time.monotonic() - since > STILL_SECONDS:
            return
        await player.hands.nudge(player.running.targets[0])  # some only write in an engine's steps
        await asyncio.sleep(POLL_SECONDS)
