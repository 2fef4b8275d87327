"""The connector on a vLLM that lacks something, for tests of real engines: rows of the probe's table, named in the
environment variable KVTIER_WITHOUT (separated by ";"), fail.

    "kv_connector": "ConnectorWithoutRows", "kv_connector_module_path": "without_rows"
"""

import os

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.vllm_compat.probe import features

for row in features.rows():
    if row.name in os.environ["KVTIER_WITHOUT"].split(";"):
        features._results[row.name] = features.Result(row, features.State.FAILED, "a test took it away")


class ConnectorWithoutRows(KVTierConnector):
    """As it is."""
