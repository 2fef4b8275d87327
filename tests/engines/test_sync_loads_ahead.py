"""Loads that a step waits for while the next step has been scheduled on top of it, as engines on GPUs do.

vLLM schedules ahead on no CPU, although its CPU model runner can: so this file runs itself, in a process in which the
platform is set otherwise, with the engine in that same process.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from node_fixtures import SLOT_PAGES, Memory, runtime_dir, store_env
from store_support import map_pool

from vllm_kvtier.telemetry.stats import merge

BLOCK, MAX_LENGTH = 32, 2048
CASES = ((650, 0, 8), (700, 20, 1), (1300, 17, 24))  # tokens, the bad block, tokens asked for
SPOILED = 1, 4  # of six short prompts that are loaded while others generate


def test_sync_load_bad_blocks_roll_back_with_the_next_step_scheduled(model_path, run_script):
    """Alone, and among requests that generate."""
    with runtime_dir() as folder:
        env = {**store_env(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        output = run_script(__file__, str(model_path), env=env)
    first, *cases, among = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert first == {"scheduler": "AsyncScheduler", "steps": 2}
    assert len(cases) == len(CASES)
    for case in cases:
        assert case == {"good": ["right", 1, 0], "bad": ["right", 0, 1], "again": ["right", 0, 0]}
    assert among == {"others": 3, "loads": [["right", 0, 1] if i in SPOILED else ["right", 1, 0] for i in range(6)]}


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
            model, max_model_len=MAX_LENGTH, block_size=BLOCK, kv_cache_memory_bytes=96 << 20, dtype="float32",
            max_num_batched_tokens=512, enforce_eager=True, async_scheduling=True,
            kv_transfer_config={
                "kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
            },
        )  # fmt: skip
        self._engine, self._begun, self._answers = self._llm.llm_engine, 0, {}
        self.core = self._engine.engine_core.engine_core
        half = self.core.scheduler.connector._scheduler
        self.counts, self._take = {}, half.counters.take
        half.counters.take = self._taken

    def _taken(self) -> dict[str, float]:
        counts = self._take()
        merge(self.counts, counts)
        return counts

    def _begin(self, prompt: list[int], count: int, kv_params: dict | None = None) -> str:
        from vllm import SamplingParams

        self._begun += 1
        more = {"kv_transfer_params": kv_params} if kv_params else {}
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, extra_args=more)
        self._engine.add_request(str(self._begun), {"prompt_token_ids": prompt}, params)
        return str(self._begun)

    def ask(self, prompt: list[int], count: int, kv_params: dict | None = None) -> list[int]:
        name = self._begin(prompt, count, kv_params)
        while len(self._answers.get(name, [])) < count:
            self._step()
        return self._answers[name]

    def _step(self) -> None:
        self._answers.update((output.request_id, list(output.outputs[0].token_ids)) for output in self._engine.step())

    @contextmanager
    def generating(self, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[None]:
        """Each of these generates until this ends, while others are asked; ``answers`` then begin as they should."""
        names = [self._begin(prompt, MAX_LENGTH - len(prompt)) for prompt in prompts]
        while not all(name in self._answers for name in names):
            self._step()
        yield
        assert self._engine.get_num_unfinished_requests() == len(names)
        self._engine.abort_request(names)
        given = [self._answers[name] for name in names]
        assert all(answer and answer == truth[: len(answer)] for answer, truth in zip(given, answers, strict=True))

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
        self._taken()
        before = [self.counts.get(name, 0) for name in names]
        right = self.ask(prompt, count, kv_params) == truth[:count]
        self._taken()  # vLLM does not after each step
        now = [self.counts.get(name, 0) for name in names]
        return ["right" if right else "wrong", *(int(a - b) for a, b in zip(now, before, strict=True))]


def spoil(memory: Memory, pages: list[int]) -> None:
    """Other numbers, that change every answer."""
    numbers = np.random.default_rng(pages[0]).standard_normal((len(pages), memory.pages.shape[1] // 4), np.float32)
    memory.pages[pages] = 3 * numbers.view(np.uint8)


def main(model: str) -> None:
    from vllm_kvtier.scheduler.integrity import sync_load
    from vllm_kvtier.store.launcher import store_path

    options = {"store_size": "256MiB", "load_policy": "always", "store_idle_seconds": 5, "sync_load_ms": 10_000}
    sync_load.SHORT_LOAD_SECONDS = 10.0  # loads are synchronous however slow the machine is, among others too
    engine = InProcess(model, options)
    print(json.dumps({"scheduler": type(engine.core.scheduler).__name__, "steps": engine.core.batch_queue_size}))
    while not engine.counts.get("store_registered_bytes"):  # without a loop, requests let time pass
        engine.ask([300], 1)
        time.sleep(0.05)
    engine.settle()
    memory, rng = Memory(map_pool(store_path())), random.Random(1)

    def kept(length: int) -> tuple[list[int], list[int], list[list[int]]]:
        """A prompt, its answer, and the pages of its blocks in the store, without those of their checksums."""
        prompt = [rng.randrange(300, 2000) for _ in range(length)]
        before, stored = memory.written(), engine.counts.get("stored_blocks", 0)
        truth = engine.ask(prompt, 24)
        engine.settle(stored + (length + 23) // BLOCK)
        pages = sorted(memory.written() - before)
        return prompt, truth, [pages[at : at + SLOT_PAGES - 1] for at in range(0, len(pages), SLOT_PAGES)]

    for length, which, count in CASES:
        prompt, truth, slots = kept(length)
        told = {"good": engine.verified(prompt, 24, truth)}
        engine.settle()
        spoil(memory, slots[which])
        told["bad"] = engine.verified(prompt, count, truth)
        told["again"] = engine.verified(prompt, 24, truth)  # from vLLM's prefix cache
        print(json.dumps(told), flush=True)
    short = [kept(100) for _ in range(6)]
    for i in SPOILED:
        spoil(memory, short[i][2][i // 2])
    others = [[rng.randrange(300, 2000) for _ in range(40)] for _ in range(3)]
    with engine.generating(others, [engine.ask(prompt, 400) for prompt in others]):
        loads = [engine.verified(prompt, 8, truth) for prompt, truth, _ in short]
    print(json.dumps({"others": len(others), "loads": loads}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
