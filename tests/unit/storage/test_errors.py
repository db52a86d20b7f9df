"""What errors of the store say, and leave out."""

from __future__ import annotations

import os

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import (
    CorruptRecord,
    DamagedObject,
    StorageError,
    StoreFailed,
    StoreUnavailable,
    readable,
)
from libs.storage.objects.probe import probe_store

TEXT = "HEAD http://key:it's-SECRET@127.0.0.1:1/b/p?X-Amz-Signature=SECRET failed"


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable(TEXT),
        StoreFailed(f"the commit loop broke: {OSError(TEXT)!r}"),
        CorruptRecord("queue name", TEXT),
        DamagedObject("a/b", TEXT),
    ],
)
def test_no_error_of_the_store_has_a_login(error: StorageError) -> None:
    assert "SECRET" not in str(error) + repr(error)
    assert "http://***@127.0.0.1:1/b/p" in str(error)


def test_what_is_read_of_a_librarys_message_has_no_login_and_no_query() -> None:
    assert readable(TEXT) == "HEAD http://***@127.0.0.1:1/b/p failed"


async def test_a_store_that_is_down_is_named_without_the_login_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:it's-SECRET@127.0.0.1:1")
    for name in ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")

    with pytest.raises(StoreUnavailable) as caught:
        await open_root("s3://b/p?allow_http=true").objects.size("a")

    assert "HEAD http://***@127.0.0.1:1/b/p/a" in str(caught.value)
    assert "SECRET" not in str(caught.value)


S3_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("PUT http://169.254.169.254/latest/api/token in 1s: error sending request", S3_KEYS),
        ("GET http://169.254.169.254/latest/meta-data/iam/security-credentials/: 404", S3_KEYS),
        (
            "GET http://169.254.169.254/computeMetadata/v1/instance/token in 1s",
            "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, or",
        ),
        (
            "GET http://169.254.169.254/metadata/identity/oauth2/token in 1s",
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or",
        ),
    ],
)
def test_where_a_machine_gives_no_identity_the_error_names_the_keys_to_set(
    said: str, advice: str
) -> None:
    text = readable(f"Generic error: Error performing {said}\n\nDebug source:")

    assert text.startswith(f"the machine gave no credentials: {advice}")
    assert text.endswith(said)


@pytest.mark.parametrize(
    "said",
    [
        "GET http://h:1/b/latest/meta-data/ingest/0 in 1s: error sending request",
        "GET https://b.s3.eu.amazonaws.com/latest/meta-data/ingest/0 in 1s: 503",
        "PUT http://h:1/b/computeMetadata/v1 in 1s: 503",
        "PUT https://x.blob.core.windows.net/c/metadata/identity/0 in 1s: 503",
    ],
)
def test_an_object_that_is_named_as_an_identity_is_none(said: str) -> None:
    assert readable(f"Generic error: Error performing {said}") == (
        f"Generic error: Error performing {said}"
    )


async def test_a_store_without_credentials_is_not_called_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    s3 = "s3://b/p?endpoint=http://127.0.0.1:1&region=us-east-1&allow_http=true"

    with pytest.raises(StoreUnavailable, match=S3_KEYS):
        await probe_store(open_root(s3).objects)
    with pytest.raises(StoreUnavailable, match="set AZURE_STORAGE_ACCOUNT_NAME and"):
        open_root("az://container/p")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    with pytest.raises(StoreUnavailable, match=S3_KEYS):
        open_root(s3)
    # With both, it is down
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(StoreUnavailable) as caught:
        await probe_store(open_root(s3).objects)
    assert "credentials" not in str(caught.value)
