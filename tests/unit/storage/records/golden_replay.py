"""Golden bytes of replays, under the same rule as those in golden.py."""

from libs.storage.layout import own_keys
from libs.storage.records import replay_records
from tests.unit.storage.records.golden import Row

REPLAY = [
    replay_records.ReplayRange(
        ingest_shard=0, start=0, cursor=7, end=9, done_count=6, left_count=2
    ),
    replay_records.ReplayRange(258, 0x102000000000001, 0x102000000000001, 0x102000000000005),
    replay_records.ReplayRange(259, 0, 0, 0x103000000000007, since_ms=1_700_000_000_000),
]

KEYS = [
    Row(
        "replay key",
        "replay key",
        own_keys.parse_replay_key,
        "orders",
        "014d6f726465727300",
        lambda: own_keys.replay_key("orders"),
    ),
]
VALUES = [
    Row(
        "replay",
        "replay",
        replay_records.decode_replay,
        REPLAY,
        "03000000000000000000000007000000000000000900000000000000ffffffffffffffff"
        "06000000000000000200000000000000"
        "0201010000000000020101000000000002010500000000000201ffffffffffffffff"
        "0000000000000000ffffffffffffffff"
        "03010000000000000000000000000000000007000000000003010068e5cf8b010000"
        "0000000000000000ffffffffffffffff",
        lambda: replay_records.encode_replay(REPLAY),
    ),
]
