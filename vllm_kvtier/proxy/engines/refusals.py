"""What an engine's refusal means, by its HTTP status, and what an engine is known to lack. One table for all routes.

Engines of a role may differ in their models, adapters, routes, parsers and lengths.

* 401: with a key of the proxy's, the engine has failed (``Engine.ask``); with the client's, the client gets it.
* 404, 405: this engine lacks the route for the model. The request waits for, or takes, a slot at another engine.
* 403: likewise, but the engine is only known to lack it when another one has served the request. vLLM from 0.32 on
  answers so on paths that it is not started with, a gateway perhaps to one client.
* 429, 503: this engine is full. The request waits for, or takes, a slot at another engine.
* Any other 5xx, or an answer that breaks off before the client has any of it: another engine is tried. If that serves
  the request, this one has made an error (``Engine.refused``), else it is probed: it may be the request (vLLM answers
  500 if it cannot fetch a picture).
* Any other 4xx: the request may be at fault. Only a prefill is tried at another engine.

An engine that is unavailable is tried only while no other one has answered: it may hang.
"""

import time

# Another engine may have the model, the adapter or the path, whatever the request asks for.
LACKS = (403, 404, 405)
LACKS_AT_ONCE = (404, 405)
FULL = (429, 503)
LACKS_SECONDS = 30.0  # then it may have been given what it lacked, and one request tries
MAX_LACKING, MAX_NAME = 256, 256  # what is remembered, and characters of a model's name

#: Route and model; None if the model is not known, or what is missing may be something else: nothing is remembered.
Wants = tuple[str, str] | None


def may_be_served_elsewhere(status: int) -> bool:
    return status in (*LACKS, *FULL) or status >= 500


class Lacking:
    """What an engine has refused. It answers that at once, so that it would always be the least busy."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}  # monotonic seconds, then a request may try again
        self._retried: set[tuple[str, str]] = set()  # of these, those that a request tries again, not answered yet

    def __contains__(self, wants: Wants) -> bool:
        return wants is not None and self._until.get(wants, 0.0) > time.monotonic()

    def add(self, wants: Wants) -> bool:
        """Whether this is news: it has not answered so for a while."""
        if wants is None:
            return False
        news = wants not in self or wants in self._retried
        self.remove(wants)
        self._until[wants] = time.monotonic() + LACKS_SECONDS
        if len(self._until) > MAX_LACKING:  # clients make names up
            self.remove(next(iter(self._until)))
        return news

    def tried(self, wants: Wants) -> None:
        """A request that wants this goes there. If that is to try again, no other one does until it is answered."""
        if wants in self._until and self.add(wants):
            self._retried.add(wants)

    def remove(self, wants: Wants) -> bool:
        """It serves this. Whether it was known to lack it."""
        self._retried.discard(wants)
        return self._until.pop(wants, None) is not None

    def clear(self) -> None:
        self._until.clear()
        self._retried.clear()
