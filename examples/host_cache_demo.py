#!/usr/bin/env python3
"""One engine with a small KV cache, and a node store that keeps its blocks across a crash.

Asks about documents that need three times the cache, so that each is evicted before it is asked for again. The second
time they are loaded from the store. Then the engine is killed, as by a crash, and restarted. It finds its blocks,
because the store is a separate process.

vLLM counts prompt tokens. The exit code is not 0 if an answer differs from the first one, if nothing of a repeated
prompt was loaded, or if a loaded block failed its checksum. The shipped model must also recall the planted codes. Other
models guess, and may give another answer if the choice is nearly a tie.

The store is in a temporary runtime directory and ends with the demo. No other store is used.

usage: host_cache_demo.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0] [--store-size 256MiB]
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from multiturn_demo import (
    SHIPPED_MODEL,
    SYSTEM,
    Fit,
    at_least_one_computed,
    bring_up,
    bring_up_fitted,
    console,
    nearly_tied,
    python_file,
)
from rich.table import Table

from vllm_kvtier.devtools.clients import Answer, PromptTokens, chat, complete, prompt_tokens
from vllm_kvtier.devtools.engines import MIB, Engine, kvtier
from vllm_kvtier.devtools.gpus import chosen
from vllm_kvtier.devtools.processes import ServiceFailed, free_port
from vllm_kvtier.store import linux
from vllm_kvtier.store.memory.memory_limits import format_bytes
from vllm_kvtier.store.protocol import PAGE

BLOCK = 32
CACHE_BLOCKS = 140  # 4,480 tokens: about three documents
CACHE_TIMES = 2.5  # the documents must need at least so many caches for the demo to show anything
MAX_LEN = 2560
FUNCTIONS = 24  # of a document: about 1,500 tokens
IDLE_SECONDS = 300  # of the store: longer than an engine's slowest start; then it ends by itself
ANSWER_SECONDS = 30  # for `kvtier stats`

SUBJECTS = {
    "amber brook": "40512",
    "silver harbor": "77120",
    "quiet meadow": "91834",
    "violet bridge": "20657",
    "copper lantern": "55309",
    "hollow cedar": "38946",
    "scarlet field": "64271",
    "winter orchard": "12785",
    "golden valley": "83160",
}
COMPUTED, STORED, RESTARTED = PASSES = "computed", "from the store", "after the restart"


class Asked(msgspec.Struct, frozen=True):
    """One request: its prompt tokens by source, seconds to the first token."""

    tokens: PromptTokens
    first_token: float
    answer: str


class Failures(msgspec.Struct, frozen=True):
    """The connector's counts of failed loads, since the engine's start."""

    integrity: int = 0
    loads: int = 0


class StoreFailed(RuntimeError):
    """The store did not answer."""


def main() -> int:
    args = arguments()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    console.print(f"Model {args.model}; logs in {folder}")
    engine = make_engine(args, folder, runtime)
    counts: dict[str, Any] | None = None
    try:
        what, make = "the engine, which starts its store,", partial(make_engine, args, folder, runtime)
        engine = bring_up_fitted(args, engine, CACHE_BLOCKS, make, what)
        passes, failures, referee = play(engine)
        counts = store_counts(runtime)
        summary(passes, args.recalls, referee)
        describe_store(counts)
    except (ServiceFailed, StoreFailed, httpx.HTTPError) as error:
        console.print(f"[red]{type(error).__name__}:[/red] ", end="")
        console.print(str(error), markup=False)
        return 2
    finally:
        engine.kill()
        end_store(runtime, counts)
    problems = judge(passes, args.recalls, referee, failures, counts)
    console.print(f"{time.monotonic() - started:.0f} s in all.")
    for problem in problems:
        console.print("[red]NOT RIGHT[/red] ", end="")
        console.print(problem, markup=False)
    if problems:
        return 1
    shutil.rmtree(folder)
    console.print("[green]All answers the same; the KV came back from the store, also after the crash.[/green]")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(SHIPPED_MODEL), help="directory or hub name")
    parser.add_argument("--gpus", type=chosen, default=[], help="GPU to use, for example 0; without, the CPU build")
    parser.add_argument(
        "--store-size", help="memory of the store; 256MiB for the shipped model, 4GiB for any other"
    )
    args = parser.parse_args()
    args.gpus = args.gpus[:1]
    args.recalls, args.fit = Path(args.model).resolve() == SHIPPED_MODEL.resolve(), Fit()
    args.store_size = args.store_size or ("256MiB" if args.recalls else "4GiB")
    return args


def small_cache_engine(
    args: argparse.Namespace, logs: Path, runtime: str | None, options: dict[str, Any]
) -> Engine:
    """An engine with a cache for about three documents. ``runtime``: the directory with its store's socket."""
    extra = {"endpoint_port": free_port(), "store_size": args.store_size, "store_idle_seconds": IDLE_SECONDS}
    fit = args.fit.engine(args.gpus, CACHE_BLOCKS, MAX_LEN)
    return Engine(
        args.model,
        name="engine",
        kv=kvtier(extra | options),
        gpus=args.gpus,
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        num_blocks=fit["num_blocks"],
        kv_cache_bytes=2048 * MIB,
        args=[*fit["args"], *(["--gpu-memory-utilization", "0.4"] if args.gpus else [])],
        env={"XDG_RUNTIME_DIR": runtime},
        log_dir=logs,
    )


def make_engine(args: argparse.Namespace, logs: Path, runtime: Path) -> Engine:
    # By default a load must be expected to arrive before the prompt could be computed. So small a model on an unknown
    # machine may well compute some of them, and this demo is about the others.
    return small_cache_engine(args, logs, str(runtime), {"load_policy": "always"})


def play(engine: Engine) -> tuple[dict[str, list[Asked]], list[Failures], list[Answer]]:
    """All passes, the failures before and after the restart, and every answer again with its probabilities."""
    passes: dict[str, list[Asked]] = {}
    warm_up(engine)
    passes[COMPUTED] = ask_all(engine, COMPUTED)
    passes[STORED] = ask_all(engine, STORED)
    failures = [read_failures(engine)]
    engine.kill()
    console.print("Killed the engine (SIGKILL).")
    bring_up([engine], "the engine again")
    warm_up(engine)
    passes[RESTARTED] = ask_all(engine, RESTARTED)
    referee = [
        chat(engine.base_url, document(subject), logprobs=True, top_logprobs=5)
        for subject in (SUBJECTS if len({tuple(a.answer for a in asked) for asked in passes.values()}) > 1 else ())
    ]
    return passes, [*failures, read_failures(engine)], referee


def document(subject: str) -> list[dict[str, str]]:
    """A conversation that states the subject's code, reads a file, and asks for the code. Conversations share only a
    few tokens at the beginning."""
    number = list(SUBJECTS).index(subject)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"The code for {subject} is {SUBJECTS[subject]}."},
        {"role": "assistant", "content": "Noted 1 codes."},
        {"role": "user", "content": "Read this file:\n" + python_file(number, FUNCTIONS)},
        {"role": "assistant", "content": "Done reading."},
        {"role": "user", "content": f"What is the code for {subject}?"},
    ]


def warm_up(engine: Engine) -> None:
    """The first requests of an engine pay for much that later ones find ready; none of the documents is to."""
    for length in (BLOCK * 2, BLOCK * 8):
        complete(engine.base_url, list(range(300, 300 + length)), max_tokens=4)


def ask_all(engine: Engine, name: str) -> list[Asked]:
    """Every document once, one after the other."""
    asked = []
    with console.status("") as status:
        for number, subject in enumerate(SUBJECTS, 1):
            status.update(f"Asking, {name}: {number} of {len(SUBJECTS)}")
            before = prompt_tokens(engine.base_url)
            answer = chat(engine.base_url, document(subject), stream=True)
            tokens = at_least_one_computed(prompt_tokens(engine.base_url) - before)
            asked.append(Asked(tokens, answer.first_token_seconds or answer.seconds, answer.text))
    console.print(f"Asked {len(asked)} prompts, {name}: {sum(a.first_token for a in asked):.2f} s to the first tokens.")
    return asked


def cache_times(asked: list[Asked]) -> float:
    """How many of the engine's KV caches these prompts need."""
    return sum(a.tokens.total for a in asked) / (CACHE_BLOCKS * BLOCK)


def read_failures(engine: Engine) -> Failures:
    complete(engine.base_url, [300, 301], max_tokens=1)  # counts leave the engine with its next step
    response = httpx.get(f"{engine.base_url}/metrics", timeout=10, trust_env=False)
    response.raise_for_status()
    return failures_in(response.text)


def failures_in(metrics: str) -> Failures:
    """Read from the text of /metrics, which lacks events that never happened."""

    def total(name: str) -> int:
        return sum(int(float(value)) for value in re.findall(rf"^vllm:kvtier_{name} ([\d.e+]+)$", metrics, re.M))

    return Failures(
        integrity=total(r"integrity_failures_total\{[^}]*\}"),
        loads=total(r'loads_total\{[^}]*kind="failed"[^}]*\}'),
    )


def store_counts(runtime: Path) -> dict[str, Any]:
    """The output of ``kvtier stats`` for the store in this runtime directory. Raises StoreFailed with its message."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_kvtier.cli", "stats", "--json"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise StoreFailed(f"kvtier stats did not end within {ANSWER_SECONDS} s") from error
    if done.returncode:
        raise StoreFailed(f"kvtier stats ended with code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def end_store(runtime: Path, counts: dict[str, Any] | None) -> None:
    """Have the store that the engine started end, and wait until it has."""
    try:
        pid = (counts or store_counts(runtime))["pid"]
        fd = linux.pidfd_open(pid)
    except (StoreFailed, ProcessLookupError):
        return  # there is none, or it is ending; a hung store ends when its engines are gone
    try:
        os.kill(pid, signal.SIGTERM)
        select.select([fd], [], [], ANSWER_SECONDS)
    except ProcessLookupError:
        return  # it ended in between
    finally:
        os.close(fd)


def same(first: str, again: str, referee: Answer | None) -> bool:
    """Whether two answers are one, or the engine that answered ``referee`` found them nearly equally likely.

    KV of another prompt moves probabilities by far more than a near tie, and then at least one of the two is far
    from the referee's answer, whichever KV that one was made with.
    """
    if first == again:
        return True
    return referee is not None and all(a == referee.text or nearly_tied(referee, a) for a in (first, again))


def verdicts(passes: dict[str, list[Asked]], recalls: bool, referee: list[Answer]) -> list[bool]:
    """By prompt, whether the later passes answered as the first; from the shipped model, to the letter."""
    judges = [None] * len(SUBJECTS) if recalls or not referee else referee
    rows = zip(*(passes[name] for name in PASSES), judges, strict=True)
    return [all(same(first.answer, a.answer, judge) for a in again) for first, *again, judge in rows]


def judge(
    passes: dict[str, list[Asked]],
    recalls: bool,
    referee: list[Answer],
    failures: list[Failures],
    counts: dict[str, Any],
) -> list[str]:
    """The failures, as sentences."""
    problems = []
    evictions = counts["index"]["evictions"]
    for number, (subject, equal) in enumerate(zip(SUBJECTS, verdicts(passes, recalls, referee), strict=True)):
        first, *later = (passes[name][number] for name in PASSES)
        if first.tokens.pulled:
            problems.append(f"{subject}: {first.tokens.pulled} tokens were loaded before anything was stored.")
        if recalls and SUBJECTS[subject] not in first.answer:
            problems.append(f"{subject}: was answered {first.answer!r}, the code is {SUBJECTS[subject]}.")
        if not equal:
            answers = ", ".join(f"{a.answer!r} {name}" for name, a in zip(PASSES[1:], later, strict=True))
            problems.append(f"{subject}: was answered {first.answer!r} first, and {answers}.")
        for name, asked in zip(PASSES[1:], later, strict=True):
            if not asked.tokens.pulled:
                why = f"{asked.tokens.cached} were still in the cache, {asked.tokens.computed} computed"
                if evictions:
                    why += f", and the store evicted {evictions} blocks: a larger --store-size may hold all"
                problems.append(f"{subject}: nothing of its {asked.tokens.total} tokens was loaded {name}; {why}.")
    if cache_times(passes[COMPUTED]) < CACHE_TIMES:
        problems.append(
            f"the prompts need {cache_times(passes[COMPUTED]):.1f} times the cache: too little to push each other out."
        )
    integrity, loads = sum(f.integrity for f in failures), sum(f.loads for f in failures)
    if integrity:
        problems.append(f"{integrity} blocks came from the store with a wrong checksum.")
    if loads:
        problems.append(f"{loads} loads from the store failed.")
    return problems


def summary(passes: dict[str, list[Asked]], recalls: bool, referee: list[Answer]) -> None:
    """Every prompt in all passes: milliseconds to the first token, tokens loaded from the store."""
    times = cache_times(passes[COMPUTED])
    table = Table(title=f"Time to first token; the prompts need {times:.1f} times the engine's KV cache")
    table.add_column("prompt")
    for head in ("tokens", "computed\nms", "from the\nstore ms", "tokens\nloaded", "restarted\nms", "tokens\nloaded"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("answer as\nthe first")
    equal = verdicts(passes, recalls, referee)
    for number, subject in enumerate(SUBJECTS):
        word = "yes" if equal[number] else "NO"
        table.add_row(subject, *cells([passes[name][number : number + 1] for name in PASSES]), word)
    table.add_section()
    table.add_row("all", *cells([passes[name] for name in PASSES]), "yes" if all(equal) else "NO")
    console.print(table)


def describe_store(counts: dict[str, Any]) -> None:
    """The essentials of ``kvtier stats``."""
    table = Table(title="The store, out of kvtier stats", show_header=False)
    for row in store_rows(counts):
        table.add_row(*row)
    console.print(table)


def store_rows(counts: dict[str, Any]) -> list[tuple[str, str]]:
    index = counts["index"]
    looked = f"{index['prefix_hits']:,} of {index['prefix_queries']:,} block hashes"
    return [
        ("up", f"{counts['seconds']:.0f} s, pid {counts['pid']}"),
        ("pool", f"{format_bytes(counts['pool_bytes'])}, policy {counts['policy']}"),
        ("holds", f"{index['entries']:,} blocks in {format_bytes(index['used_pages'] * PAGE)}"),
        ("lookups", f"{index['lookups']:,}, which found {looked}"),
        ("written", f"{index['commits']:,} blocks; {index['evictions']:,} evicted"),
        ("held now", f"{index['leases']:,} leases, {index['reservations']:,} reservations"),
    ]


def cells(passes: list[list[Asked]]) -> list[str]:
    """A row of the table out of the passes' prompts, summed up: tokens, then ms and tokens loaded of each pass."""
    out = [f"{sum(a.tokens.total for a in passes[0]):,}"]
    for number, asked in enumerate(passes):
        out.append(f"{sum(a.first_token for a in asked) * 1000:,.0f}")
        if number:  # the first pass has nothing to load
            out.append(f"{sum(a.tokens.pulled for a in asked):,}")
    return out


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
