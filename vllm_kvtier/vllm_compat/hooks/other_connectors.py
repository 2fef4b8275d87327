"""The other connectors of an engine with a MultiConnector, and whether one of them may hand prefills off.

vLLM's MultiConnector passes a request's ``kv_transfer_params`` to all of its connectors and joins what they answer. A
field that two of them answer raises in vLLM's scheduler, and the engine ends. Connectors for prefill and decode engines
take the same fields and answer them. So an engine has one of these.
"""

from collections.abc import Iterator
from typing import Any

# Connectors of vLLM, 0.25.1 to 0.33, that do no more than keep KV: none answers a field of ours.
STORES = {
    "DecodeBenchConnector", "ExampleConnector", "ExampleHiddenStatesConnector", "FlexKVConnectorV1", "HF3FSKVConnector",
    "HiSparseConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "LMCacheMPConnectorUpstream",
    "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "UMBPStoreConnector",
}  # fmt: skip


def handing_off(scheduler: Any, connector: Any) -> str:
    """The name of another connector of vLLM's ``scheduler`` that may hand prefills off; "" if there is none."""
    names = (type(each).__name__ for each in _leaves(scheduler.connector) if each is not connector)
    return next((name for name in names if name not in STORES), "")


def _leaves(connector: Any) -> Iterator[Any]:
    """``connector``, or those in it if it is a MultiConnector."""
    children = getattr(connector, "_connectors", None)
    if children is None:
        yield connector
    else:
        for child in children:
            yield from _leaves(child)
