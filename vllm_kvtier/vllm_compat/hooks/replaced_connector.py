"""A warning where vLLM replaces our connector: with ``--kv-offloading-size`` it puts its own in place of any other one,
and says nothing. The configuration does it when it is made; the plugin installs this hook before.
"""

from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.hooks.mm_embeddings import CONNECTOR, configured
from vllm_kvtier.vllm_compat.probe import features

logger = get_logger(__name__)


def install() -> None:
    """Idempotent. Does nothing, and logs nothing, if this vLLM has no such method or another one."""
    if features.refused(features.Feature.REPLACEMENT):
        return
    from vllm.config import VllmConfig

    choose = VllmConfig._post_init_kv_transfer_config
    if choose.__module__ == __name__:
        return

    def choose_and_warn(config: Any, *args: Any, **kwargs: Any) -> None:
        ours = _is_ours(config.kv_transfer_config)
        choose(config, *args, **kwargs)
        if ours and not _is_ours(transfer := config.kv_transfer_config):
            logger.warning(
                "kvtier: plugin: %s is not used: with --kv-offloading-size vLLM puts %s in place of the connector of "
                "--kv-transfer-config; leave that option out (store_size in kv_connector_extra_config is the memory of "
                "the node store)",
                CONNECTOR, transfer.kv_connector,
            )  # fmt: skip

    VllmConfig._post_init_kv_transfer_config = choose_and_warn


def _is_ours(transfer: Any) -> bool:
    return transfer is not None and configured(transfer.kv_connector, transfer.kv_connector_extra_config)
