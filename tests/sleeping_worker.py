"""A CPU engine's worker that sleeps: for ``--worker-cls sleeping_worker.SleepingWorker``.

vLLM's CPU worker ignores sleep mode. This one calls the connector as vLLM 0.33 does on a GPU, at the same moments, and
overwrites the cache, because a GPU's memory has any content after waking.
"""

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker

ANYTHING = 7.0


class SleepingWorker(CPUWorker):
    def sleep(self, level: int = 1) -> None:
        get_kv_transfer_group().unregister_kv_caches()
        for cache in self.model_runner.kv_caches:
            cache.fill_(ANYTHING)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            get_kv_transfer_group().restore_kv_caches()
