"""`kvtier doctor --object-url`: what is wrong with a bucket or a shared directory."""

import os

import pytest
from s3_server import REGION, S3Server
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.doctor.machine.objects import objects
from vllm_kvtier.store.tiers.objects.object_client import ObjectClient
from vllm_kvtier.store.tiers.objects.object_names import FORMAT


@pytest.fixture
def mounts(tmp_path):
    """As if the directory were on NFS."""
    file = tmp_path / "mounts"
    file.write_text(f"1 1 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / {tmp_path} rw - nfs4 server:/x rw\n")
    return file


def test_doctor_tries_a_shared_directory_and_leaves_nothing(tmp_path, mounts):
    root = tmp_path / "kv"
    url = f"file://{root}"
    (missing,) = objects(url, "", "", 1, mounts)
    assert missing.state == "fail" and "there is no directory" in missing.message and missing.fix == "create it"
    root.mkdir(mode=0o700)
    (good,) = objects(url, "", "", 1, mounts)
    assert good.state == "ok" and "no store has used it" in good.message and os.listdir(root) == []
    (root / ".kvtier").write_bytes(FORMAT)
    assert "blocks of this version are there" in objects(url, "", "", 1, mounts)[0].message
    assert [check.state for check in objects(url, "", "", 1 << 60, mounts)] == ["ok", "warn"]
    mounts.write_text("1 1 8:1 / / rw - ext4 /dev/sda rw\n")
    assert "of this node only (ext4)" in objects(url, "", "", 1, mounts)[1].message
    root.chmod(0o755)
    assert "other users" in objects(url, "", "", 1, mounts)[-1].message
    (root / ".kvtier").write_bytes(b"another")
    assert "use another prefix" in objects(url, "", "", 1, mounts)[0].fix
    for wrong in ("file://relative/x", "ftp://x", "s3://key:hush@bucket/x"):
        (check,) = objects(wrong, "", "", 1, mounts)
        assert check.state == "fail" and "hush" not in check.message


def test_doctor_finds_an_object_store_that_corrupts(tmp_path, mounts, monkeypatch):
    monkeypatch.setattr(ObjectClient, "get", lambda self, key, into, deadline: 0.0)
    (check,) = objects(f"file://{tmp_path}", "", "", 1, mounts)
    assert check.state == "fail" and "not what was written" in check.message
    assert sorted(os.listdir(tmp_path)) == ["mounts"]


def test_doctor_tells_a_missing_bucket_from_an_empty_one(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = S3Server().start()
    try:
        (check,) = objects("s3://blocks/x", server.endpoint, REGION, 1)
        assert "there is no such bucket" in check.message and check.fix == "create it"
        server.create("blocks")
        (check,) = objects("s3://blocks/x", server.endpoint, REGION, 1)
        assert check.state == "ok" and "no store has used it" in check.message
        assert "Contents" not in server.client().list_objects_v2(Bucket="blocks")
        server.check()
        (check,) = objects("s3://blocks/x", server.endpoint, REGION, 1)
        assert "does not know the access key" in check.message and "AWS_ACCESS_KEY_ID" in check.fix
    finally:
        server.kill()
    (check,) = objects("s3://blocks/x", server.endpoint, REGION, 1)
    assert "cannot be reached" in check.message and "--object-endpoint" in check.fix


def test_doctor_names_a_missing_azure_account(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    (check,) = objects("az://blocks/x", "", "", 1)
    assert "set AZURE_STORAGE_ACCOUNT_NAME" in check.message


def test_doctor_command_tries_an_object_url(tmp_path):
    command = ["doctor", "--remote", f"--object-url=file://{tmp_path}", "--object-size=1MiB"]
    done = CliRunner().invoke(app, command)
    assert "1 MiB was written and read" in done.output
    assert CliRunner().invoke(app, [*command[:-1], "--object-size=much"]).exit_code == 2
