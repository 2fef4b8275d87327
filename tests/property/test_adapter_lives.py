"""Whatever is done to adapters and their files: a fingerprint that a request gets is that of what it is computed with.

The model is vLLM's: workers load an adapter by its number, unless they have it, from what its path holds then; they may
forget it at any time; and the prefix cache goes by the names that vLLM hashes, not by content.
"""

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support import eventually
from vllm.lora.request import LoRARequest

from vllm_kvtier import file_digests
from vllm_kvtier.vllm_compat import adapters as adapters_module
from vllm_kvtier.vllm_compat.adapters import AWAITED, Adapters, _identity

NAMES, PATHS, NUMBERS = (st.sampled_from(each) for each in (("a", "b"), ("x", "y"), (1, 2, 3)))


class Cache:
    """vLLM's prefix cache."""


class Lives(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.memory, file_digests._memory = file_digests._memory, lambda: self.folder / "digests.json"
        names = "READ_SECONDS", "LOOK_SECONDS", "SLOW_SECONDS", "SHORT_SECONDS"
        self.limits = {name: getattr(adapters_module, name) for name in names}
        vars(adapters_module).update(dict.fromkeys(self.limits, 60.0))
        self.adapters, self.cache = Adapters(), Cache()
        self.adapters.caches.add(self.cache)
        self.versions = self.touched = 0
        self.content: dict[str, int] = {}  # path -> version of its files
        self.loaded: dict[int, int] = {}  # number -> version that the workers have
        self.cached: dict[tuple, set[int]] = defaultdict(set)  # what vLLM hashes -> versions whose KV it may find
        self.running = []  # requests: (adapter asked for, its path, admitted with, versions that its KV was made with)
        self.prints: dict[bytes, int] = {}

    def teardown(self):
        file_digests._memory = self.memory
        vars(adapters_module).update(self.limits)
        shutil.rmtree(self.folder)

    @initialize()
    def files(self):
        self.write("x")
        self.write("y")

    @rule(path=PATHS)
    def write(self, path):
        self.versions += 1
        self.content[path] = self.versions
        (self.folder / path).mkdir(exist_ok=True)
        (self.folder / path / "adapter_model.bin").write_bytes(b"w" * (100 + self.versions))
        self.touch(path)

    @rule()
    def copy(self):
        """The other folder's files, as they are."""
        self.content["y"] = self.content["x"]
        shutil.copy(self.folder / "x" / "adapter_model.bin", self.folder / "y" / "adapter_model.bin")
        self.touch("y")

    def touch(self, path):
        """Two versions within a tick of the file system's clock look alike; steps of a request take longer."""
        self.touched += 1
        os.utime(self.folder / path / "adapter_model.bin", ns=(self.touched, self.touched))

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.cached.clear()
        self.adapters.cache_is_empty(self.cache)

    @rule()
    def exchange(self):
        """Folders are renamed: their files stay as they are."""
        for old, new in (("x", "z"), ("y", "x"), ("z", "y")):
            (self.folder / old).rename(self.folder / new)
        self.content["x"], self.content["y"] = self.content["y"], self.content["x"]

    @rule(path=PATHS, number=NUMBERS)
    def collective_rpc(self, path, number):
        """It loads an adapter into the workers."""
        self.loaded[number] = self.content[path]
        self.adapters.clear_loaded()

    @rule(number=NUMBERS)
    def workers_forget(self, number):
        self.loaded.pop(number, None)

    @rule(name=NAMES, path=PATHS, number=NUMBERS, inplace=st.booleans())
    def add_lora(self, name, path, number, inplace):
        lora = LoRARequest(name, number, str(self.folder / path), load_inplace=inplace)
        self.adapters.load(lora, lambda: self.execute(lora, path))

    @rule(name=NAMES, path=PATHS, number=NUMBERS, inplace=st.booleans(), seen=st.sampled_from([True, True, False]))
    def begin(self, name, path, number, inplace, seen):
        lora = LoRARequest(name, number, str(self.folder / path), load_inplace=inplace)
        answers = [] if seen else [self.adapters.unseen(lora)]
        eventually(lambda: not seen or answers.append(self.adapters.admit(lora)) or answers[-1] is not AWAITED)
        # What vLLM's prefix cache has for it, and what it computes.
        self.running.append((lora, path, answers[-1], set(self.cached[_identity(lora)])))
        self.step(len(self.running) - 1)
        if answers[-1] is not None:
            assert len(self.running[-1][3]) == 1, "vLLM finds KV of another adapter for it"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def step(self, which):
        lora, path, _, versions = self.running[which % len(self.running)]
        self.execute(lora, path)
        versions.add(self.loaded[lora.lora_int_id])
        self.cached[_identity(lora)].add(self.loaded[lora.lora_int_id])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def load_other_files_in_the_middle(self, which):
        lora, path, _, _ = self.running[which % len(self.running)]
        self.write(path)
        self.workers_forget(lora.lora_int_id)
        self.step(which)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def end(self, which):
        lora, _, adapter, versions = self.running.pop(which % len(self.running))
        if adapter is not None and self.adapters.confirm(lora, adapter):
            assert len(versions) == 1, "KV of several adapters is shared"
            [version] = versions
            assert self.prints.setdefault((lora.lora_name, adapter.digest), version) == version, "one for two adapters"

    def execute(self, lora, path):
        if lora.lora_int_id not in self.loaded or lora.load_inplace:
            self.loaded[lora.lora_int_id] = self.content[path]


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestLives = Lives.TestCase
