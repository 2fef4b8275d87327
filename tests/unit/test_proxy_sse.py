"""Events are cut and rewritten alike however the bytes arrive, and everything else passes byte for byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.proxy.messages import sse
from vllm_kvtier.proxy.messages.response_rewriter import AnswerRewriter

# Small alphabets find the corners: line ends, split markers, colons.
raw_bytes = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"data:", b" ", b"x", b"id: 1", b":", b"\n\n"])
).map(b"".join)
cuts = st.lists(st.integers(0, 400), max_size=12)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(i for i in at if i < len(data))})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def rewriter(report=None, **options):
    learned = []
    options = {"expose_params": False, "max_event_bytes": 1 << 20} | options
    return AnswerRewriter(learned.append, report, **options), learned


@given(raw_bytes, cuts)
def test_sse_events_are_independent_of_chunking(data, at):
    whole = sse.EventSplitter(1 << 20)
    expected = whole.feed(data)
    assert b"".join(expected) + whole.tail == data
    split = sse.EventSplitter(1 << 20)
    assert [event for piece in pieces(data, at) for event in split.feed(piece)] == expected
    assert split.tail == whole.tail


@given(raw_bytes)
def test_sse_event_is_emitted_with_its_last_byte(data):
    """No event waits for a byte that comes after it."""
    one_by_one = sse.EventSplitter(1 << 20)
    passed = b""
    for i in range(len(data)):
        passed += b"".join(one_by_one.feed(data[i : i + 1]))
        unfinished = data[len(passed) : i + 1]
        assert b"\n\n" not in unfinished and b"\n\r\n" not in unfinished


def test_sse_event_beyond_limit_raises():
    splitter = sse.EventSplitter(10)
    assert splitter.feed(b"data: a\n\n" * 9 + b"data:") == [b"data: a\n\n"] * 9
    with pytest.raises(sse.EventTooLarge):
        splitter.feed(b"123456")


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\r\n\r\n", b"a"),
        (b"id: 7\ndata: a\ndata:  b\n\n", b"a\n b"),
        (b": ping\n\n", None),
        (b"data:\n\n", b""),
    ],
)
def test_sse_event_data_is_extracted(event, data):
    assert sse.event_data(event) == data


def test_sse_with_data_keeps_other_fields():
    event = b"id: 7\r\n: note\r\ndata: a\r\ndata: b\r\nevent: x\r\n\r\n"
    assert sse.with_data(event, b"c") == b"id: 7\r\n: note\r\ndata: c\r\nevent: x\r\n\r\n"
    with pytest.raises(ValueError, match="one line"):
        sse.with_data(event, b"c\nd")


json_text = (
    st.text(max_size=20)
    | st.sampled_from(['{"kv_transfer_params": 1}', '"kv_transfer_params":null'])
    | st.just("\n\ndata: [DONE]\n\n")
)
chunk = st.fixed_dictionaries(
    {
        "id": json_text,
        "choices": st.lists(st.floats(allow_nan=False, allow_infinity=False) | json_text, max_size=3),
    },
    optional={
        "kv_transfer_params": st.none() | st.just({"remote_host": "h", "remote_port": 5, "kvtier": {}})
    },
)


@given(st.lists(chunk, max_size=6), cuts, st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_sse_rewriter_changes_only_event_with_params(chunks, at, end, compact):
    def as_event(value) -> bytes:
        text = json.dumps(value, separators=(",", ":") if compact else None)
        return b"data: " + text.encode() + end.encode()

    stream = b"".join(as_event(c) for c in chunks) + b"data: [DONE]" + end.encode()
    subject, learned = rewriter()
    out = b"".join(subject.feed(piece) for piece in pieces(stream, at)) + subject.close()

    parts = out.split(end.encode())
    assert len(parts) == len(chunks) + 2 and parts[-2:] == [b"data: [DONE]", b""]
    for value, part in zip(chunks, parts, strict=False):
        if value.get("kv_transfer_params"):
            rest = {k: v for k, v in value.items() if k != "kv_transfer_params"}
            assert json.loads(part.removeprefix(b"data: ")) == rest
        else:
            assert part + end.encode() == as_event(value)
    assert len(learned) == sum(bool(c.get("kv_transfer_params")) for c in chunks)
    assert subject.done


def test_sse_rewriter_keeps_number_text():
    subject, _ = rewriter()
    out = subject.feed(b'data: {"a":1.00e-05,"kv_transfer_params":{"x":1},"b":[12345678901234567890]}\n\n')
    assert out == b'data: {"a":1.00e-05,"b":[12345678901234567890]}\n\n'


def test_sse_rewriter_drops_unfinished_event_with_params():
    subject, _ = rewriter()
    assert subject.feed(b'data: {"kv_transfer_params": {"remote_host"') == b""
    assert subject.close() == b""
    subject, _ = rewriter()
    assert subject.feed(b"data: [DO") + subject.close() == b"data: [DO"


def test_sse_rewriter_adds_report_to_last_chunk_or_own_event():
    def report(found):
        return {"decode": None if found is None else found.report}

    subject, _ = rewriter(report)
    out = subject.feed(
        b'data: {"id":"i","kv_transfer_params":{"kvtier":{"pulled_tokens":3,"export":"e"}}}\n\n'
    )
    out += subject.feed(b"data: [DONE]\n\n")
    assert out == (
        b'data: {"id":"i","kv_transfer_params":{"kvtier":{"decode":{"pulled_tokens":3}}}}\n\ndata: [DONE]\n\n'
    )
    subject, _ = rewriter(report)
    out = subject.feed(b'data: {"id":"i","choices":[1]}\n\n') + subject.feed(b"data: [DONE]\n\n")
    own = b'data: {"id":"i","choices":[],"kv_transfer_params":{"kvtier":{"decode":null}}}\n\n'
    assert out == b'data: {"id":"i","choices":[1]}\n\n' + own + b"data: [DONE]\n\n"


@given(st.lists(st.sampled_from([b": keep-alive", b":", b""])), cuts, st.sampled_from([b"\n", b"\r\n"]))
def test_sse_comments_say_nothing_however_they_are_cut(lines, at, end):
    comments, data = sse.Comments(), b"".join(line + end for line in lines)
    assert not any(comments.skip(piece) for piece in pieces(data, at))
    assert comments.skip(b"data: :x" + end) == b"data: :x" + end
    assert comments.skip(b": a" + end + b"id: 1") == b"id: 1" and comments.skip(b"2") == b"2"
