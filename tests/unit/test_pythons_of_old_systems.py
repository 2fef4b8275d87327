"""A Python that was built on a system older than this one, as conda's is: it lacks names that others have."""

import fcntl
import os
import subprocess
import sys

import pytest

from vllm_kvtier.store import linux

LACKS = """
import fcntl, os, signal
for module in (fcntl, os, signal):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "pidfd_", "PIDFD_", "F_ADD_SEALS", "F_SEAL_", "O_TMPFILE")):
            delattr(module, name)
"""

USES = """
import os, signal, subprocess, sys
from pathlib import Path

from support import descriptors_of_processes, eventually

from vllm_kvtier.devtools.stores import end_store, open_tier, store_counts, tier_of
from vllm_kvtier.store.launcher import start_store
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire.messages import Shared
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.peer_fetch import process_memory
from vllm_kvtier.worker.peer_fetch.peer_process_watch import PeerProcessWatch

assert not hasattr(os, "memfd_create")
path, folder = sys.argv[1:]
start_store(path, StoreOptions(size="4MiB", disk_path=folder, disk_size="8MiB", idle_seconds=30))
try:
    store = open_tier(path)[0].pid
    (tier,) = "".join(each.read_text() for each in Path(f"/proc/{store}/task").glob("*/children")).split()
    os.kill(int(tier), signal.SIGKILL)
    eventually(lambda: tier_of(store_counts(path)).restarts == 1 and open_tier(path), 30)
finally:
    end_store(path)
assert not Path(path).exists()

reactor, gone = Reactor("watch"), []
watch = PeerProcessWatch(reactor, gone.append)
reactor.start()
peer = subprocess.Popen(["sleep", "60"])
node = process_memory.identity().node
watch.follow("peer", [Shared(node, peer.pid, process_memory._started(peer.pid), "", ())])
eventually(descriptors_of_processes)
peer.kill()
eventually(lambda: gone == ["peer"])
peer.wait()
reactor.stop()
"""


def test_stores_tiers_and_watches_of_peers_work_in_a_python_that_lacks_the_calls(tmp_path, root):
    (tmp_path / "sitecustomize.py").write_text(LACKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root, root / "tests")))}
    command = [sys.executable, "-c", USES, tmp_path / "s.sock", tmp_path / "disk"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [os, fcntl])
def test_constants_are_those_of_a_python_that_has_them(module):
    ours = {name: value for name, value in vars(linux).items() if name.isupper() and hasattr(module, name)}
    assert ours == {name: getattr(module, name) for name in ours}
    assert len(ours) == {os: 3, fcntl: 4}[module]


def test_calls_fail_as_those_of_os():
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(1 << 22)  # no number is larger
    with pytest.raises(OSError, match="Invalid argument"):
        linux.memfd_create("no such flag", 1 << 25)
    us = linux.pidfd_open(os.getpid())
    assert not os.get_inheritable(us)
    with pytest.raises(OSError, match="Invalid argument"):
        linux.pidfd_send_signal(us, 1000)
    os.close(us)
