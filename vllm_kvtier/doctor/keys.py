"""The cluster's key file."""

from pathlib import Path

from vllm_kvtier.doctor.report import Check, fail, ok
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.auth import ClusterKey


def cluster_key(file: Path) -> tuple[Check, ClusterKey | None]:
    """The key too, for the checks that need it."""
    try:
        key = ClusterKey.load(str(file))
    except ConfigError as error:
        words, _, remedy = str(error).partition("; ")
        return fail("cluster key", words, remedy or "let its owner alone read it"), None
    return ok("cluster key", f"{file} holds a key that only its owner reads"), key
