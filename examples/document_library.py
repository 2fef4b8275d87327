#!/usr/bin/env python3
"""A library of documents that needs ten times the node store's memory, served from its disk.

One engine with a KV cache for three documents, and a store with memory for four. Each document states a code, and its
question asks for that code. In the first pass all are computed. In the second pass, in the same order, each has been
evicted from the cache and from memory, and is loaded from disk if that is expected to be faster than computing. Then
the engine and the store are killed, as by a power cut, and restarted: the disk still has all written blocks.

vLLM counts prompt tokens; the store counts tokens read from disk. The exit code is not 0 if an answer differs from the
first one, if a later pass got nothing from disk, if loading from disk took longer than computing, or if a block failed
its checksum.

The store and its disk are in a temporary directory and end with the demo. No other store is used.

usage: document_library.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0] [--store-size 36MiB] [--times 10] [--disk DIR]
"""

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import host_cache_demo
import httpx
from host_cache_demo import (
    CACHE_BLOCKS,
    FUNCTIONS,
    SUBJECTS,
    Failures,
    read_failures,
    same,
    small_cache_engine,
    warm_up,
)
from multiturn_demo import (
    SHIPPED_MODEL,
    SYSTEM,
    Fit,
    at_least_one_computed,
    bring_up,
    bring_up_fitted,
    console,
    python_file,
)
from rich.table import Table

from vllm_kvtier.devtools.clients import Answer, chat, prompt_tokens
from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.devtools.gpus import chosen
from vllm_kvtier.devtools.processes import ServiceFailed
from vllm_kvtier.devtools.stores import StoreFailed, counts_when_idle, end_store, open_tier, tier_of
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import store_path
from vllm_kvtier.store.memory.memory_limits import format_bytes

RECALLS = 0.8  # of the codes, computed; the shipped model recalls nine of ten, and must answer the same each time
TINY = 64 << 20  # bytes of a model's weights
FIRST_ROWS = 8  # of the documents; the others are in the sums

COMPUTED, FROM_DISK, RESTARTED = PASSES = "computed", "from disk", "restarted"


class Asked(host_cache_demo.Asked, frozen=True):
    """``from_disk``: tokens, of those that were loaded, whose blocks the store read from disk for this."""

    from_disk: int = 0

    @property
    def from_memory(self) -> int:
        return self.tokens.pulled - self.from_disk


class Library(NamedTuple):
    """What the store and its disk had come to."""

    filled: m.Counts  # behind the first pass
    before: m.Counts  # it was killed
    after: m.Counts  # as the new one found it
    found_seconds: float  # that the disk was not yet open when the new engine was ready
    end: m.Counts


class Played(NamedTuple):
    passes: dict[str, list[Asked]]
    decisions: dict[str, dict[str, int]]  # by pass: what the engine decided about loading, how often
    failures: list[Failures]  # of each of the engine's lives
    referee: list[Answer]  # with probabilities; only where answers differ
    library: Library


def main() -> int:
    args = arguments()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    runtime, disk = folder / "run", Path(tempfile.mkdtemp(prefix="kvtier-library-", dir=args.disk or folder))
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)  # the engine's, and ours to find its store
    console.print(f"Model {args.model}; logs in {folder}, blocks in {disk}")
    engine = make_engine(args, folder, disk)
    try:
        what, make = "the engine, which starts its store,", partial(make_engine, args, folder, disk)
        engine = bring_up_fitted(args, engine, CACHE_BLOCKS, make, what)
        played = play(engine, args.times, args.fit.block)
    except (ServiceFailed, StoreFailed, httpx.HTTPError) as error:
        console.print(f"[red]{type(error).__name__}:[/red] ", end="")
        console.print(str(error), markup=False)
        return 2
    finally:
        engine.kill()
        end_store(store_path())
        shutil.rmtree(disk, ignore_errors=True)
    show(played, args.recalls)
    console.print(f"{time.monotonic() - started:.0f} s in all.")
    if problems := judge(played, args.recalls, args.times):
        for problem in problems:
            console.print("[red]NOT RIGHT[/red] ", end="")
            console.print(problem, markup=False)
        return 1
    shutil.rmtree(folder)
    console.print("[green]All answers the same; the library came from disk, also after everything was killed.[/green]")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(SHIPPED_MODEL), help="directory or hub name")
    parser.add_argument("--gpus", type=chosen, default=[], help="GPU to use, for example 0; without, the CPU build")
    parser.add_argument("--store-size", help="memory of the store; 36MiB for tiny models, 1GiB for others")
    parser.add_argument("--times", type=float, default=10, help="the documents need so many times that memory")
    parser.add_argument("--disk", help="directory on the disk to use; a temporary one without")
    parser.add_argument("--disk-size", default="64GiB", help="most that may be written there")
    args = parser.parse_args()
    args.gpus = args.gpus[:1]
    args.recalls, args.fit = Path(args.model).resolve() == SHIPPED_MODEL.resolve(), Fit()
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    args.store_size = args.store_size or ("36MiB" if 0 < weights < TINY else "1GiB")
    return args


def make_engine(args: argparse.Namespace, logs: Path, disk: Path) -> Engine:
    options = {
        "store_disk_path": str(disk),
        "store_disk_size": args.disk_size,
        # By default only what is seen twice is written, and the demo would be a pass longer.
        "store_disk_admission": "all",
    }
    return small_cache_engine(args, logs, os.environ.get("XDG_RUNTIME_DIR"), options)


def play(engine: Engine, times: float, block: int) -> Played:
    """``block``: tokens of the model's blocks."""
    passes: dict[str, list[Asked]] = {}
    decisions: dict[str, dict[str, int]] = {}

    def one_pass(name: str, enough: Callable[[int, m.Counts], bool] = lambda asked, _: asked == number) -> m.Counts:
        passes[name], decisions[name] = ask_all(engine, name, enough, block)
        failures.append(read_failures(engine))
        return counts_when_idle(store_path())

    failures: list[Failures] = []
    warm_up(engine)
    open_tier(store_path())
    filled = one_pass(COMPUTED, lambda _, counts: needed(counts) >= times * counts.pool_bytes)
    number = len(passes[COMPUTED])
    before = one_pass(FROM_DISK)
    engine.kill()  # before its store, or it would start another one
    end_store(store_path(), signal.SIGKILL)
    console.print("Killed the engine and the store (SIGKILL).")
    bring_up([engine], "the engine again, which starts another store,")
    warm_up(engine)
    after, found_seconds = open_tier(store_path())
    end = one_pass(RESTARTED)
    differ = any(len({a.answer for a in asked}) > 1 for asked in zip(*passes.values(), strict=True))
    referee = [
        chat(engine.base_url, document(n), logprobs=True, top_logprobs=5) for n in range(number if differ else 0)
    ]
    # Failures are counted over an engine's life: the last of either life.
    return Played(passes, decisions, failures[1:], referee, Library(filled, before, after, found_seconds, end))


def code(number: int) -> tuple[str, str]:
    """What a document's code is for, and the code."""
    # Words of names that small models recall well, each first one with each second one.
    first, second = zip(*(subject.split() for subject in SUBJECTS), strict=True)
    again, which = divmod(number, len(first) * len(second))
    name = f"{first[which % len(first)]} {second[which // len(first)]}{f' {again + 1}' if again else ''}"
    return name, str(random.Random(number).randrange(10000, 100000))


def document(number: int) -> list[dict[str, str]]:
    """A conversation that states the document's code, reads a file, and asks for the code. Conversations share only a
    few tokens at the beginning."""
    name, digits = code(number)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"The code for {name} is {digits}."},
        {"role": "assistant", "content": "Noted 1 codes."},
        {"role": "user", "content": "Read this file:\n" + python_file(number, FUNCTIONS)},
        {"role": "assistant", "content": "Done reading."},
        {"role": "user", "content": f"What is the code for {name}?"},
    ]


def ask_all(
    engine: Engine, name: str, enough: Callable[[int, m.Counts], bool], block: int
) -> tuple[list[Asked], dict[str, int]]:
    """Ask about the documents one by one until ``enough``; returns also the engine's load decisions."""
    asked: list[Asked] = []
    decided, counts = decisions(engine), counts_when_idle(store_path())
    with console.status("") as status:
        while not enough(len(asked), counts):
            status.update(f"Asking, {name}: document {len(asked) + 1}")
            tokens, read = prompt_tokens(engine.base_url), tier_of(counts).read_blocks
            answer = chat(engine.base_url, document(len(asked)), stream=True)
            tokens = at_least_one_computed(prompt_tokens(engine.base_url) - tokens)
            # What was begun to be read for a prompt that was then computed would count for the next one, and slow it.
            counts = counts_when_idle(store_path())
            from_disk = min(tokens.pulled, (tier_of(counts).read_blocks - read) * block)
            first_token = answer.first_token_seconds or answer.seconds
            asked.append(Asked(tokens, first_token, answer.text, from_disk))
    console.print(f"Asked {len(asked)} documents, {name}: {seconds(asked):.2f} s to the first tokens.")
    new = {word: n - decided.get(word, 0) for word, n in decisions(engine).items()}
    return asked, {word: n for word, n in new.items() if n}


def seconds(asked: Sequence[Asked]) -> float:
    return sum(a.first_token for a in asked)


def needed(counts: m.Counts) -> int:
    """Bytes of all blocks that were ever committed, as if none had been evicted."""
    index = counts.index
    return index.commits * index.used_pages // max(1, index.entries) * m.PAGE


def decisions(engine: Engine) -> dict[str, int]:
    """What the engine decided about loading and about waiting for the disk, and how often."""
    return decisions_in(httpx.get(f"{engine.base_url}/metrics", timeout=10, trust_env=False).raise_for_status().text)


def decisions_in(text: str) -> dict[str, int]:
    """The same out of /metrics."""
    found: dict[str, int] = {}
    for name, kind, count in re.findall(
        r'^vllm:kvtier_(load_decisions|promotion_waits)_total\{.*?kind="(.*?)".*\} ([\d.e+]+)$', text, re.M
    ):
        word = f"{'decisions' if name == 'load_decisions' else 'waits'}: {kind}"
        found[word] = found.get(word, 0) + int(float(count))
    return found


def recalled(asked: Sequence[Asked]) -> int:
    return sum(code(number)[1] in a.answer for number, a in enumerate(asked))


def times_memory(library: Library) -> float:
    """How often the documents would fill the store's memory."""
    return needed(library.filled) / library.filled.pool_bytes


def from_disk(first: Sequence[Asked], later: Sequence[Asked]) -> list[tuple[Asked, Asked]]:
    """The documents whose repetition came mostly from disk, with their first answers."""
    return [(a, b) for a, b in zip(first, later, strict=True) if b.from_disk * 2 > b.tokens.total]


def verdicts(played: Played, recalls: bool) -> list[bool]:
    """By document, whether the later passes answered as the first; exactly for answers that the shipped model knew.

    It guesses one of ten. Rounding may choose another of nearly equal guesses if only the end of a prompt is computed;
    wrong KV would change what it knows.
    """
    rows = list(zip(*(played.passes[name] for name in PASSES), strict=True))
    judges = [None] * len(rows) if recalls or not played.referee else played.referee
    return [
        (recalls and code(n)[1] not in first.answer) or all(same(first.answer, a.answer, judge) for a in again)
        for n, ((first, *again), judge) in enumerate(zip(rows, judges, strict=True))
    ]


def judge(played: Played, recalls: bool, times: float) -> list[str]:
    """The failures, as sentences."""
    problems = []
    first, library = played.passes[COMPUTED], played.library
    for number, equal in enumerate(verdicts(played, recalls)):
        name, _ = code(number)
        if first[number].tokens.pulled:
            problems.append(f"{name}: {first[number].tokens.pulled} tokens were loaded before anything was stored.")
        if not equal:
            answers = ", ".join(f"{played.passes[later][number].answer!r} {later}" for later in PASSES[1:])
            problems.append(f"{name}: was answered {first[number].answer!r} first, and {answers}.")
    if recalls and recalled(first) < RECALLS * len(first):
        problems.append(f"of {len(first)} codes only {recalled(first)} were recalled.")
    for name in PASSES[1:]:
        served = from_disk(first, played.passes[name])
        if not served:
            decided = ", ".join(f"{word} {n}" for word, n in played.decisions[name].items()) or "nothing"
            problems.append(f"{name}: no document came from disk; the engine decided: {decided}.")
        elif seconds([b for _, b in served]) >= seconds([a for a, _ in served]):
            before, after = (seconds(pair) for pair in zip(*served, strict=True))
            problems.append(f"{name}: {len(served)} documents took {after:.2f} s from disk, {before:.2f} s to compute.")
    if (much := times_memory(library)) < times:
        problems.append(f"the documents need {much:.1f} times the store's memory, and {times:g} were asked for.")
    kept, found = tier_of(library.before), tier_of(library.after)
    if found.blocks < kept.blocks:
        problems.append(f"of {kept.blocks:,} blocks on disk {found.blocks:,} were found after the kill.")
    integrity, loads = (sum(getattr(f, name) for f in played.failures) for name in ("integrity", "loads"))
    if integrity:
        problems.append(f"{integrity} blocks came from the store with a wrong checksum.")
    if loads:
        problems.append(f"{loads} loads from the store failed.")
    return problems


def show(played: Played, recalls: bool) -> None:
    console.print(documents_table(played, verdicts(played, recalls)))
    console.print(passes_table(played))
    table = Table(title="The store and its disk", show_header=False)
    for row in library_rows(played.library):
        table.add_row(*row)
    console.print(table)
    first = played.passes[COMPUTED]
    console.print(f"Recalled, computed: {recalled(first)} of {len(first)} codes.")
    for name in PASSES:
        decided = ", ".join(f"{word} {n}" for word, n in played.decisions[name].items())
        console.print(f"Decided, {name}: {decided or 'nothing'}.", markup=False)


def documents_table(played: Played, equal: Sequence[bool]) -> Table:
    """Milliseconds to the first token, and the tokens that came from disk, document by document."""
    times = times_memory(played.library)
    table = Table(title=f"Time to first token; the documents need {times:.1f} times the store's memory")
    table.add_column("document", no_wrap=True)
    for head in ("tokens", "computed\nms", "again\nms", "from\ndisk", "anew\nms", "from\ndisk"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("same\nanswer")
    number = len(equal)
    for i in range(min(FIRST_ROWS, number)):
        one = [played.passes[name][i : i + 1] for name in PASSES]
        table.add_row(code(i)[0], *cells(one), "yes" if equal[i] else "NO")
    if number > FIRST_ROWS:
        rest = [played.passes[name][FIRST_ROWS:] for name in PASSES]
        word = "yes" if all(equal[FIRST_ROWS:]) else "NO"
        table.add_row(f"{number - FIRST_ROWS} more", *cells(rest), word)
    table.add_section()
    table.add_row("all", *cells([played.passes[name] for name in PASSES]), "yes" if all(equal) else "NO")
    return table


def cells(passes: Sequence[Sequence[Asked]]) -> list[str]:
    """A row out of the passes' documents, summed up: tokens, then ms of each pass, and tokens from disk but in the
    first, which has none."""
    out = [f"{sum(a.tokens.total for a in passes[0]):,}"]
    for number, asked in enumerate(passes):
        out.append(f"{seconds(asked) * 1000:,.0f}")
        if number:
            out.append(f"{sum(a.from_disk for a in asked):,}")
    return out


def passes_table(played: Played) -> Table:
    """A row a pass: where its tokens came from, and times."""
    table = Table(title="Where the prompts' tokens came from")
    for head in ("pass", "computed", "cache", "memory", "disk", "median\nms", "worst\nms", "faster"):
        table.add_column(head, justify="left" if head == "pass" else "right", no_wrap=True)
    for name in PASSES:
        table.add_row(name, *pass_cells(played.passes[COMPUTED], played.passes[name]))
    return table


def pass_cells(first: Sequence[Asked], asked: Sequence[Asked]) -> list[str]:
    sources = [(a.tokens.computed, a.tokens.cached, a.from_memory, a.from_disk) for a in asked]
    times = [a.first_token * 1000 for a in asked]
    served = from_disk(first, asked)
    faster = f"{seconds([a for a, _ in served]) / seconds([b for _, b in served]):.1f} x" if served else "-"
    sums = [f"{sum(of):,}" for of in zip(*sources, strict=True)]
    return [*sums, f"{statistics.median(times):,.0f}", f"{max(times):,.0f}", faster]


def library_rows(library: Library) -> list[tuple[str, str]]:
    first, second, last = tier_of(library.before), tier_of(library.after), tier_of(library.end)
    rows = [
        ("memory", f"{format_bytes(library.before.pool_bytes)}, {library.before.index.evictions:,} blocks evicted"),
        ("on disk", f"{first.blocks:,} blocks in {format_bytes(first.used_bytes)}"),
        ("written", f"{format_bytes(first.written_bytes)}{rate(first.written_bytes, first.write_seconds)}"),
        ("read", f"{format_bytes(first.read_bytes)}{rate(first.read_bytes, first.read_seconds)}"),
        ("found after the kill", f"{second.blocks:,} blocks, {library.found_seconds:.1f} s after the engine was ready"),
        ("read after it", f"{format_bytes(last.read_bytes)}{rate(last.read_bytes, last.read_seconds)}"),
    ]
    failed = last.read_failures + first.read_failures, last.write_failures + first.write_failures
    return [*rows, ("failed", "{:,} reads, {:,} writes".format(*failed))]


def rate(nbytes: int, taken: float) -> str:
    return f" at {nbytes / taken / 1e9:.2f} GB/s" if taken else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
