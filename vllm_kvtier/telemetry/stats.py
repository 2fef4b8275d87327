"""What happened, counted by name and label; drained into vLLM's stats once a step. No vLLM import here."""

import threading
from collections import Counter

# Everything that can be counted, with the meaning of its label (documentation of the metrics).
MEANINGS = {
    "declined": "requests or sources not pulled from, by reason",
    "pulls": "pulls that ended, by outcome (ok, failed)",
    "pulled_tokens": "prompt tokens pulled instead of computed, by source kind",
    "pulled_bytes": "bytes read from other engines",
    "pull_seconds": "seconds spent in pulls, from order to verified",
    "integrity_failures": "blocks whose checksum was wrong on arrival; computed instead",
    "fetches": "copies from GPU caches of other engines of this node that ended, by outcome (ok, failed)",
    "fetched_tokens": "prompt tokens copied from there instead of computed",
    "fetched_bytes": "bytes copied from there",
    "fetch_seconds": "seconds spent in such copies, from order to verified",
    "not_fetched": "times that an engine of this node had what a request lacked and was not asked, by reason",
    "lent_blocks": "blocks of this engine's cache that others of this node were lent",
    "lending_refused": "times that they were not, by reason",
    "loads": "loads from the node store that ended, by outcome (ok, failed, aborted)",
    "synchronous_loads": "those of them and of the fetches that the step which computes on them waited for, by outcome",
    "host_hit_seconds": "seconds of loads that succeeded, by stage: asking, placing (vLLM finds room), loading",
    "gpu_hit_seconds": "the same of copies from other engines' GPU caches",
    "loaded_tokens": "prompt tokens loaded from the node store instead of computed",
    "loaded_bytes": "bytes loaded from the node store, all ranks",
    "loaded_logical_bytes": "bytes of KV that these were decoded to, all ranks",
    "load_seconds": "seconds spent in loads from the node store, from order to verified",
    "planned": "offers of the node store weighed against computing, by the reason of the decision",
    "planned_seconds": "seconds that loads were expected to take, and took",
    "weighed_seconds": "seconds that loading and computing were expected to take, over all such decisions",
    "warmed": "queued requests whose KV the node store was asked to have ready",
    "waits": "times a request waited, or did not, for what the node store brings up from below its memory, by reason",
    "waited_seconds": "seconds that requests waited for that",
    "waited_tokens": "prompt tokens that were in the node store's memory after such a wait, and not before",
    "awaited": "requests that waited for another one's load of the same blocks, by source",
    "stored_blocks": "blocks copied to the node store",
    "stored_bytes": "bytes copied to the node store, all ranks",
    "stored_logical_bytes": "bytes of KV that these stand for, all ranks, by the codec that keeps them",
    "store_seconds": "seconds in which the workers had copies to the node store under way",
    "not_stored": "full blocks not copied to the node store, by reason",
    "store_lost": "times the node store went away",
    "exports": "finished requests offered to others, by kind",
    "export_refused": "finished requests not offered, by reason",
}


class Counters:
    """Thread-safe; ``take`` returns what was counted since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        if name not in MEANINGS:
            raise KeyError(f"{name} is not a declared counter")
        with self._lock:
            self._counts[name, label] += amount

    def take(self) -> dict[str, float]:
        """{"name" or "name|label": amount} with plain keys, as vLLM ships them between processes."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {f"{name}|{label}" if label else name: amount for (name, label), amount in counts.items()}
