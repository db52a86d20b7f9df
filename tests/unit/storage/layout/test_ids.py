from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord, SequenceExhausted
from libs.storage.layout import ids, keys
from libs.storage.layout.ids import IdAllocator, SeqBlock

shards = st.integers(0, ids.MAX_SHARD)
sequences = st.integers(ids.FIRST_SEQUENCE, ids.MAX_SEQUENCE)


@given(shards, sequences)
def test_an_id_shows_its_shard_and_sequence(shard: int, sequence: int) -> None:
    message_id = ids.message_id(shard, sequence)
    assert ids.shard_of(message_id) == shard
    assert ids.sequence_of(message_id) == sequence
    assert 0 < message_id <= ids.MAX_MESSAGE_ID < 2**62


@pytest.mark.parametrize(
    ("shard", "sequence", "field_name"),
    [
        (-1, 1, "shard"),
        (ids.MAX_SHARD + 1, 1, "shard"),
        (0, 0, "sequence"),
        (0, ids.MAX_SEQUENCE + 1, "sequence"),
    ],
)
def test_a_shard_or_sequence_out_of_bounds_is_refused(
    shard: int, sequence: int, field_name: str
) -> None:
    with pytest.raises(ValueError, match=f"{field_name} = "):
        ids.message_id(shard, sequence)


@given(shards, sequences, st.integers(0, 2**64 - 1))
def test_payload_keys_and_log_keys_of_one_database_never_meet(
    shard: int, sequence: int, log_sequence: int
) -> None:
    payload = keys.payload_key(ids.message_id(shard, sequence))
    log = keys.log_key(log_sequence)
    payloads = keys.payload_range()
    assert payloads.start <= payload < payloads.end < log
    with pytest.raises(CorruptRecord):
        keys.parse_payload_key(log[:10])


def test_the_highest_message_id_sorts_before_the_log() -> None:
    assert keys.payload_key(ids.MAX_MESSAGE_ID) < keys.log_key(0)
    assert keys.payload_range().end < keys.log_range(0).start
    with pytest.raises(ValueError, match="message_id"):
        keys.payload_key(ids.MAX_MESSAGE_ID + 1)


def test_an_empty_block_is_corrupt() -> None:
    with pytest.raises(CorruptRecord, match="empty"):
        ids.decode_seq_block(bytes(16))


def test_the_first_allocation_of_all_starts_at_one_and_persists_a_block() -> None:
    allocator = IdAllocator(None)
    assert allocator.allocate(3) == (1, SeqBlock(1, ids.DEFAULT_BLOCK_SIZE))
    assert allocator.allocate(2) == (4, None)


def test_a_restart_goes_on_after_the_whole_last_block() -> None:
    allocator = IdAllocator(SeqBlock(4096, 4096), block_size=100)
    assert allocator.allocate(1) == (8192, SeqBlock(8192, 100))


def test_a_range_that_just_fills_the_block_persists_nothing_and_one_across_does() -> None:
    allocator = IdAllocator(None, block_size=10)
    assert allocator.allocate(4) == (1, SeqBlock(1, 10))
    assert allocator.allocate(6) == (5, None)
    assert allocator.allocate(8) == (11, SeqBlock(11, 10))
    assert allocator.allocate(3) == (19, SeqBlock(21, 10))


def test_a_range_longer_than_a_block_gets_a_block_that_covers_it() -> None:
    allocator = IdAllocator(None, block_size=10)
    assert allocator.allocate(25) == (1, SeqBlock(1, 25))
    assert allocator.allocate(1) == (26, SeqBlock(26, 10))


def test_a_full_shard_refuses_and_stays_as_it_was() -> None:
    allocator = IdAllocator(SeqBlock(1, ids.MAX_SEQUENCE - 2), block_size=1)
    with pytest.raises(SequenceExhausted):
        allocator.allocate(3)
    first, block = allocator.allocate(2)
    assert (first + 1, block) == (ids.MAX_SEQUENCE, SeqBlock(ids.MAX_SEQUENCE - 1, 2))
    with pytest.raises(SequenceExhausted):
        allocator.allocate(1)


def test_counts_and_block_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="count = 0"):
        IdAllocator(None).allocate(0)
    with pytest.raises(ValueError, match="block_size = 0"):
        IdAllocator(None, block_size=0)


@dataclass
class Disk:
    """What a database keeps of an allocator: the last block, and the sequences in use."""

    block: SeqBlock | None = None
    used: list[int] = field(default_factory=list)

    def commit(self, first: int, count: int, block: SeqBlock | None) -> None:
        self.block = block or self.block
        assert self.block is not None
        numbers = range(first, first + count)
        assert numbers[-1] < self.block.end, "a number is used that no block on disk covers"
        assert not self.used or first > self.used[-1], "numbers went back"
        self.used.extend(numbers)


steps = st.lists(st.integers(1, 30), max_size=6)


@given(st.lists(st.tuples(steps, st.integers(0, 6), st.integers(1, 12)), max_size=6))
def test_numbers_never_go_back_whenever_the_process_crashes(
    lives: list[tuple[list[int], int, int]],
) -> None:
    # given a database, and lives of a process that each end with some batches not yet committed
    disk = Disk()
    for counts, committed, block_size in lives:
        # when each life allocates, and commits the first batches in order before it crashes
        allocator = IdAllocator(disk.block, block_size)
        batches = [(count, *allocator.allocate(count)) for count in counts]
        for count, first, block in batches[:committed]:
            disk.commit(first, count, block)
    # then (asserted by each commit) every number was covered, and higher than all before
    assert len(set(disk.used)) == len(disk.used)
