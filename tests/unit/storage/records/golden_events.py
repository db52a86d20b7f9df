"""Golden bytes of events that wait to be published: golden.py's rule holds here too."""

from libs.storage.layout import own_keys
from libs.storage.records import event_records
from tests.unit.storage.records.golden import Row

EVENTS = event_records.EventsRecord(
    0x1000000000007, 1, "queue.deleted", "req-1", b'[[1767225600000,{"queue":"orders"}]]'
)
COUNTER = event_records.EventCounterRecord(0x0123456789ABCDEF, 258)

KEYS = [
    Row(
        "events key",
        "events key",
        own_keys.parse_events_key,
        258,
        "015a0000000000000102",
        lambda: own_keys.events_key(258),
    ),
]

VALUES = [
    Row(
        "events value",
        "events",
        event_records.decode_events,
        EVENTS,
        "070000000000010001000000240000000d0071756575652e64656c6574656405007265712d315b5b31373637"
        "3232353630303030302c7b227175657565223a226f7264657273227d5d5d",
        lambda: event_records.encode_events(EVENTS),
    ),
    Row(
        "event counter value",
        "event counter",
        event_records.decode_event_counter,
        COUNTER,
        "efcdab89674523010201000000000000",
        lambda: event_records.encode_event_counter(COUNTER),
    ),
]
