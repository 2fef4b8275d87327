"""The ``vllm.general_plugins`` entry point: makes ``"kv_connector": "KVTierConnector"`` known to vLLM."""

from vllm_kvtier import dynamo
from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.hooks import mm_embeddings, replaced_connector
from vllm_kvtier.vllm_compat.hooks.mm_embeddings import CONNECTOR as CONNECTOR_NAME
from vllm_kvtier.vllm_compat.version import check_supported

CONNECTOR_MODULE = "vllm_kvtier.connector"

# vLLM sets handlers only on the logger "vllm"; a child of it appears in the engine's log, in its format.
logger = get_logger(__name__)


def register() -> None:
    """Register the connector with vLLM's factory, and in a Dynamo worker with Dynamo; hook into vLLM's configuration.

    vLLM calls this in each of its processes, maybe repeatedly.

    Never raises: an engine without our connector must start whatever the state of this package. An engine with it gets
    vLLM's "unsupported connector" error, with this function's warning above it.
    """
    try:
        check_supported()
    except UnsupportedVLLM as reason:
        logger.warning("kvtier: plugin: %s is not registered (%s)", CONNECTOR_NAME, reason)
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logger.warning("kvtier: plugin: %s is not registered (no connector factory in vLLM: %s)", CONNECTOR_NAME, error)
        return
    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError as error:  # it is registered already
        logger.debug("kvtier: plugin: %s: %s", CONNECTOR_NAME, error)
    mm_embeddings.install()
    replaced_connector.install()
    dynamo.register(CONNECTOR_NAME)
