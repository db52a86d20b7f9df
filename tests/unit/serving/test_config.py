from dataclasses import FrozenInstanceError, dataclass

import pytest

from libs.serving.process.config import ServingConfig, load
from libs.serving.process.instance import InstanceSettings, StatedSetting
from libs.serving.process.settings import setting


@dataclass(frozen=True, kw_only=True)
class KettleConfig(ServingConfig):
    """Boils water."""

    lease_ms: int = setting("Lease, in ms.", default=30_000, minimum=1, maximum=60_000)
    tea_token: str = setting("Token of the tea.", default="", is_secret=True)


ROOT = ["--root", "memory:///"]


def test_a_flag_goes_before_the_variable_and_that_before_the_default() -> None:
    environ = {"SLATEMQ_LEASE_MS": "20", "SLATEMQ_PORT": "7420"}

    config = load(KettleConfig, "kettle", [*ROOT, "--lease-ms", "10"], environ)

    assert (config.lease_ms, config.port) == (10, 7420)
    assert config.host == "127.0.0.1"


@pytest.mark.parametrize("link", ["tcp://10.0.0.1:7420", "udp://[fd00::1]:53"])
def test_the_link_to_a_kubernetes_service_of_our_name_is_passed_over(
    link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(KettleConfig, "kettle", [*ROOT, "--lease-ms", "10"], {"SLATEMQ_PORT": link})

    assert config.port == 0
    assert capsys.readouterr().err == ""


def test_a_secret_has_a_variable_and_no_flag() -> None:
    config = load(KettleConfig, "kettle", ROOT, {"SLATEMQ_TEA_TOKEN": "hidden"})

    assert config.tea_token == "hidden"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tea-token", "hidden"], "--tea-token: a secret has no flag: set SLATEMQ_TEA_TOKEN"),
        (["--tea-token=hidden"], "--tea-token: a secret has no flag: set SLATEMQ_TEA_TOKEN"),
        (["--tea-tokn", "hidden"], "unrecognized arguments: --tea-tokn"),
    ],
)
def test_a_secret_that_is_a_word_of_the_command_is_refused_and_not_repeated(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(KettleConfig, "kettle", [*ROOT, *arguments], {})

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert "hidden" not in error


@pytest.mark.parametrize("endpoint", ["http://user:hidden@127.0.0.1:4317", "user:hidden@host:1"])
def test_a_collector_with_a_login_is_refused_and_not_repeated(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(KettleConfig, "kettle", ROOT, {"SLATEMQ_OTLP_ENDPOINT": endpoint})

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "SLATEMQ_OTLP_ENDPOINT: takes no login" in error
    assert "hidden" not in error


@pytest.mark.parametrize(
    "endpoint", ["collector", "127.0.0.1:4317", "ftp://x:1", "http://", "http://x:99999"]
)
def test_a_collector_that_is_no_url_is_refused(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(KettleConfig, "kettle", ROOT, {"SLATEMQ_OTLP_ENDPOINT": endpoint})

    assert ended.value.code == 2
    assert "SLATEMQ_OTLP_ENDPOINT: must be a URL such as" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["", "http://collector", "https://[::1]:4317/path"])
def test_a_collector_is_a_url_or_none(endpoint: str) -> None:
    config = load(KettleConfig, "kettle", ROOT, {"SLATEMQ_OTLP_ENDPOINT": endpoint})
    assert config.otlp_endpoint == endpoint


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
        ([*ROOT, "--log-format", "xml"], {}, "--log-format: must be one of text, json"),
        ([*ROOT, "--leese-ms", "1"], {}, "unrecognized arguments"),
        ([*ROOT, "--lease", "1"], {}, "unrecognized arguments: --lease"),
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
    assert "SLATEMQ_PURGE_GRACE_S; default 60; of the instance: for a new one, and then as" in text


def test_settings_of_the_instance_are_stated_by_flags_and_variables_with_their_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*ROOT, "--replay-window-s", "60"]

    config = load(KettleConfig, "kettle", arguments, {"SLATEMQ_PURGE_GRACE_S": "7"})

    assert config.stated == (
        StatedSetting("replay_window_s", 60, "--replay-window-s"),
        StatedSetting("purge_grace_s", 7, "SLATEMQ_PURGE_GRACE_S"),
    )
    # What holds is known only once the process has joined the instance
    assert config.instance == InstanceSettings()
    with pytest.raises(SystemExit):
        load(KettleConfig, "kettle", [*ROOT, "--request-id-window-s", "599"], {})
    assert "--request-id-window-s: must be at least 600, not '599'" in capsys.readouterr().err
