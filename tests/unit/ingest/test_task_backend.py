"""Where the bodies of a backend's tasks lie."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libs.events.settings import QueueSettings, RedisSettings
from libs.serving.telemetry import Telemetry
from services.ingest.tasks.backend import TaskBackend


def place_of(url: str) -> str:
    settings = replace(QueueSettings(enabled=True, backend="redis"), redis=RedisSettings(url=url))
    return TaskBackend(settings, 0, Telemetry().meter).place


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@localhost:6379",
        "redis://user:p%40ss@localhost:6379",
        "redis://localhost:6379?username=user&password=p@ss",
        "redis://localhost:6379?socket_keepalive=yes",
    ],
)
def test_a_backend_has_one_folder_whatever_its_login_and_options(url: str) -> None:
    assert place_of(url) == place_of("redis://localhost:6379")


def test_other_servers_and_databases_have_other_folders() -> None:
    urls = ("redis://a", "redis://b", "rediss://a", "redis://a/1", "redis://a?db=1&password=x")
    places = [place_of(url) for url in urls]
    assert len({*places}) == 4
    assert places[3] == places[4]
