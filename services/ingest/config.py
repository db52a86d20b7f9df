"""Settings of ingest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libs.serving.limits import RETENTION_S_MAX
from libs.serving.process.commit_config import CommitConfig
from libs.serving.process.settings import setting
from libs.storage.layout.ids import DEFAULT_BLOCK_SIZE, MAX_SHARD

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IngestConfig(CommitConfig):
    """The SlateMQ ingest: accepts messages, stores them, serves payloads and the metadata log."""

    shard: int = setting(
        "Number of this ingest shard; a second process of the same number takes it over.",
        default=0,
        minimum=0,
        maximum=MAX_SHARD,
    )
    dedupe_cache_keys: int = setting(
        "Dedupe keys kept in memory, some 300 bytes each; one that is not there is looked up on "
        "disk.",
        default=50_000,
        minimum=0,
    )
    events_hold_s: int = setting(
        "For how long after its receipt a message is kept from being purged while its event is not "
        "published (`queue.consistency: write-through`), in seconds; 0 waits for no event.",
        default=7 * 24 * 3600,
        minimum=0,
        maximum=RETENTION_S_MAX,
    )
    id_block_size: int = setting(
        "Message IDs reserved by one block record; a restart skips the rest of a block.",
        default=DEFAULT_BLOCK_SIZE,
        minimum=1,
        maximum=1 << 40,
    )
    uncommitted_bytes_max: int = setting(
        "Bytes accepted and not yet durable, blobs on their way included; over it publishes get "
        "RESOURCE_EXHAUSTED. With async and sync the publishes over 512 KiB, or over what the "
        "queue backend takes, which wait for the store, and the others, which wait for the "
        "backend, have this much each.",
        default=128 * MIB,
        minimum=1,
    )
    payload_cache_bytes: int = setting(
        "Fresh messages kept in memory, in bytes, for the brokers that will soon ask for them.",
        default=64 * MIB,
        minimum=0,
    )
    answers_bytes_max: int = setting(
        "Bytes of messages and log entries in answers that callers have not read yet; where they "
        "are used up, only answers of up to 64 KiB go out. In memory they take twice as much.",
        default=128 * MIB,
        minimum=1,
    )
    log_cache_bytes: int = setting(
        "Recent log entries kept in memory, in bytes of their encoding (in memory they take some "
        "three times as much); a tailer further behind reads the database.",
        default=16 * MIB,
        minimum=0,
    )
    tail_streams_max: int = setting(
        "TailLog streams open at once; over it RESOURCE_EXHAUSTED.", default=256, minimum=1
    )
    heartbeat_ms: int = setting(
        "An idle TailLog stream sends an empty answer this often, in ms.",
        default=5_000,
        minimum=1,
        maximum=10_000,
    )
    s3_events_token: str = setting(
        "Token with which S3 stores POST to /s3-events on the HTTP port (Authorization: Bearer …); "
        "without one there is no such path.",
        default="",
        is_secret=True,
    )
    s3_events_token_file: str = setting(
        "File with that token; read again when it changes.", default=""
    )
    blob_uploads_max: int = setting(
        "Large payloads uploaded at the same time.", default=16, minimum=1
    )
