"""Which messages a claim takes: as many as fit into its bounds and into an answer."""

from hypothesis import given
from hypothesis import strategies as st

from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.scan import Choice
from services.broker.delivery.message_cache import CachedMessage
from services.broker.delivery.selection import ClaimSelector
from slatemq.v1.message_pb2 import Message

BIG = 1 << 40
HELD = st.tuples(st.binary(max_size=20), st.binary(max_size=20))


def nothing(_: int) -> CachedMessage | None:
    return None


def items(held: list[CachedMessage]) -> list[AvailableMessage]:
    return [AvailableMessage(at, 0, 0, 0, 0) for at in range(len(held))]


@given(st.lists(st.lists(HELD, max_size=4), max_size=4), st.integers(0, 100))
def test_many_are_taken_where_their_payloads_fit(
    offers: list[list[CachedMessage]], bound: int
) -> None:
    here: dict[int, CachedMessage] = {}
    chooser = ClaimSelector(100, bound, BIG, here, nothing, {}, lambda _: True)
    taken: list[CachedMessage] = []

    for held in offers:
        here.update(enumerate(held))
        fits = sum(len(payload) for payload, _ in taken + held) <= bound
        assert chooser.offer(items(held)) == fits
        taken += held if fits else []

    assert chooser.chosen == taken


@given(st.lists(HELD, max_size=9), st.integers(0, 400), st.booleans())
def test_an_answer_is_never_larger_than_its_bound(
    held: list[CachedMessage], bound: int, at_once: bool
) -> None:
    chooser = ClaimSelector(100, BIG, bound, dict(enumerate(held)), nothing, {}, lambda _: True)

    if not (at_once and chooser.offer(items(held))):
        for item in items(held):
            if chooser.choose(item) == Choice.STOP:
                break

    assert chooser.chosen == held[: len(chooser.chosen)]
    sizes = [
        len(Message(message_id=(1 << 62) - 1, payload=payload).SerializeToString()) + len(common)
        for payload, common in chooser.chosen
    ]
    assert len(sizes) <= 1 or sum(sizes) <= bound


def test_many_are_taken_only_if_all_are_here() -> None:
    held: list[CachedMessage] = [(b"a", b""), (b"b", b""), (b"c", b"")]
    here = dict(enumerate(held))
    first = {0: held[0]}

    assert not ClaimSelector(9, BIG, BIG, first, nothing, {}, lambda _: True).offer(items(held))
    assert ClaimSelector(9, BIG, BIG, first, here.get, {}, lambda _: True).offer(items(held))
    assert not ClaimSelector(9, BIG, BIG, here, nothing, {2: 1}, lambda _: True).offer(items(held))
