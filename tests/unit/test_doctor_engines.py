"""`kvtier doctor` names what is wrong with engines: their versions, their endpoints, and whether two can share."""

import json
import socket

import msgspec
import pytest
import zmq
from doctor_fakes import METRICS, PROXY_METRICS, FakeEngine, FakeServer, changed, counter, geometry, ranks
from peer_caches import Group, Layout, ranks_of
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe, NoEndpoint, field_label, parse_address
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey


@pytest.fixture
def make():
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def doctor(*arguments: str) -> tuple[int, list[dict]]:
    """Exit status and checks, of everything but this machine."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--remote", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def only(checks: list[dict], state: str) -> dict:
    found = [check for check in checks if check["state"] == state]
    assert len(found) == 1, checks
    return found[0]


def both(a: FakeEngine, b: FakeEngine) -> tuple[int, list[dict]]:
    return doctor("--endpoint", a.address, "--endpoint", b.address)


def test_devtools_engine_is_ready_once_its_connector_does_not_start_any_more(make):
    server, fake = make(FakeServer), make(FakeEngine, why=m.STILL_STARTING)
    engine = Engine("model", kv=kvtier({"endpoint_port": fake.endpoint.port}), port=server.port)
    assert not engine._healthy()
    fake.endpoint.unusable = "NIXL has none of the backends UCX here"
    assert engine._healthy(), "it will not open"
    opened, gone = make(FakeEngine), free_port()
    for port in (opened.endpoint.port, gone, 0):
        assert Engine("model", kv=kvtier({"endpoint_port": port}), port=server.port)._healthy()


def test_doctor_equal_engines_are_ok(make):
    code, checks = both(make(FakeEngine), make(FakeEngine))
    assert code == 0 and [check["state"] for check in checks] == ["ok"] * 3
    assert "they can use each other's KV" in checks[2]["message"]


@pytest.mark.parametrize(
    ("nodes", "words"), [("aa", "(same node)"), ("ab", "two pid namespaces)"), ("a-", "each other's KV")]
)
def test_doctor_engines_report_connections_between_each_other(make, nodes, words):
    def somewhere(node: str) -> list[m.RankInfo]:
        shared = None if node == "-" else m.Shared(node, 1, 1, "", ())
        return [msgspec.structs.replace(rank, shared=shared) for rank in ranks()]

    code, checks = both(*(make(FakeEngine, ranks=somewhere(node)) for node in nodes))
    assert code == 0 and checks[2]["message"].endswith(words)


WORDS = {"model": "llama, from /m/llama", "model configuration": "c0ffee", "weights": "beef, 2 files"}


@pytest.mark.parametrize(
    ("theirs", "causes"),
    [
        (
            {"weights": "f00d, 2 files"},
            ["the weights of llama, from /m/llama differs: beef, 2"],
        ),
        (
            {"model": "{other}", "model configuration": "d0", "weights": "f00d, 1 file"},
            ["the model configuration of llama, from /m/llama and of {other} differs: c0ffee on", "the weights "],
        ),
        ({}, ["the model's configuration or weights differs: model-a on"]),
    ],
)
def test_doctor_model_differences_are_named(make, theirs, causes):
    a, b = make(FakeEngine), make(FakeEngine, changed(model="model-b"))
    a.words, b.words = list(WORDS.items()), list({**WORDS, **theirs}.items())
    code, checks = both(a, b)
    broken = [check for check in checks if check["state"] == "fail"]
    assert code == 2 and len(broken) == len(causes), broken
    assert all(cause in check["message"] for cause, check in zip(causes, broken, strict=True)), broken


def test_doctor_reports_unset_hash_seed(make):
    a, b = make(FakeEngine), make(FakeEngine, changed(hash_seed="0ddb"))
    a.words, b.words = [("hash seed", "5eed, fixed by PYTHONHASHSEED")], [("hash seed", "0ddb, random: another one")]
    found = only(both(a, b)[1], "fail")
    assert f"5eed, fixed by PYTHONHASHSEED on {a.address}, 0ddb, random: another one on" in found["message"]


def test_doctor_older_engine_is_reported(make, monkeypatch):
    """An older one disconnects, with a reason."""
    old = m.Hello | m.Welcome | m.LeaseRefused | m.Query | m.PrefixLengths | m.Inspect | m.Inspection
    with monkeypatch.context() as patch:
        patch.setattr(m, "decode_engine", msgspec.msgpack.Decoder(old).decode)
        engine = make(FakeEngine)
    with EndpointProbe(engine.address) as probe:
        for ask in (probe.description, lambda: probe.explanation([1, 2], "")):
            with pytest.raises(NoEndpoint, match="runs an older vllm-kvtier") as caught:
                ask()
            assert caught.value.why == "other version"


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_doctor_reaches_an_engine_by_a_name(make, monkeypatch, host):
    def getaddrinfo(name, port, *_):
        found = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
        return [(f, socket.SOCK_STREAM, 6, "", (a, port)) for f, a in found if a == host or "." in host]

    try:
        engine = make(FakeEngine, endpoint_host=host)
    except KVTierError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with EndpointProbe(f"machine:{engine.endpoint.port}") as probe:
        assert probe.identity().hash_block_size == 16


@pytest.mark.parametrize("host", ["*", "a..b", "http://127.0.0.1"])
def test_doctor_names_an_address_that_no_engine_can_have(host):
    code, checks = doctor("--endpoint", f"{host}:5601")
    assert code == 2 and f"'{host}:5601' is not HOST:PORT: " in only(checks, "fail")["message"]


def test_doctor_identity_has_every_compared_field(make):
    names = {"codecs": "store fp8", "model": "m" * 32}
    namespace = changed(**names)
    with EndpointProbe(make(FakeEngine, namespace).address) as probe:
        identity = probe.identity()
    compared = {name for name in namespace.__struct_fields__ if not field_label(name).endswith(" differs")}
    assert identity.fields and set(identity.fields) <= compared
    assert identity.fields == {name: getattr(namespace, name) for name in identity.fields}
    assert {"model", "hash_seed", "codecs", "cache_dtype"} <= set(identity.fields)
    assert identity.hash_block_size == 16 and len(identity.ranks) == 1


@pytest.mark.parametrize(
    ("fields", "cause", "fix"),
    [
        ({"hash_seed": "0ddb"}, "hash seed differs: 5eed on {a}, 0ddb on {b}", "PYTHONHASHSEED"),
        ({"model": "model-b"}, "weights differs: model-a on {a}, model-b on {b}", "same model"),
        ({"cache_dtype": "fp8/bfloat16"}, "KV cache dtype differs: auto/bfloat16 on {a}", "--kv-cache-dtype"),
        ({"hash_algorithm": "sha256/py3.12"}, "hash algorithm differs: sha256_cbor on {a}", "sha256_cbor"),
        ({"options": "quantization=fp8"}, "KV differs: none on {a}, quantization=fp8 on {b}", "same options"),
        ({"codecs": "store fp8"}, "encoded differs: none on {a}, store fp8 on {b}", "codec"),
    ],
)
def test_doctor_difference_between_engines_is_named(make, fields, cause, fix):
    a, b = make(FakeEngine), make(FakeEngine, changed(**fields))
    code, checks = both(a, b)
    found = only(checks, "fail")
    assert code == 2
    assert cause.format(a=a.address, b=b.address) in found["message"] and fix in found["fix"]


def test_doctor_xxhash_seed_difference_has_own_fix(make):
    xx = {"hash_algorithm": "xxhash/py3.11"}
    _, checks = both(make(FakeEngine, changed(**xx)), make(FakeEngine, changed(**xx, hash_seed="other")))
    found = only(checks, "fail")
    assert "the random seed of xxhash differs" in found["message"] and "sha256_cbor" in found["fix"]


def test_doctor_all_differences_are_named(make):
    _, checks = both(make(FakeEngine), make(FakeEngine, changed(hash_seed="x", model="y")))
    assert len([check for check in checks if check["state"] == "fail"]) == 2


def test_doctor_different_tensor_parallel_sizes_warn(make):
    code, checks = both(make(FakeEngine), make(FakeEngine, ranks=ranks(2)))
    found = only(checks, "warn")
    assert code == 1 and "tensor parallel size: 1 ranks on" in found["message"]


@pytest.mark.parametrize(
    "sizes, layout, state, words",
    [
        ((1, 2), Layout(), "warn", "they share nothing in the node store, and pulls are re-sliced"),
        ((1, 1), Layout(token=True), "ok", "re-sliced, since their pages differ (layer g0.l0: heads before tokens"),
        ((2, 2), Layout(), "ok", "they can use each other's KV, and fetch from each other's caches directly"),
    ],
)  # fmt: skip
def test_doctor_shapes_that_can_be_translated(make, sizes, layout, state, words):
    kept = [ranks_of((Group(heads=4),), 4, size, layout=lay) for size, lay in zip(sizes, (None, layout), strict=True)]
    a, b = (
        make(FakeEngine, ranks=[msgspec.structs.replace(r.info, agent=f"agent {r.info.rank}") for r in engine])
        for engine in kept
    )
    _, checks = both(a, b)
    assert any(check["state"] == state and words in check["message"] for check in checks), checks


def test_doctor_block_sizes_that_can_be_translated(make):
    kept = [ranks_of((Group(cells=cells),), 4) for cells in (4, 8)]
    sizes = {}, {"hash_block_size": 32}
    a, b = (
        make(FakeEngine, changed(**size), ranks=[msgspec.structs.replace(r.info, agent="a") for r in engine])
        for engine, size in zip(kept, sizes, strict=True)
    )
    _, checks = both(a, b)
    found = only(checks, "warn")
    assert f"block size: 16 on {a.address}, 32 on {b.address}; they share nothing in the node store" in found["message"]
    assert "pulls are re-sliced" in found["message"] and "--block-size" in found["fix"]


def test_doctor_different_layouts_are_found(make):
    code, checks = both(make(FakeEngine), make(FakeEngine, ranks=ranks(1, geometry("token"))))
    found = only(checks, "fail")
    assert code == 2 and "heads before tokens within a page on 127.0.0.1" in found["message"]
    assert "VLLM_KV_CACHE_LAYOUT" in found["fix"]


# -- endpoints -----------------------------------------------------------------------------------------------------


def test_doctor_endpoint_without_listener_is_found(make):
    engine = make(FakeEngine)
    engine.stop()
    code, checks = doctor("--endpoint", engine.address)
    assert code == 2 and f"nothing listens on {engine.address}" in only(checks, "fail")["message"]


def test_doctor_http_port_given_as_endpoint_is_found(make):
    server = make(FakeServer)
    _, checks = doctor("--endpoint", f"127.0.0.1:{server.port}")
    found = only(checks, "fail")
    assert "is not a connector's endpoint" in found["message"] and "not the HTTP port" in found["fix"]


def test_doctor_engine_unable_to_serve_reports_cause(make):
    code, checks = doctor("--endpoint", make(FakeEngine, why="NIXL has none of the backends UCX here").address)
    assert code == 1 and "NIXL has none of the backends UCX" in only(checks, "warn")["message"]


def test_doctor_hung_scheduler_is_found(make):
    engine = make(FakeEngine)
    engine.silent = True
    code, checks = doctor("--endpoint", engine.address)
    found = only(checks, "warn")
    assert code == 1 and "its connector answers, its scheduler does not" in found["message"]


def test_doctor_engine_that_refuses_questions_is_busy_and_does_not_hang(make):
    engine = make(FakeEngine)
    engine.busy = True
    code, checks = doctor("--endpoint", engine.address)
    found = only(checks, "warn")
    assert code == 1 and "is busy: too many questions wait here" in found["message"], found
    assert "firewall" not in found["fix"]


def test_doctor_engine_without_address_is_found(make):
    _, checks = doctor("--endpoint", "somewhere")
    assert "'somewhere' is not HOST:PORT" in only(checks, "fail")["message"]


@pytest.mark.parametrize("port", ["", "0", "-1", "65536", "²", "٣", "9" * 5000])
def test_doctor_port_that_is_none_is_refused_in_words(port):
    with pytest.raises(KVTierError, match="is not HOST:PORT"):
        parse_address(f"here:{port}")


@pytest.fixture
def key_file(tmp_path):
    def make(name):
        ClusterKey.create(str(tmp_path / name))
        return tmp_path / name

    return make


def test_doctor_with_right_cluster_key_connects(make, key_file):
    file = key_file("key")
    engine = make(FakeEngine, key=ClusterKey.load(str(file)))
    code, checks = doctor("--endpoint", engine.address, "--cluster-key", file)
    assert code == 0 and len(checks) == 2


@pytest.mark.parametrize(
    ("there", "here", "cause"),
    [
        ("a", "b", "has another cluster key than the given one"),
        ("a", None, "requires its cluster key"),
        (None, "b", "has no cluster key, and one was given"),
    ],
)
def test_doctor_wrong_cluster_key_is_found(make, key_file, there, here, cause):
    engine = make(FakeEngine, key=ClusterKey.load(str(key_file(there))) if there else None)
    code, checks = doctor("--endpoint", engine.address, *(["--cluster-key", key_file(here)] if here else []))
    assert code == 2 and cause in only(checks, "fail")["message"]


def test_probe_that_was_refused_does_not_hang_when_it_asks_again(make, key_file):
    """ZMQ queues nothing for an endpoint that has refused the handshake: sending would wait without end."""
    engine = make(FakeEngine, key=ClusterKey.load(str(key_file("a"))))
    with EndpointProbe(engine.address, None, 0.5) as probe:
        for _ in range(2):
            with pytest.raises(NoEndpoint, match="requires its cluster key"):
                probe.identity()
            eventually(lambda: not probe._socket.poll(0, zmq.POLLOUT))


def test_doctor_unusable_key_files_are_found(key_file, tmp_path):
    file = key_file("key")
    file.chmod(0o644)
    code, checks = doctor("--cluster-key", file)
    assert code == 2 and "readable by others" in checks[0]["message"] and "chmod 600" in checks[0]["fix"]
    _, checks = doctor("--cluster-key", tmp_path / "none")
    assert "No such file" in checks[0]["message"] and "wire.auth" in checks[0]["fix"]
    file.write_text("secret\n")
    file.chmod(0o600)
    _, checks = doctor("--cluster-key", file)
    assert "does not hold a key" in checks[0]["message"]


# -- servers -------------------------------------------------------------------------------------------------------


def test_doctor_healthy_server_is_ok(make):
    server = make(FakeServer)
    code, checks = doctor("--server", server.url)
    assert code == 0 and "vLLM 0.33.0" in checks[0]["message"]


@pytest.mark.parametrize(
    ("version", "code", "state"), [("0.20.0", 2, "fail"), ("0.40.1", 1, "warn"), ("dev", 1, "warn")]
)
def test_doctor_unsupported_vllm_of_server_is_found(make, version, code, state):
    found, checks = doctor("--server", make(FakeServer, version).url)
    assert found == code and f"it runs vLLM {version}" in only(checks, state)["message"]


def test_doctor_engine_not_running_is_found(make):
    server = make(FakeServer)
    server.stop()
    server.stop = lambda: None
    code, checks = doctor("--server", server.url)
    assert code == 2 and "no vLLM server answers at" in only(checks, "fail")["message"]


def test_doctor_server_without_connector_is_found(make):
    plain = "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 5.0\n"
    code, checks = doctor("--server", make(FakeServer, metrics=plain).url)
    assert code == 2 and "runs without the connector" in only(checks, "fail")["message"]


def test_doctor_proxy_is_no_engine(make):
    code, checks = doctor("--server", make(FakeServer, metrics=PROXY_METRICS).url)
    assert code == 1 and "`kvtier proxy`, not an engine" in only(checks, "warn")["message"]


def test_doctor_prefix_caching_off_is_found(make):
    off = METRICS.replace('caching="True"', 'caching="False"')
    code, checks = doctor("--server", make(FakeServer, metrics=off).url)
    assert code == 2 and "prefix caching is off" in only(checks, "fail")["message"]


def test_doctor_connector_that_is_disabled_is_found(make):
    """For a model or an option that it does not support: the engine counts nothing of it, no errors either."""
    served = METRICS + "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 5.0\n"
    code, checks = doctor("--server", make(FakeServer, metrics=served).url)
    assert code == 2 and "as if it were disabled" in only(checks, "fail")["message"]
    served += counter("prompt_tokens", 5, "local_compute")
    assert doctor("--server", make(FakeServer, metrics=served).url)[0] == 0


def store_up(*values: int) -> str:
    """The gauge of so many data-parallel ranks."""
    ranks = (f'vllm:kvtier_store_up{{engine="{rank}",kind=""}} {value}.0\n' for rank, value in enumerate(values))
    return "# TYPE vllm:kvtier_store_up gauge\n" + "".join(ranks)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (counter("integrity_failures", 3), "3 blocks arrived with a wrong checksum"),
        (counter("store_disconnects", 2), "the node store disconnected 2 times"),
        (counter("pulls", 4, "failed"), "4 loads, peer fetches or pulls failed"),
        (counter("fetches", 4, "failed"), "4 loads, peer fetches or pulls failed"),
        (counter("internal_errors", 3, "step"), "errors in vllm-kvtier itself: step (3)"),
        (store_up(1, 0), "its node store did not answer"),
        (counter("lookups_declined", 7, "namespace_mismatch"), "in other engines failed: namespace_mismatch (7)"),
        (counter("load_decisions", 9, "slower"), "9 of 9 prompts that were found were computed"),
        (counter("stores_skipped", 50, "store_full"), "not stored: store_full (50)"),
    ],
)
def test_doctor_error_counters_warn(make, lines, cause):
    code, checks = doctor("--server", make(FakeServer, metrics=METRICS + lines).url)
    assert code == 1 and cause in only(checks, "warn")["message"]


def test_doctor_harmless_counters_are_ok(make):
    lines = counter("lookups_declined", 7, "local_cache_hit") + counter("stores_skipped", 50, "already_stored")
    lines += store_up(1, 1)
    code, checks = doctor("--server", make(FakeServer, metrics=METRICS + lines).url)
    assert code == 0 and checks[1]["message"] == "no errors counted"


def test_doctor_different_vllm_versions_warn(make):
    code, checks = doctor("--server", make(FakeServer, "0.32.0").url, "--server", make(FakeServer).url)
    assert code == 1 and "different vLLM: 0.32.0 at" in only(checks, "warn")["message"]


def test_doctor_field_words_are_distinct_for_every_namespace_field():
    """The words come from Namespace.mismatch itself: a field that is compared has some."""
    words = {name: field_label(name) for name in m.Namespace.__struct_fields__}
    assert len(set(words.values())) == len(words)
