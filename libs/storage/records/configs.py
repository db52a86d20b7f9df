"""The value of a queue's config record.

    | filter Utf8 | max attempts u16 | done retention u32 |
    | settings: Array<(key Utf8, value Utf8)> |

Little-endian. The filter is CEL source; the retention is in seconds, 0: for ever. The settings are
ours, sorted by key: every setting that the RFC lacks, as text. A reader of the RFC's layout stops
before them; a value without them has none. A program keeps settings that it does not know, and
refuses those that are not in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.storage.errors import CorruptRecord
from libs.storage.layout.partitions import Partition
from libs.storage.layout.primitives import Fixed, Reader, count_prefix, utf8

_FIXED = Fixed(max_attempts="H", done_retention_s="I")


@dataclass(frozen=True, slots=True)
class QueueConfigRecord:
    filter: str
    max_attempts: int
    done_retention_s: int
    settings: Mapping[str, str] = field(default_factory=dict)


def encode_config(config: QueueConfigRecord) -> bytes:
    parts = [
        utf8("filter", config.filter),
        _FIXED.pack(config.max_attempts, config.done_retention_s),
        count_prefix("settings", config.settings),
    ]
    for key, value in sorted(config.settings.items()):
        parts += (utf8("setting key", key), utf8(f"setting {key[:64]!r}", value))
    return b"".join(parts)


def decode_config(data: bytes) -> QueueConfigRecord:
    """Queue config value, ours or the RFC's; CorruptRecord when it is neither."""
    reader = Reader("config value", data)
    source = reader.utf8("filter")
    max_attempts, done_retention_s = reader.fixed("max attempts and done retention", _FIXED)
    settings: dict[str, str] = {}
    last_key = ""
    count = 0 if reader.at_end else reader.number("count of settings", "H")
    for place in range(count):
        key = reader.utf8("setting key")
        if place and key <= last_key:
            raise reader.corrupt(f"it has the setting {key!r} twice, or after {last_key!r}")
        last_key = key
        settings[key] = reader.utf8("setting value")
    reader.finish()
    return QueueConfigRecord(source, max_attempts, done_retention_s, settings)


def partition_in(config: QueueConfigRecord) -> Partition:
    """The partition that a queue is on its shard; where it has none, the only one.

    Raises CorruptRecord.
    """
    try:
        return Partition.parse(config.settings.get("partition", "0 1 "))
    except ValueError as error:
        raise CorruptRecord("config value", f"its partition is damaged: {error}") from error
