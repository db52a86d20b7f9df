from dataclasses import FrozenInstanceError, dataclass

import pytest

from libs.serving.process.config import Scope, ServingConfig, load, setting


@dataclass(frozen=True, kw_only=True)
class KettleConfig(ServingConfig):
    """Boils water."""

    lease_ms: int = setting("Lease, in ms.", default=30_000, minimum=1, maximum=60_000)
    whistle: bool = setting("Whether to whistle.", default=False, scope=Scope.INSTANCE)


ROOT = ["--root", "memory:///"]


def test_a_flag_goes_before_the_variable_and_that_before_the_default() -> None:
    environ = {"SLATEMQ_LEASE_MS": "20", "SLATEMQ_PORT": "7420", "SLATEMQ_WHISTLE": "yes"}

    config = load(KettleConfig, "kettle", [*ROOT, "--lease-ms", "10"], environ)

    assert (config.lease_ms, config.port, config.whistle) == (10, 7420, True)
    assert config.host == "127.0.0.1"


@pytest.mark.parametrize("link", ["tcp://10.0.0.1:7420", "udp://[fd00::1]:53"])
def test_the_link_to_a_kubernetes_service_of_our_name_is_passed_over(
    link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(KettleConfig, "kettle", [*ROOT, "--lease-ms", "10"], {"SLATEMQ_PORT": link})

    assert config.port == 0
    assert capsys.readouterr().err == ""


def test_a_config_cannot_be_changed() -> None:
    config = load(KettleConfig, "kettle", ROOT, {})

    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ([], {}, "--root or SLATEMQ_ROOT is required"),
        ([*ROOT, "--lease-ms", "0"], {}, "--lease-ms: must be at least 1, not '0'"),
        ([*ROOT, "--lease-ms", "60001"], {}, "--lease-ms: must be at most 60000"),
        (ROOT, {"SLATEMQ_LEASE_MS": "1s"}, "SLATEMQ_LEASE_MS: must be a whole number, not '1s'"),
        (ROOT, {"SLATEMQ_WHISTLE": "maybe"}, "SLATEMQ_WHISTLE: must be true or false"),
        ([*ROOT, "--log-format", "xml"], {}, "--log-format: must be one of text, json"),
        ([*ROOT, "--leese-ms", "1"], {}, "unrecognized arguments"),
    ],
)
def test_a_wrong_setting_ends_with_2_and_names_itself(
    arguments: list[str],
    environ: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(KettleConfig, "kettle", arguments, environ)

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_teaches_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(KettleConfig, "kettle", ["--help"], {})

    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Lease, in ms. [SLATEMQ_LEASE_MS; default 30000; may differ per process]" in text
    assert "SLATEMQ_WHISTLE; default False; the same for all processes" in text
