"""Payload encryption: what comes back, what does not, and that no nonce comes twice."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq import encryption
from slatemq.encryption import OVERHEAD_BYTES, KeyRing, new_key
from slatemq.errors import DataLoss, FailedPrecondition, InvalidArgument

OLD, NEW = new_key(), new_key()


@given(payload=st.binary(max_size=2000))
def test_a_payload_comes_back_and_is_not_to_be_seen(payload: bytes) -> None:
    sealed = KeyRing({"a": OLD}, "a").encrypt(payload)

    assert KeyRing({"a": OLD}, "a").decrypt(sealed, "a") == payload
    assert len(sealed) == len(payload) + OVERHEAD_BYTES
    assert len(payload) < 8 or payload not in sealed


@given(place=st.integers(0, OVERHEAD_BYTES + 4), bit=st.integers(0, 7))
def test_any_changed_bit_is_found(place: int, bit: int) -> None:
    ring = KeyRing({"a": OLD}, "a")
    sealed = bytearray(ring.encrypt(b"lamps"))
    sealed[place] ^= 1 << bit

    with pytest.raises(DataLoss) as caught:
        ring.decrypt(bytes(sealed), "a")

    assert caught.value.reason == "NOT_DECRYPTED"


@given(length=st.integers(0, OVERHEAD_BYTES + 4))
def test_a_payload_that_is_cut_or_was_never_encrypted_is_refused(length: int) -> None:
    ring = KeyRing({"a": OLD}, "a")

    for payload in (ring.encrypt(b"lamps")[:length], b"\x01" * length):
        with pytest.raises(DataLoss):
            ring.decrypt(payload, "a")


def test_keys_rotate_without_a_break() -> None:
    before = KeyRing({"old": OLD}, "old")
    meanwhile = KeyRing({"old": OLD, "new": NEW}, "new")
    after = KeyRing({"new": NEW}, "new")
    first, second = before.encrypt(b"1"), meanwhile.encrypt(b"2")

    assert meanwhile.decrypt(first, "old") == b"1"
    assert after.decrypt(second, "new") == b"2"
    with pytest.raises(FailedPrecondition) as caught:
        after.decrypt(first, "old")
    assert (caught.value.reason, caught.value.subject) == ("KEY_UNKNOWN", "old")


def test_the_name_of_the_key_is_authenticated() -> None:
    ring = KeyRing({"a": OLD, "b": OLD}, "a")

    with pytest.raises(DataLoss):
        ring.decrypt(ring.encrypt(b"lamps"), "b")


def test_no_nonce_comes_twice_also_where_the_data_key_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encryption, "MESSAGES_PER_DATA_KEY_MAX", 10)
    ring = KeyRing({"a": OLD}, "a")

    sealed = [ring.encrypt(b"lamps") for _ in range(35)]

    heads = {payload[: OVERHEAD_BYTES - 16] for payload in sealed}
    assert len(heads) == 35
    assert len({payload[1:61] for payload in sealed}) == 4
    assert [ring.decrypt(payload, "a") for payload in sealed] == [b"lamps"] * 35


def test_two_clients_share_no_data_key() -> None:
    one, two = (KeyRing({"a": OLD}, "a").encrypt(b"")[1:61] for _ in range(2))

    assert one != two


def test_a_ring_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the shop\nnew {NEW}\nold {OLD}  # until spring\n\n")

    ring = KeyRing.from_file(file)

    assert ring.current == "new"
    assert ring.decrypt(KeyRing({"old": OLD}, "old").encrypt(b"x"), "old") == b"x"


def test_a_mark_of_the_encoding_is_no_part_of_the_first_id(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\ufeffnew {NEW}\n", encoding="utf-8")

    assert KeyRing.from_file(file).current == "new"


@pytest.mark.parametrize(
    "text", ["", "a", "a b", "a OLD\na NEW", "a OLD c", "OLD a", "a NEW\nOLD b", "OLD"]
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text.replace("OLD", OLD).replace("NEW", NEW))

    with pytest.raises(InvalidArgument) as caught:
        KeyRing.from_file(file)

    assert OLD not in caught.value.message


def test_a_key_in_the_place_of_its_id_is_not_quoted() -> None:
    with pytest.raises(InvalidArgument) as caught:
        KeyRing({OLD: "a"}, "a")

    assert OLD not in caught.value.message


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        KeyRing.from_file(tmp_path / "absent")
    key = new_key()
    with pytest.raises(InvalidArgument, match="must be the path of a key file") as refused:
        KeyRing.from_file(f"2026 {key}")
    assert key not in str(refused.value)


def test_a_request_is_encrypted_alike_each_time_and_other_content_with_another_key() -> None:
    ring, other = KeyRing({"a": OLD}, "a"), KeyRing({"a": OLD}, "a")
    payloads = [b"1", b"2"]

    def sealed(keys: KeyRing, request_id: str, payloads: list[bytes]) -> list[bytes]:
        data_key = keys.for_request(request_id, payloads)
        return [data_key.encrypt(payload) for payload in payloads]

    first = sealed(ring, "request", payloads)
    assert sealed(other, "request", payloads) == first
    assert [ring.decrypt(one, "a") for one in first] == payloads
    wrapped = {
        sealed(ring, *request)[0][1:61]
        for request in (
            ("request", payloads),
            ("request", [b"1", b"3"]),
            ("request", [b"12"]),
            ("requestx", payloads),
        )
    }
    assert len(wrapped) == 4


def test_a_fork_takes_another_data_key() -> None:
    ring = KeyRing({"a": OLD}, "a")
    ring.encrypt(b"before")
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        os.write(writing, ring.encrypt(b"child"))
        os._exit(0)
    os.waitpid(child, 0)
    of_child, of_parent = os.read(reading, 1000), ring.encrypt(b"parent")

    assert of_child[1:61] != of_parent[1:61]
    assert (ring.decrypt(of_child, "a"), ring.decrypt(of_parent, "a")) == (b"child", b"parent")


def test_messages_without_the_header_are_as_they_were_published() -> None:
    assert KeyRing({"a": OLD}, "a").open(b"plain", {"x": "y"}, "message 1") == b"plain"


def test_an_error_names_the_message_and_the_key() -> None:
    payload, headers = KeyRing({"a": OLD}, "a").seal(b"x")

    with pytest.raises(FailedPrecondition, match=r"message 7: .*'a'"):
        KeyRing({"b": NEW}, "b").open(payload, headers, "message 7")
    with pytest.raises(DataLoss, match=r"message 7: .*'a'"):
        KeyRing({"a": NEW}, "a").open(payload, headers, "message 7")


def test_no_nonce_comes_twice_of_a_data_key_that_threads_share() -> None:
    # As a ring that two synchronous clients have: each has a thread of its own
    key = KeyRing({"a": OLD}, "a")._data_key
    sealed = list[bytes]()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for some in threads.map(lambda _: [key.encrypt(b"") for _ in range(20_000)], range(4)):
                sealed += some
    finally:
        sys.setswitchinterval(interval_s)

    assert len(set(sealed)) == len(sealed) == key.used_count
