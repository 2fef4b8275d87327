"""A cache, a pool and orders of copies; and our copier doing them."""

import time

import numpy as np
import torch

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, part_layout, slot_layout
from vllm_kvtier.worker import tuning
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.cuda_copier import CudaCopier
from vllm_kvtier.worker.device.cuda_driver import Driver

# One call's work, as the offload engine cuts it.
CALL_BYTES = 64 << 20
# Calls of a direction that are ordered before the first of them has ended, as the offload engine does. More would
# measure how long the driver makes one wait whose queues are full.
AHEAD = 3


class Bench:
    """A cache and a pool that all ways share."""

    def __init__(self, page: int, layers: int, nbytes: int, cache: torch.Tensor, pool: tuple[int, int, object]):
        self.page, self.layers, self.pool = page, layers, pool
        device = cache.device
        blocks = cache.numel() // (page * layers)
        heads, tokens = 8, 16
        head, token = page // heads, page // heads // tokens
        base = cache.data_ptr()
        regions = tuple(
            Region(f"layer{i}", base + i * blocks * page, page, heads, head, 0, tokens, token, token, dtype="bfloat16")
            for i in range(layers)
        )
        group = GroupView(0, tokens, "full", None, regions)
        self.view = CacheView([group], blocks, device, [cache.untyped_storage()])
        self.layout = part_layout(group)
        self.slot_pages = slot_layout([self.layout]).pages
        self.count = min(max(2, nbytes // (page * layers)), blocks // 2, (pool[1] // PAGE - 1) // self.slot_pages // 2)
        # Slots are never straddling a piece, as in the store.
        per_piece = PIECE_BYTES // PAGE // self.slot_pages
        pieces = pool[1] // PIECE_BYTES
        places = np.arange(pieces * per_piece)
        slots = places // per_piece * (PIECE_BYTES // PAGE) + places % per_piece * self.slot_pages
        self.all_slots = slots[slots > 0]
        rng = np.random.default_rng(1)
        order = rng.permutation(self.all_slots)
        self.count = min(self.count, len(order) // 2)
        self.slots = {"store": order[: self.count], "load": order[self.count : 2 * self.count]}
        chosen = rng.permutation(blocks)
        self.blocks = {"store": chosen[: self.count], "load": chosen[self.count : 2 * self.count]}
        self.keys = rng.integers(0, 1 << 63, 2 * self.count, dtype=np.uint64)
        self.nbytes = self.count * page * layers
        self.base, self.num_blocks = base, blocks


class Registered(Driver):
    """Of memory that is pinned once for all copiers of this run: a second registration would be refused."""

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


class Ours:
    """One way through our copier."""

    def __init__(self, bench: Bench, choice: tuning.Tuning, checked: bool = True, adjacent: bool = False):
        self.bench, self.checked, self.adjacent = bench, checked, adjacent
        driver = Registered(torch.cuda.current_device())
        copier = type("Copier", (CudaCopier,), {"checked": checked})
        self.copier = copier(bench.view, bench.pool, [bench.layout], [0], choice, driver)
        for at in range(0, bench.pool[1], PIECE_BYTES):
            self.copier.register(at, PIECE_BYTES)
        self.copier.warm_up()
        self.step = max(1, CALL_BYTES // bench.layout.nbytes)
        self.nbytes = bench.nbytes
        self.host_us: list[float] = []

    def close(self) -> None:
        self.copier.close()

    def run(self, direction: str) -> float:
        """Seconds from the first call to the end of the last copy."""
        bench = self.bench
        names = ("store", "load") if direction == "both" else (direction,)
        slots = bench.slots
        if self.adjacent:
            slots = {n: bench.all_slots[k * bench.count :][: bench.count] for k, n in enumerate(names)}
        under_way = {n: [] for n in names}
        torch.cuda.synchronize()
        start = time.perf_counter()
        spent = 0.0
        at = dict.fromkeys(names, 0)
        while any(at[n] < bench.count for n in names) or any(under_way.values()):
            for n in names:
                copies = under_way[n]
                while copies and copies[0].done():
                    copies.pop(0)
                a = at[n]
                if a >= bench.count or len(copies) >= AHEAD:
                    continue
                b = min(bench.count, a + self.step)
                call = self.copier.store if n == "store" else self.copier.load
                before = time.perf_counter()
                copies.append(call(0, bench.blocks[n][a:b], bench.keys[a:b], slots[n][a:b]))
                spent += time.perf_counter() - before
                at[n] = b
        seconds = time.perf_counter() - start
        moved = len(names) * bench.nbytes
        self.host_us.append(spent * 1e6 / (moved / CALL_BYTES))
        return seconds

    def check(self) -> None:
        """Stores blocks, loads them into others, compares bytes; a flipped byte and a wrong key must show."""
        bench, copier = self.bench, self.copier
        n = min(bench.count, 64)
        source, target = bench.blocks["store"][:n], bench.blocks["load"][:n]
        slots, keys = bench.slots["store"][:n], bench.keys[:n].copy()
        pages = [bench.view.pages(r).view(bench.num_blocks, -1) for r in bench.view.groups[0].regions]
        for i, page in enumerate(pages):
            page[torch.from_numpy(source).to(page.device)] = torch.randint(
                0, 256, (n, bench.page), dtype=torch.uint8, device=page.device
            )
            if i == 0:
                page[torch.from_numpy(target).to(page.device)] = 0
        torch.cuda.synchronize()
        store = copier.store(0, source, keys, slots)
        store.wait()
        load = copier.load(0, target, keys, slots)
        load.wait()
        wrong = sum(
            int((p[torch.from_numpy(source).to(p.device)] != p[torch.from_numpy(target).to(p.device)]).any())
            for p in pages
        )
        if wrong or load.bad is None or load.bad.any():
            raise AssertionError(f"{wrong} of {len(pages)} layers differ, {load.bad} bad blocks")
        address = int(slots[0]) * PAGE + bench.layout.nbytes // 3
        bench.pool[2].view(-1)[address] ^= 16
        keys[n - 1] ^= np.uint64(1)
        load = copier.load(0, target, keys, slots)
        load.wait()
        expected = np.zeros(n, dtype=bool)
        expected[[0, n - 1]] = True
        if (load.bad != expected).any():
            raise AssertionError(f"bad {np.flatnonzero(load.bad)} instead of 0 and {n - 1}")
        bench.pool[2].view(-1)[address] ^= 16
