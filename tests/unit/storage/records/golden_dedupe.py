"""Golden bytes of dedupe records, under the same rule as those in golden.py."""

from libs.storage.layout import own_keys
from libs.storage.records import dedupe_records, states
from tests.unit.storage import oracles
from tests.unit.storage.records.golden import Row

REQUESTS = [
    states.RequestIdRecord("req-1", 42, 1, bytes(16)),
    states.RequestIdRecord("req-2", 43, 4, bytes(16), ((1, 7), (3, 44))),
]

KEYS = [
    Row(
        "dedupe key key",
        "dedupe key key",
        oracles.parse_dedupe_key,
        "order-7",
        "01446f726465722d3700",
        lambda: own_keys.dedupe_key("order-7"),
    ),
    Row(
        "dedupe ends key",
        "dedupe ends key",
        oracles.parse_dedupe_ends_key,
        own_keys.RequestIdsKey(29453770, 43),
        "014b01c16dca000000000000002b",
        lambda: own_keys.dedupe_ends_key(29453770, 43),
    ),
]

VALUES = [
    Row(
        "dedupe key",
        "dedupe key",
        dedupe_records.decode_dedupe,
        dedupe_records.DedupeRecord(43, 1767226200000),
        "2b00000000000000c0cfe3769b010000",
        lambda: dedupe_records.encode_dedupe(dedupe_records.DedupeRecord(43, 1767226200000)),
    ),
    Row(
        "dedupe ends",
        "dedupe ends",
        dedupe_records.decode_dedupe_ends,
        ["order-7", "ü"],
        "020007006f726465722d370200c3bc",
        lambda: dedupe_records.encode_dedupe_ends(["order-7", "ü"]),
    ),
    Row(
        "request IDs of publishes with duplicates",
        "request IDs",
        states.decode_request_ids,
        REQUESTS,
        "020005007265712d312a000000000000000100000000000000000000000000000000000000050072"
        "65712d322b0000000000000004000000000000000000000000000000000000000200010001000000"
        "07000000000000000100030000002c00000000000000",
        lambda: states.encode_request_ids(REQUESTS),
        ends=(72,),
    ),
]
