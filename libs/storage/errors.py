"""The errors of the storage library."""

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from slatemq._secrets import redacted


class StorageError(Exception):
    """Base of all errors of this package. Their texts have no secrets, wherever they come out."""

    def __init__(self, text: str) -> None:
        super().__init__(redacted(text))


class CorruptRecord(StorageError):
    """The bytes of a key or value are not what its layout says.

    `record` names the record ("active value", "payload key", ...), `detail` says what is wrong and
    where. Nothing was changed. Report the record and stop using it; do not guess its meaning.
    """

    def __init__(self, record: str, detail: str) -> None:
        super().__init__(f"corrupt {record}: {detail}")
        self.record = record
        self.detail = detail


class SequenceExhausted(StorageError):
    """The ingest shard has no message IDs left; messages must go to another shard."""


_S3_KEYS: Final = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_GS_KEYS: Final = "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS"
_AZ_KEYS: Final = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"

_MACHINES: Final = (
    r"http://(?:169\.254\.169\.254|\[fd00:ec2::254\]|metadata(?:\.google\.internal)?)"
)
"""Where clients of stores ask the machine for an identity; AWS_METADATA_ENDPOINT is another."""

_ASKED: Final = {
    r"/latest/(?:api/token|meta-data)\b": _S3_KEYS,
    r"/computeMetadata/": _GS_KEYS,
    r"/metadata/identity/": _AZ_KEYS,
}
_LACKS: Final = {
    r"Missing (?:AccessKeyId|SecretAccessKey)": _S3_KEYS,
    r"Account must be specified": _AZ_KEYS,
}
"""By what a store's client says without keys, the variables of these."""


def readable(message: str) -> str:
    """A store's message on one line, without logins, and without queries of URLs: signatures.

    Where the client had no credentials for the store, it says what to do.
    """
    code = re.search(r"<Code>(\w+)</Code>", message)
    first = redacted(message.strip().partition("<?xml")[0].partition("\n")[0])
    first = re.sub(r"\?[^\s\"')]*", "", first)
    problem, keys = _credentials_problem(first)
    if problem:
        return (
            f"{problem}: set {keys}, or run it where a role or an identity gives them "
            f"(docs/how-to/object-stores.md): {first}"
        )
    return f"{first.strip()} {code[1]}" if code else first


def lacks_credentials(said: str) -> bool:
    """Whether a store's client says that it has no credentials."""
    return bool(_credentials_problem(said)[0])


def _credentials_problem(said: str) -> tuple[str, str]:
    """What lacks where a store's client has no credentials, and their variables; else empty."""
    named = os.environ.get("AWS_METADATA_ENDPOINT", "").rstrip("/")
    machines = f"(?:{_MACHINES}|{re.escape(named)})" if named else _MACHINES
    for path, keys in _ASKED.items():
        if re.search(machines + path, said):
            return "the machine gave no credentials", keys
    for lack, keys in _LACKS.items():
        if re.search(lack, said):
            return "there are no credentials for the store", keys
    return "", ""


class StoreUnavailable(StorageError):
    """The object store cannot be used now: unreachable, no such bucket, or credentials refused.

    Nothing is known to be damaged. At start: report it and stop. Later: the database is unusable,
    restart the process.
    """


class StoreFailed(StorageError):
    """A write or flush failed, or the database is closed. Memory may be ahead of the disk.

    The database object is unusable from here on; restart the process from what is durable.
    """


class Unstorable(StoreFailed):
    """A record cannot be encoded, which checks of requests should have prevented.

    Nothing of its commit is stored. The message names the record and what does not fit.
    """


@contextmanager
def first_raised(*kinds: type[Exception]) -> Iterator[None]:
    """Raises the first error of a group instead of the group, if all in it are of these kinds.

    For tasks that fail for one reason. `except*` would do, but until Python 3.11.4 it puts what it
    raises into a group again.
    """
    try:
        yield
    except ExceptionGroup as failed:
        _, others = failed.split(kinds)
        if others is not None:
            raise
        raise failed.exceptions[0] from None


@contextmanager
def encoding(record: str) -> Iterator[None]:
    """Raise Unstorable, naming the record, where it cannot be encoded."""
    try:
        yield
    except (ValueError, struct.error) as error:
        raise Unstorable(f"{record}: {error}") from error


class Fenced(StoreFailed):
    """Another process opened this database for writing; this one may never commit again.

    Stop, with the exit code for which supervisors do not restart a process.
    """


class DamagedStore(StorageError):
    """SlateDB found its own files missing or damaged. Stop; restore or inspect them."""


class LostDatabase(DamagedStore):
    """A database is gone that the topology has. Opening it again cannot help until it is restored.

    The message says what to do.
    """


class LostWalStore(DamagedStore):
    """The store of the WALs is gone, or has lost what says whose it is. As LostDatabase."""


class LostInstance(DamagedStore):
    """The record of the instance's settings is gone, and its databases are not. As LostDatabase."""


class UnfinishedRestore(StorageError):
    """A root has a part of a backup that is being restored to it. The message says what to do."""


class OtherWalStore(StorageError):
    """A process was given another store for the WALs than its instance has.

    Nothing has changed. The message says what to do.
    """


class OtherFormat(StorageError):
    """A database was written in a format that this version does not read.

    Its records are unchanged. The message says what to do.
    """


class UnsafeStore(StorageError):
    """The store ignores create-if-absent, so two writers could both own a database."""


class ClockAhead(StorageError):
    """This machine's clock is more than a minute ahead of the store's; correct it, then start.

    `ahead_ms` says by how much (milliseconds).
    """

    def __init__(self, ahead_ms: int) -> None:
        super().__init__(
            f"the clock of this machine is {ahead_ms} ms ahead of the object store's clock"
        )
        self.ahead_ms = ahead_ms


class ClockOutOfRange(StorageError):
    """This machine's clock is beyond the last time that records can have; correct it."""

    def __init__(self, now_ms: int, last_ms: int) -> None:
        super().__init__(
            f"the clock of this machine is {now_ms} ms after 1970, at most {last_ms} can be stored:"
            " correct it, then start"
        )


class ObjectNotFound(StorageError):
    """No object has this path or URI; `path` names it."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no object at {path}")
        self.path = path


class DamagedObject(StorageError):
    """The bytes of an object are not those that were stored; `path` names it.

    Do not use them: restore the object, or give it up.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path} is damaged: {detail}")
        self.path = path
        self.detail = detail


class SnapshotNotFound(StorageError):
    """The snapshot was released, or its lifetime has ended.

    Take a new one and begin again. `snapshot_id` names it.
    """

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"no snapshot {snapshot_id}: released, or its lifetime has ended")
        self.snapshot_id = snapshot_id


class ForeignUri(StorageError):
    """A payload URI is not that of a payload below the root; it is not followed. `uri` names it."""

    def __init__(self, uri: str, root: str) -> None:
        super().__init__(f"{uri} is not a payload object below {root}")
        self.uri = uri
