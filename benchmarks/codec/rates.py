"""How fast the coding kernels are by themselves, and the compilation of all that is measured, on all cores at once."""

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from cases import Bench, Shape
from vllm_kvtier.kernels import encoded_pages, page_copy

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.worker.copy.part_tables import MAX_ROWS, ROW_ALIGN, encoded_lines
from vllm_kvtier.worker.device.cuda_driver import Driver

_FAKE_BASE = 1 << 40  # an address of some alignment; nothing is launched


def _compile(shape: Shape, name: str, cuts: list[encoded_pages.Shape]) -> None:
    group = shape.group(_FAKE_BASE, 16)
    layout = part_layout(group, codecs.get(name))
    scratch = (torch.empty((1, 4), dtype=torch.int64, device="cuda"), torch.empty(1, dtype=torch.int64, device="cuda"))
    for cut in cuts:
        for gather in (True, False):
            setup = page_copy.LaunchSetup(scratch, 8)
            page_copier = encoded_pages.EncodedPageCopier(
                gather, encoded_lines(group, layout), layout.sum_offset, setup, cut
            )
            page_copier.launch(0, 0, torch.cuda.current_stream())


def compile_all(jobs: list[tuple[Shape, str, list[encoded_pages.Shape]]]) -> None:
    """Fills Triton's cache on disk."""
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_compile, shape, name, [cut]) for shape, name, cuts in jobs for cut in cuts]:
            future.result()


class Kernels:
    """Encoding or decoding between the cache and rows in GPU memory, nothing else under way."""

    def __init__(self, bench: Bench, logical: int):
        layout, group = bench.layout, bench.view.groups[0]
        self.bench, self.lines = bench, encoded_lines(group, layout)
        self.n = n = min(MAX_ROWS, logical // group.block_bytes, bench.count)
        pitch = -(-layout.nbytes // ROW_ALIGN) * ROW_ALIGN
        self.rows = torch.empty(n * pitch + ROW_ALIGN, dtype=torch.uint8, device="cuda")
        first = -(-self.rows.data_ptr() // ROW_ALIGN) * ROW_ALIGN
        self.table = torch.empty(n, 4, dtype=torch.int64, pin_memory=True)
        self.verdicts = torch.empty(n, dtype=torch.uint8, pin_memory=True)
        flat = self.table.numpy()
        flat[:, 0], flat[:, 1] = bench.blocks["store"][:n], bench.keys[:n].view(np.int64)
        flat[:, 2] = first + np.arange(n) * pitch
        flat[:, 3] = self.verdicts.data_ptr() + np.arange(n)
        self.scratch = (
            torch.empty((n, 4), dtype=torch.int64, device="cuda"), torch.empty(n, dtype=torch.int64, device="cuda"),
        )  # fmt: skip
        self.driver = Driver(torch.cuda.current_device())
        self.logical, self.stored = n * group.block_bytes, n * layout.nbytes

    def seconds(self, gather: bool, programs: int, cut: encoded_pages.Shape, checked: bool, repeats: int = 4) -> float:
        setup = page_copy.LaunchSetup(self.scratch, programs, checked, self.driver.launch)
        page_copier = encoded_pages.EncodedPageCopier(gather, self.lines, self.bench.layout.sum_offset, setup, cut)
        stream = torch.cuda.Stream()
        times = []
        for _ in range(repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            page_copier.launch(self.table.data_ptr(), self.n, stream)
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    def row(self, programs: int, cut: encoded_pages.Shape) -> dict:
        """Logical GB/s of encoding and decoding, without and with the checksum, and stored GB/s of the checksum."""
        found = {"codec": self.bench.codec.name, "shape": self.bench.shape.name, "programs": programs}
        found |= {"numbers": cut.numbers, "warps": cut.warps, "stages": cut.stages}
        for gather, word in ((True, "encode"), (False, "decode")):
            bare, whole = (self.seconds(gather, programs, cut, checked) for checked in (False, True))
            found[word] = round(self.logical / bare / 1e9, 1)
            found[f"{word}+sum"] = round(self.logical / whole / 1e9, 1)
            found["sum"] = round(self.stored / max(whole - bare, 1e-9) / 1e9)
        return found
