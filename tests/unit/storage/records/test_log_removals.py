import random
from collections.abc import Collection

import pytest

from libs.storage.errors import CorruptRecord
from libs.storage.records.metadata import (
    MessageMetadata,
    Removal,
    decode_log_entry,
    encode_log_entry,
    last_message_id,
    remove_messages,
)

HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"queue": "orders"},
    {"queue": "orders", "tier": "gold"},
    {"z": "ü", "a": ""},
)


def message(chance: random.Random, message_id: int) -> MessageMetadata:
    return MessageMetadata(
        message_id,
        chance.randrange(1 << 40),
        1_767_225_600_005,
        chance.choice((0, 1_767_225_700_000)),
        chance.choice((0, 60, (1 << 32) - 1)),
        chance.choice(HEADERS),
        chance.choice((None, 0, 100)),
        chance.randrange(1 << 32),
        chance.choice(("", "", "orders")),
    )


def removed(data: bytes, ids: Collection[int]) -> Removal:
    return remove_messages(data, ids, lambda *_: True)


@pytest.mark.parametrize("seed", range(50))
def test_the_others_stay_as_they_were_and_what_went_is_reported(seed: int) -> None:
    chance = random.Random(seed)
    messages = [message(chance, 100 + n) for n in range(chance.randrange(1, 20))]
    data = encode_log_entry(messages)
    while messages:
        assert last_message_id(data) == messages[-1].message_id
        ids = {one.message_id for one in messages if chance.random() < 0.3}
        kept = [one for one in messages if one.message_id not in ids]
        result = removed(data, ids | {99, 10_000})
        assert result.removed == [
            (one.message_id, one.payload_bytes) for one in messages if one.message_id in ids
        ]
        assert result.last_message_id == messages[-1].message_id
        if not kept:
            assert result.kept is None
            return
        assert result.kept == encode_log_entry(kept)
        messages, data = kept, result.kept


def test_receipt_and_retention_are_there_to_decide_by() -> None:
    one = MessageMetadata(42, 1, 1_767_225_600_005, 0, 3600, {"a": "b"})
    asked: list[tuple[int, int, int]] = []

    def goes(message_id: int, received_at_ms: int, retention_s: int) -> bool:
        asked.append((message_id, received_at_ms, retention_s))
        return False

    data = encode_log_entry([one, one._replace(message_id=43, retention_s=0)])
    assert remove_messages(data, (42, 43, 44), goes) == Removal(data, [], 43)
    assert asked == [(42, 1_767_225_600_005, 3600), (43, 1_767_225_600_005, 0)]
    assert remove_messages(data, (43,), goes) == Removal(data, [], 43)
    assert asked[2:] == asked[1:2]


def test_an_entry_without_our_arrays_gets_them() -> None:
    messages = [MessageMetadata(42, 1, 2, 0, 0, {}), MessageMetadata(43, 1, 2, 0, 0, {"a": "b"})]
    whole = encode_log_entry(messages)
    bare = whole[: len(whole) - (2 + 2 * 8) - (2 + 2 * 4)]
    assert decode_log_entry(bare) == messages
    assert removed(bare, {42}).kept == encode_log_entry(messages[1:])


def test_damage_is_found_wherever_decoding_finds_it() -> None:
    data = encode_log_entry([message(random.Random(n), 100 + n) for n in range(3)])
    refused_count = 0
    for size in range(len(data)):
        try:
            decode_log_entry(data[:size])
        except CorruptRecord:
            refused_count += 1
            with pytest.raises(CorruptRecord):
                removed(data[:size], {101})
        else:
            removed(data[:size], {101})
    assert refused_count >= len(data) - 4  # it may end where an array of ours begins
    with pytest.raises(CorruptRecord):
        removed(data + b"\x00", {101})
    for damaged in (b"", b"\x00\x00", data[:20]):
        with pytest.raises(CorruptRecord):
            last_message_id(damaged)
