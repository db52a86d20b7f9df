"""Numbers with their nouns."""

from slatemq._counts import counted


def test_a_noun_is_plural_but_for_one() -> None:
    assert [counted(count, "message") for count in (0, 1, 2, 1200)] == [
        "0 messages",
        "1 message",
        "2 messages",
        "1,200 messages",
    ]
    assert [counted(count, "claim waits", "claims wait") for count in (1, 2)] == [
        "1 claim waits",
        "2 claims wait",
    ]
    assert [counted(count, "process") for count in (1, 2)] == ["1 process", "2 processes"]
