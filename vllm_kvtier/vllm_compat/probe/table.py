"""``python -m vllm_kvtier.vllm_compat.probe.table``: the probe's table for the importable vLLM, as JSON.

A process of its own for `kvtier doctor` and tools/try_vllm.py: importing vLLM takes seconds and writes to stderr.
"""

import json
import sys
from typing import Any

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.vllm_compat.probe import features as probe
from vllm_kvtier.vllm_compat.version import installed_version


def found() -> dict[str, Any]:
    """``features``: whether each is granted; ``rows``: in the table's order, ``state`` as of
    ``vllm_compat.probe.features.State``."""
    rows = [
        {
            "name": row.name, "feature": row.feature.value, "need": row.need, "how": row.how,
            "state": state.name.lower(), "reason": reason,
        }
        for row, state, reason in probe.table()
    ]  # fmt: skip
    features = {feature.value: probe.granted(feature) for feature in probe.Feature}
    return {"version": installed_version(), "features": features, "rows": rows}


if __name__ == "__main__":
    try:
        json.dump(found(), sys.stdout)
    except UnsupportedVLLM as error:
        sys.exit(str(error))
