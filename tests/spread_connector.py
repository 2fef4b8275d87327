"""A connector whose workers are on the node that the environment variable KVTIER_TESTS_NODE names, for engines over
several nodes on one machine. The engine needs this folder in PYTHONPATH:

    "kv_connector": "SpreadConnector", "kv_connector_module_path": "spread_connector"
"""

import os

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.peer_fetch import process_memory


class SpreadConnector(KVTierConnector):
    def register_kv_caches(self, kv_caches):
        node = f"node {os.environ['KVTIER_TESTS_NODE']}"
        process_memory._node = lambda pid: node
        super().register_kv_caches(kv_caches)
