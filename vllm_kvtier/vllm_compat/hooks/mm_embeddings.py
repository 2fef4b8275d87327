"""Media whose embedding tensors a client omits: refused as without a connector, since any prompt is computed here.

vLLM (0.28 on) assumes that an engine that consumes KV never computes a prompt. Its frontend lets requests omit the
tensors, and from 0.30 on it accepts embeddings at all, which are off by default. Such a request whose KV is not found
ends the engine: the model runner gets no output of the encoder for it. Therefore vLLM resolves these two options as if
no connector were configured.

The frontend reads them. The plugin installs this hook in every process, before ``EngineArgs`` makes a configuration.
"""

from collections.abc import Mapping
from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe import features

logger = get_logger(__name__)

CONNECTOR = "KVTierConnector"
METHODS = ("_resolve_mm_embedding_inputs", "_resolve_allow_missing_mm_embeddings")  # of VllmConfig; second: before 0.30


def configured(connector: str | None, extra_config: Mapping[str, Any]) -> bool:
    """Whether this connector is ours, or a MultiConnector that has ours."""
    children = extra_config.get("connectors", ()) if connector == "MultiConnector" else ()
    return connector == CONNECTOR or any(
        configured(child.get("kv_connector"), child.get("kv_connector_extra_config") or {}) for child in children
    )


def install() -> None:
    """Idempotent. Does nothing, and logs nothing, if this vLLM has no such method or another one."""
    if features.refused(features.Feature.MM_EMBEDDINGS):
        return
    from vllm.config import VllmConfig

    name = next(name for name in METHODS if hasattr(VllmConfig, name))
    resolve = getattr(VllmConfig, name)
    if resolve.__module__ == __name__:
        return

    def resolve_without_connector(config: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = config.kv_transfer_config
        if transfer is None or not configured(transfer.kv_connector, transfer.kv_connector_extra_config):
            return resolve(config, *args, **kwargs)
        config.kv_transfer_config = None
        try:
            return resolve(config, *args, **kwargs)
        finally:
            config.kv_transfer_config = transfer

    setattr(VllmConfig, name, resolve_without_connector)


def warn(vllm_config: Any) -> None:
    """Log a warning if requests of this engine may omit the tensors and no encoder cache has them."""
    media = vllm_config.model_config.multimodal_config
    encoder_cache = vllm_config.ec_transfer_config
    if (
        media is None
        or not features.value(media, "MultiModalConfig.allow_missing_mm_embeddings")
        or (encoder_cache is not None and encoder_cache.is_ec_consumer)
    ):
        return
    logger.warning(
        "kvtier: connector: vLLM accepts media without their embedding tensors (the plugin did not run before the "
        "configuration was made, or does not know this vLLM); one such request that is computed ends the engine: let "
        "VLLM_PLUGINS, if it is set, name kvtier, or serve only clients that you trust"
    )
