"""What Mooncake's master, as installed, refuses of several masters: what the guide says of it."""

import subprocess

import pytest
from mooncake_master import binary, why_not

from vllm_kvtier.devtools.processes import free_port


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "UNAVAILABLE_IN_CURRENT_MODE, backend_type=redis"),
        ({"enable_oplog": "true"}, "enable_oplog currently requires ha_backend_type=etcd"),
    ],
)
def test_mooncake_master_refuses_redis_and_a_log_without_etcd(more, message):
    options = {
        "enable_ha": "true", "ha_backend_type": "redis", "ha_backend_connstring": f"127.0.0.1:{free_port()}",
        "rpc_address": "127.0.0.1", "rpc_port": free_port(), "metrics_host": "127.0.0.1", "metrics_port": free_port(),
    }  # fmt: skip
    command = [binary(), *(f"--{name}={value}" for name, value in {**options, **more}.items())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode and message in ran.stderr
