"""A connector that changes what it loaded, after its checksum was found right: for negative controls of real engines.

The environment variable KVTIER_ALTER names a file: "zero GROUP" or "exchange GROUP", or nothing. The engine needs this
folder in PYTHONPATH, and runs on a CPU:

    "kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"
"""

import os
from pathlib import Path

import torch

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.copy.host_copier import HostCopier

VARIABLE = "KVTIER_ALTER"
_load = HostCopier.load


def _altered_load(self, group, blocks, keys, slots, after=None):
    copy = _load(self, group, blocks, keys, slots, after)
    how, _, which = Path(os.environ[VARIABLE]).read_text().partition(" ")
    if len(blocks) and which == str(group):
        ids = torch.from_numpy(blocks)
        for region in self._view.groups[group].regions:
            pages = self._view.pages(region)
            pages[ids] = 0 if how == "zero" else pages[ids.roll(1)] if len(blocks) > 1 else pages[ids].flip(-1)
    return copy


class AlteringConnector(KVTierConnector):
    def __init__(self, *args, **kwargs):
        HostCopier.load = _altered_load
        super().__init__(*args, **kwargs)
