"""Whatever is done to adapters and their files: a fingerprint that a request gets is that of what it is computed with.

The model is vLLM's: workers load an adapter by its number, unless they have it, from what its path holds then; they may
forget it at any time; and the prefix cache goes by the names that vLLM hashes, not by content.
"""

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support import eventually
from vllm.lora.request import LoRARequest

from vllm_kvtier import file_digests
from vllm_kvtier.vllm_compat import adapters as adapters_module
from vllm_kvtier.vllm_compat.adapters import Adapters, _identity

NAMES, PATHS, NUMBERS = (st.sampled_from(each) for each in (("a", "b"), ("x", "y"), (1, 2, 3)))


class Lives(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.memory, file_digests._memory = file_digests._memory, lambda: self.folder / "digests.json"
        self.read_seconds, adapters_module.READ_SECONDS = adapters_module.READ_SECONDS, 60.0
        self.adapters = Adapters()
        self.versions = 0
        self.content: dict[str, int] = {}  # path -> version of its files
        self.loaded: dict[int, int] = {}  # number -> version that the workers have
        self.cached: dict[tuple, set[int]] = defaultdict(set)  # what vLLM hashes -> versions whose KV it may find
        self.prints: dict[bytes, int] = {}

    def teardown(self):
        file_digests._memory, adapters_module.READ_SECONDS = self.memory, self.read_seconds
        shutil.rmtree(self.folder)

    @initialize()
    def files(self):
        self.write("x")
        self.write("y")

    @rule(path=PATHS)
    def write(self, path):
        """Each version has a size of its own: two of one size within a tick of the file system's clock look alike."""
        self.versions += 1
        self.content[path] = self.versions
        (self.folder / path).mkdir(exist_ok=True)
        (self.folder / path / "adapter_model.bin").write_bytes(b"w" * (100 + self.versions))

    @rule()
    def copy(self):
        """The other folder's files, as they are."""
        self.content["y"] = self.content["x"]
        shutil.copy(self.folder / "x" / "adapter_model.bin", self.folder / "y" / "adapter_model.bin")

    @rule(number=NUMBERS)
    def workers_forget(self, number):
        self.loaded.pop(number, None)

    @rule()
    def reset(self):
        self.cached.clear()
        self.adapters.cache_is_empty()

    @rule(name=NAMES, path=PATHS, number=NUMBERS, inplace=st.booleans())
    def add_lora(self, name, path, number, inplace):
        lora = LoRARequest(name, number, str(self.folder / path), load_inplace=inplace)
        self.adapters.load(lora, lambda: self.execute(lora, path))

    @rule(name=NAMES, path=PATHS, number=NUMBERS, inplace=st.booleans())
    def request(self, name, path, number, inplace):
        lora = LoRARequest(name, number, str(self.folder / path), load_inplace=inplace)
        self.adapters.fingerprint(lora)
        eventually(lambda: not self.adapters.awaited(lora))
        found = self.adapters.fingerprint(lora)
        self.execute(lora, path)
        version, cached = self.loaded[number], self.cached[_identity(lora)]
        cached.add(version)
        if found is not None:
            assert cached == {version}, "vLLM finds KV of another adapter for it"
            assert self.prints.setdefault((name, found), version) == version, "one fingerprint for two adapters"

    def execute(self, lora, path):
        if lora.lora_int_id not in self.loaded or lora.load_inplace:
            self.loaded[lora.lora_int_id] = self.content[path]


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestLives = Lives.TestCase
