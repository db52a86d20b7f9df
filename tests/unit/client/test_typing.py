"""What users write against the public API is checked by mypy --strict, as theirs would be."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

PROGRAM = """
import slatemq
import slatemq.sync
from slatemq import Batch, Client, Complete, Consumer, OutgoingMessage, Push, Received, codecs
from slatemq.errors import SlateMQError


async def work(message: Received) -> None:
    reveal_type(message.payload)
    reveal_type(message.headers)


async def main() -> None:
    async with slatemq.connect("localhost:1", call_timeout=5, tracing=False) as client:
        reveal_type(client)
        reveal_type(await client.publish("x", {"a": "b"}))
        reveal_type(await client.publish_many([b"x", OutgoingMessage(b"y")], in_flight=4))
        async with client.consume("q", prefetch=5) as messages:
            async for message in messages:
                async with message as entered:
                    reveal_type(entered)
        async with client.consume_batches("q", 100) as batches:
            async for batch in batches:
                reveal_type(batch[0])
                reveal_type(await batch.ack_all())
        await client.process("q", work)
        reveal_type([queue async for queue in client.list_queues()])
        view = client.queue_view("q", codecs.TEXT)
        reveal_type(view)
        token = await view.try_next()
        assert token is not None
        async with view.refs.lease(token) as lease:
            reveal_type(lease.item)
        released = client.queue_commands("q", codecs.TEXT).complete([token])
        results = await client.execute([Complete("0-0"), Push("q", "x"), released])
        reveal_type(results[0].lease_deadline_ms)
        async for entry in client.watch_delayed("q"):
            reveal_type(entry.state)


def blocking() -> None:
    with slatemq.sync.connect() as client:
        reveal_type(client.publish(b"x", retention=60))
        reveal_type(client.get_queue("q").counts.available_count)
        with client.consume("q") as messages:
            for message in messages:
                with message:
                    reveal_type(message.payload)
                reveal_type(message.extend(5))
        for batch in client.consume_batches("q"):
            reveal_type(batch[0])
            reveal_type(batch.ack_all())
        reveal_type(client.claim("q", 5, wait=1))
        for queue in client.list_queues():
            reveal_type(queue)
        view = client.queue_view("q", codecs.TEXT)
        reveal_type(len(view))
        token = view.try_next()
        assert token is not None
        with view.refs.lease(token) as lease:
            reveal_type(lease.item)
        client.execute([client.queue_commands("q", codecs.TEXT).complete([token])])
        for entry in client.list_entries("q", "failed"):
            reveal_type(entry.attempts[0].outcome)
"""

EXPECTED = [
    "bytes",
    "typing.Mapping[str, str]",
    "slatemq.client.Client",
    "slatemq._publish.published.Published",
    "list[slatemq._publish.published.Published]",
    "slatemq._consume.delivered.Received",
    "slatemq._consume.delivered.Received",
    "list[slatemq.errors.SlateMQError | None]",
    "list[slatemq._admin.queue_models.Queue]",
    "slatemq._commands.message_refs.MessageView[str]",
    "str",
    "int",
    "slatemq._admin.entry_models.EntryState",
    "slatemq._publish.published.Published",
    "int",
    "bytes",
    "int",
    "slatemq.sync.Received",
    "list[slatemq.errors.SlateMQError | None]",
    "list[slatemq.sync.Received]",
    "slatemq._admin.queue_models.Queue",
    "int",
    "str",
    "str",
]


def check(program: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout + ended.stderr


@pytest.mark.slow  # mypy reads the stubs of gRPC.
def test_a_users_program_is_typed_throughout(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    result = check(program)

    assert "error:" not in result, result
    shown = [line.split('"')[1] for line in result.splitlines() if "Revealed type" in line]
    assert [kind.replace("builtins.", "") for kind in shown] == EXPECTED
    assert (REPOSITORY / "slatemq" / "py.typed").exists()


@pytest.mark.slow
def test_wrong_calls_are_reported_by_the_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import slatemq.sync\n"
        "with slatemq.sync.connect() as client:\n"
        "    client.publish(5)\n"
        "    client.consume('q', prefetch='many')\n"
        "    client.claim('q', wait=None)\n"
    )
    assert check(program).count("error:") == 3
