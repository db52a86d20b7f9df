"""URLs of stores, taken apart; loads no client of a store.

    file:///folder                     a folder of this machine, made if absent
    memory:///                         in this process only, as long as the Root object lives
    s3://bucket/prefix?endpoint=&region=&allow_http=true&s3_express=true
    gs://bucket/prefix
    az://container/prefix?endpoint=&allow_http=true

Credentials come from the usual environment variables of each store, never from the URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

PAID: Final = frozenset({"s3", "gs", "az"})
"""The schemes of stores where each request costs money and a trip over the network."""

_OPTIONS: Final = {
    "file": frozenset[str](),
    "memory": frozenset[str](),
    "s3": frozenset({"endpoint", "region", "allow_http", "s3_express"}),
    "gs": frozenset[str](),
    "az": frozenset({"endpoint", "allow_http"}),
}
_SWITCHES: Final = frozenset({"allow_http", "s3_express"})

NO_ENDPOINT: Final = "must be http://HOST:PORT or https://HOST"

_FILES: Final = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT")
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_TEXTS: Final = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_ENDPOINT_URL_STS",
        "AWS_METADATA_ENDPOINT",
        "AWS_SSE_KMS_KEY_ID",
        "AWS_SSE_CUSTOMER_KEY_BASE64",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        *(
            f"AZURE_{where}{name}"
            for where in ("", "STORAGE_")
            for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID", "AUTHORITY_ID")
        ),
        "AZURE_STORAGE_AUTHORITY_HOST",
        "AZURE_AUTHORITY_HOST",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_OBJECT_ID",
        "AZURE_MSI_RESOURCE_ID",
        "AZURE_IDENTITY_ENDPOINT",
        "AZURE_MSI_ENDPOINT",
        "AZURE_ENCRYPTION_KEY",
    ),
}
"""The environment variables that the client of a store reads; others may have such names, too."""


@dataclass(frozen=True)
class Address:
    """A root URL taken apart; `prefix` has no outer slash, `bucket` may be empty (file, memory).

    `folder` is that of file://; the place of WALs has a prefix below it, a root has none.
    """

    scheme: str
    bucket: str
    prefix: str
    folder: Path | None
    options: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        """The URL without its options: what stored URIs start with."""
        if self.folder is not None:
            return (self.folder / self.prefix).as_uri()
        if self.scheme == "memory":
            return f"memory:///{self.prefix}"
        tail = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{self.bucket}{tail}"


def parse_root(url: str, what: str = "root URL") -> Address:
    """Take a root URL apart. Raises ValueError naming what is wrong, never repeating a secret.

    `what` the URL is, for the message.
    """
    parts = urlsplit(url)
    scheme = parts.scheme
    if scheme not in _OPTIONS:
        known = ", ".join(f"{name}://" for name in _OPTIONS)
        raise ValueError(f"{what}: unknown scheme {scheme!r}, expected one of {known}")
    if "@" in parts.netloc:
        raise ValueError(f"{what}: credentials belong in the environment, not in the URL")
    if parts.fragment:
        raise ValueError(f"{what}: it has a fragment (#...), which has no meaning here: remove it")
    options = parse_qsl(parts.query, keep_blank_values=True)
    for name, value in options:
        if name not in _OPTIONS[scheme]:
            raise ValueError(f"{what}: unknown option {name!r} for {scheme}://")
        if "@" in value:
            raise ValueError(
                f"{what}: credentials belong in the environment, not in the option {name!r}"
            )
        if name in _SWITCHES and value not in ("true", "false"):
            raise ValueError(f"{what}: {name} must be true or false")
        if not value:
            raise ValueError(f"{what}: option {name!r} is empty")
        if name == "endpoint" and not _is_endpoint(value):
            raise ValueError(f"{what}: endpoint {NO_ENDPOINT}")
    path = unquote(parts.path)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{what}: file:// takes no host, found {parts.netloc!r}")
        if path in ("", "/"):
            raise ValueError(f"{what}: file:// needs a folder, as in file:///var/lib/slatemq")
        return Address(scheme, "", "", Path(path).resolve(), ())
    if scheme == "memory":
        if parts.netloc:
            raise ValueError(f"{what}: memory:// takes no host: write memory:///")
    elif not parts.netloc:
        raise ValueError(f"{what}: {scheme}:// needs a bucket, as in {scheme}://bucket/prefix")
    segments = [segment for segment in path.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise ValueError(f"{what}: the path contains . or ..")
    return Address(scheme, parts.netloc, "/".join(segments), None, tuple(options))


def parse_wal_store(url: str, root: Address) -> Address:
    """The place of the WALs in the store of this URL, which serves an instance with this root.

    A database has one path in both stores: so the URL names a bucket or a folder alone, and the
    root's prefix is added. Raises ValueError as `parse_root`, and for the root's own store.
    """
    what = "wal_store"
    found = parse_root(url, what)
    if found.prefix:
        raise ValueError(
            f"{what}: give the bucket alone, {found.scheme}://{found.bucket}: the WALs have the "
            "prefix of the root there"
        )
    if found.scheme == "memory" != root.scheme:
        raise ValueError(f"{what}: memory:// keeps nothing: give a store that lasts")
    found = replace(found, prefix=root.prefix)
    if found.scheme != "memory" and overlap(found, root):
        raise ValueError(
            f"{what}: it is the store of the root, or one of them is in the other: give another "
            "one, or none"
        )
    return found


def overlap(one: Address, other: Address) -> bool:
    """Whether one of two roots is the other, or lies below it."""
    places = [(at.scheme, at.bucket, dict(at.options).get("endpoint")) for at in (one, other)]
    if places[0] != places[1]:
        return False
    if one.folder is not None and other.folder is not None:
        return one.folder.is_relative_to(other.folder) or other.folder.is_relative_to(one.folder)
    first, second = (f"{part}/" if part else "" for part in (one.prefix, other.prefix))
    return first.startswith(second) or second.startswith(first)


def check_variables(scheme: str, variables: Mapping[str, str]) -> None:
    """Check the environment variables of a store, which its client panics at, or repeats in errors.

    Raises ValueError that names the variable, and says nothing of what it has.
    """
    for name in _FILES if scheme == "gs" else ():
        if variables.get(name, "").lstrip().startswith("{"):
            raise ValueError(
                f"{name} must name a file: what the file has goes into GOOGLE_SERVICE_ACCOUNT_KEY"
            )
    for name in _ENDPOINTS.get(scheme, ()):
        if name in variables and not _is_endpoint(variables[name]):
            raise ValueError(f"{name} {NO_ENDPOINT}")
    for name in _TEXTS.get(scheme, ()):
        if not variables.get(name, "").isprintable():
            raise ValueError(f"{name} must not contain line breaks or unprintable characters")


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
