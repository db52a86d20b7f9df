"""What files of encrypted messages become when they are sent again."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slatemq._admin.entry_models import Archived, Entry, EntryState, SealedMessage, StoredMessage
from slatemq._admin.settling import (
    DropDeadLetter,
    RedriveDeadLetter,
    ReplaceDeadLetter,
    Settlement,
)
from slatemq.cli.entry_output import opened
from slatemq.cli.files.importing import Item, outgoing_of
from slatemq.cli.files.queue_files import Content, content_of, encryption_problem, exported
from slatemq.cli.repair.archive_settling import ArchiveSettler
from slatemq.cli.repair.dead_letter_plans import PlannedSettlement
from slatemq.cli.repair.dead_letter_settling import DeadLetterSettler
from slatemq.encryption import KEY_HEADER, KeyRing, new_key
from slatemq.textqueue import TextQueue

RING = KeyRing({"2026": new_key()}, "2026")
PLAIN = (b"PIN 4711", b"", b"\x01" * 200)


def in_a_file(folder: Path, message: StoredMessage) -> Item:
    """A message as it comes back from an export."""
    file = folder / "f.tq"
    file.write_bytes(
        exported(Entry("q/1/1", "q", 1, EntryState.AVAILABLE, message=message), opened(message))
    )
    (entry,) = TextQueue(file).entries()
    return Item(entry, content_of(entry, str(file)))


def stored(payload: bytes, *, with_keys: bool) -> StoredMessage:
    """An encrypted message as a client has it."""
    return as_it_is(*RING.seal(payload, {"queue": "q"}), with_keys=with_keys)


def as_it_is(payload: bytes, headers: dict[str, str], *, with_keys: bool = True) -> StoredMessage:
    fields: dict[str, Any] = {
        "message_id": 1,
        "payload": payload,
        "headers": headers,
        "created_at_ms": 1_700_000_000_000,
        "received_at_ms": 1_700_000_000_000,
        "retention_s": 0,
    }
    return SealedMessage(RING, **fields) if with_keys else StoredMessage(**fields)


@pytest.mark.parametrize("payload", PLAIN)
def test_what_was_decrypted_is_sent_with_keys_alone(tmp_path: Path, payload: bytes) -> None:
    content = in_a_file(tmp_path, stored(payload, with_keys=True)).content

    assert content.payload == payload
    assert encryption_problem(content, RING) == ""
    assert "it is plain text" in encryption_problem(content, None)


@pytest.mark.parametrize("payload", PLAIN)
def test_what_is_encrypted_is_sent_without_keys_alone(tmp_path: Path, payload: bytes) -> None:
    content = in_a_file(tmp_path, stored(payload, with_keys=False)).content

    assert payload not in content.payload or not payload
    assert encryption_problem(content, None) == ""
    assert "is encrypted already" in encryption_problem(content, RING)
    edited = replace(content, payload=b"PIN 4712")
    assert "it is plain text" in encryption_problem(edited, None)


@pytest.mark.parametrize("ring", [RING, None])
def test_a_message_without_a_key_is_sent_by_any_client(ring: KeyRing | None) -> None:
    for content in (
        Content(b"text", {"queue": "q"}),
        Content(b"text", {"queue": "q"}, is_not_decrypted=True),
    ):
        assert encryption_problem(content, ring) == ""


OTHER = KeyRing({"2027": new_key()}, "2027")


@pytest.mark.parametrize("ring", [RING, OTHER, None])
@pytest.mark.parametrize("payload", [b"forged", b""])
def test_plain_text_that_says_it_is_encrypted_is_sent_by_no_client(
    tmp_path: Path, payload: bytes, ring: KeyRing | None
) -> None:
    forged = as_it_is(payload, {"queue": "q", KEY_HEADER: "2026"})
    content = in_a_file(tmp_path, forged).content

    assert content.is_not_decrypted
    said = encryption_problem(content, ring)
    assert "could not be decrypted when it was exported: remove the header slatemq-key, or" in said


def test_an_entry_of_a_key_that_is_not_given_is_sent_without_keys_alone(tmp_path: Path) -> None:
    sealed, headers = OTHER.seal(b"PIN 4711", {"queue": "q"})
    content = in_a_file(tmp_path, as_it_is(sealed, headers)).content

    said = encryption_problem(content, RING)
    assert "with the key '2027', which is not among the keys given: import such entries" in said
    assert encryption_problem(content, None) == ""
    assert "is encrypted already" in encryption_problem(content, OTHER)
    damaged = replace(content, payload=sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert "could not be decrypted" in encryption_problem(damaged, OTHER)


def test_a_payload_is_not_found_by_its_dedupe_key(tmp_path: Path) -> None:
    item = in_a_file(tmp_path, stored(b"7", with_keys=True))
    headers = sorted(item.content.headers.items())

    key = outgoing_of(item, "secret", RING).dedupe_key

    # What the server has, but for the payload, of which there are few
    named = f"id 1 of {item.content.created_at_ms} {headers} ".encode()
    guesses = [named + b"%d" % digit for digit in range(10)]
    digests = {"tq-" + hashlib.blake2b(one, digest_size=16).hexdigest() for one in guesses}
    assert outgoing_of(item, "secret", None).dedupe_key in digests
    assert key not in digests
    # It is the same in each run, and another one for another payload
    assert outgoing_of(item, "other", RING).dedupe_key == key
    edited = item._replace(content=replace(item.content, payload=b"8"))
    assert outgoing_of(edited, "secret", RING).dedupe_key != key


def test_plain_messages_of_a_run_without_keys_are_not_published_again_with_them(
    tmp_path: Path,
) -> None:
    message = replace(stored(b"", with_keys=False), payload=b"7", headers={"queue": "q"})
    plain = in_a_file(tmp_path, message)
    new = plain._replace(content=replace(plain.content, message_id=0))

    for item in (plain, new):
        keys = {outgoing_of(item, "secret", ring).dedupe_key for ring in (None, RING)}
        assert len(keys) == 1


HANDLE = "q/1/f2"


class Broker:
    """A broker that has one dead letter, in the archive or not."""

    def __init__(self, *, is_archived: bool) -> None:
        self._entry = Entry(HANDLE, "q", 1, EntryState.FAILED)
        if is_archived:
            archived = Archived("run", 1, 1)
            self._entry = replace(self._entry, state=EntryState.ARCHIVED, archived=archived)

    async def get_entry(self, _: str, **__: Any) -> Entry:
        return self._entry


@pytest.mark.parametrize(
    ("settler", "settlement", "is_refused"),
    [
        (DeadLetterSettler, ReplaceDeadLetter(HANDLE, b"PIN 4712"), True),
        (DeadLetterSettler, RedriveDeadLetter(HANDLE), False),
        (DeadLetterSettler, DropDeadLetter(HANDLE), False),
        (ArchiveSettler, ReplaceDeadLetter(HANDLE, b"PIN 4712"), True),
        (ArchiveSettler, RedriveDeadLetter(HANDLE), True),
        (ArchiveSettler, DropDeadLetter(HANDLE), False),
    ],
)
async def test_an_edit_without_keys_sends_no_plain_text_as_encrypted(
    settler: type[DeadLetterSettler], settlement: Settlement, is_refused: bool
) -> None:
    content = Content(b"PIN 4712", {KEY_HEADER: "2026"}, handle=HANDLE, is_decrypted=True)
    step = PlannedSettlement("f.tq", 0, 1, content, (), settlement)
    client: Any = Broker(is_archived=settler is ArchiveSettler)

    forged = replace(step, content=replace(content, is_decrypted=False, is_not_decrypted=True))
    not_decrypted = await settler(client, "ann", ring=RING).decide_once(forged)
    without = await settler(client, "ann").decide_once(step)
    with_keys = await settler(client, "ann", ring=RING).decide_once(step)

    assert bool(without.problem) is is_refused
    assert with_keys.problem == ""
    assert ("could not be decrypted" in not_decrypted.problem) is is_refused
