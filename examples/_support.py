"""What the newer examples share: their arguments, the directory they work in, and how they end.

What is older is in ``multiturn_demo`` and ``host_cache_demo``, which they import from too. No example meets a store of
yours: ``workplace`` gives the engines a runtime directory of their own.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import httpx
from host_cache_demo import BLOCK
from multiturn_demo import SHIPPED_MODEL, console

from vllm_kvtier.devtools.clients import TIMEOUT
from vllm_kvtier.devtools.engines import MIB, Engine
from vllm_kvtier.devtools.gpus import chosen, visible
from vllm_kvtier.devtools.processes import ServiceFailed
from vllm_kvtier.devtools.stores import POLL_SECONDS, StoreFailed, end_store, store_counts
from vllm_kvtier.store.launcher import store_path

# Longer timeouts than the defaults (2 s): here no block is to be computed only because a laptop was busy.
PATIENT = {"lookup_timeout": 20.0, "handshake_timeout": 20.0}
# Of the store: longer than an engine's slowest start; then it ends by itself.
IDLE_SECONDS = 300


def parser(doc: str) -> argparse.ArgumentParser:
    """With the options that all have; ``doc``: the example's docstring, which is its help."""
    made = argparse.ArgumentParser(
        description=doc.partition("\nusage:")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default=str(SHIPPED_MODEL), help="directory or hub name (default: %(default)s)")
    made.add_argument(
        "--gpus",
        type=chosen,
        default=visible() or [],
        help="GPUs to use, for example 0,1; by default those of CUDA_VISIBLE_DEVICES, and without it the CPU build",
    )
    made.add_argument("--quick", action="store_true", help="less of it: a minute at most on two cores")
    return made


def arguments(made: argparse.ArgumentParser) -> argparse.Namespace:
    """``recalls``: whether the model was trained to answer, so that its answers can be judged."""
    args = made.parse_args()
    args.recalls = Path(args.model).resolve() == SHIPPED_MODEL.resolve()
    return args


def engine(args: argparse.Namespace, name: str, folder: Path, *, gpus: Sequence = (), flags=(), **options) -> Engine:
    """One that is not started yet; ``options`` as Engine's."""
    # Several engines may share a device: vLLM only checks this free memory; the cache's size is given.
    shared = ["--gpu-memory-utilization", "0.25"] if gpus else []
    # In float32 rounding decides nothing, so that the shipped model's answers can be compared to the letter.
    exact = ["--dtype", "float32"] if args.recalls else []
    return Engine(
        args.model, name=name, gpus=gpus, block_size=BLOCK, kv_cache_bytes=2048 * MIB, log_dir=folder,
        args=[*shared, *exact, *flags], **options,
    )  # fmt: skip


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for logs and data, with the runtime directory of this process and its children. The store in it is
    stopped at the end. The directory stays; ``finish`` removes it after success."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    (folder / "run").mkdir(mode=0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
    try:
        yield folder
    finally:
        end_store(store_path())
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def run(args: argparse.Namespace, play: Callable[[argparse.Namespace, Path], Sequence[str]], well: str) -> int:
    """Run an example, which returns its failures as sentences; print ``well`` if there are none.

    Returns the exit code: 0, 1 after failures, 2 if the example could not run.
    """
    started = time.monotonic()
    with workplace() as folder:
        console.print(f"Model {args.model}; logs in {folder}", markup=False)
        try:
            problems = play(args, folder)
        except (ServiceFailed, StoreFailed, httpx.HTTPError) as error:
            console.print(f"[red]{type(error).__name__}:[/red] ", end="")
            console.print(str(error), markup=False)
            return 2
    console.print(f"{time.monotonic() - started:.0f} s in all.")
    return finish(folder, problems, well)


def await_store(seconds: float = 60.0) -> None:
    """Wait for the store that the engines start, since a ready engine does not wait for it. Raises StoreFailed with the
    last answer after the timeout."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            store_counts(store_path())
            return
        except StoreFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)  # there is no event for its socket


def finish(folder: Path, problems: Sequence[str], well: str) -> int:
    for problem in problems:
        console.print("[red]NOT RIGHT[/red] ", end="")
        console.print(problem, markup=False)
    if problems:
        return 1
    shutil.rmtree(folder)
    console.print(f"[green]{well}[/green]")
    return 0


def as_command(main: Callable[[], int]) -> NoReturn:
    """As a command: its exit code, and 130 for Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def tokens_of(base_url: str, messages: Sequence[dict], **body) -> list[int]:
    """Token ids of a chat's prompt, as the engine makes them. Raises httpx.HTTPError."""
    asked = {"model": "model", "messages": list(messages), "add_generation_prompt": True, **body}
    response = httpx.post(f"{base_url}/tokenize", json=asked, timeout=TIMEOUT, trust_env=False)
    return response.raise_for_status().json()["tokens"]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
