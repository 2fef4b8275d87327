"""Hand-offs that a step waits for while the next step has been scheduled on top of it, as engines on GPUs do.

The decode engine is in a process of its own, as in ``test_sync_loads_ahead``.
"""

import json
import os
import random
import sys

import torch
from engine_client import PREFILL
from engine_fixtures import SHORT
from test_sync_loads_ahead import InProcess

from vllm_kvtier.jobs.results import FetchResult

CASES = ((650, 0, 8), (700, 20, 1), (720, 22, 24), (1300, 17, 24))  # tokens, the bad block, tokens asked for


def test_wrong_block_of_handoff_rolls_back_with_the_next_step_scheduled(model_path, make_engine, run_script):
    args = ("--dtype", "float32")
    p = make_engine("P", {**SHORT, "same_node_pulls": "mapped"}, max_model_len=2048, block_size=32, args=args)
    p.start()
    p.wait_ready()
    output = run_script(__file__, str(model_path), p.base_url, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    first, *cases = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert first == {"scheduler": "AsyncScheduler", "steps": 2}
    assert len(cases) == len(CASES)
    for case in cases:
        assert case == {"good": ["right", 1, 0], "bad": ["right", 0, 1], "again": ["right", 0, 0]}


class Spoiled:
    """Has a block of numbers that change every answer, before the forward computes on them; it is reported as wrong."""

    def __init__(self, fetches):
        self.fetches, self.row, self._result = fetches, None, fetches._result
        fetches._result = self.result

    def result(self, fetch, number):
        found = self._result(fetch, number)
        if self.row is None:
            return found
        view, block = self.fetches._view, fetch.jobs[number].block_list[self.row]
        for region in view.groups[0].regions:
            page = view.pages(region)[block]
            page.copy_((3 * torch.randn(page.numel() * page.element_size() // 4)).view(page.dtype).view(page.shape))
        self.row = None
        return FetchResult(found.request_id, {block}, True, "spoiled", found.bytes, found.seconds,
                           checksum_mismatch=True, load_id=found.load_id)  # fmt: skip


def main(model: str, prefill_url: str) -> None:
    import httpx
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine, rng = InProcess(model, {**SHORT, "same_node_pulls": "mapped", "sync_load_ms": 10_000}), random.Random(1)

    def handed_off(prompt: list[int], truth: list[int], count: int = 24) -> list:
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": PREFILL}
        answer = httpx.post(f"{prefill_url}/v1/completions", json=body, timeout=60.0)
        answer.raise_for_status()
        return engine.verified(prompt, count, truth, answer.json()["kv_transfer_params"])

    def made(length: int) -> tuple[list[int], list[int]]:
        """A prompt and its answer; the cache has neither."""
        prompt = [rng.randrange(300, 2000) for _ in range(length)]
        truth = engine.ask(prompt, 24)
        engine.settle()
        return prompt, truth

    print(json.dumps({"scheduler": type(engine.core.scheduler).__name__, "steps": engine.core.batch_queue_size}))
    while not engine.counts.get("pulled_tokens|handoff"):  # until both are set up, and the other's memory is mapped
        assert handed_off(*made(100)) == ["right", 0, 0]
    spoiled = Spoiled(get_kv_transfer_group()._worker._exchange.fetching._fetches)
    for length, which, count in CASES:
        engine.settle()
        prompt, truth = made(length)
        found = {"good": handed_off(prompt, truth)}
        engine.settle()
        spoiled.row = which
        found["bad"] = handed_off(prompt, truth, count)
        found["again"] = engine.verified(prompt, 24, truth)  # from vLLM's prefix cache
        print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
