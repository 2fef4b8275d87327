"""The object store as a secondary tier, shared by any number of nodes and clusters.

If the store fails, the tier process is replaced after a backoff; if only writes are refused, the tier is read only for
a while.
"""

from vllm_kvtier.store.tiers.content_tier import ContentTier, Limits
from vllm_kvtier.store.tiers.objects.object_names import check_endpoint, parse_url
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import TierContext

SECONDS = {"timeout": 5.0, "look_seconds": 4.0, "read_seconds": 20.0}  # options of the tier process
SLACK_SECONDS = 30.0  # seconds in which the tier process must answer after its own deadlines
REFUSED_SECONDS = 60.0, 960.0  # first and longest pause after refused writes
# A bucket's lifecycle rule, or another node in a shared directory, deletes objects without notice. So a block is
# offered again after a while, which costs a HEAD if it is still there.
KNOWN_SECONDS, KEPT_SECONDS = 600.0, 6 * 3600.0


class ObjectTier(ContentTier):
    """options: of the tier process (see ``objects.process``). Raises ConfigError for an invalid url or endpoint."""

    name = "object"

    def __init__(self, context: TierContext, options: m.Options):
        location = parse_url(str(options["url"]))
        check_endpoint(str(options["endpoint"]))
        options = {**SECONDS, **options}
        move = float(options["read_seconds"]) + SLACK_SECONDS
        look = float(options["look_seconds"]) + SLACK_SECONDS
        limits = Limits(look, move, move, REFUSED_SECONDS, 4.0, known=KNOWN_SECONDS, kept=KEPT_SECONDS)
        super().__init__(context, options, limits)
        if location.scheme == "file":
            self._counts.capacity_bytes = int(options["size"])

    def process_message(self, message: m.ToServer) -> None:
        if isinstance(message, m.Scanned):
            self._counts.used_bytes = message.used_bytes
            self._counts.evicted_blocks += message.removed
        else:
            super().process_message(message)
