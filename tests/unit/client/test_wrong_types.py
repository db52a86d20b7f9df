"""What a caller gives in a wrong type is refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import slatemq
import slatemq.sync
from slatemq import codecs
from slatemq._checks import message_of
from slatemq._consume.commands import CommandContext, Complete, Fail, Push, Release, Transfer
from slatemq.errors import InvalidArgument
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.v1 import entry_pb2

Call = Callable[[Any], Awaitable[object]]
"""A call on a client whose arguments no type checker would let pass."""

LEASE = "0-abc"


async def first(items: Any) -> object:
    """Begins with an iterator."""
    return await anext(items)


async def made(what: object) -> object:
    """For what is refused when it is made."""
    return what


def commands(client: Any) -> Any:
    return client.queue_commands("q", codecs.JSON)


CALLS: list[tuple[str, str, Call]] = [
    ("commands[0]", "a command, such as", lambda c: c.execute(["x"])),
    ("commands", "a list of commands, not str", lambda c: c.execute("x")),
    ("commands", "a list of commands, not int", lambda c: c.execute(5)),
    ("commands[1]", "not int", lambda c: made(CommandContext().add(Complete(LEASE), 5))),  # type: ignore[func-returns-value,arg-type]
    ("commands[0].lease", "lease token, not int", lambda c: c.execute([Complete(5)])),  # type: ignore[arg-type]
    ("commands[0].reason", "text, not int", lambda c: c.execute([Fail(LEASE, 5)])),  # type: ignore[arg-type]
    ("commands[0].delay", "seconds or", lambda c: c.execute([Release(LEASE, "5s")])),  # type: ignore[arg-type]
    ("commands[0].target_queue_id", "text", lambda c: c.execute([Transfer(LEASE, 5)])),  # type: ignore[arg-type]
    ("commands[0].payload", "bytes or text", lambda c: c.execute([Push("q", {"a": 1})])),  # type: ignore[arg-type]
    ("request_id", "text", lambda c: c.execute([Push("q", b"")], request_id=5)),
    ("tokens[0]", "a MessageToken, not str", lambda c: made(commands(c).complete(["x"]))),
    ("tokens", "a list of MessageTokens", lambda c: made(commands(c).complete("x"))),
    ("token", "a TransferToken, not str", lambda c: made(commands(c).push("x"))),
    ("token", "a MessageToken", lambda c: made(c.queue_view("q", codecs.JSON).refs.lease("x"))),
    ("lease", "seconds or", lambda c: made(c.queue_view("q", codecs.JSON, lease="5s"))),
    ("payload", "bytes or text, not int", lambda c: c.publish(5)),
    ("messages[0].payload", "text, not str", lambda c: c.publish_many([OutgoingMessage("x")])),  # type: ignore[arg-type]
    ("payload", "bytes or text, not NoneType", lambda c: c.publish(None)),
    ("headers", "a mapping of text to text, not str", lambda c: c.publish(b"", "h")),
    ("headers['a']", "text, not int", lambda c: c.publish(b"", {"a": 5})),
    ("visible_at", "a datetime, not str", lambda c: c.publish(b"", visible_at="+5m")),
    ("delay", "seconds or a timedelta, not str", lambda c: c.publish(b"", delay="5m")),
    ("delay", "a finite", lambda c: c.publish(b"", delay=float("inf"))),
    ("dedupe_key", "not empty", lambda c: c.publish(b"", dedupe_key="")),
    ("messages", "a list of messages, not str", lambda c: c.publish_many("abc")),
    ("messages[1].payload", "bytes or text", lambda c: c.publish_many([b"", 5])),
    ("messages[0]", "an OutgoingMessage", lambda c: c.publish_batch([b"x"])),
    (
        "messages[0].dedupe_key",
        "not empty",
        lambda c: c.publish_batch([OutgoingMessage(b"", dedupe_key="")]),
    ),
    ("queue_id", "text, not int", lambda c: c.claim(5)),
    ("max_messages", "a whole number", lambda c: c.claim("q", "x")),
    ("wait", "0 to 60 s, not 61 s", lambda c: c.claim("q", wait=61)),
    ("queue_id", "text", lambda c: first(c.consume(5))),
    ("lease", "seconds or", lambda c: first(c.consume("q", lease="5s"))),
    ("prefetch", "a whole number", lambda c: first(c.consume("q", prefetch="5"))),
    ("concurrency", "1 to 50,000, not 0", lambda c: c.process("q", made, concurrency=0)),
    ("lease_tokens", "a list of lease tokens, not str", lambda c: c.ack(LEASE)),
    ("lease_tokens", "a list of lease tokens, not str", lambda c: c.extend(LEASE)),
    ("reason", "text", lambda c: c.nack([LEASE], 5)),
    ("queue_id", "text", lambda c: c.create_queue(5)),
    ("filter", "text", lambda c: c.create_queue("q", filter=5)),
    ("backoff", "a Backoff, such as", lambda c: c.create_queue("q", backoff="fixed:1s")),
    ("start_from", "now, beginning or", lambda c: c.create_queue("q", start_from="yesterday")),
    ("max_attempts", "fit into 32 bits", lambda c: c.update_queue("q", max_attempts=1 << 40)),
    ("states", "a list of states, not str", lambda c: c.purge_queue("q", "failed")),
    ("page_size", "a whole number", lambda c: c.entry_page("q", "done", page_size="x")),
    ("handle", "text", lambda c: c.get_entry(5)),
    ("message_id", "a whole number", lambda c: first(c.find_message("5"))),
    ("message_ids", "a list of whole numbers", lambda c: c.read_messages("5")),
    ("message_ids[1]", "a whole number", lambda c: c.read_messages([1, "5"])),
    ("queue_ids", "a list of text, not str", lambda c: first(c.find_message(5, "q"))),
    ("position", "text", lambda c: first(c.watch_delayed("q", position=5))),
    ("message_ids", "a list of whole numbers", lambda c: c.start_redrive("q", message_ids="12")),
    ("rate", "a whole number, not float", lambda c: c.start_redrive("q", rate=0.5)),
    ("redrive_id", "text", lambda c: c.get_redrive(5)),
    ("headers['a']", "text, not int", lambda c: c.explain({"a": 1})),
    ("payload", "UTF-8 text", lambda c: c.publish("\ud800")),
    ("messages[1].payload", "UTF-8 text", lambda c: c.publish_many(["a", "\ud800"])),
    ("headers", "UTF-8 text", lambda c: c.publish(b"", {"a": "\ud800"})),
    ("headers[b'a']", "text, not bytes", lambda c: c.publish(b"", {b"a": "b"})),
    ("headers['a']", "text, not bytes", lambda c: c.publish(b"", {"a": b"b"})),
    (
        "messages[0].headers[b'a']",
        "text, not bytes",
        lambda c: c.publish_many([OutgoingMessage(b"", {b"a": "b"})]),  # type: ignore[dict-item]
    ),
    ("messages", "a list of messages, not bytearray", lambda c: c.publish_many(bytearray(b"x"))),
    ("messages[0].payload", "bytes", lambda c: c.publish_many([OutgoingMessage(bytearray(b"x"))])),  # type: ignore[arg-type]
    ("payload", "UTF-8 text", lambda c: c.edit_message("q/1/a", payload="\ud800")),
    ("queue_id", "UTF-8 text", lambda c: first(c.consume("\ud800"))),
    ("queue_id", "UTF-8 text", lambda c: c.get_queue("\ud800")),
    ("queue_id", "text, not bytes", lambda c: c.get_queue(b"q")),
    ("consumer_id", "UTF-8 text", lambda c: first(c.consume("q", consumer_id="\ud800"))),
    ("dedupe_key", "UTF-8 text", lambda c: c.publish(b"", dedupe_key="\ud800")),
    ("call_timeout", "seconds or", lambda c: made(slatemq.connect("h:1", call_timeout="5"))),  # type: ignore[arg-type]
    (
        "messages_max",
        "a whole number",
        lambda c: made(slatemq.connect("h:1", batches=BatchSettings("x"))),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(("field", "expected", "call"), CALLS)
async def test_what_cannot_be_sent_is_named_with_what_was_expected(
    field: str, expected: str, call: Call
) -> None:
    client = slatemq.connect("127.0.0.1:1", call_timeout=0.1)

    with pytest.raises(InvalidArgument) as refused:
        await call(client)

    assert refused.value.field == field
    assert expected in refused.value.description


def test_a_list_that_can_be_read_only_once_is_sent_whole() -> None:
    request = message_of(entry_pb2.StartRedriveRequest, message_ids=iter([1, 2]))

    assert list(request.message_ids) == [1, 2]
    with pytest.raises(InvalidArgument, match="message_ids: must be a list of whole numbers"):
        message_of(entry_pb2.StartRedriveRequest, message_ids=iter([1, "2"]))


def test_a_wrong_token_is_named_without_asyncio_too() -> None:
    client = slatemq.sync.connect("127.0.0.1:1", call_timeout=0.1)
    wrong: Any = "x"
    try:
        with pytest.raises(InvalidArgument, match="token: must be a TransferToken, not str"):
            client.queue_commands("q", codecs.JSON).push(wrong)
    finally:
        client.close()
