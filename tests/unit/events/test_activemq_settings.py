"""Addresses in ActiveMQ, and what a wrong setting of it says."""

from __future__ import annotations

import pytest

from libs.events.settings import ActivemqSettings
from slatemq.errors import InvalidArgument

pytest.importorskip(
    "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
)

from libs.events.activemq.backend import ActivemqBackend
from libs.events.activemq.connection import Addresses


def test_a_group_gets_the_events_of_a_virtual_topic_in_a_queue_of_its_own() -> None:
    addresses = Addresses(ActivemqSettings(queue_prefix="shop", consumer_group="audit"))
    assert addresses.events == "topic://VirtualTopic.shop.events"
    assert addresses.group == "queue://Consumer.audit.VirtualTopic.shop.events"
    assert addresses.tasks == "queue://shop.tasks"
    assert addresses.retry == "queue://shop.tasks.retry"
    assert addresses.dead == "queue://shop.dead-letter"


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"url": "http://localhost"}, "url", "amqp://HOST"),
        ({"url": "amqp://"}, "url", "amqp://HOST"),
        ({"url": "amqp://localhost:none"}, "url", "not a URL"),
        ({"url": "amqp://localhost/vhost"}, "url", "must end with"),
        ({"url": "amqp://localhost?transport=x"}, "url", "must end with"),
        ({"consumer_group": "shop.audit"}, "consumer_group", "no dots"),
        ({"queue_address": "queue://tasks"}, "queue_address", "{name}"),
        ({"queue_address": "queue://{name"}, "queue_address", "expected '}'"),
        ({"events_address": "topic://{group}.{name}"}, "events_address", "{name}"),
        ({"group_address": "queue://{name}"}, "group_address", "{group} and {name}"),
    ],
)
async def test_a_wrong_setting_stops_the_start_with_its_key(
    changes: dict[str, str], key: str, says: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await ActivemqBackend().connect(ActivemqSettings(**changes))  # type: ignore[arg-type]
    assert refused.value.field == f"queue.activemq.{key}"
    assert says in refused.value.description
