"""A run from the command line to what it prints: servers up, probe and passes, servers down."""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
from rich.console import Console

from vllm_kvtier.devtools.processes import Service, ServiceFailed, free_port

from . import control, engines, options, picture, probe, report
from .client import new_session
from .control import Hands, ServerFailed
from .counters import NoMetrics
from .engines import Running
from .load import Form, Load
from .meters import Meters
from .passes import Plan, Player, play
from .sources import NoData
from .stats import milliseconds
from .targets import Target

HERE = Path(__file__).resolve().parent
COLUMNS = 150
FLOOR_TTFT, FLOOR_ITL, FLOOR_SECONDS = 0.02, 0.01, 15.0


def main(doc: str, argv: list[str] | None = None) -> int:
    """``doc``: what --help begins with."""
    args = options.parse(argv, doc)
    console = Console()
    if not console.is_terminal:  # whose width would be known
        console = Console(width=COLUMNS)
    try:
        if args.draw:
            data = json.loads(args.draw[0].read_text("utf-8"))
            picture.draw(data, report.records_of(data), args.draw[1])
            return 0
        return run(args, console)
    except (ServiceFailed, ServerFailed, NoMetrics, NoData, ValueError, argparse.ArgumentTypeError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
    except picture.NoMatplotlib as error:
        console.print(str(error), style="yellow")
    return 2


def run(args: argparse.Namespace, console: Console) -> int:
    """0, or 1 if a variant answered nothing. What was measured is written however it ends."""
    begun = time.monotonic()
    work = options.Work(args)
    needs = work.needs()
    host = engines.host_bytes(args, needs)
    document = report.Document(args.out, options.settings(args, needs, host), args.requests)
    if args.floor:
        document.add(floor=_run(_floor(args, work, console)))
    variants = [] if args.floor and args.no_load and not args.probe else options.chosen(args, host)
    deadline = begun + args.seconds if args.seconds else float("inf")
    facts: dict[str, dict] = {}
    for group in [[variant] for variant in variants] if args.apart else filter(None, [variants]):
        running = engines.start(group, args, needs)
        try:
            console.print(f"{', '.join(v.name for v in group)}: up after {time.monotonic() - begun:.0f} s; {args.logs}")
            _run(_measure(running, args, work, document, facts, deadline, console))
        finally:
            engines.stop(running)
    report.show(console, document.data)
    console.print(f"{time.monotonic() - begun:.0f} s in all.")
    if args.plot:
        records: dict[tuple[str, str], list] = {}
        for result in document.results:
            records.setdefault((result.variant, result.name), []).extend(result.records)
        picture.draw(document.data, records, args.plot)
    return int(any(not row["requests"] for row in document.data["variants"]))


async def _measure(
    running: list[Running], args: argparse.Namespace, work: options.Work, document: report.Document,
    facts: dict[str, dict], deadline: float, console: Console,
) -> None:
    async with new_session(args.timeout) as session:
        players = [await _player(one, args, work, session) for one in running]
        for player in players:
            facts[player.name] = await _facts(player, session)
            for target in player.running.targets if player.running.variant.store_bytes else ():
                await player.hands.until_usable(target, int(0.99 * player.running.variant.store_bytes))
        document.add(facts=facts)
        if args.probe:
            before = list(document.data["probe"])  # of variants that were up before these
            await probe.probe(
                players, args.probe, args.probe_repeats, args.probe_warmup, work.vocabulary, args.seed, session,
                console, lambda rows: document.add_probe(before + rows),
            )  # fmt: skip
        if not args.no_load:
            limits = options.limits(args)
            plan = Plan(args.rounds, args.passes, args.policy, limits, args.seed, work.fresh, args.reset, deadline)
            await play(players, plan, session, console, document.add_pass)


async def _player(
    running: Running, args: argparse.Namespace, work: options.Work, session: aiohttp.ClientSession
) -> Player:
    headers = {name.strip(): value.strip() for name, _, value in (text.partition(":") for text in args.header)}
    model = args.served_model or await control.served_model(session, running.targets[0], headers)
    form = Form(model, args.chat, args.ignore_eos, args.body, headers)
    return Player(running, Hands(session, model, headers, work.vocabulary), form)


async def _facts(player: Player, session: aiohttp.ClientSession) -> dict:
    variant, ours = player.running.variant, player.running.engines
    return {
        "vllm": await control.server_version(session, player.running.targets[0]),
        "targets": len(player.running.targets),
        "kv_transfer_config": variant.kv,
        "args": list(variant.args),
        "start_seconds": [round(engine.ready_after or 0.0, 1) for engine in ours],
    }


async def _floor(args: argparse.Namespace, work: options.Work, console: Console) -> dict:
    """What the client adds to a time, at this load's concurrency: measured, less what the server waits by intention.
    The server's own lateness is in it."""
    command = [sys.executable, str(HERE / "floor.py"), "--ttft", str(FLOOR_TTFT), "--itl", str(FLOOR_ITL)]
    port = free_port()
    logs = Path(args.logs) / "floor.log"
    with Service("floor", [*command, "--port", str(port)], port=port, log_path=logs, ready_seconds=30) as service:
        target = Target(service.base_url, name="floor")
        limits = replace(options.limits(args), seconds=FLOOR_SECONDS)
        said = [conversation.unplayed() for conversation in work.fresh(0)]
        load = Load(said, [target], lambda *_: 0, limits, Form("floor", args.chat), args.seed)
        async with new_session(args.timeout) as session, Meters() as meters:
            records = await load.play(session)
    good = [record for record in records if not record.error]
    result = {
        "requests": len(good), "errors": len(records) - len(good),
        "server": {"ttft_ms": FLOOR_TTFT * 1000, "itl_ms": FLOOR_ITL * 1000},
        "ttft_added_ms": milliseconds(record.ttft - FLOOR_TTFT for record in good),
        "itl_added_ms": milliseconds(record.itl - FLOOR_ITL for record in good if record.itl is not None),
        "client": meters.result(),
    }  # fmt: skip
    added = result["ttft_added_ms"]
    if added:
        text = f"The client adds at most {added['p50']} ms to a TTFT at the median, {added['p99']} at p99; "
        console.print(text + f"busy {result['client']['busy']:.0%}", highlight=False)
    return result


def _run(coroutine):
    """With vLLM's own event loop where it is installed: it takes half of the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)

