"""When methods of vLLM and of this connector ran, in all processes of a benchmark, on one clock.

    python benchmarks/timeline.py run /tmp/times -- python benchmarks/pd.py --model models/recall-6m --lengths 1500 \\
        --connectors kvtier-mapped-follow kvtier-mapped
    python benchmarks/timeline.py show /tmp/times --last 2      # the last two seconds
    python benchmarks/timeline.py steps /tmp/times --requests 64
    python benchmarks/timeline.py bursts /tmp/times --requests 64
    python benchmarks/timeline.py series /tmp/times --requests 8

``run``: each Python process of the command loads this file at its start and wraps the methods of HOOKS when their
module is imported. Each process writes a line a call to FOLDER/<pid>.jsonl: when it began (``time.perf_counter``, the
same clock in all processes of a machine), seconds, method, the thread's own processor time in seconds, thread. A call
costs some 15 microseconds more.

``show``: the calls of all processes in order; milliseconds from the first one shown.

``steps``: the device's time for the steps that compute one token of each of so many requests, by CUDA events around the
forward and the sampling of each step (vLLM's second model runner; a step costs some 20 microseconds more): milliseconds
of the gap before it, the forward and the sampling, by engine. The first 200 such steps of an engine are left out.

``bursts``: where so many requests came to an engine at once, medians of what happened in the 0.2 s from the first one
on: the device's time in steps that compute prompts, when the last request was there, and each method's calls and
milliseconds. The first burst of an engine is left out.

``series``: where so many requests came to an engine one after the other, medians by their place in the series: from
when a request was added until its first output was read in, and each method's milliseconds meanwhile, by thread (the
engine's own or another, whose work takes the interpreter from it). The first series of an engine is left out.
"""

import argparse
import bisect
import functools
import importlib.abc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "KVTIER_TIMELINE"
# Module: methods by class.
HOOKS = {
    "vllm.v1.core.sched.scheduler": {"Scheduler": "schedule update_from_output"},
    "vllm.v1.engine.core": {"EngineCore": "add_request"},
    "vllm.v1.worker.gpu.model_runner": {
        "GPUModelRunner": "execute_model add_requests prepare_inputs prepare_attn sample_tokens"
    },
    "vllm.v1.worker.gpu.cudagraph_utils": {"ModelCudaGraphManager": "run_fullgraph"},
    "vllm.v1.engine.output_processor": {"OutputProcessor": "process_outputs"},
    "vllm_kvtier.connector": {
        "KVTierConnector": "get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
        "update_connector_output request_finished_all_groups get_kv_connector_stats start_load_kv get_transfer_results"
    },
    "vllm_kvtier.scheduler.leases.lease_server": {"LeaseServer": "checksums_ready _grant _begin_following"},
    "vllm_kvtier.scheduler.leases.lease_client": {"LeaseClient": "_granted"},
    "vllm_kvtier.scheduler.offload.store_jobs": {"StoreJobs": "_reserve_all reserved stored"},
    "vllm_kvtier.worker.store.store_worker": {"StoreWorker": "store step collect _poll _send_stored"},
    "vllm_kvtier.worker.store.copy_engine": {"CopyEngine": "_start"},
    "vllm_kvtier.worker.peer_fetch.fetch_jobs": {"PeerFetches": "start start_now _result"},
}


RUNNER = "vllm.v1.worker.gpu.model_runner"
STEPS = ".steps"
WARM_UP = 200
BURST_SECONDS = 0.2
BURST_PAUSE = 0.3  # seconds without a new request before a burst
DECODES_BETWEEN = 30  # steps


class Lines:
    """Of this process; a child of fork begins a file of its own."""

    def __init__(self, folder: Path):
        self._folder, self._pid, self._file = folder, 0, None

    def write(self, *fields: object) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._file = (self._folder / f"{self._pid}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps(fields) + "\n")


def wrap(owner: type, name: str, lines: Lines) -> None:
    method = getattr(owner, name, None)  # another version may lack it
    if method is None:
        return

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds, cpu = time.perf_counter() - begin, time.thread_time() - cpu
            thread = threading.current_thread().name
            lines.write(round(begin, 6), round(seconds, 6), f"{owner.__name__}.{name}", round(cpu, 6), thread)

    setattr(owner, name, timed)


class StepTimes:
    """Of one engine, in its model runner's process. A step's events are read when it has passed."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, None
        self._step: tuple[list[Any], list[int]] | None = None
        self._under_way: deque[tuple[list[Any], list[int]]] = deque()
        self._before: Any = None  # the last event of the step before

    def mark(self, runner: Any, scheduled: Any = None) -> None:
        """A point on the current stream. ``scheduled``: vLLM's SchedulerOutput, if a step begins here."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if scheduled is not None:
            self._step = [], [len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens]
        if self._step is None:
            return
        self._step[0].append(event)
        if len(self._step[0]) == 3:
            self._under_way.append(self._step)
            self._step = None
            self._write(runner)

    def _write(self, runner: Any) -> None:
        if self._file is None:
            transfer = runner.vllm_config.kv_transfer_config
            self._file = (self._folder / f"{os.getpid()}{STEPS}").open("w", buffering=1)
            self._file.write(json.dumps(["none"] if transfer is None else [transfer.kv_connector]) + "\n")
        while self._under_way and self._under_way[0][0][-1].query():
            events, counts = self._under_way.popleft()
            if self._before is not None:
                points = [self._before, *events]
                times = [round(a.elapsed_time(b), 4) for a, b in zip(points, points[1:], strict=False)]
                self._file.write(json.dumps(counts + times) + "\n")
            self._before = events[-1]


def wrap_steps(runner: type, folder: Path) -> None:
    execute, sample, times = runner.execute_model, runner.sample_tokens, StepTimes(folder)

    @functools.wraps(execute)
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        computes = not kwargs.get("dummy_run") and scheduled.total_num_scheduled_tokens > 0
        if computes:
            times.mark(self, scheduled)
        result = execute(self, scheduled, *args, **kwargs)
        if computes:
            times.mark(self)
        return result

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(self, *args, **kwargs)
        times.mark(self)
        return result

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


class Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, lines: Lines):
        self._inner, self._lines = inner, lines

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for owner, names in HOOKS[module.__name__].items():
            for name in names.split():
                wrap(getattr(module, owner), name, self._lines)
        if module.__name__ == RUNNER:
            wrap_steps(module.GPUModelRunner, Path(os.environ[FOLDER]))


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, lines: Lines):
        self._lines, self._inside = lines, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in HOOKS or self._inside:
            return None
        self._inside = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._inside = False
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, self._lines)
        return spec


def install() -> None:
    """In each Python process of ``run``."""
    sys.meta_path.insert(0, Finder(Lines(Path(os.environ[FOLDER]))))


def run(folder: Path, command: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        here = str(Path(__file__).resolve().parent)
        text = f"import sys\nsys.path.append({here!r})\nimport timeline\nsys.path.remove({here!r})\n"
        (Path(site) / "sitecustomize.py").write_text(text + "timeline.install()\n")
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, FOLDER: str(folder.resolve())}).returncode


def show(folder: Path, last: float) -> None:
    calls = [(json.loads(line), file.stem) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    calls.sort()
    calls = [each for each in calls if each[0][0] >= calls[-1][0][0] - last]
    print(f"{'ms':>10} {'took ms':>8} {'cpu ms':>8}  process thread          method")
    for (begin, seconds, method, cpu, thread), pid in calls:
        at = 1e3 * (begin - calls[0][0][0])
        print(f"{at:10.2f} {1e3 * seconds:8.2f} {1e3 * cpu:8.2f}  {pid:>7} {thread[:15]:15} {method}")


def steps(folder: Path, requests: int) -> None:
    print(f"{'process':>8} {'connector':20} {'steps':>6}   gap, forward, sampling, all: median (mean)")
    for file in sorted(folder.glob(f"*{STEPS}")):
        (connector,), *rows = [json.loads(line) for line in file.read_text().splitlines()]
        found = [times for *counts, gap, forward, sampling in rows if counts == [requests, requests]
                 for times in [(gap, forward, sampling, gap + forward + sampling)]][WARM_UP:]  # fmt: skip
        if found:
            cells = [
                f"{statistics.median(each):.3f} ({statistics.mean(each):.3f})" for each in zip(*found, strict=True)
            ]
            print(f"{file.name.removesuffix(STEPS):>8} {connector:20} {len(found):6}   {', '.join(cells)}")


def bursts(folder: Path, requests: int) -> None:
    for file in sorted(folder.glob(f"*{STEPS}")):
        (connector,), *rows = [json.loads(line) for line in file.read_text().splitlines()]
        calls = sorted(json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines())
        added = [call[0] for call in calls if call[2] == "EngineCore.add_request"]
        starts = [at for before, at in pairwise([0.0, *added]) if at - before > BURST_PAUSE]
        found = []
        for start in starts:
            until = bisect.bisect_left(added, start + BURST_PAUSE)
            if until - bisect.bisect_left(added, start) < requests:
                continue
            took: dict[str, list[float]] = {}
            for begin, seconds, method, *_ in calls[bisect.bisect_left(calls, [start]) :]:
                if begin > start + BURST_SECONDS:
                    break
                of_method = took.setdefault(method, [0, 0.0])
                of_method[0] += 1
                of_method[1] += 1e3 * seconds
            found.append((1e3 * (added[until - 1] - start), took))
        prompts = _prompt_steps(rows, requests)[1:]
        if len(found) < 2 or not prompts:
            continue
        forward, sampling = (statistics.median(sum(row[i] for row in each) for each in prompts) for i in (3, 4))
        last = statistics.median(at for at, _ in found[1:])
        device = f"{forward:.1f} + {sampling:.1f}"
        print(f"{file.stem} {connector}, {len(found) - 1} bursts: device {device}, last request {last:.1f}")
        for method in sorted({name for _, took in found for name in took}):
            count, milliseconds = (
                statistics.median(took.get(method, (0, 0.0))[i] for _, took in found[1:]) for i in (0, 1)
            )
            print(f"    {method:50} {count:6.1f} {milliseconds:8.2f}")


def series(folder: Path, requests: int) -> None:
    for file in sorted(folder.glob(f"*{STEPS}")):
        (connector,), *_ = [json.loads(line) for line in file.read_text().splitlines()]
        calls = sorted(json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines())
        engine = next(call[4] for call in calls if call[2] == "EngineCore.add_request")
        added = [call[0] for call in calls if call[2] == "EngineCore.add_request"]
        groups: list[list[float]] = []
        for before, at in pairwise([-math.inf, *added]):
            if at - before > BURST_PAUSE:
                groups.append([])
            groups[-1].append(at)
        groups = [group for group in groups if len(group) == requests][1:]
        print(f"{file.stem} {connector}, {len(groups)} series")
        if not groups:
            continue
        for place in range(requests):
            found = [_until_output(calls, group[place], engine) for group in groups]
            names = sorted({name for _, took in found for name in took})
            cells = {name: statistics.median(took.get(name, 0.0) for _, took in found) for name in names}
            print(f"  {place + 1}: {statistics.median(whole for whole, _ in found):.2f} ms")
            print("".join(f"      {name:60} {took:8.2f}\n" for name, took in cells.items() if took >= 0.05), end="")


def _until_output(calls: list[list[Any]], start: float, engine: str) -> tuple[float, dict[str, float]]:
    """Milliseconds from then until a step's output was read in that the engine had scheduled since, and of each
    method meanwhile."""
    took: dict[str, float] = {}
    scheduled = False
    for begin, seconds, method, _, thread in calls[bisect.bisect_left(calls, [start]) :]:
        name = f"{'' if thread == engine else '(another thread) '}{method}"
        took[name] = took.get(name, 0.0) + 1e3 * seconds
        scheduled |= method == "GPUModelRunner.execute_model"
        if scheduled and method == "Scheduler.update_from_output":
            return 1e3 * (begin + seconds - start), took
    return math.nan, took


def _prompt_steps(rows: list[list[float]], requests: int) -> list[list[list[float]]]:
    """Steps that compute more than a token a request, by burst: those between which few others ran."""
    groups: list[list[list[float]]] = []
    others = DECODES_BETWEEN
    for row in rows:
        if row[1] > row[0]:
            if others >= DECODES_BETWEEN:
                groups.append([])
            groups[-1].append(row)
            others = 0
        else:
            others += 1
    return [group for group in groups if max(row[0] for row in group) >= requests // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    todo = parser.add_subparsers(dest="todo", required=True)
    one = todo.add_parser("run")
    one.add_argument("folder", type=Path)
    one.add_argument("command", nargs="+", help="behind --")
    two = todo.add_parser("show")
    two.add_argument("folder", type=Path)
    two.add_argument("--last", type=float, default=1.0, help="seconds before the last call")
    three = todo.add_parser("steps")
    three.add_argument("folder", type=Path)
    three.add_argument("--requests", type=int, default=64, help="of a step")
    four = todo.add_parser("bursts")
    four.add_argument("folder", type=Path)
    four.add_argument("--requests", type=int, default=64, help="that come at once")
    five = todo.add_parser("series")
    five.add_argument("folder", type=Path)
    five.add_argument("--requests", type=int, default=8, help="that come one after the other")
    args = parser.parse_args()
    if args.todo == "show":
        show(args.folder, args.last)
    elif args.todo == "steps":
        steps(args.folder, args.requests)
    elif args.todo == "bursts":
        bursts(args.folder, args.requests)
    elif args.todo == "series":
        series(args.folder, args.requests)
    else:
        sys.exit(run(args.folder, args.command))


if __name__ == "__main__":
    main()
