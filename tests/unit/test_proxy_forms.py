"""Forms of ``/v1/audio/``: a client may not set by them what it may not set by JSON."""

import json

import aiohttp
import httpx
import pytest
from proxy_fakes import Cluster

from vllm_kvtier.proxy.messages.forms import Form, is_form
from vllm_kvtier.proxy.messages.request_bodies import BadRequest

PATH = "/v1/audio/transcriptions"
KIND = "multipart/form-data; boundary=b"
AUDIO = b"RIFF\r\n--\r\n\r\n\x00\xff"
NAMED = b'content-disposition: form-data; name="vllm_xargs"'


def part(value: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"--b", *(lines or (NAMED,)), b"", value, b""])


def form(*parts: bytes) -> bytes:
    return b"".join([*parts, b"--b--\r\n"])


FILE = part(AUDIO, b'Content-Disposition: form-data; name="file"; filename="a.wav"', b"Content-Type: audio/wav")
MODEL = part(b"whisper", b'Content-Disposition: form-data; name="model"')


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ('{"kv_transfer_params": "victim", "mine": [1, "a"]}', {"mine": [1, "a"]}),
        ('{"ec_transfer_params": ["victim"], "mine": 1}', {"mine": 1}),
        (r'{"\u006bv_transfer_params": "victim"}', {}),
        ('{ "mine" : 1 }', None),
    ],
)
async def test_form_sets_no_transfer_params(given, left):
    async with Cluster() as c:
        body = form(MODEL, part(given.encode()), FILE, part(given.encode()))
        reply = await c.client.post(PATH, content=body, headers={"content-type": KIND})
        assert reply.status_code == 200
        (seen,) = c.d[0].passed
        kept = part(given.encode() if left is None else json.dumps(left, separators=(",", ":")).encode())
        assert seen.body == form(MODEL, kept, FILE, kept)


async def test_form_without_arguments_of_vllm_is_unchanged():
    async with Cluster() as c:
        sent = httpx.Request("POST", "http://h", data={"model": "m"}, files={"file": ("ä b.wav", AUDIO)})
        reply = await c.client.post(PATH, content=sent.read(), headers={"content-type": sent.headers["content-type"]})
        assert reply.status_code == 200 and c.d[0].passed[0].body == sent.content


XARGS = b'{"kv_transfer_params": "victim"}'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (KIND, form(part(XARGS, b"content-disposition: form-data; name*=utf-8''vllm%5fxargs"), FILE)),
        (KIND, form(part(XARGS, b"content-disposition: form-data;", b' name="vllm_xargs"'), FILE)),
        (KIND, form(part(XARGS, NAMED + b'; name="other"'), FILE)),
        (KIND, form(part(XARGS, rb'content-disposition: form-data; name="vllm\_xargs"'), FILE)),
        (KIND, form(part(XARGS, b'content-disposition: form-data; name="a"', NAMED), FILE)),
        (KIND, form(part(XARGS, b"x: a\n" + NAMED, b'content-disposition: form-data; name="a"'), FILE)),
        (KIND, form(part(XARGS, rb'content-disposition: form-data; name=a; filename="\"; name=vllm_xargs; a="'), FILE)),
        (KIND, form(part(XARGS, rb'content-disposition: form-data; name=a; filename="x\\"; filename="; name=b"'))),
        (KIND, b"before\r\n" + form(part(XARGS), FILE)),
        (KIND, form(part(XARGS).replace(b"--b", b"--b "), FILE)),
        (KIND, form(part(XARGS).replace(b"\r\n", b"\n"), FILE)),
        (KIND, form(FILE, part(XARGS))[:-5]),
        (KIND + "; charset=utf-16", form(FILE)),
        (KIND + "; boundary=c", form(FILE)),
        (KIND + "; boundary*=c", form(FILE)),
        ("multipart/form-data", form(FILE)),
        (KIND, form(FILE, part(b"5"), part(b"{"))),
    ],
)
async def test_form_that_could_be_read_in_another_way_reaches_no_engine(kind, body):
    async with Cluster() as c:
        reply = await c.client.post(PATH, content=body, headers={"content-type": kind})
        assert reply.status_code == 400 and not c.d[0].passed


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("Multipart/Form-Data; boundary=b", (b'Content-Disposition: form-data; name="model"',)),
        ('multipart/form-data; charset=UTF-8; boundary="b"', (b"Content-Disposition: form-data; name=model",)),
        (KIND, (b"Content-Type: text/plain; charset=utf-8", b'Content-Disposition: form-data; name="model"', b"X: 1")),
        (KIND, (b"Content-Disposition: form-data; name=model; filename=m; filename*=utf-8''m",)),
        (KIND, (rb'Content-Disposition: form-data; name=model; filename="C:\talk\a.wav"',)),
    ],
)
def test_form_as_clients_write_it_is_read(kind, lines):
    made = Form(form(FILE, part(b"whisper", *lines)), kind)
    assert is_form(kind) and made.get("model") == "whisper" and made.get("file") == AUDIO.decode("utf-8", "replace")


async def test_form_of_aiohttp_is_read():
    data = aiohttp.FormData({"model": "whisper"})
    data.add_field("file", AUDIO, filename="ä b.wav", content_type="audio/wav")
    made = data()
    assert Form(await made.as_bytes(), made.content_type).get("model") == "whisper"


def test_form_with_many_lines_or_parts_is_refused_in_no_time():
    """Ten million header lines, or a million parts."""
    lines = b'--b\r\ncontent-disposition: form-data; name="model"\r\n' + b"a: b\r\n" * 10_000_000 + b"\r\nx\r\n--b--"
    for body in (lines, form(*[MODEL] * 1_000_000)):
        with pytest.raises(BadRequest):
            Form(body, KIND)
