"""Golden bytes of replays and moves, under the same rule as those in golden.py."""

from libs.storage.layout import own_keys
from libs.storage.records import move_records, replay_records
from tests.unit.storage.records.golden import Row

REPLAY = [
    replay_records.ReplayRange(
        ingest_shard=0, start=0, cursor=7, end=9, done_count=6, left_count=2
    ),
    replay_records.ReplayRange(258, 0x102000000000001, 0x102000000000001, 0x102000000000005),
    replay_records.ReplayRange(259, 0, 0, 0x103000000000007, since_ms=1_700_000_000_000),
]

COPIED = move_records.MoveRecord(
    move_records.MoveStage.COPIED, 7, 2, config=b"\x01", state=b"\x02\x03"
)
LEAVING = move_records.MoveRecord(move_records.MoveStage.LEAVING, 7, 2, revision=9)
ARRIVED = LEAVING._replace(stage=move_records.MoveStage.ARRIVED)

KEYS = [
    Row(
        "replay key",
        "replay key",
        own_keys.parse_replay_key,
        "orders",
        "014d6f726465727300",
        lambda: own_keys.replay_key("orders"),
    ),
    Row(
        "move key",
        "move key",
        own_keys.parse_move_key,
        "orders",
        "015d6f726465727300",
        lambda: own_keys.move_key("orders"),
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
    Row(
        "move that arrives",
        "move",
        move_records.decode_move,
        COPIED,
        "03070000000000000002000000000000000000010000000102000000020300000000",
        lambda: move_records.encode_move(COPIED),
    ),
    Row(
        "move that leaves",
        "move",
        move_records.decode_move,
        LEAVING,
        "01070000000000000002000900000000000000000000000000000000000000",
        lambda: move_records.encode_move(LEAVING),
    ),
    Row(
        "move that has arrived",
        "move",
        move_records.decode_move,
        ARRIVED,
        "04070000000000000002000900000000000000000000000000000000000000",
        lambda: move_records.encode_move(ARRIVED),
    ),
]
