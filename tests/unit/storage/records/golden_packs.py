"""Golden bytes of packs of payloads: golden.py's rule holds here too."""

from libs.storage.records import payload_packs
from tests.unit.storage.records.golden import Row

KEYS = [
    Row(
        "payload pack key",
        "payload pack key",
        payload_packs.parse_pack_key,
        42,
        "0154000000000000002a",
        lambda: payload_packs.pack_key(42),
    ),
]

VALUES = [
    Row(
        "payload pack",
        "payload pack",
        lambda data: payload_packs.decode_pack(42, data),
        {42: b"hello", 43: b"", 45: b"bye"},
        "0104000500000000000000ffffffff0300000068656c6c6f627965",
        lambda: payload_packs.encode_pack([b"hello", b"", None, b"bye"]),
    ),
]
