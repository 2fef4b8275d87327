"""``kvtier bench``: this machine's bandwidth of copies, codecs, disk and pulls, beside its limits."""

import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from vllm_kvtier.cli import inputs
from vllm_kvtier.errors import KVTierError

BENCHES = ("copy", "codec", "disk", "pull")

Names = Annotated[list[str] | None, typer.Argument(help="copy, codec, disk, pull. Default: all.", metavar="[BENCH]...")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.1, help="Duration of each measurement, without its set-up.")]
Folder = Annotated[
    Path | None, typer.Option("--disk", help="Directory on the disk to measure. Default: that of temporary files.")
]
DiskMib = Annotated[int, typer.Option("--disk-mib", min=64, help="MiB to write there, twice; removed afterwards.")]
Device = Annotated[str, typer.Option("--device", help="cuda or cpu; auto: CUDA if available.")]
Backends = Annotated[list[str] | None, typer.Option("--nixl-backend", help="As nixl_backends; repeatable.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object instead of a table; `kvtier plan --machine` reads it.")
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw it as PNG, SVG or PDF (needs matplotlib).")]


def bench(
    benches: Names = None,
    seconds: Seconds = 8.0,
    disk: Folder = None,
    disk_mib: DiskMib = 512,
    device: Device = "auto",
    nixl_backend: Backends = None,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Measure copies, codecs, disk and pulls on this machine, each beside the machine's limit.

    Blocks are those of an 8B model: 16 tokens, 2.25 MiB. A benchmark that cannot run prints why; the others still run.
    Exit status: 0, or 1 if none could run.
    """
    wanted = benches or list(BENCHES)
    if unknown := [name for name in wanted if name not in BENCHES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not a benchmark: choose from {', '.join(BENCHES)}")
    if device not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter("auto, cuda or cpu", param_hint="--device")
    errors = inputs.error_console()
    folder = disk or Path(tempfile.gettempdir())
    rows, failed = [], {}
    with _ended_by_signals():
        for name in wanted:
            with errors.status(f"{name} ..."):
                try:
                    rows += _measure(name, seconds, folder, disk_mib << 20, device, nixl_backend or ["UCX"])
                except KVTierError as error:
                    failed[name] = str(error)
                except (RuntimeError, OSError) as error:  # of a driver, of torch
                    failed[name] = f"{type(error).__name__}: {error}"
    for name, reason in failed.items():
        errors.print(f"{name}: {reason}", markup=False)
    about = _about(device)
    with inputs.errors_as_messages():
        if plot is not None and rows:
            from vllm_kvtier.bench.picture import draw

            draw(rows, plot, about["device"])
    if as_json:
        print(json.dumps({"machine": about, "rows": msgspec.to_builtins(rows), "failed": failed}, indent=1))
    else:
        _show(rows, about, Console())
    raise typer.Exit(int(not rows))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end the command as an exception: files are removed."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    handled = {each: handler for each, handler in before.items() if handler is not signal.SIG_IGN}

    def end(number: int, _) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)  # the end of a terminal sends two
        sys.exit(128 + number)

    for each in handled:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in handled.items():
            signal.signal(each, handler)


def _measure(name: str, seconds: float, folder: Path, nbytes: int, device: str, backends: list[str]) -> list:
    """Raises KVTierError if this machine cannot run it."""
    try:
        if name == "disk":
            from vllm_kvtier.bench import disk

            return disk.measure(seconds, folder, nbytes)
        from vllm_kvtier.bench import copies, pull
    except ModuleNotFoundError as error:
        raise KVTierError(f"it needs {error.name}, which vLLM brings") from error
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise KVTierError("this machine has no CUDA device")
    cuda = None if device == "auto" else device == "cuda"
    if name == "pull":
        return pull.measure(seconds, backends, cuda)
    return copies.measure(seconds, cuda) if name == "copy" else copies.measure_codecs(seconds, cuda)


def _about(device: str) -> dict[str, str | int]:
    name = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    try:
        import torch

        if device != "cpu" and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
    except ModuleNotFoundError:
        name += ", no torch"
    except RuntimeError as error:
        name += f", {error}"
    return {"device": name, "kernel": platform.release(), "cores": len(os.sched_getaffinity(0))}


def _show(rows: list, about: dict[str, str | int], console: Console) -> None:
    cells, before = [], ""
    for row in rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        limit = f"{row.limit / 1e9:.2f}" if row.limit else ""
        first = "" if row.bench == before else row.bench
        cells.append((first, row.name, f"{row.bytes_per_second / 1e9:.2f}", limit, share, row.limit_is))
        before = row.bench
    console.print(f"{about['device']}, Linux {about['kernel']}", markup=False, highlight=False, soft_wrap=True)
    heads = ("bench", "", "GB/s", "limit", "share", "the limit is")
    console.print(inputs.make_table(heads, cells, left=("bench", "", "the limit is")))
    for remark in dict.fromkeys(row.remark for row in rows if row.remark):
        console.print(remark, style="yellow", markup=False, soft_wrap=True)
