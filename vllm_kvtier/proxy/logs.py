"""The request's id in every line that is logged while it is worked on."""

from __future__ import annotations

import contextvars
import logging

from vllm_kvtier.logs import LIMIT

FORMAT = "%(asctime)s %(levelname)s [%(request_id)s] %(name)s: %(message)s"

#: The id of the request that this task works on; "-": of none.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("kvtier_request_id", default="-")


class AddRequestId(logging.Filter):
    """A filter for handlers: gives each record ``request_id``."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def install(level: str) -> None:
    """Log to stderr with request ids, all of this process's loggers. ``level``: debug, info, warning or error."""
    handler = logging.StreamHandler()
    handler.addFilter(AddRequestId())
    handler.addFilter(LIMIT)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What they say at lower levels is noise, even to somebody who looks for something.
    for noisy in ("asyncio", "watchfiles"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
