"""The coding kernels against the formats' reference, bit for bit: dtypes, head sizes, strides, any numbers at all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_kvtier.kernels import coded, pages
from vllm_kvtier.kernels.checksum_reference import block_sum

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.worker.copier_parts import coded_lines
from vllm_kvtier.worker.cuda import Driver
from vllm_kvtier.worker.views import CacheView

# NaNs and infinities are among the numbers, and numpy, which the interpreter computes with, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPACE = 0xA5  # what rows hold where nothing is written
ATTENTION = ("k", "v")
LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
# Those of one format for K and V; others are made of theirs.
SIMPLE = [name for name in LOSSY if len({codecs.get(name).formats[f] for f in ATTENTION}) == 1]


def numbers(rng: np.random.Generator, lines: int, dtype: torch.dtype) -> torch.Tensor:
    """[lines, 16] of all kinds: plain, large and small, and in a few lines anything that 16 bits can be."""
    x = torch.from_numpy(rng.standard_normal((lines, 16), dtype=np.float32))
    x *= torch.from_numpy(np.exp2(rng.integers(-12, 10, (lines, 1))).astype(np.float32))
    x = x.to(dtype)
    kinds = torch.from_numpy(rng.integers(0, 64, lines))
    x[kinds == 0] = 0.0
    x[kinds == 1] = torch.finfo(dtype).max
    x[kinds == 2] *= torch.finfo(dtype).tiny
    x[kinds == 3, 3] = float("nan")
    x[kinds == 4, 2] = float("-inf")
    x[kinds == 5, 1] = 60000.0
    any_bits = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, (lines, 16), dtype=np.int16)).view(dtype)
    return torch.where((kinds == 6)[:, None], any_bits, x)


def make_view(
    device, dtype="bfloat16", fields=(("k", 128), ("v", 128)), heads=2, tokens=4, layers=2, blocks=5, shift=0,
    tokens_first=False, seed=0,
) -> CacheView:  # fmt: skip
    """Layers with gaps between their pages, which begin ``shift`` bytes beyond a multiple of 64."""
    count = sum(c for _, c in fields)
    inner = 2 * count
    head, token = (inner, heads * inner) if tokens_first else (tokens * inner, inner)
    page = heads * tokens * inner + 2 * 64
    rng = np.random.default_rng(seed)
    total = layers * blocks * page + 256
    memory = numbers(rng, -(-total // 32), DTYPES[dtype]).view(torch.uint8).reshape(-1).to(device)
    base = -(-memory.data_ptr() // 64) * 64 + shift
    regions = tuple(
        Region(
            f"l{i}", base + i * blocks * page, page, heads, head, 0, tokens, token, inner, dtype=dtype,
            fields=tuple(Field(*f) for f in fields),
        )
        for i in range(layers)
    )  # fmt: skip
    return CacheView([GroupView(0, tokens, "full", None, regions)], blocks, device, [memory.untyped_storage()])


class Rows:
    """Coded rows in memory of the device, in an order of their own, and the scratch of a launch."""

    def __init__(self, view: CacheView, codec, n: int, programs: int = 3, shape: coded.Shape | None = None):
        self.view, self.n, self.group, self.programs = view, n, view.groups[0], programs
        self.layout = part_layout(self.group, codec)
        self.shape = shape or coded.Shape(1024, 4)
        device = view.device
        self.pitch = self.layout.nbytes + 64
        self.memory = torch.full(((n + 1) * self.pitch + 64,), SPACE, dtype=torch.uint8, device=device)
        first = -(-self.memory.data_ptr() // 64) * 64
        self.shift = first - self.memory.data_ptr()
        self.starts = np.random.default_rng(n).permutation(n) * self.pitch
        pin = device.type == "cuda"
        self.table = torch.zeros(n, 4, dtype=torch.int64, pin_memory=pin)
        self.verdicts = torch.full((n,), pages.BAD, dtype=torch.uint8, pin_memory=pin)
        self.table[:, 2] = torch.from_numpy(first + self.starts)
        self.table[:, 3] = self.verdicts.data_ptr() + torch.arange(n)
        self.scratch = (
            torch.full((n + 3, 4), -1, dtype=torch.int64, device=device),
            torch.full((n + 3,), -1, dtype=torch.int64, device=device),
        )
        self.stream = torch.cuda.Stream() if pin else None

    def launch(self, gather: bool, blocks, keys, checked: bool = True) -> list[bool]:
        self.table[:, 0] = torch.tensor(blocks)
        self.table[:, 1] = torch.from_numpy(np.asarray(keys, dtype=np.uint64).view(np.int64))
        cuda = self.view.device.type == "cuda"
        start = Driver(self.view.device.index).launch if cuda else None
        fields = coded_lines(self.group, self.layout)
        mover = coded.CodedMover(
            gather, fields, self.layout.sum_offset, self.scratch, self.programs, self.shape, checked, start
        )
        for _ in range(2 if cuda else 1):  # the second time by the compiled kernels alone
            self.verdicts.fill_(pages.BAD)
            mover.launch(self.table.data_ptr(), self.n, self.stream)
            if cuda:
                torch.cuda.synchronize()
        return [v == pages.GOOD for v in self.verdicts.tolist()]

    def bytes(self) -> np.ndarray:
        """uint8 [n, nbytes], in the order of the blocks."""
        flat = self.memory.cpu().numpy()[self.shift :]
        return np.stack([flat[s : s + self.layout.nbytes] for s in self.starts])

    def poke(self, row: int, at: int) -> None:
        self.memory[self.shift + int(self.starts[row]) + at] ^= 4


def lines_of(view: CacheView, part, block: int) -> torch.Tensor:
    """[lines, G] of a field in one block, copied to the host."""
    region = view.groups[0].regions[part.region]
    count = region.fields[part.field].count
    cells = view.pages(region)[block].cpu().contiguous().view(DTYPES[region.dtype])  # [outer, tokens, numbers]
    return cells[..., part.offset : part.offset + count].reshape(-1, part.line)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for what NaNs look like."""
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | a.isnan() & b.isnan()).all())


def check(view: CacheView, codec, shape: coded.Shape | None = None, programs: int = 3, n: int = 3) -> None:
    device = view.device
    rows = Rows(view, codec, n, programs, shape)
    layout = rows.layout
    assert layout.coded
    sources, targets = [4, 0, 3, 2, 1][:n], [1, 4, 2, 0, 3][:n]
    keys = np.arange(n, dtype=np.uint64) + 77
    rows.launch(True, sources, keys)
    made = rows.bytes()
    wanted = np.full_like(made, SPACE)
    for row, got, block, key in zip(wanted, made, sources, keys, strict=True):
        for part in layout.coded:
            data, scales = part.format.encode(lines_of(view, part, block))
            # What the data of a line hold that decodes to NaN means nothing.
            bad = part.format.decode(data, scales, DTYPES[view.groups[0].regions[0].dtype]).isnan().all(dim=1).numpy()
            area = slice(part.data_offset, part.data_offset + part.data_bytes)
            row[area] = data.numpy().reshape(-1)
            if part.format.lossy:
                ours, theirs = row[area].reshape(len(bad), -1), got[area].reshape(len(bad), -1)
                ours[bad] = theirs[bad]
            row[part.scale_offset : part.scale_offset + part.scale_bytes] = scales.numpy().reshape(-1)
        # The sum is of the row as it is.
        words = [got[: layout.sum_offset].reshape(1, -1, 8)]
        total = block_sum(words, [layout.sum_offset // 8], int(key))
        row[layout.sum_offset : layout.sum_offset + 8] = np.frombuffer(total.to_bytes(8, "little"), np.uint8)
    assert (made == wanted).all(), np.argwhere(made != wanted)[:5]
    if n < view.num_blocks:
        beside = rows.memory.cpu().numpy()[rows.shift :]
        assert all((beside[s + layout.nbytes : s + rows.pitch] == SPACE).all() for s in rows.starts)

    before = [[lines_of(view, part, b).clone() for part in layout.coded] for b in range(view.num_blocks)]
    rows.poke(n - 1, layout.coded[-1].data_offset + 5)
    stored = rows.bytes()
    assert rows.launch(False, targets, keys) == [True] * (n - 1) + [False]
    for block in range(view.num_blocks):
        for p, part in enumerate(layout.coded):
            now = lines_of(view, part, block)
            if block not in targets:
                assert same(now, before[block][p])
                continue
            row = torch.from_numpy(stored[targets.index(block)])
            data = row[part.data_offset :][: part.data_bytes].view(part.lines, -1)
            scales = row[part.scale_offset :][: part.scale_bytes].view(part.lines, -1)
            assert same(now, part.format.decode(data, scales, now.dtype)), (block, part)
    assert device == view.device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_rows_equal_the_reference_and_come_back(kernel_device, name, dtype):
    view = make_view(kernel_device, dtype)
    check(view, codecs.get(name))


@pytest.mark.parametrize("size", [64, 80, 96, 112, 256])
@pytest.mark.parametrize("name", SIMPLE)
def test_head_sizes(kernel_device, name, size):
    view = make_view(kernel_device, fields=(("k", size), ("v", size)), heads=1, layers=1, tokens=3, seed=size)
    check(view, codecs.get(name), programs=2, n=2)


@pytest.mark.parametrize("name", SIMPLE)
def test_latent_and_rotary_part(kernel_device, name):
    view = make_view(kernel_device, fields=(("latent", 512), ("rope", 64)), heads=1, layers=1, tokens=5)
    check(view, codecs.get(name), n=2)


@pytest.mark.parametrize("fields", [(("k", 128),), (("k", 96), ("v", 64))])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_keys_apart_and_values_of_another_size(kernel_device, name, fields):
    check(make_view(kernel_device, fields=fields, layers=1), codecs.get(name), n=2)


@pytest.mark.parametrize("shift", [0, 2, 4, 8])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_alignment_and_order_in_the_cache(kernel_device, name, shift):
    view = make_view(kernel_device, shift=shift, tokens_first=True, layers=1, tokens=3)
    check(view, codecs.get(name), n=2)
    launches = coded.plan(
        coded_lines(view.groups[0], part_layout(view.groups[0], codecs.get(name))), True, coded.Shape(1024, 4)
    )
    assert {flags["VECTOR"] for flags, _ in launches} == {min(16, shift or 16) // 2}


@pytest.mark.parametrize("numbers, warps, stages, programs", [(256, 1, 1, 7), (4096, 8, 1, 1), (16384, 8, 2, 16)])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_how_work_is_cut_does_not_show(kernel_device, name, numbers, warps, stages, programs):
    """Tiles of less than a block's lines, of several blocks, with lines and blocks to spare."""
    view = make_view(kernel_device, tokens=5, layers=1)
    check(view, codecs.get(name), coded.Shape(numbers, warps, stages), programs)


@pytest.mark.parametrize("name", SIMPLE)
def test_any_bytes_decode_to_something_within_their_line(kernel_device, name):
    """Rows of another's making: the kernel and the reference agree about every byte that there can be."""
    view = make_view(kernel_device, layers=1, heads=1)
    rows = Rows(view, codecs.get(name), 1)
    rng = np.random.default_rng(5)
    rows.memory[:] = torch.from_numpy(rng.integers(0, 256, rows.memory.shape[0], dtype=np.uint8))
    row = torch.from_numpy(rows.bytes()[0])
    assert rows.launch(False, [2], [1]) == [False]
    for part in rows.layout.coded:
        data = row[part.data_offset :][: part.data_bytes].view(part.lines, -1)
        scales = row[part.scale_offset :][: part.scale_bytes].view(part.lines, -1)
        now = lines_of(view, part, 2)
        assert same(now, part.format.decode(data, scales, now.dtype))


def test_without_checksum_only_the_sums_are_missing(kernel_device):
    rows = Rows(make_view(kernel_device), codecs.get("fp8"), 2)
    rows.launch(True, [1, 2], [3, 4], checked=False)
    bare = rows.bytes()
    rows.launch(True, [1, 2], [3, 4])
    at = np.argwhere(bare != rows.bytes())[:, 1]
    assert len(at) and all(0 <= a - rows.layout.sum_offset < 8 for a in at)


def test_what_cannot_be_addressed_is_refused():
    view = make_view("cpu")
    fields = coded_lines(view.groups[0], part_layout(view.groups[0], codecs.get("int4")))
    with pytest.raises(ValueError, match="multiples of 2 bytes"):
        coded.plan([replace(fields[0], base=fields[0].base + 1)], True, coded.Shape(1024, 4))
    with pytest.raises(ValueError, match="two halves"):
        coded.plan([replace(fields[0], line=65)], True, coded.Shape(1024, 4))


def test_no_triton_says_so(monkeypatch):
    monkeypatch.setattr(pages, "triton", None)
    with pytest.raises(RuntimeError, match="need Triton"):
        coded.CodedMover(True, [], 0, (None, None), 1, coded.Shape())
