"""The proxy's parts without sockets: options, bodies, salts, names of conversations, routes."""

import json
import math
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import turn

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.messages.request_bodies import _MEDIA, BadRequest, ClientRequest, Route
from vllm_kvtier.proxy.messages.transfer_params import (
    Source,
    TransferParams,
    decode_only_params,
    find_params,
    prefill_params,
)
from vllm_kvtier.proxy.routes.query import read_query
from vllm_kvtier.proxy.routing.conversations import ConversationRoute, Holder, Name, RouteTable, name_conversation
from vllm_kvtier.proxy.tenants import Tenants

D = (EngineAddress("http://d:1"),)


def chat(*texts, header=None, **fields) -> ClientRequest:
    return ClientRequest(
        Route.CHAT, json.dumps(turn(*texts, **fields)).encode(), header_conversation_id=header
    )


def completion(prompt, **fields) -> ClientRequest:
    return ClientRequest(Route.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt} | fields).encode())


# ---------------------------------------------------------------- options


def test_engine_addresses_are_parsed():
    assert EngineAddress.parse("http://h:1/") == EngineAddress("http://h:1")
    assert EngineAddress.parse("https://h:1, kv=[::1]:22") == EngineAddress("https://h:1", "::1", 22)


@pytest.mark.parametrize("name", ["events", "replay"])
def test_ipv6_address_of_events_without_brackets_raises(name):
    """It was never followed: its last number may be a part of the address."""
    given = {"events": "[fd00::1]:5557", name: "fd00::1:5557"}
    with pytest.raises(ConfigError, match=f"'fd00::1:5557' for {name}; .* \\[ADDRESS\\]:PORT"):
        EngineAddress("http://h:1", **given).check()
    EngineAddress("http://h:1", **given | {name: "[fd00::1]:5557"}).check()


@pytest.mark.parametrize(
    "text",
    [
        "http://h:1,kv=x",
        "http://h:1,kv=h:0",
        "http://h:1,kw=h:5",
        "http://h:1,kv=h:99999",
        "http://h:1,kv=h:²",
    ],
)
def test_engine_address_with_bad_endpoint_raises(text):
    with pytest.raises(ConfigError, match="kv=HOST:PORT"):
        EngineAddress.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": ()}, "no decode engine"),
        ({"decode": (EngineAddress("h:1"),)}, "is invalid"),
        ({"decode": (EngineAddress("http://a..b:1"),)}, "is invalid"),
        ({"decode": (EngineAddress("http://h:99999"),)}, "is invalid"),
        ({"decode": (EngineAddress("http://[::1"),)}, "is invalid"),
        ({"decode": (EngineAddress("http://u:pw@h:1"),)}, "password"),
        ({"decode": (EngineAddress("http://h:1/v1"),)}, "before /v1"),
        ({"decode": D + D}, "twice"),
        ({"prefill_timeout": 0}, "more than zero"),
        ({"connect_timeout": math.inf}, "connect_timeout is inf; it must be a number of seconds"),
        ({"retry_after_max": math.inf}, "retry_after_max is inf; it must be a number of seconds"),
        ({"affinity_slack": -1}, "not be negative"),
        ({"backoff_initial": 9, "backoff_max": 1}, "backoff_initial is 9 s; it must be at most"),
    ],
)
def test_proxy_options_invalid_raise_with_cause(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ProxyConfig(**{"decode": D, **options})
    assert "pw" not in str(caught.value).replace("password", "")


# ---------------------------------------------------------------- bodies


def test_prefill_body_asks_for_one_token_only():
    request = chat(
        "hi",
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=50,
        min_tokens=9,
        n=3,
        logprobs=True,
        top_logprobs=2,
        tools=[{"type": "function"}],
    )
    body = json.loads(request.body_for_prefill("salt", prefill_params([Source("e", "h", 5)])))
    messages = turn("hi")["messages"]
    assert body == {
        "model": "m",
        "messages": messages,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "cache_salt": "salt",
        "tools": [{"type": "function"}],
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "kvtier": {"sources": [{"engine_id": "e", "host": "h", "port": 5}]},
        },
    }
    assert "max_completion_tokens" not in json.loads(chat("hi").body_for_prefill("s", {}))
    assert "kvtier" not in prefill_params([])


def test_decode_body_equals_request_with_params():
    raw = b'{"model":"m","messages":[{"role":"user"}],"seed":12345678901234567890123,"top_p":1.00e-05}'
    body = ClientRequest(Route.CHAT, raw).body_for_decode("salt", msgspec.Raw(b'{"x": 1}'))
    assert body.startswith(raw[:-1]) and body.endswith(b',"cache_salt":"salt","kv_transfer_params":{"x": 1}}')


def test_client_kv_transfer_params_are_removed():
    aim = {"do_remote_prefill": True, "remote_host": "victim", "remote_port": 1}
    request = chat(
        "hi",
        kv_transfer_params=aim,
        ec_transfer_params=aim,
        vllm_xargs={"kv_transfer_params": "victim", "mine": 1},
    )
    for body in (request.body_for_decode("s", {}), request.body_for_prefill("s", prefill_params([]))):
        assert b"victim" not in body and b"ec_transfer_params" not in body
        assert json.loads(body)["vllm_xargs"] == {"mine": 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"conversation_id": {}}, "conversation_id"),
        ({"conversation_id": "x" * 257}, "257 characters"),
    ],
)
def test_client_request_invalid_raises(fields, words):
    with pytest.raises(BadRequest, match=words):
        chat("hi", **fields)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a": NaN}'])
def test_client_request_with_malformed_json_raises(body):
    with pytest.raises(BadRequest, match="JSON"):
        ClientRequest(Route.CHAT, body)


MANY = b"[" + b"[]," * (1 << 20) + b"1]"


@pytest.mark.parametrize("name", ["messages", "stream", "vllm_xargs", "echo"])
def test_json_of_too_many_values_is_not_parsed(name):
    """64 MiB of empty lists take 3 GiB and the event loop for 14 s."""
    with pytest.raises(BadRequest, match=f"{name} has more than 2097152 values") as caught:
        request = ClientRequest(Route.CHAT, b'{"messages":[{"content":"a"}],"%s":%s}' % (name.encode(), MANY))
        assert request.can_prefill_elsewhere
    assert caught.value.status == 413
    with pytest.raises(BadRequest, match="sampling_params has more than"):
        ClientRequest(Route.GENERATE, b'{"token_ids":[1],"sampling_params":{"a":%s}}' % MANY)


def test_json_of_too_many_fields_is_not_held():
    body = b"{" + b",".join(b'"%x":0' % i for i in range(1025)) + b"}"
    with pytest.raises(BadRequest, match="more than 1024 fields") as caught:
        ClientRequest(Route.CHAT, body)
    assert caught.value.status == 413
    with pytest.raises(BadRequest, match="more than 2097152 colons"):
        ClientRequest(Route.CHAT, b"{" + b'"a":0,' * (1 << 21) + b'"a":0}')


def test_long_texts_and_media_are_no_values():
    text = "a, b: " * (1 << 18) + "iVBO" * (1 << 20)
    assert chat(text).prompt_chars > len(text)


@pytest.mark.parametrize("prompt", ["x" * 8000, [1234] * 2000])
def test_several_prompts_count_for_all_their_tokens(prompt):
    one = completion(prompt).prompt_chars
    assert one == 8000 and completion([prompt] * 256).prompt_chars >= 256 * one
    assert not completion([prompt] * 256).can_prefill_elsewhere


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_of_a_chat_are_part_of_its_prefix(name):
    def asked(letter, *texts):
        return chat(*texts, **{name: [{"text": letter * 40_000}] if letter else None})

    def pieces(request):
        return name_conversation(TENANTS, b"a", request).pieces

    one, other, none = (asked(letter, "u1") for letter in ("x", "y", ""))
    assert one.prompt_chars - none.prompt_chars >= 40_000 and pieces(one)[-1].tokens >= 10_000
    assert pieces(one)[0] != pieces(other)[0] and pieces(one)[0] == pieces(asked("x", "u2"))[0]
    table = table_with(one, none)
    assert [found(table, asked(letter, "u1", "a1", "u2")) for letter in ("x", "y", "")] == [0, None, 1]


def renamed(route=Route.CHAT, **fields):
    request = ClientRequest(route, json.dumps({"messages": [{}]} | fields).encode())
    request.rename_media(lambda name: f"tenant's {name}")
    return json.loads(request.body_for_decode("s", {}))


def test_media_that_clients_name_are_renamed():
    """vLLM keeps a picture by its uuid for the requests of all tenants."""
    picture = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "logo"}
    theirs = picture | {"uuid": "tenant's logo"}
    tool = {"type": "function", "function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}
    other = [{"role": "tool", "content": '{"uuid": "logo"}', "uuid": "logo"}, {"content": [{"text": "uuid"}, "uuid"]}]
    message = {"role": "user", "content": [picture, {"type": "text", "text": "a"}]}
    found = renamed(messages=[*other, message], tools=[tool], n=1e-05)
    assert found["messages"] == [*other, message | {"content": [theirs, message["content"][1]]}]
    assert found["tools"] == [tool]
    assert renamed(messages=[[message], [message]])["messages"][1][0]["content"][0] == theirs  # of a batch
    part = {"type": "image_url", "url": "data:,"}  # of tokens-in/tokens-out
    names = {5: "tenant's 5", None: None, "logo": "tenant's logo"}
    parts = [part | {"uuid": name} for name in names]
    found = renamed(Route.GENERATE, content_parts=parts)["content_parts"]
    assert found == [part | {"uuid": name} for name in names.values()]
    for kind in ("function_call_output", "custom_tool_call_output"):  # of /v1/responses
        item = {"type": kind, "call_id": "c", "output": [{"type": "input_text", "text": "a"}, picture]}
        assert renamed(input=[item])["input"] == [item | {"output": [item["output"][0], theirs]}]
    item = {"content": [picture], "output": picture, "reasoning": picture | {"type": "prompt_embeds"}}
    names = {"content": [theirs], "output": theirs, "reasoning": theirs | {"type": "prompt_embeds"}}
    assert renamed(input=[item])["input"] == [names]
    features = {"mm_hashes": {"image": ["logo"]}, "kwargs_data": {"image": [None]}}
    theirs = features | {"mm_hashes": {"image": ["tenant's logo"]}}
    assert renamed(Route.GENERATE, features=features)["features"] == theirs
    assert renamed(Route.GENERATE, features=None)["features"] is None


def test_only_media_of_messages_are_renamed():
    """What clients send elsewhere, or what is not of media, engines and templates get as it is."""
    picture = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "logo"}
    item = {"content": [picture], "output": picture, "reasoning": picture}
    names = ("chat_template_kwargs", "tools", "metadata", "documents", "state", "rows", "content", "output")
    others = {name: [item] if name != "chat_template_kwargs" else item for name in names}
    assert {name: value for name, value in renamed(**others).items() if name in others} == others
    parts = [{"uuid": 5}, {"type": "text", "text": "a", "uuid": "logo"}, {"type": ["image_url"], "uuid": "logo"}]
    messages = [{"content": parts, "output": [{"stdout": "x", "uuid": "logo"}], "reasoning": {"uuid": "logo"}}]
    assert renamed(messages=messages, input=messages)["messages"] == messages


def test_all_kinds_of_parts_to_which_vllm_gives_a_name_are_known_as_media():
    chat_utils = pytest.importorskip("vllm.renderers.chat_utils")
    texts = {"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"}
    assert set(chat_utils.MM_PARSER_MAP) - texts <= _MEDIA


def test_media_names_behind_escapes_are_renamed():
    body = rb'{"messages": [{"\u0063ontent": [{"\u0075\u0075id": "logo", "image_\u0075rl": 1}]}]}'
    request = ClientRequest(Route.CHAT, body)
    request.rename_media(str.upper)
    assert msgspec.json.decode(request.fields["messages"]) == [{"content": [{"uuid": "LOGO", "image_url": 1}]}]


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (Route.CHAT, {"messages": [{"content": [{"uuid": "logo", "image_url": 1}] * 16_385}]}),
        (Route.CHAT, {"messages": [{"content": {"uuid": "logo", "image_url": 1}}] * 16_385}),
        (Route.GENERATE, {"features": {"mm_hashes": {"image": ["logo"] * 16_385}}}),
    ],
)
def test_request_with_very_many_named_media_is_refused(route, fields):
    """Everything else waits meanwhile: 400,000 names took 1.1 s."""
    with pytest.raises(BadRequest, match="more than 16384 media with names") as caught:
        renamed(route, **fields)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("fields", "most"),
    [({"tools": [{"uuid": 1}] * 100}, 2), ({"messages": [{"content": [{"uuid": "logo", "image_url": 1}] * 100}]}, 7)],
    ids=["objects", "named media"],
)
def test_media_are_renamed_in_few_calls_for_each_object(fields, most):
    """Everything else waits meanwhile: 400,000 objects of 46 MB took 3 s, with 11 calls for each of them."""
    request = ClientRequest(Route.CHAT, json.dumps(fields).encode())
    calls = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: event == "call" and calls.append(frame.f_code.co_name))
    try:
        request.rename_media(lambda name: name)
    finally:
        sys.setprofile(before)
    assert len(calls) < 100 * most + 50


def test_media_names_differ_by_tenant_and_secret():
    one, two = Tenants(b"x" * 32), Tenants(b"y" * 32)
    names = {t.media_name(tenant, name) for t in (one, two) for tenant in (b"a", b"b") for name in ("logo", "cat")}
    assert len(names) == 8 and one.media_name(b"a", "logo") in names


@pytest.mark.parametrize("features", [{"mm_hashes": 5}, {"mm_hashes": {"image": [5]}}, 5])
def test_features_that_cannot_be_renamed_are_refused(features):
    with pytest.raises(BadRequest, match="features"):
        renamed(Route.GENERATE, features=features)


@pytest.mark.parametrize(
    ("request_", "possible"),
    [
        (completion("abc"), True),
        (completion(["abc"]), True),
        (completion([1, 2, 3]), True),
        (completion([[1, 2, 3]]), True),
        (completion(["abc", "def"]), False),
        (completion([[1], [2]]), False),
        (completion(""), False),
        (completion(None), False),
        (completion("abc", echo=True), True),
        (completion("abc", echo=True, logprobs=0), False),
        (completion("abc", logprobs=1, n=4), True),
        (completion("abc", echo=1, logprobs=1), False),
        (completion("abc", use_beam_search=True), False),
        (completion("abc", use_beam_search=1), False),
        (chat("abc"), True),
        (chat("abc", echo=False, logprobs=True), True),
        (chat("abc", echo=True), False),
        (chat("abc", echo=1), False),
        (chat(), False),
        (chat("abc", prompt_logprobs=1), False),
    ],
)
def test_requests_that_can_be_prefilled_elsewhere(request_, possible):
    assert request_.can_prefill_elsewhere is possible


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.integers(min_value=1 << 63) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known_fields = (
    "model messages prompt stream n echo logprobs prompt_logprobs prompt_embeds cache_salt conversation_id "
    "kv_transfer_params vllm_xargs use_beam_search max_completion_tokens truncate_prompt_tokens"
).split()
bodies_like_ours = st.fixed_dictionaries({}, optional=dict.fromkeys(known_fields, anything))
messages_like_ours = st.lists(st.fixed_dictionaries({"role": anything, "content": anything}), max_size=3)


@given(bodies_like_ours, st.none() | messages_like_ours, st.sampled_from(Route))
def test_fuzz_client_request_is_routed_or_refused(body, messages, route):
    if messages is not None:
        body["messages"] = messages
    raw = json.dumps(body).encode()
    try:
        request = ClientRequest(route, raw)
        request.rename_media(str)
        name_conversation(Tenants(b"x" * 32), b"tenant", request)
    except BadRequest as error:
        assert 400 <= error.status < 500 and str(error)
    else:
        assert request.prompt_chars >= 0
        sent = json.loads(request.body_for_prefill("salt", prefill_params([])))
        assert sent["cache_salt"] == "salt" and sent["kv_transfer_params"]["do_remote_decode"] is True
        sent = json.loads(request.body_for_decode("salt", decode_only_params([Source("e", "h", 5)])))
        assert sent["kv_transfer_params"]["kvtier"]["sources"] == [{"engine_id": "e", "host": "h", "port": 5}]
        untouched = set(body) - {"cache_salt", "conversation_id", "kv_transfer_params", "vllm_xargs"}
        assert {name: sent[name] for name in untouched} == {name: body[name] for name in untouched}
    try:
        read_query(raw)
    except BadRequest as error:
        assert str(error)


# ---------------------------------------------------------------- tenants


def test_tenant_salts_are_distinct_and_stable():
    tenants = Tenants(b"x" * 32)
    ann, bob = (tenants.identify({"authorization": f"Bearer {key}"}) for key in ("ann", "bob"))
    salts = [tenants.salt(t, s) for t in (ann, bob) for s in (None, "", "s", "t")]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 64 and salt.isalnum() for salt in salts)
    assert tenants.salt(ann, "s") == Tenants(b"x" * 32).salt(ann, "s") != Tenants().salt(ann, "s")


def test_tenant_is_identified_by_trusted_headers():
    plain, trusting = Tenants(b"x" * 32), Tenants(b"x" * 32, trust_header=True)
    alone = plain.identify({})
    assert plain.identify({"x-tenant": "a"}) == alone
    assert trusting.identify({"x-tenant": "a"}) != trusting.identify({"x-tenant": "b"}) != alone
    assert (
        plain.identify({"authorization": "bearer k"})
        == plain.identify({"authorization": "Bearer  k "})
        != alone
    )
    assert trusting.identify({"x-tenant": "k"}) != trusting.identify({"authorization": "Bearer k"})


def test_salt_secret_file_invalid_raises(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants.from_file(str(file), trust_header=False)
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes") as caught:
        Tenants.from_file(str(file), trust_header=False)
    assert "short" not in str(caught.value)
    file.write_bytes(b"y" * 99)
    assert Tenants.from_file(str(file), trust_header=False).salt(b"t", None) == Tenants(b"y" * 99).salt(
        b"t", None
    )


# ---------------------------------------------------------------- names and routes

TENANTS = Tenants(b"z" * 32)


def table_with(*requests, tenant=b"a"):
    table = RouteTable(100, 1e9)
    for i, request in enumerate(requests):
        table.enter(name_conversation(TENANTS, tenant, request), ConversationRoute((Holder(i, 0),)))
    return table


def found(table, request, tenant=b"a"):
    route = table.find(name_conversation(TENANTS, tenant, request))
    return None if route is None else route.holders[0].decode


def test_route_table_matches_longest_conversation_prefix():
    table = table_with(chat("sys"), chat("u1"), chat("u1", "a1", "u2"))
    assert found(table, chat("u1", "a1", "u2", "a2", "u3")) == 2
    assert found(table, chat("u1", "a1", "other")) == 1
    assert found(table, chat("u1", "edited", "u2")) == 1
    assert found(table, chat("new", "a1", "u2")) is None


def test_route_table_common_system_prompt_is_no_match():
    table = table_with(chat("long system prompt", "ok", "question 1"))
    assert found(table, chat("long system prompt", "ok", "question 2")) is None


@pytest.mark.parametrize("kind", [{"type": "image_url"}, {}])
def test_pictures_differ_and_count_for_tokens_not_bytes(kind):
    def picture(letter):
        return [{**kind, "image_url": {"url": "data:image/png;base64," + letter * 1_000_000}}]

    table = table_with(chat(picture("A")), chat(picture("B")))
    again = chat(picture("B"), "a1", "u2")
    assert found(table, again) == 1 and found(table, chat(picture("C"), "a1", "u2")) is None
    assert again.prompt_chars < 5000 and name_conversation(TENANTS, b"a", again).pieces[-1].tokens < 1250
    assert bytes(again.fields["messages"]).count(b"B") >= 1_000_000, "engines get the picture"


def test_route_table_key_includes_tenant_and_model():
    for request in (
        chat("u1"),
        chat("u1", conversation_id="c"),
        chat("u1", header="c"),
        completion("x" * 999),
    ):
        table = table_with(request)
        assert found(table, request) == 0
        assert found(table, request, tenant=b"b") is None
    assert (
        found(table_with(chat("u1", conversation_id="c")), chat("u1", model="n", conversation_id="c")) is None
    )


def test_route_table_conversation_id_overrides_text():
    table = table_with(chat("u1", conversation_id="c"))
    assert found(table, chat("quite different", header="c")) == 0
    assert found(table, chat("u1")) is None
    assert found(table, chat("u1", header="c", conversation_id="other")) is None


@given(st.integers(256, 1500), st.integers(0, 600))
def test_route_table_matches_completion_prompts_by_pieces(length, more):
    first = "".join(chr(65 + i * 7 % 26) for i in range(length))
    table = table_with(completion(first))
    assert found(table, completion(first + "x" * more)) == 0
    assert found(table, completion("!" + first)) is None
    tokens = list(range(length))
    table = table_with(completion(tokens))
    assert found(table, completion([tokens + [5] * more])) == 0
    assert found(table, completion([7, *tokens[1:]])) is None


def test_route_table_uses_first_4096_messages():
    many = [str(i) for i in range(10_000)]
    name = name_conversation(TENANTS, b"a", chat(*many))
    assert len(name.pieces) == len(name.candidates) == 4096
    assert found(table_with(chat(*many)), chat(*many, "and", "more")) == 0


def test_route_table_ignores_order_of_message_fields():
    one = b'{"model":"m","messages":[{"role":"user","content":"h"}]}'
    two = b'{"messages": [ {"content": "h", "role": "user"} ], "model": "m"}'
    assert found(table_with(ClientRequest(Route.CHAT, one)), ClientRequest(Route.CHAT, two)) == 0


names = st.integers(0, 9)
steps = st.lists(st.tuples(st.sampled_from(["enter", "find", "wait"]), names), max_size=60)


@given(steps, st.integers(1, 4))
def test_route_table_equals_lru_model(actions, capacity):
    """Bounded, least recently used first out, forgotten after its time: as a list of (name, use) does it."""
    now = 0.0
    table = RouteTable(capacity, ttl=5.0, clock=lambda: now)
    model: list[tuple[int, float]] = []
    for action, key in actions:
        name = Name((bytes([key]),), bytes([key]), explicit=True)
        now += key if action == "wait" else 0
        model = [(k, t) for k, t in model if t >= now - 5.0]
        if action == "enter":
            table.enter(name, ConversationRoute((Holder(key, 0),)))
            model = [*((k, t) for k, t in model if k != key), (key, now)][-capacity:]
        elif action == "find":
            route = table.find(name)
            assert (route is not None) == any(k == key for k, _ in model)
            if route is not None:
                assert route.holders[0].decode == key
                model = [*((k, t) for k, t in model if k != key), (key, now)]
        assert len(table) == len(model)


# ---------------------------------------------------------------- params


def test_transfer_params_malformed_have_no_source_or_export():
    for raw in (
        b"5",
        b"[]",
        b'{"kvtier":5}',
        b'{"remote_host":"h","remote_port":0,"kvtier":{"export":"e","engine_id":"i"}}',
        '{"remote_host":"h","remote_port":"²","kvtier":{"export":"e","engine_id":"i"}}'.encode(),
        b"[" * 100_000 + b"]" * 100_000,
    ):
        params = TransferParams(msgspec.Raw(raw))
        assert params.source is None and params.export is None and params.report == {}
    good = TransferParams(msgspec.Raw(b'{"remote_host":"h","remote_port":"5","remote_engine_id":"i"}'))
    assert good.source == Source("i", "h", 5) and good.export is None


@pytest.mark.parametrize(
    "document",
    [
        b"{}",
        b"[]",
        b"kv_transfer_params",
        b'{"kv_transfer_params" :  null }',
        b'{"a":{"kv_transfer_params":{"b":1}}}',
        b'{"kv_transfer_params":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_find_params_of_document_without_params_is_none(document):
    assert find_params(document) is None
