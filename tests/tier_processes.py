"""Tier processes of a running node store."""

from contextlib import suppress
from pathlib import Path

from vllm_kvtier.devtools.processes import lives


def tier_process_of(store: int, kind: str = "disk") -> int:
    """Process id of the store's tier process of that kind; 0 if there is none."""
    wanted = {b"vllm_kvtier.store.tiers.process.main", f"--kind={kind}".encode()}
    for children in Path(f"/proc/{store}/task").glob("*/children"):
        with suppress(OSError):  # a thread or a child has ended
            for pid in map(int, children.read_text().split()):
                if wanted <= set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) and lives(pid):
                    return pid
    return 0
