"""An engine's context without vLLM, for tests of sockets and for their processes."""

from types import SimpleNamespace

from vllm_kvtier.scheduler.context import EngineContext


def engine_of(reactor, config, instance=""):
    """The context of an engine for tests of its sockets; ``instance``: "": others reach it over TCP."""
    identity, info = SimpleNamespace(instance=instance), SimpleNamespace(data_parallel_rank=0)
    return EngineContext(config, info, None, None, None, reactor, identity)
