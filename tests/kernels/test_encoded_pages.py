"""The coding kernels against the formats' reference, bit for bit: dtypes, head sizes, strides, any numbers at all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_kvtier.kernels import encoded_pages, page_copy
from vllm_kvtier.kernels.checksum_reference import block_checksum

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.part_tables import encoded_lines
from vllm_kvtier.worker.device.cuda_driver import Driver

# NaNs and infinities are among the numbers, and numpy, which the interpreter computes with, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FILL_BYTE = 0xA5  # what rows hold where nothing is written
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

    def __init__(self, view: CacheView, codec, n: int, programs: int = 3, shape: encoded_pages.Shape | None = None):
        self.view, self.n, self.group, self.programs = view, n, view.groups[0], programs
        self.layout = part_layout(self.group, codec)
        self.shape = shape or encoded_pages.Shape(1024, 4)
        device = view.device
        self.pitch = self.layout.nbytes + 64
        self.memory = torch.full(((n + 1) * self.pitch + 64,), FILL_BYTE, dtype=torch.uint8, device=device)
        first = -(-self.memory.data_ptr() // 64) * 64
        self.shift = first - self.memory.data_ptr()
        self.starts = np.random.default_rng(n).permutation(n) * self.pitch
        pin = device.type == "cuda"
        self.table = torch.zeros(n, 4, dtype=torch.int64, pin_memory=pin)
        self.verdicts = torch.full((n,), page_copy.BAD, dtype=torch.uint8, pin_memory=pin)
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
        fields = encoded_lines(self.group, self.layout)
        setup = page_copy.LaunchSetup(self.scratch, self.programs, checked, start)
        page_copier = encoded_pages.EncodedPageCopier(gather, fields, self.layout.sum_offset, setup, self.shape)
        for _ in range(2 if cuda else 1):  # the second time by the compiled kernels alone
            self.verdicts.fill_(page_copy.BAD)
            page_copier.launch(self.table.data_ptr(), self.n, self.stream)
            if cuda:
                torch.cuda.synchronize()
        return [v == page_copy.GOOD for v in self.verdicts.tolist()]

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


def check(view: CacheView, codec, shape: encoded_pages.Shape | None = None, programs: int = 3, n: int = 3) -> None:
    device = view.device
    rows = Rows(view, codec, n, programs, shape)
    layout = rows.layout
    assert layout.encoded
    sources, targets = [4, 0, 3, 2, 1][:n], [1, 4, 2, 0, 3][:n]
    keys = np.arange(n, dtype=np.uint64) + 77
    rows.launch(True, sources, keys)
    made = rows.bytes()
    wanted = np.full_like(made, FILL_BYTE)
    for row, got, block, key in zip(wanted, made, sources, keys, strict=True):
        for part in layout.encoded:
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
        total = block_checksum(words, [layout.sum_offset // 8], int(key))
        row[layout.sum_offset : layout.sum_offset + 8] = np.frombuffer(total.to_bytes(8, "little"), np.uint8)
    assert (made == wanted).all(), np.argwhere(made != wanted)[:5]
    if n < view.num_blocks:
        beside = rows.memory.cpu().numpy()[rows.shift :]
        assert all((beside[s + layout.nbytes : s + rows.pitch] == FILL_BYTE).all() for s in rows.starts)

    before = [[lines_of(view, part, b).clone() for part in layout.encoded] for b in range(view.num_blocks)]
    rows.poke(n - 1, layout.encoded[-1].data_offset + 5)
    stored = rows.bytes()
    assert rows.launch(False, targets, keys) == [True] * (n - 1) + [False]
    for block in range(view.num_blocks):
        for p, part in enumerate(layout.encoded):
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
def test_encoded_pages_equal_reference_and_round_trip(kernel_device, name, dtype):
    view = make_view(kernel_device, dtype)
    check(view, codecs.get(name))


@pytest.mark.parametrize("size", [64, 80, 96, 112, 256])
@pytest.mark.parametrize("name", SIMPLE)
def test_encoded_pages_of_all_head_sizes_round_trip(kernel_device, name, size):
    view = make_view(kernel_device, fields=(("k", size), ("v", size)), heads=1, layers=1, tokens=3, seed=size)
    if codecs.get(name).applies(view.groups[0]):
        check(view, codecs.get(name), programs=2, n=2)


@pytest.mark.parametrize("size", [80, 96])
@pytest.mark.parametrize("name", SIMPLE)
def test_encoded_pages_short_lines_of_one_sign_equal_reference(kernel_device, name, size):
    """The kernels' tiles have zeros beyond the end of such a line, which are not its least numbers."""
    view = make_view(kernel_device, fields=(("k", size), ("v", size)), heads=1, layers=1, tokens=3)
    pages = view.pages(view.groups[0].regions[0]).view(torch.bfloat16)
    pages.copy_((torch.rand(pages.shape, generator=torch.Generator().manual_seed(size)) + 1).to(torch.bfloat16))
    if codecs.get(name).applies(view.groups[0]):
        check(view, codecs.get(name), programs=2, n=2)


@pytest.mark.parametrize("name", SIMPLE)
def test_encoded_pages_of_mla_latent_and_rope_equal_reference(kernel_device, name):
    view = make_view(kernel_device, fields=(("latent", 512), ("rope", 64)), heads=1, layers=1, tokens=5)
    check(view, codecs.get(name), n=2)


@pytest.mark.parametrize("fields", [(("k", 128),), (("k", 96), ("v", 64))])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_encoded_pages_with_separate_k_and_v_sizes_equal_reference(kernel_device, name, fields):
    check(make_view(kernel_device, fields=fields, layers=1), codecs.get(name), n=2)


@pytest.mark.parametrize("shift", [0, 2, 4, 8])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_encoded_pages_of_any_alignment_and_order_equal_reference(kernel_device, name, shift):
    view = make_view(kernel_device, shift=shift, tokens_first=True, layers=1, tokens=3)
    check(view, codecs.get(name), n=2)
    launches = encoded_pages.plan(
        encoded_lines(view.groups[0], part_layout(view.groups[0], codecs.get(name))), True, encoded_pages.Shape(1024, 4)
    )
    assert {flags["VECTOR"] for flags, _ in launches} == {min(16, shift or 16) // 2}


@pytest.mark.parametrize("numbers, warps, stages, programs", [(256, 1, 1, 7), (4096, 8, 1, 1), (16384, 8, 2, 16)])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_encoded_pages_equal_for_any_partition_of_work(kernel_device, name, numbers, warps, stages, programs):
    """Tiles of less than a block's lines, of several blocks, with lines and blocks to spare."""
    view = make_view(kernel_device, tokens=5, layers=1)
    check(view, codecs.get(name), encoded_pages.Shape(numbers, warps, stages), programs)


@pytest.mark.parametrize("name", SIMPLE)
def test_encoded_pages_decode_any_bytes_as_reference(kernel_device, name):
    """Rows of another's making: the kernel and the reference agree about every byte that there can be."""
    view = make_view(kernel_device, layers=1, heads=1)
    rows = Rows(view, codecs.get(name), 1)
    rng = np.random.default_rng(5)
    rows.memory[:] = torch.from_numpy(rng.integers(0, 256, rows.memory.shape[0], dtype=np.uint8))
    row = torch.from_numpy(rows.bytes()[0])
    assert rows.launch(False, [2], [1]) == [False]
    for part in rows.layout.encoded:
        data = row[part.data_offset :][: part.data_bytes].view(part.lines, -1)
        scales = row[part.scale_offset :][: part.scale_bytes].view(part.lines, -1)
        now = lines_of(view, part, 2)
        assert same(now, part.format.decode(data, scales, now.dtype))


def test_copy_without_checksum_writes_same_bytes(kernel_device):
    rows = Rows(make_view(kernel_device), codecs.get("fp8"), 2)
    rows.launch(True, [1, 2], [3, 4], checked=False)
    bare = rows.bytes()
    rows.launch(True, [1, 2], [3, 4])
    at = np.argwhere(bare != rows.bytes())[:, 1]
    assert len(at) and all(0 <= a - rows.layout.sum_offset < 8 for a in at)


def test_encoded_pages_beyond_addressable_size_are_refused():
    view = make_view("cpu")
    fields = encoded_lines(view.groups[0], part_layout(view.groups[0], codecs.get("int4")))
    with pytest.raises(ValueError, match="multiples of 2 bytes"):
        encoded_pages.plan([replace(fields[0], base=fields[0].base + 1)], True, encoded_pages.Shape(1024, 4))
    with pytest.raises(ValueError, match="two halves"):
        encoded_pages.plan([replace(fields[0], line=65)], True, encoded_pages.Shape(1024, 4))
    with pytest.raises(ValueError, match="5 bits per number"):
        encoded_pages.plan([replace(fields[0], bits=5)], True, encoded_pages.Shape(1024, 4))


def test_encoded_pages_format_without_kernels_is_refused(monkeypatch):
    """Else its lines would be copied as 16 bits a number, over their neighbours."""
    view = make_view("cpu")
    layout = part_layout(view.groups[0], codecs.get("int4"))
    monkeypatch.setattr(type(layout.encoded[0].format), "kernels", None)
    with pytest.raises(ValueError, match="uint4.64 has no kernels"):
        encoded_lines(view.groups[0], layout)


def test_encoded_pages_without_triton_raises(monkeypatch):
    monkeypatch.setattr(page_copy, "triton", None)
    with pytest.raises(RuntimeError, match="need Triton"):
        encoded_pages.EncodedPageCopier(True, [], 0, page_copy.LaunchSetup((None, None), 1), encoded_pages.Shape())
