"""Dynamo: makes the connector known to its prefill workers, which refuse a connector whose protocol they do not know.

Dynamo 1.6 has a table of classes by connector name in ``dynamo.vllm.kv_connector_protocols``. It is private and may
change; an entry that cannot be made costs a warning. Aggregated serving does not read the table.
"""

import sys
from typing import Any

from vllm_kvtier.logs import get_logger

MODULE, TABLE, BASE = "dynamo.vllm.kv_connector_protocols", "KV_CONNECTOR_PROTOCOLS", "KvConnectorProtocol"

logger = get_logger(__name__)


def register(name: str) -> bool:
    """Enter the connector's protocol if this process is a Dynamo worker. Returns whether Dynamo knows the connector.

    Never imports Dynamo, and never raises. A worker has imported the module before vLLM loads its plugins.
    """
    module = sys.modules.get(MODULE)
    if module is None:
        return False
    try:
        table = getattr(module, TABLE)
        if name not in table:
            table[name] = _protocol(getattr(module, BASE))
    except Exception as error:
        logger.warning(
            "kvtier: dynamo: %s is not registered for disaggregated serving (%s has changed: %s: %s); aggregated "
            "serving is not affected", name, MODULE, type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def _protocol(base: type) -> type:
    """As NixlConnector's: the answer of the prefill engine has all that the decode engine needs."""

    class KVTierProtocol(base):  # type: ignore[misc, valid-type]
        def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
            return {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            }

        def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any]:
            # Without any, the decode engine finds what it can by hash. None would be an error in Dynamo's router.
            return prefill_response.kv_transfer_params or {}

    if missing := sorted(getattr(KVTierProtocol, "__abstractmethods__", ())):
        raise TypeError(f"{BASE} also requires {', '.join(missing)}")
    return KVTierProtocol
