"""A console that other machines reach shows nothing of an instance that has no policy."""

from __future__ import annotations

import pytest

from services.console.clients import Clients, OpenInstance
from services.console.config import ConsoleConfig
from tests.integration.cli.stack import Cli


async def test_no_one_becomes_the_operator_of_an_open_instance_over_the_network(cli: Cli) -> None:
    endpoint = cli.stack.endpoint
    exposed = Clients(ConsoleConfig(host="0.0.0.0", endpoint=endpoint))
    on_loopback = Clients(ConsoleConfig(endpoint=endpoint))
    insecure = Clients(ConsoleConfig(host="0.0.0.0", endpoint=endpoint, insecure=True))
    try:
        for token in ("", "smq_any"):
            with exposed.kept(token), pytest.raises(OpenInstance):
                await exposed.of(token)
        for clients in (on_loopback, insecure):
            with clients.kept(""):
                assert (await (await clients.of("")).topology()).brokers
    finally:
        for clients in (exposed, on_loopback, insecure):
            await clients.close()
