from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from libs.storage.database.addresses import parse_root
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import DamagedStore, ObjectNotFound, StoreUnavailable

SOON_S = 60
"""A third of the time for which the store's library repeats a request by itself."""


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "unknown scheme"),
        ("/var/lib/slatemq", "unknown scheme"),
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("file://", "needs a folder"),
        ("file:///", "needs a folder"),
        ("file://host/x", "takes no host"),
        ("file:///x?sync=no", "unknown option 'sync'"),
        ("memory://name", "takes no host"),
        ("s3://", "needs a bucket"),
        ("s3:///prefix", "needs a bucket"),
        ("s3://b/p?endpoint=", "option 'endpoint' is empty"),
        ("s3://b/p?endpiont=http://x", "unknown option 'endpiont'"),
        ("s3://b/p?allow_http=yes", "allow_http must be"),
        ("s3://b/p?allow_http", "allow_http must be"),
        ("s3://b/p?endpoint", "option 'endpoint' is empty"),
        ("s3://b/p?endpoint=host:9000", "endpoint must be http://HOST:PORT"),
        ("az://b/p?endpoint=https:///x", "endpoint must be http://HOST:PORT"),
        ("s3://b/../p", "contains . or .."),
        ("s3://b/p#x", "fragment"),
        ("gs://b?region=x", "unknown option 'region'"),
    ],
)
def test_a_bad_url_is_refused_with_what_is_wrong(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="root URL") as caught:
        open_root(url)
    assert complaint in str(caught.value)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    for url in ("s3://AKIA:geheim@bucket/p", "s3://bucket/p?secret_access_key=geheim"):
        with pytest.raises(ValueError, match="root URL") as caught:
            open_root(url)
        assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name", "text", "complaint"),
    [
        ("s3://b/p", "AWS_SESSION_TOKEN", "geheim\n", "must not contain line breaks"),
        ("az://b/p", "AZURE_STORAGE_ACCOUNT_KEY", "geheim\r", "must not contain line breaks"),
        ("s3://b/p", "AWS_ENDPOINT_URL", "geheim:9000", "must be http://HOST:PORT"),
        ("s3://b/p", "AWS_ENDPOINT_URL_S3", "http://[geheim", "must be http://HOST:PORT"),
        ("az://b/p", "AZURE_STORAGE_ENDPOINT", "https://", "must be http://HOST:PORT"),
        ("gs://b/p", "GOOGLE_APPLICATION_CREDENTIALS", '{"key": "geheim"}', "must name a file"),
        ("gs://b/p", "GOOGLE_SERVICE_ACCOUNT", ' {"key": "geheim"}', "must name a file"),
    ],
)
def test_a_wrong_variable_of_a_store_is_named_and_not_repeated(
    url: str, name: str, text: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as caught:
        open_root(url)
    assert complaint in str(caught.value)
    assert "geheim" not in str(caught.value)
    # The variables of another store are not looked at.
    open_root("memory:///")


@pytest.mark.parametrize(
    ("url", "name", "text"),
    [
        ("s3://b/p", "AWS_ENDPOINT_URL_DYNAMODB", "localhost:8000"),
        ("s3://b/p", "AWS_ENDPOINT_SERVICE_HOST", "10.0.0.1"),
        ("az://b/p", "AZURE_CREDENTIALS", "{\n}"),
    ],
)
def test_a_variable_that_the_client_of_a_store_does_not_read_is_ignored(
    url: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "x")
    open_root(url)


def test_stored_uris_start_with_the_url_without_its_options() -> None:
    assert parse_root("s3://b/a/p/?region=eu&endpoint=http://h:1").url == "s3://b/a/p"
    assert parse_root("az://box?endpoint=http://h:1").url == "az://box"
    assert parse_root("memory:///").url == "memory:///"
    assert parse_root("file:///a/b%20c").url == "file:///a/b%20c"


@pytest.mark.parametrize("place", ["file", "memory"])
async def test_what_was_committed_is_there_after_reopening(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "100%"
    root = open_root(folder.as_uri() if place == "file" else "memory:///")
    first = await root.database("ingest/0", Kind.INGEST)
    batch = Batch()
    batch.put(b"k", b"v")
    await first.commit(batch)
    await first.close()

    second = await root.database("ingest/0", Kind.INGEST)
    assert await second.get(b"k", durable=True) == b"v"
    assert first.closed_reason == "clean"
    assert second.closed_reason is None
    await second.close()
    if place == "file":
        assert (folder / "ingest" / "0").is_dir()


async def test_an_unreachable_store_is_a_clear_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]  # bound, not listening: connections are refused
        url = f"s3://b/p?endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"
        async with asyncio.timeout(SOON_S):
            with pytest.raises(StoreUnavailable) as caught:
                await open_root(url, timeout_s=2).database("ingest/0", Kind.INGEST)
    assert "geheim" not in str(caught.value)


async def test_a_store_that_never_answers_is_a_clear_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        url = f"s3://b/p?endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"
        with pytest.raises(StoreUnavailable, match=r"0\.3 s"):
            await open_root(url, timeout_s=0.3).database("ingest/0", Kind.INGEST)


async def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreUnavailable, match="data folder"):
        open_root((tmp_path / "taken" / "below").as_uri())


async def test_a_damaged_manifest_is_called_damage(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    await (await root.database("ingest/0", Kind.INGEST)).close()
    newest = sorted((tmp_path / "ingest" / "0" / "manifest").glob("*.manifest"))[-1]
    newest.write_bytes(b"")

    with pytest.raises(DamagedStore):
        await root.database("ingest/0", Kind.INGEST)


async def test_a_gap_of_a_million_files_of_the_wal_is_one_fault(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    await (await root.database("ingest/0", Kind.INGEST)).close()
    assert (await root.files("ingest/0")).faults == []
    # As where a bit of the manifest has flipped that says where the replay begins.
    await root.objects.put("ingest/0/wal/00000000000001000000.sst", b"")

    (fault,) = (await root.files("ingest/0")).faults
    assert "up to 00000000000000999999.sst, 999,99" in fault.wrong
    with pytest.raises(DamagedStore, match=r"up to 00000000000000999999\.sst"):
        await root.database("ingest/0", Kind.INGEST)


@pytest.mark.parametrize("place", ["file", "memory"])
async def test_small_objects_are_written_listed_replaced_and_deleted(
    place: str, tmp_path: Path
) -> None:
    objects = open_root(tmp_path.as_uri() if place == "file" else "memory:///").objects

    assert await objects.list("topology") == []
    assert await objects.put_if_absent("topology/ingest-0.json", b"1")
    assert not await objects.put_if_absent("topology/ingest-0.json", b"2")
    assert await objects.get("topology/ingest-0.json") == b"1"
    await objects.put("topology/ingest-0.json", b"3")
    await objects.put("topology/broker-0.json", b"4")
    assert await objects.list("topology") == ["topology/broker-0.json", "topology/ingest-0.json"]
    assert await objects.get("topology/ingest-0.json") == b"3"
    await objects.delete("topology/ingest-0.json")
    await objects.delete("topology/ingest-0.json")
    with pytest.raises(ObjectNotFound, match="ingest-0"):
        await objects.get("topology/ingest-0.json")
