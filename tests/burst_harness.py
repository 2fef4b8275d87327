"""Prompts that come together, before vLLM's own scheduler and this package's scheduler side, in virtual time.

The node store is real, and so are the workers until it has the prompts. Then they copy nothing: a load takes what a
link takes, one behind the other, and a step what it takes on an H200 (Qwen3-8B shapes).
"""

import sys
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

from decode_harness import BLOCK, Calls, Engine
from support import Clock, eventually
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.sources.base import LookupHit, PendingLookup
from vllm_kvtier.vllm_compat.connector_types import WorkerReport

KV = 147_456  # bytes a token
SCHEDULING = 0.5e-3  # seconds of a step in vLLM's scheduler
IDLE = 3e-3  # seconds that an empty step stays with loads


@dataclass
class Machine:
    """``link``: bytes/s of loads. ``least``: seconds of the shortest step that computes; ``launch``: of its launch,
    after which the model runner looks which loads have ended. ``gap``: seconds between two prompts."""

    link: float = 50e9
    least: float = 0.022
    launch: float = 0.018
    gap: float = 1.5e-3

    def step_seconds(self, work):
        """``work``: (new tokens, tokens before them) of each request. 2k tokens take 55 ms, 8k 217."""
        tokens, pairs = sum(new for new, _ in work), sum(new * before + new * new / 2 for new, before in work)
        return max(self.least, 0.008 + 2.3e-5 * tokens + 9e-10 * pairs) if work else 0.0


class Burst:
    """``count`` prompts of ``tokens`` tokens, which the store has. ``ahead``: steps that vLLM schedules before it has
    read the one before."""

    def __init__(self, store, root, monkeypatch, *, count=24, tokens=2048, step_tokens=2048, ahead=0):
        self.store, self.tokens, self.count, self.ahead = store, tokens, count, ahead
        blocks = (tokens // BLOCK + 2) * (count + 1)
        self.engine = Engine(Calls(), store, root, monkeypatch, count, 1, step_tokens, tokens + 64, blocks, ahead > 0)
        self.scheduler, self.ours = self.engine.scheduler, self.engine.ours
        self.clock = Clock(5000.0)
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm_kvtier.scheduler") and hasattr(module, "time"):
                monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock))
        self.planner = self.ours._planner
        self.planner._clock = self.ours._step_timer._clock = self.ours._gauges._clock = self.clock
        monkeypatch.setattr(LookupHit, "bytes_from", lambda hit, start: KV * max(0, hit.tokens - max(start, hit.start)))
        poll = PendingLookup.poll  # the store's answers take no time
        monkeypatch.setattr(PendingLookup, "poll", lambda pending: pending.answer.wait(60.0) and poll(pending))
        monkeypatch.setattr("decode_harness.STEP_SECONDS", 0.0)
        self.rounds = 0
        while store.counts().index.entries < count * (tokens // BLOCK):
            self.store_all()
        self.ours._store.client._lookup_timeout = 60.0

    def store_all(self):
        """On a slow machine the end of a chain may be dropped, and the store be left alone for some time."""
        self.rounds += 1
        for n in range(self.count):
            self.engine.add(f"{self.rounds} {n}", self.prompt(n), 1)
        eventually(lambda: self.engine.step() and not self.scheduler.requests, 60, "all are computed")
        self.engine.all_stored()
        self.clock.now += 60.0
        eventually(self.scheduler.reset_prefix_cache, 20, "nothing holds blocks")

    def prompt(self, n):
        return [n + 1, *range(7, self.tokens + 6)]

    def learn(self, machine, link):
        """What the engine has measured: steps that compute, and a link of ``link`` bytes/s."""
        size, prior = self.planner._step_tokens, {"host": 20e9, "peer_gpu": 200e9}
        vars(self.planner).update(vars(LoadPlanner(prior, self.clock, step_tokens=size, known=2)))
        for new in (1, 512, 1024, 2048) * 8:
            work = [] if new == 1 else [(new, 0)]
            self.planner.observe_step(machine.step_seconds([(new, 0)]), work, 1 if new == 1 else 0)
        for new in (64, 2048) * 8:
            self.planner.observe_load("host", new * KV, 0, new * KV / link + 0.5e-3)

    def play(self, machine):
        """Sends all prompts, with the GPU's cache empty. Returns how many were loaded, and each one's seconds until its
        first token."""
        eventually(self.scheduler.reset_prefix_cache, 20, "nothing holds blocks")
        self.rounds += 1
        self.machine, self.link_free, self.runner_free, self.device_free = machine, 0.0, 0.0, 0.0
        self.loads, self.loaded, self.waits = [], set(), {}
        arrivals = deque((self.clock.now + n * machine.gap, n) for n in range(self.count))
        begun, steps = {}, deque()
        while arrivals or steps or self.scheduler.requests:
            if not (steps or self.scheduler.requests):
                self.clock.now = max(self.clock.now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.clock.now:
                at, n = arrivals.popleft()
                begun[f"{self.rounds} {n}"] = at
                self.engine.add(f"{self.rounds} {n}", self.prompt(n), 1)
            if self.scheduler.requests:
                steps.append(self.launch())
                if len(steps) <= self.ahead and self.scheduler.requests:
                    continue
            self.read(*steps.popleft())
        return len(self.loaded), [at - begun[name] for name, at in self.waits.items()]

    def launch(self):
        """Schedules and launches a step, and begins its loads. Returns it, what its worker reports and its end."""
        output = self.scheduler.schedule()
        self.clock.now += SCHEDULING
        requests, machine = self.scheduler.requests, self.machine
        new = output.num_scheduled_tokens
        work = [(tokens, requests[name].num_computed_tokens - tokens) for name, tokens in new.items()]
        begin = max(self.clock.now, self.runner_free)
        seconds = machine.step_seconds(work)
        seen = begin + min(machine.launch, seconds)
        end = max(begin, self.device_free) + seconds
        for job in output.kv_connector_metadata.work.loads:
            nbytes, at = KV * BLOCK * len(job.groups[0].blocks), begin if job.synchronous else seen
            self.link_free = max(self.link_free, at) + nbytes / machine.link
            self.loads.append((self.link_free, job, nbytes, self.link_free - at))
            self.loaded.add(job.request_id)
            if job.synchronous:  # the device waits for it, and the step's output for its verification
                end = seen = max(self.device_free, self.link_free) + seconds
        if not new and self.loads:
            seen = end = max(begin, min(begin + IDLE, self.loads[0][0]))
        ended = [load for load in self.loads if load[0] <= seen]
        self.loads = [load for load in self.loads if load[0] > seen]
        results = [LoadResult(job.request_id, set(), "", n, t, 0.0, load_id=job.load_id) for _, job, n, t in ended]
        kv = KVConnectorOutput(
            finished_recving={job.request_id for _, job, *_ in ended if not job.synchronous},
            kv_connector_worker_meta=WorkerReport(results) if results else None,
        )
        self.runner_free = seen
        if new:
            self.device_free = end
        done = [name for name in new if requests[name].num_computed_tokens >= requests[name].num_prompt_tokens]
        return output, kv, end, done

    def read(self, output, kv, end, done):
        names = list(output.num_scheduled_tokens)
        self.clock.now = max(self.clock.now, end if names else end + 1e-3)
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] if name in done else [] for name in names], logprobs=None, prompt_logprobs_dict={},
            pooler_output=[], kv_connector_output=kv,
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)
        self.waits.update(dict.fromkeys(done, self.clock.now))
