"""CPU time of this connector's methods and threads while requests come, generate, are stored and end: without a GPU.

    python benchmarks/step_cost.py --requests 1 64 256 --seconds 6
    python benchmarks/step_cost.py --requests 64 --together          # all begin and end in the same steps
    python benchmarks/step_cost.py --requests 1 --together --prompt 8200 --generated 1 --hits 2  # vLLM's cache has them
    python benchmarks/step_cost.py --requests 64 --functions 40      # by function, with the profiler's own time

vLLM's own scheduler and the calls of its model runner drive both sides of the connector (tests/decode_harness.py),
with a node store; the step itself is a pause, before which this thread keeps the interpreter as long as a launch does.
Prompts of random tokens are found nowhere. Per step and per call, in microseconds of this thread's CPU: unlike time by
the clock it is nearly the same on a busy machine. Copies are plain copies of small blocks on the host.

``main``: all of the loop, vLLM's scheduler included. Of the connector's threads: CPU and wakes a step. Python calls by
method and thread are counted by tests/unit/test_decode_calls.py.
"""

import argparse
import cProfile
import os
import pstats
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import pytest  # noqa: E402
from decode_harness import BLOCK, Calls, Engine, runner  # noqa: E402
from shares import usage  # noqa: E402
from store_process import Store  # noqa: E402
from tiers import markdown  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

METHODS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "take_events", "get_kv_connector_stats",
    "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results", "get_finished",
    "get_block_ids_with_load_errors", "build_connector_worker_meta",
)  # fmt: skip
WARM_UP_STEPS = 20


class Load:
    """``number`` requests at a time in ``engine``."""

    def __init__(self, engine: Engine, number: int, args: argparse.Namespace):
        self.engine, self.number, self.args = engine, number, args
        self.cells: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._rng, self._hasher = random.Random(17), get_request_block_hasher(BLOCK, sha256)
        self._made, self._inside = 0, False
        self.profile = cProfile.Profile() if args.functions else None

    def watch(self) -> None:
        """Time the methods that vLLM calls; what one calls of another is its own time."""
        for side, connector in (("scheduler", self.engine.scheduler.connector), ("worker", self.engine.worker)):
            for name in METHODS:
                if hasattr(connector, name):
                    setattr(connector, name, self._timed((side, name), getattr(connector, name)))

    def _timed(self, key, method):
        cell = self.cells[key]

        def call(*args, **kwargs):
            if self._inside:
                return method(*args, **kwargs)
            self._inside, begin = True, time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                cell[1] += time.thread_time_ns() - begin
                cell[0] += 1
                self._inside = False

        return call

    def request(self, generated: int) -> Request:
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        self._made += 1
        if self.args.hits:
            tokens = random.Random(self._made % self.args.hits).choices(range(1, 500), k=self.args.prompt)
        else:
            tokens = self._rng.choices(range(1, 500), k=self.args.prompt)
        return Request(f"q{self._made}", tokens, params, None, block_hasher=self._hasher)

    def begin(self) -> None:
        """So that requests end one after the other, unless --together."""
        for _ in range(0 if self.args.together else self.number):
            self.engine.core.add_request(self.request(self._rng.randint(1, self.args.generated)))
        for _ in range(WARM_UP_STEPS):
            self.step()
        for cell in self.cells.values():
            cell[:] = [0, 0]
        if self.profile is not None:
            self.profile = cProfile.Profile()

    def step(self) -> None:
        scheduler, profile = self.engine.scheduler, self.profile
        if profile is not None:
            profile.enable()
        here = len(scheduler.running) + len(scheduler.waiting)
        for _ in range(0 if self.args.together and here else self.number - here):
            self.engine.core.add_request(self.request(self.args.generated))
        output = scheduler.schedule()
        with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as kv:
            end = time.perf_counter() + self.args.launch_ms / 1e3
            while time.perf_counter() < end:
                pass
        if profile is not None:
            profile.disable()
        time.sleep(self.args.device_ms / 1e3)
        if profile is not None:
            profile.enable()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names), logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=kv,
        )  # fmt: skip
        scheduler.update_from_output(output, result)
        if profile is not None:
            profile.disable()


def measured(load: Load, seconds: float) -> list[dict]:
    load.watch()
    load.begin()
    made, steps, pid = load._made, 0, os.getpid()
    before, cpu, end = usage({pid: ""}), time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        load.step()
        steps += 1
    cpu, after, requests = time.thread_time() - cpu, usage({pid: ""}), load._made - made
    rows = [
        {"requests": load.number, "where": side, "what": name, "calls a step": round(calls / steps, 2),
         "us a step": round(spent / 1e3 / steps, 1), "us a call": round(spent / 1e3 / calls, 1)}
        for (side, name), (calls, spent) in sorted(load.cells.items(), key=lambda item: -item[1][1]) if calls
    ]  # fmt: skip
    ours = sum(spent for _, spent in load.cells.values()) / 1e3 / steps
    total = {"requests": load.number, "where": "", "what": "all methods", "us a step": round(ours, 1)}
    rows.append({**dict.fromkeys(rows[0]), **total})
    ours = 1e6 * cpu / steps - 1e3 * load.args.launch_ms
    main = {"what": f"main ({steps} steps, {requests} requests begun)", "us a step": round(ours)}
    rows.append({**dict.fromkeys(rows[0]), "requests": load.number, "where": "thread", **main})
    names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")}
    for (_, tid), (_, spent, wakes) in after.items():
        if tid in names:
            _, spent_before, wakes_before = before.get((pid, tid), ("", 0.0, 0))
            row = {"requests": load.number, "where": "thread", "what": names[tid]}
            row["us a step"] = round(1e6 * (spent - spent_before) / steps, 1)
            row["calls a step"] = f"{(wakes - wakes_before) / steps:.2f} wakes"
            rows.append({**dict.fromkeys(rows[0]), **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--generated", type=int, default=192, help="tokens")
    parser.add_argument("--hits", type=int, default=0, metavar="N", help="only N prompts, in vLLM's prefix cache")
    parser.add_argument("--together", action="store_true", help="requests begin when all before have ended")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each number of requests")
    parser.add_argument("--launch-ms", type=float, default=2.0, help="of a step in which this thread computes")
    parser.add_argument("--device-ms", type=float, default=3.0, help="of a step in which it waits")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="print so many, by their own time")
    args = parser.parse_args()
    init_none_hash(sha256)
    for number in args.requests:
        with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
            os.environ["XDG_RUNTIME_DIR"] = folder
            store = Store(Path(folder))
            store.start("--size=256MiB")
            try:
                room = {"max_tokens": max(1024, args.prompt + args.generated)}
                room["blocks"] = 8 * 16 * number + 2048 + (number + args.hits) * room["max_tokens"] // BLOCK
                engine = Engine(Calls(), store, ROOT, pytest.MonkeyPatch(), number, 16, **room)
                engine.names = ["first one"]
                engine.begin()
                engine.scheduler.finish_requests("first one", RequestStatus.FINISHED_ABORTED)
                load = Load(engine, number, args)
                print(markdown(measured(load, args.seconds)), flush=True)
                if load.profile is not None:
                    pstats.Stats(load.profile).sort_stats("tottime").print_stats(args.functions)
                engine.end()
            finally:
                store.kill()


if __name__ == "__main__":
    main()
