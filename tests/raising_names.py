"""Names of functions for ``raising_connector`` and its tests, as "path in the package:qualified name".

A test checks that they exist. Imports nothing of vLLM, which takes seconds.
"""

VARIABLE = "KVTIER_RAISING"  # names the control socket in the engine's environment

# Functions that are not made to raise. ``containment`` catches the exceptions. Wrappers of vLLM's methods call vLLM's
# method and contained functions only.
LEFT_OUT = {
    "containment.py", "vllm_compat/hooks/scheduler_lock.py:SchedulerLock.held.<locals>.holding",
    "vllm_compat/hooks/idle_hook.py:EngineThread._install.<locals>.dummy",
    "vllm_compat/hooks/idle_hook.py:EngineThread._install.<locals>.notify",
    "vllm_compat/hooks/idle_hook.py:_looking.<locals>.looking",
    "vllm_compat/hooks/block_pool.py:BlockPool.around_reset.<locals>.reset_prefix_cache",
    "vllm_compat/hooks/rollback.py:before_output.<locals>.update_from_output",
    "vllm_compat/hooks/local_hits.py:limit.<locals>.get_computed_blocks_for_connector",
    "vllm_compat/hooks/waiting_loop.py:WaitingLoop.install.<locals>.bounded",
    # These do nothing, read one of their fields, or wait for an event of Python's.
    "vllm_compat/stats.py:KVTierStats.is_empty", "vllm_compat/hooks/step_pause.py:_Time.__getattr__",
    "vllm_compat/hooks/step_pause.py:_Time.sleep",
    *(f"connector.py:KVTierConnector.{name}" for name in ("wait_for_layer_load", "save_kv_layer", "wait_for_save")),
}  # fmt: skip

# Functions that a test must reach at least.
KNOWN = {
    "connector.py:KVTierConnector.get_num_new_matched_tokens", "connector.py:KVTierConnector.build_connector_meta",
    "scheduler/connector_scheduler.py:KVTierConnectorScheduler.begin_step",
    "scheduler/matching/request_matcher.py:RequestMatcher.match",
    "scheduler/matching/request_matcher.py:RequestMatcher.allocated",
    "scheduler/matching/request_matcher.py:RequestMatcher.on_load_ended",
    "scheduler/integrity/sync_load.py:SyncLoad.apply_results", "vllm_compat/hooks/rollback.py:preempt_and_recompute",
    "worker/connector_worker.py:KVTierConnectorWorker.submit",
    "worker/connector_worker.py:KVTierConnectorWorker.collect",
    "worker/integrity/sync_load_tracker.py:SyncLoadTracker.split",
    "scheduler/offload/block_tables.py:BlockTables.begin_step",
    "scheduler/leases/export_builder.py:ExportBuilder.finished", "scheduler/offload/offloader.py:Offloader._collect",
    "vllm_compat/hooks/block_pool.py:BlockPool.pin",
    "scheduler/sources/job_builder.py:pull_job", "scheduler/sources/job_builder.py:load_job",
    "scheduler/sources/job_builder.py:peer_fetch_job",
}  # fmt: skip

# Copiers, what they call, and NIXL: an exception there ends a load, which is counted as such and logged once for all.
LOADS = (
    "worker/cache_view.py", "worker/copy/", "worker/peer_fetch/base.py", "worker/peer_fetch/cuda_copier.py",
    "worker/peer_fetch/cuda_ipc.py", "worker/peer_fetch/fetch_jobs.py", "worker/peer_fetch/host_copier.py",
    "worker/peer_fetch/kernel_args.py", "worker/peer_fetch/process_memory.py", "worker/nixl_pull/pulls.py",
    "worker/nixl_pull/nixl_transport.py", "worker/store/copy_engine.py:_Lane.add",
)  # fmt: skip
