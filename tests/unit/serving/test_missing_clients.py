"""Backends of event queues whose client library is not installed."""

from __future__ import annotations

import sys

import pytest

from libs.events.settings import QueueSettings
from libs.serving.events.relay import ProcessRelay
from libs.serving.process.exits import EXIT_USAGE, FatalError
from libs.serving.telemetry import Telemetry


def test_a_process_without_the_client_of_its_backend_names_the_page_on_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [one for one in sys.modules if one.startswith("libs.events.activemq")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "proton", None)

    with pytest.raises(
        FatalError, match=r"not installed: see docs/how-to/backend-activemq\.md"
    ) as raised:
        ProcessRelay(QueueSettings(backend="activemq"), Telemetry())

    assert raised.value.cause.code == EXIT_USAGE
