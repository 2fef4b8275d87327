"""Loads that a step waits for while the next step has been scheduled on top of it, as engines on GPUs do.

vLLM schedules ahead on no CPU, although its CPU model runner can: so this file runs itself, in a process in which the
platform is set otherwise, with the engine in that same process.
"""

import json
import os
import random
import sys
import time

import numpy as np
from node_fixtures import SLOT_PAGES, Memory, runtime_dir, store_env
from store_support import map_pool

from vllm_kvtier.telemetry.stats import merge

BLOCK = 32
CASES = ((650, 0, 8), (700, 20, 1), (1300, 17, 24))  # tokens, the bad block, tokens asked for


def test_sync_load_bad_blocks_roll_back_with_the_next_step_scheduled(model_path, run_script):
    with runtime_dir() as folder:
        env = {**store_env(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        output = run_script(__file__, str(model_path), env=env)
    first, *cases = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert first == {"scheduler": "AsyncScheduler", "steps": 2}
    assert len(cases) == len(CASES)
    for case in cases:
        assert case == {"good": ["right", 1, 0], "bad": ["right", 0, 1], "again": ["right", 0, 0]}


class InProcess:
    def __init__(self, model: str, extra: dict):
        from vllm.platforms.cpu import CpuPlatform

        settle = CpuPlatform.check_and_update_config.__func__

        def ahead(cls, config) -> None:
            settle(cls, config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(ahead)
        from vllm import LLM

        self._llm = LLM(
            model, max_model_len=2048, block_size=BLOCK, kv_cache_memory_bytes=96 << 20, max_num_batched_tokens=512,
            dtype="float32", enforce_eager=True, async_scheduling=True,
            kv_transfer_config={
                "kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
            },
        )  # fmt: skip
        self.core = self._llm.llm_engine.engine_core.engine_core
        half = self.core.scheduler.connector._scheduler
        self.counts, take = {}, half.counters.take

        def taken() -> dict[str, float]:
            counts = take()
            merge(self.counts, counts)
            return counts

        half.counters.take = taken

    def ask(self, prompt: list[int], count: int, kv_params: dict | None = None) -> list[int]:
        from vllm import SamplingParams

        more = {"kv_transfer_params": kv_params} if kv_params else {}
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, extra_args=more)
        [answer] = self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def settle(self, stored: float = 0) -> None:
        """So many blocks in all have been stored, and nothing is in vLLM's prefix cache: resetting it cancels copies.

        Without a loop, requests let time pass."""
        for i in range(600):
            self.ask([300 + i], 1)
            time.sleep(0.05)
            if self.counts.get("stored_blocks", 0) >= stored and self._llm.reset_prefix_cache():
                return
        raise AssertionError(f"{self.counts.get('stored_blocks', 0):g} of {stored:g} blocks are stored")

    def verified(self, prompt: list[int], count: int, truth: list[int], kv_params: dict | None = None) -> list:
        """(whether the answer is right, loads that a step waited for and that were right, that were wrong)."""
        names = ("synchronous_loads|ok", "synchronous_loads|failed")
        before = [self.counts.get(name, 0) for name in names]
        right = self.ask(prompt, count, kv_params) == truth[:count]
        self.ask([300], 1)
        now = [self.counts.get(name, 0) for name in names]
        return ["right" if right else "wrong", *(int(a - b) for a, b in zip(now, before, strict=True))]


def main(model: str) -> None:
    from vllm_kvtier.store.launcher import store_path

    options = {"store_size": "256MiB", "load_policy": "always", "store_idle_seconds": 5, "sync_load_ms": 10_000}
    engine = InProcess(model, options)  # loads are synchronous however slow the machine is
    print(json.dumps({"scheduler": type(engine.core.scheduler).__name__, "steps": engine.core.batch_queue_size}))
    while not engine.counts.get("store_registered_bytes"):  # without a loop, requests let time pass
        engine.ask([300], 1)
        time.sleep(0.05)
    engine.settle()
    memory, rng = Memory(map_pool(store_path())), random.Random(1)
    for length, which, count in CASES:
        prompt = [rng.randrange(300, 2000) for _ in range(length)]
        before, stored = memory.written(), engine.counts.get("stored_blocks", 0)
        truth = engine.ask(prompt, 24)
        engine.settle(stored + (length + 23) // BLOCK)
        told = {"good": engine.verified(prompt, 24, truth)}
        engine.settle()
        pages = sorted(memory.written() - before)[which * SLOT_PAGES :][: SLOT_PAGES - 1]
        numbers = np.random.default_rng(length).standard_normal((len(pages), memory.pages.shape[1] // 4), np.float32)
        memory.pages[pages] = 3 * numbers.view(np.uint8)
        told["bad"] = engine.verified(prompt, count, truth)
        told["again"] = engine.verified(prompt, 24, truth)  # from vLLM's prefix cache
        print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
