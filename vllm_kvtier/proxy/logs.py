"""Log lines with the id of the request that caused them."""

import contextvars
import logging

from vllm_kvtier.logs import LIMIT

FORMAT = "%(asctime)s %(levelname)s [%(request_id)s] %(name)s: %(message)s"

#: The id of the request that this task serves; "-" if none.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("kvtier_request_id", default="-")


class AddRequestId(logging.Filter):
    """Adds ``request_id`` to each record of a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def install(level: str) -> None:
    """Log to stderr with request ids, for all loggers of the process. ``level``: debug, info, warning or error."""
    handler = logging.StreamHandler()
    handler.addFilter(AddRequestId())
    handler.addFilter(LIMIT)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Their lower levels are noise, also when debugging.
    for noisy in ("asyncio", "watchfiles"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
