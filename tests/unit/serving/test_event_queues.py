"""The section `queue` in the settings of a process."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from libs.events.settings import Backend, Consistency
from libs.serving.process.config import load
from services.broker.config import BrokerConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.stack.options import parse
from services.stack.stack import programs

CONFIGS = (BrokerConfig, IngestConfig, JanitorConfig, RouterConfig)
ROOT = ["--root", "memory:///"]
ENABLED = "queue:\n  enabled: true\n  backend: redis\n  redis:\n    max_retries: 7\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "slatemq.yaml"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_service_without_a_file_or_with_event_queues_off_runs_in_direct_mode(
    config: type[IngestConfig], file: Path
) -> None:
    file.write_text("queue:\n  enabled: false\n  backend: kafka\n")

    assert load(config, "it", ROOT, {}).queue is None
    assert load(config, "it", [*ROOT, "--config", str(file)], {}).queue is None


@pytest.mark.parametrize("config", CONFIGS)
def test_every_service_has_the_settings_of_the_file_and_the_environment_over_it(
    config: type[IngestConfig], file: Path
) -> None:
    file.write_text(ENABLED)
    environ = {"SLATEMQ_CONFIG": str(file), "SLATEMQ_QUEUE_CONSISTENCY": "async"}

    queue = load(config, "it", ROOT, environ).queue

    assert queue is not None
    assert (queue.backend, queue.consistency, queue.redis.max_retries) == ("redis", "async", 7)


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("queue:\n  redis:\n    urll: x\n", {}, ("queue.redis.urll", "line 3", "queue.redis.url?")),
        ("queues: {}\n", {}, ("queues", "line 1")),
        (
            "",
            {"SLATEMQ_QUEUE_KAFKA_PARTITIONS": "0"},
            ("queue.kafka.partitions", "SLATEMQ_QUEUE_KAFKA_PARTITIONS"),
        ),
        ("queue:\n  backend: mongo\n", {}, ("queue.backend", "line 2", "kafka")),
    ],
)
@pytest.mark.parametrize("program", [*CONFIGS, None])
def test_a_wrong_setting_of_event_queues_ends_with_2_and_names_its_key(
    program: type[IngestConfig] | None,  # None: the launcher
    text: str,
    environ: dict[str, str],
    said: tuple[str, ...],
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file.write_text(text)
    arguments = ["--config", str(file)]

    def start() -> None:
        if program is None:
            parse(["--data", "d", *arguments], services_count=4, environ=environ)
        else:
            load(program, "it", [*ROOT, *arguments], environ)

    with pytest.raises(SystemExit) as ended:
        start()

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_a_file_that_cannot_be_read_is_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(IngestConfig, "it", [*ROOT, "--config", str(file)], {})

    assert ended.value.code == 2
    assert f"cannot read {file}" in capsys.readouterr().err


@pytest.mark.parametrize("consistency", get_args(Consistency))
@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_backend_may_be_used_in_every_mode(
    backend: str, consistency: str, file: Path
) -> None:
    text = f"queue: {{enabled: true, backend: {backend}, consistency: {consistency}}}"
    file.write_text(text)
    queue = load(IngestConfig, "it", [*ROOT, "--config", str(file)], {}).queue
    assert queue is not None
    assert (queue.backend, queue.consistency) == (backend, consistency)


def test_the_launcher_gives_the_file_to_every_service(file: Path) -> None:
    file.write_text("")
    ports = dict.fromkeys(("ingest", "router", "broker", "janitor", "console"), 1)
    for argv, environ in (
        (["--config", str(file)], {}),
        ([], {"SLATEMQ_CONFIG": str(file)}),
    ):
        options = parse(["--data", "d", *argv], services_count=4, environ=environ)
        started = programs(options, ports, {}, environ)
        services = [program for program in started if not program.has_pages]
        assert len(services) == 4
        for program in services:
            place = list(program.command).index("--config")
            assert program.command[place + 1] == str(file)
