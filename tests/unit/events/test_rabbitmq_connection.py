"""A RabbitMQ that cannot be reached: what is raised, and what is logged."""

from __future__ import annotations

import logging

import pytest

from libs.events.rabbitmq.backend import RabbitmqBackend
from libs.events.settings import RabbitmqSettings
from slatemq.errors import Unavailable
from tests.ports import free_ports


async def test_a_try_to_connect_to_a_server_that_is_down_raises_and_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [port] = free_ports(1)
    backend = RabbitmqBackend()

    with pytest.raises(Unavailable, match="RabbitMQ cannot be reached"):
        await backend.connect(RabbitmqSettings(url=f"amqp://127.0.0.1:{port}/"))
    await backend.close()

    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
