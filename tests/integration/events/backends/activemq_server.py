"""Brokers that speak AMQP 1.0: ActiveMQ where one is given, and RabbitMQ with its plugin."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aio_pika

from libs.events.activemq.connection import Addresses
from libs.events.settings import ActivemqSettings
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.servers import PortServer, Process, program
from tests.ports import free_ports

SMALL = """
<beans xmlns="http://www.springframework.org/schema/beans"
    xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
    xsi:schemaLocation="http://www.springframework.org/schema/beans
      http://www.springframework.org/schema/beans/spring-beans.xsd
      http://activemq.apache.org/schema/core
      http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="events" useJmx="false"
      dataDirectory="{folder}/data">
    <persistenceAdapter>
      <kahaDB directory="{folder}/data/kahadb" journalMaxFileLength="1mb" cleanupInterval="200"
          checkpointInterval="100"/>
    </persistenceAdapter>
    <systemUsage>
      <systemUsage>
        <storeUsage><storeUsage limit="8mb"/></storeUsage>
        <tempUsage><tempUsage limit="8mb"/></tempUsage>
      </systemUsage>
    </systemUsage>
    <transportConnectors>
      <transportConnector name="amqp" uri="amqp://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"""
"""A broker with room for 8 MB of messages; its class path needs Spring and XBean, too."""


class ActivemqServer(PortServer):
    """ActiveMQ 5 as it is by default, but for its ports and its folder."""

    def __init__(self, folder: Path, is_small: bool = False) -> None:
        """Nothing runs yet."""
        (self.port,) = free_ports(1)
        options = f"persistent=true&useJmx=false&dataDirectory={folder}/data"
        configuration = f"broker:(amqp://127.0.0.1:{self.port})/events?{options}"
        if is_small:
            file = folder / "activemq.xml"
            file.write_text(SMALL.format(folder=folder, port=self.port))
            configuration = f"xbean:{file.as_uri()}"
        self._process = Process(
            [
                *(program("java"), "-cp", os.environ["ACTIVEMQ_CLASSPATH"]),
                *("org.apache.activemq.console.command.ShellCommand", "start", configuration),
            ],
            folder,
            {},
        )

    def settings(self, prefix: str) -> ActivemqSettings:
        """Settings of a backend on it."""
        return ActivemqSettings(
            url=f"amqp://127.0.0.1:{self.port}",
            queue_prefix=prefix,
            consumer_group=f"{prefix}-workers",
            max_retries=2,
            retry_delay_ms=200,
        )


class Amqp10Server(RabbitmqServer):
    """RabbitMQ with its plugin for AMQP 1.0, which cannot bind queues: that is done before."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet."""
        super().__init__(folder, "rabbitmq_amqp1_0")

    def settings(self, prefix: str) -> ActivemqSettings:  # type: ignore[override]
        """Settings of a backend on it."""
        return ActivemqSettings(
            url=f"amqp://guest:guest@127.0.0.1:{self.port}",
            queue_prefix=prefix,
            consumer_group=f"{prefix}-workers",
            max_retries=2,
            retry_delay_ms=200,
            queue_address="/amq/queue/{name}",
            events_address="/exchange/{name}",
            group_address="/amq/queue/{group}.{name}",
        )

    def prepare(self, *sections: ActivemqSettings) -> None:
        """Create the queues of these settings, and bind the queues of groups to the events."""
        with ThreadPoolExecutor(1) as thread:  # whose caller may have an event loop
            for settings in sections:
                thread.submit(asyncio.run, self._prepare(settings)).result()

    async def _prepare(self, settings: ActivemqSettings) -> None:
        addresses = Addresses(settings)
        connection = await aio_pika.connect(f"{settings.url}/")
        async with connection, connection.channel() as channel:
            name = addresses.events.removeprefix("/exchange/")
            exchange = await channel.declare_exchange(
                name, aio_pika.ExchangeType.FANOUT, durable=True
            )
            for address in (addresses.group, addresses.tasks, addresses.retry, addresses.dead):
                queue = await channel.declare_queue(
                    address.removeprefix("/amq/queue/"),
                    durable=True,
                    arguments={"x-queue-type": "quorum"},
                )
                if address == addresses.group:
                    await queue.bind(exchange)
