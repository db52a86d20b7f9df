"""`slatemq events import` against a real stack."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from slatemq.events import decode_event, read_notifications
from tests.integration.cli.stack import Cli
from tests.unit.events.test_s3 import document, record

pytestmark = pytest.mark.stack


def named(bucket: str, key: object, name: str = "ObjectCreated:Put") -> dict[str, object]:
    """A record about an object of a bucket of this test."""
    sent = record(name)
    sent["s3"]["bucket"]["name"] = bucket
    sent["s3"]["object"]["key"] = key
    return sent


@pytest.fixture
def bucket(cli: Cli) -> str:
    """A bucket, and the queue of its pictures, of the same name."""
    name = f"b-{uuid4().hex[:8]}"
    cli.ok(
        *("queue", "create", name, "--filter"),
        f'headers.type == "object.created" && headers.bucket == "{name}" '
        '&& headers.key.endsWith(".jpg")',
    )
    return name


def test_notifications_become_events_that_queues_filter_and_are_stored_once(
    cli: Cli, bucket: str, tmp_path: Path
) -> None:
    # Given two documents, of which a queue wants the created pictures
    first = document(named(bucket, "a.jpg"), named(bucket, "b.txt"))
    second = document(
        named(bucket, "gr%C3%BC+n.jpg"),
        named(bucket, "a.jpg", "ObjectRemoved:Delete"),
        named(bucket, "a.jpg", "ObjectTagging:Put"),
    )
    file = tmp_path / "notifications.jsonl"
    file.write_bytes(first + b"\n" + second + b"\n")

    # When they are imported, and again, and once more from stdin
    fields = {"file": str(file), "published_count": 4, "duplicate_count": 0, "skipped_count": 1}
    fields["accepted_count"] = 0
    assert cli.ok("events", "import", str(file), "--json").objects == [fields]
    again = cli.ok("events", "import", str(file))
    assert again.out == b"published: 0  already stored: 4  skipped: 1\n"
    (piped,) = cli.ok("events", "import", "-", "--json", stdin=second).objects
    assert (piped["published_count"], piped["duplicate_count"]) == (0, 2)

    # Then the queue has each picture once, as the event that the conversion gives
    lines = cli.ok("consume", bucket, "--max", "2", "--wait", "60s", "--json").objects
    events = [decode_event(line["payload"]) for line in lines]
    assert sorted(event.data["key"] for event in events) == ["a.jpg", "grü n.jpg"]
    converted = [*read_notifications(first).events, *read_notifications(second).events]
    assert all(event in converted for event in events)
    assert lines[0]["headers"] | {"key": ""} == {
        "type": "object.created",
        "bucket": bucket,
        "key": "",
    }


@pytest.mark.parametrize("key", [5, "k" * 70_000], ids=["no text", "too long for a header"])
def test_a_file_that_is_wrong_at_its_end_publishes_nothing(
    cli: Cli, bucket: str, tmp_path: Path, key: object
) -> None:
    good = document(*(named(bucket, f"{number}.jpg") for number in range(1_500)))
    file = tmp_path / "f"
    file.write_bytes(good + b"\n" + document(named(bucket, key)))

    wrong = cli.run("events", "import", str(file), "--json")
    assert (wrong.code, wrong.out) == (2, b"")
    assert f"{file}, line 2: Records[0].s3.object.key: " in wrong.err

    # And once it is repaired, all of it is published, which it would not be had some been before
    file.write_bytes(good)
    (result,) = cli.ok("events", "import", str(file), "--json").objects
    assert (result["published_count"], result["duplicate_count"]) == (1_500, 0)
