"""KVTierConfig: what is read, what is refused, and in which words."""

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_kvtier import config as config_module
from vllm_kvtier.config import ALIASES, NIXL_ONLY, RENAMED, KVTierConfig, markdown_table
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store import protocol
from vllm_kvtier.wire import messages

read = KVTierConfig.from_extra_config


def refusal(extra: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        read(extra)
    return str(caught.value)


def test_config_without_options_equals_defaults():
    assert read(None) == read({}) == KVTierConfig()
    assert not KVTierConfig().bidirectional
    assert KVTierConfig().nixl_backends == ("UCX",)


def test_config_values_are_converted_to_field_types():
    config = read({"handoff_seconds": 5, "nixl_backends": ["UCX", "POSIX"], "pull_threshold": 0})
    assert config.handoff_seconds == 5.0 and isinstance(config.handoff_seconds, float)
    assert config.nixl_backends == ("UCX", "POSIX")
    assert config.pull_threshold == 0


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_config_nixl_alias_equals_own_name(alias):
    value = {"bidirectional_kv_xfer": True, "backends": ["POSIX"]}.get(alias, 7)
    assert read({alias: value}) == read({ALIASES[alias]: value}) != KVTierConfig()


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_config_name_with_its_alias_raises(alias):
    words = refusal({alias: 7, ALIASES[alias]: 7})
    assert alias in words and f"keep {ALIASES[alias]}" in words


def test_config_alias_use_is_logged_once(caplog, monkeypatch):
    config_module._note_aliases.cache_clear()
    monkeypatch.setattr(config_module.logger, "propagate", True)
    with caplog.at_level("INFO", config_module.logger.name):
        read({"backends": ["UCX"], "kv_lease_duration": 20})
        read({"backends": ["UCX"], "kv_lease_duration": 20})
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 1 and "backends (NixlConnector) read as nixl_backends" in notes[0]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("bidirectionl", "bidirectional"),
        ("pull_treshold", "pull_threshold"),
        ("kv_recompute_treshold", "pull_threshold"),
        ("lease_second", "lease_seconds"),
        ("Host_Buffer", "host_buffer"),
    ],
)
def test_config_misspelt_option_raises_with_suggestion(typo, meant):
    words = refusal({typo: 1})
    assert typo in words and f"did you mean {meant}?" in words


def test_config_unknown_option_raises_with_all_names():
    words = refusal({"zzz": 1})
    assert all(name in words for name in KVTierConfig.__struct_fields__)


@pytest.mark.parametrize("option", NIXL_ONLY)
def test_config_nixl_only_option_raises_with_removal_hint(option):
    assert "remove it" in refusal({option: 1})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"retain_share": 0}, "retain_share must be a number > 0 and at most 1, not 0."),
        ({"retain_share": 1.01}, "at most 1"),
        ({"handoff_share": -0.5}, "handoff_share must be"),
        ({"lease_seconds": -1}, "lease_seconds must be a number > 0 and at most 86400, not -1."),
        ({"lookup_timeout": math.inf}, "lookup_timeout must be"),
        ({"lookup_timeout": math.nan}, "lookup_timeout must be"),
        ({"pull_threshold": 1.5}, "pull_threshold must be an integer at least 0"),
        ({"endpoint_port": True}, "endpoint_port must be an integer"),
        ({"endpoint_port": 70000}, "at most 65535"),
        ({"bidirectional": "yes"}, "bidirectional must be true or false, not 'yes'."),
        ({"host_buffer": "maybe"}, 'host_buffer must be "auto" or "always" or "never"'),
        ({"kv_load_failure_policy": "ignore"}, '"recompute" or "fail"'),
        ({"nixl_backends": []}, "at least one string"),
        ({"nixl_backends": "UCX"}, "a list of"),
        ({"nixl_backends": ["UCX", "UCX"]}, "twice"),
        ({"model_fingerprint": 3}, "a string or null"),
        ({"model_fingerprint": 513 * "m"}, "has 513 characters; at most 512"),
        ({"kv_lease_duration": 0}, "kv_lease_duration: handoff_seconds must be"),
        ({"endpoint_host": "10.0.0.1"}, "set cluster_key_file"),
        ({"advertise_host": "10.0.0.1"}, "cannot be reached"),
        ({"advertise_host": "0.0.0.0"}, "not an address that other engines can connect to"),
        ({"cluster_key_file": "/nowhere/key"}, "'/nowhere/key' is not a file on this machine"),
        ({"store": "on"}, "store 'on' must be \"auto\", \"off\" or the path of a socket"),
        ({"store": "off", "store_nodes": "h:1"}, "only a store reads from other nodes' stores. Give the engine one"),
    ],
)
def test_config_invalid_value_raises_with_cause(extra, words):
    assert words in refusal(extra)


def test_config_all_errors_are_reported_together():
    words = refusal({"retain_share": 2, "nonsense_option": 1, "engine_ttl": 1})
    assert all(name in words for name in ("retain_share", "nonsense_option", "engine_ttl"))


def test_config_non_loopback_endpoint_with_key_is_accepted(tmp_path):
    key = tmp_path / "key"
    key.write_text("k")
    with_key = {"cluster_key_file": str(key)}
    assert read({"endpoint_host": "10.0.0.1", **with_key}).endpoint_host == "10.0.0.1"
    for everywhere in ("0.0.0.0", "::", "[::]"):
        assert "set advertise_host too" in refusal({"endpoint_host": everywhere, **with_key})
    assert read({"endpoint_host": "0.0.0.0", "advertise_host": "10.0.0.1", **with_key})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"])
def test_config_loopback_endpoint_needs_no_key(host):
    assert read({"endpoint_host": host})


def test_config_constructor_refuses_invalid_combination():
    with pytest.raises(ConfigError, match="cluster_key_file"):
        KVTierConfig(endpoint_host="10.0.0.1")


def test_config_durations_that_messages_carry_fit_into_them():
    """A longer lease_seconds made every grant malformed; promotion_timeout, a lookup that cost the engine its store."""
    for option in ("lease_seconds", "promotion_timeout"):
        assert option in refusal({option: 86401})
    config = read({"lease_seconds": 86400, "promotion_timeout": 86400})
    messages.decode_engine(messages.encode(messages.LeaseGranted(1, 1, 16, 0, [[1]], config.lease_seconds)))
    protocol.decode_request(protocol.encode(protocol.Lookup(1, bytes(16), b"", 0, 1, config.promotion_timeout)))


def test_config_does_not_change_its_input():
    extra = {"backends": ["UCX"]}
    read(extra)
    assert extra == {"backends": ["UCX"]}


def test_config_every_option_is_in_markdown_table():
    table = markdown_table()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [name.strip("`") for name, *_ in rows] == list(KVTierConfig.__struct_fields__)
    for *_, meaning in rows:
        assert meaning.endswith(".") and len(meaning) > 20
    assert all(f"`{alias}`" in table for alias in (*ALIASES, *RENAMED))
    assert len({table_line.count("|") for table_line in table.splitlines()}) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*KVTierConfig.__struct_fields__, *ALIASES, *RENAMED, *NIXL_ONLY]) | st.text(max_size=20)


@given(st.dictionaries(names, json_values, max_size=4))
@example({"lookup_timeout": 1, "ask_timeout": 1})
def test_config_of_any_json_is_read_or_raises_config_error(extra):
    try:
        config = read(extra)
    except ConfigError as error:
        assert str(error).startswith("kv_connector_extra_config: ") and str(error)[-1] in ".?"
    else:
        assert msgspec.convert(msgspec.to_builtins(config), KVTierConfig) == config
