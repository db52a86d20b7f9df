"""docs/reference/events.md, made from the catalogue itself.

`python -m tests.event_catalogue` writes the page; tests/unit/events holds it to the code.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec

from slatemq.events.catalogue import CATALOGUE, EventData, ObjectCreated, make_event
from slatemq.events.cloud_events import encode_cloud_event
from slatemq.events.envelope import encode_event

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/events.md"

HEAD = """\
# Events

An event is one JSON object. Consumers use its `id` as their idempotency key: an event may be
delivered more than once, always with the same ID.

```json
{envelope}
```

| member | |
|---|---|
| `id` | `evt_` and a ULID. Of other programs, `decode_event` takes any ID of 1 to 128 printable \
ASCII characters, such as a UUID |
| `type` | one of the types below |
| `timestamp` | when it happened: ISO 8601, UTC, milliseconds. Of other programs, `decode_event` \
takes other forms of ISO 8601 with a time zone (`+02:00`, no milliseconds), and gives this one |
| `source` | the node that it happened at |
| `request_id` | the request that caused it |
| `data` | what happened, by type. A time after the year 9999 stands at its end |

Readers pass over members that they do not know, here and in `data`.

The same event as a [CloudEvent](https://cloudevents.io) 1.0 in structured JSON, where `source` is
percent-encoded, and so are in `subject` and `requestid` `%`, control characters and code points
that are no characters:

```json
{cloud_event}
```

```python
from slatemq.events import decode_cloud_event, decode_event, encode_cloud_event, encode_event


def to_cloud_event(payload: bytes) -> bytes:
    return encode_cloud_event(decode_event(payload))


def from_cloud_event(body: bytes) -> bytes:
    return encode_event(decode_cloud_event(body))
```

Send it with the content type `application/cloudevents+json`, which `CLOUD_EVENT_CONTENT_TYPE` of
`slatemq.events` is. `decode_cloud_event` reads CloudEvents that were made in this way, and raises
`InvalidArgument`, which names the member, for all others. Both need the extra `events`, which
brings the SDK of CloudEvents: `pip install '.[events]'` in a checkout.

This page is written by `python -m tests.event_catalogue`; a test compares it with the code.

## Types

"""

EXAMPLE = make_event(
    ObjectCreated(
        bucket="my-bucket",
        key="photos/cat.jpg",
        size=1_048_576,
        etag='"d41d8cd98f00b204e9800998ecf8427e"',
        content_type="image/jpeg",
    ),
    source="ingest-0",
    request_id="4442587FB7D0A2F9",
    at_ms=1_771_761_600_000,
    event_id="evt_01KJ2KH1G0J9FEYRWH6ATYF8WE",
)

_NAMES = {str: "string", int: "integer", bool: "true or false", list[str]: "list of strings"}


def render() -> str:
    """The whole page."""
    head = HEAD.format(
        envelope=msgspec.json.format(encode_event(EXAMPLE).decode(), indent=2),
        cloud_event=msgspec.json.format(encode_cloud_event(EXAMPLE).decode(), indent=2),
    )
    rows = "".join(_row(name, kind) for name, kind in CATALOGUE.items())
    return f"{head}| type | when | caused by | data |\n|---|---|---|---|\n{rows}"


def _row(name: str, kind: type[EventData]) -> str:
    hints = typing.get_type_hints(kind)
    fields = ", ".join(
        f"`{field}` ({_NAMES.get(hints[field], 'object of strings')})"
        for field in kind.__struct_fields__
    )
    summary = re.sub(r"\s+", " ", kind.__doc__ or "").strip()
    return f"| `{name}` | {summary} | {kind.cause} | {fields} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
