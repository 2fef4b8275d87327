"""Two files of weights that differ in a tensor have different digests, in every format that says where tensors lie."""

import io
import json
import os
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier import file_digests
from vllm_kvtier.file_digests import file_digests as digests_of

PAGE, WHOLE, STRIDE, BLIND = 16, 64, 256, 48

Written = tuple[bytes, list[tuple[int, int]]]  # a file, and where its tensors lie


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A file of weights is as large here as a page is there."""
    sizes = {"PAGE": PAGE, "WHOLE_BYTES": WHOLE, "STRIDE_BYTES": STRIDE, "BLIND_STRIDE_BYTES": BLIND, "READ_BYTES": 100}
    for name, value in sizes.items():
        monkeypatch.setattr(file_digests, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def safetensors(tensors: list[bytes]) -> Written:
    header, places, at = {"__metadata__": {"format": "pt"}}, [], 0
    for i, data in enumerate(tensors):
        header[f"layer.{i}"] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        places.append((at, at := at + len(data)))
    text = json.dumps(header).encode()
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors), [(begin + a, begin + b) for a, b in places]


def torch_zip(tensors: list[bytes]) -> Written:
    """Without the checksums of its members, which PyTorch may leave out."""
    buffer, places = io.BytesIO(), []
    with zipfile.ZipFile(buffer, "w") as archive:
        for i, data in enumerate(tensors):
            archive.writestr(f"archive/data/{i}", data)
            places.append((buffer.tell() - len(data), buffer.tell()))
    return buffer.getvalue(), places


def gguf(tensors: list[bytes]) -> Written:
    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    pairs = [
        text("general.alignment") + struct.pack("<II", 4, 16),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ", 9, 6, 3) + bytes(12),
        text("name") + struct.pack("<I", 8) + text("tiny"),
        text("rope") + struct.pack("<If", 6, 1e6),
    ]
    infos, data, places = b"", b"", []
    for i, tensor in enumerate(tensors):
        infos += text(f"blk.{i}") + struct.pack("<IQIQ", 1, len(tensor), 0, len(data))
        places.append((len(data), len(data) + len(tensor)))
        data += tensor + bytes(-len(tensor) % 16)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + infos
    head += bytes(-len(head) % 16)
    return head + data, [(len(head) + a, len(head) + b) for a, b in places]


FORMATS = {"safetensors": safetensors, "zip": torch_zip, "gguf": gguf}
tensors = st.lists(st.integers(0, 40) | st.integers(0, 3000), min_size=1, max_size=12).map(
    lambda sizes: [os.urandom(size) for size in sizes]
)


def digest(path, content: bytes) -> str:
    path.write_bytes(content)
    return digests_of([path])[0]


def changed(content: bytes, start: int, end: int) -> bytes:
    return content[:start] + bytes(byte ^ 0xFF for byte in content[start:end]) + content[end:]


@pytest.mark.parametrize("form", FORMATS)
def test_file_digest_changes_with_any_changed_tensor(form, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "file"

    @given(tensors, st.data())
    def run(stored, data):
        content, places = FORMATS[form](stored)
        before = digest(path, content)
        assert digest(path, content) == before
        start, end = data.draw(st.sampled_from(places), "tensor")
        if start == end:
            return
        # A run that covers the tensor, and maybe some of what is beside it.
        start, end = start - data.draw(st.integers(0, min(start, 500))), end + data.draw(st.integers(0, 500))
        assert digest(path, changed(content, start, end)) != before

    run()


@pytest.mark.parametrize("form", FORMATS)
def test_file_digest_changes_with_any_change_of_stride_length(form, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "file"

    @given(st.lists(st.integers(STRIDE, 6000), min_size=1, max_size=4), st.data())
    def run(sizes, data):
        content, places = FORMATS[form]([os.urandom(size) for size in sizes])
        start, end = data.draw(st.sampled_from(places), "tensor")
        at = data.draw(st.integers(start, end - STRIDE), "run")
        assert digest(path, changed(content, at, at + STRIDE)) != digest(path, content)

    run()


@pytest.mark.parametrize("form", FORMATS)
def test_file_digest_of_damaged_header_does_not_raise(form, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "file"

    @given(tensors, st.data())
    def run(stored, data):
        content, places = FORMATS[form](stored)
        at = data.draw(st.integers(0, max(1, places[0][0]) - 1))
        damaged = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
        assert len(digest(path, damaged[: data.draw(st.integers(0, len(damaged)))])) == 32

    run()


@given(st.integers(BLIND, 5000), st.data())
def test_file_digest_of_unknown_format_is_sampled_densely(tmp_path_factory, size, data):
    path = tmp_path_factory.mktemp("weights") / "file"
    content = os.urandom(size)
    at = data.draw(st.integers(0, size - BLIND))
    assert digest(path, changed(content, at, at + BLIND)) != digest(path, content)
