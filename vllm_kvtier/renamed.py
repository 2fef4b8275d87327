"""Options that were renamed: the old name works for one release, with one warning a process."""

import functools
from collections.abc import Mapping
from typing import Any

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)


def with_new_names(given: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """``given`` under the new names; ``renamed``: {old: new}. Raises ConfigError if both names of one are given."""
    if both := [f"{old} and {new}" for old, new in renamed.items() if old in given and new in given]:
        raise ConfigError(f"{', '.join(both)} name the same option; remove the first, which is the old name.")
    for old in renamed.keys() & given.keys():
        warn(old, renamed[old])
    return {renamed.get(name, name): value for name, value in given.items()}


@functools.cache
def warn(old: str, new: str) -> None:
    logger.warning("kvtier: option %s is now called %s; the old name works until the next release", old, new)
