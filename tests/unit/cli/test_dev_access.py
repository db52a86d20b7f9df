"""`slatemq access init`: what a local stack needs, whole or not at all, and for its user alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from libs.access.callers import callers_of
from slatemq.cli.access import dev_access
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from slatemq.cli.app import invoke, slatemq


async def test_its_token_may_do_everything_by_its_policy(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    dev_access.make_access(folder)
    callers = callers_of(str(folder / "policy.yaml"), str(folder / "tokens.yaml"), "")
    token = (folder / "operator.token").read_text().strip()

    caller = (await callers.identify(f"Bearer {token}")).caller

    assert caller.principal.name == "operator"
    caller.require("operate")
    caller.require("publish", "any")


def test_no_client_gets_the_name_of_the_services(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"

    assert invoke(["certs", "dev", str(folder), "--client", SERVICE_NAME]) == 2
    assert f"{SERVICE_NAME} is the name of the services" in " ".join(capfd.readouterr().err.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--host", ""],
        ["--host", "10.0.0.0/8"],
        ["--host", "a b"],
        ["--host", "a..b"],
        ["--host", "m\u00fcnchen.example"],
        ["--client", ""],
        ["--client", "a\nb"],
    ],
)
def test_what_is_no_name_gets_no_certificate_and_leaves_no_folder(
    tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "certs"

    assert invoke(["certs", "dev", str(folder), *words]) == 2
    assert not folder.exists()


def test_a_host_is_an_address_with_brackets_and_without_or_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    hosts = ["10.0.0.7", "[fe80::1]", "fe80::2", "*.example.com", "build-7.internal"]
    words = [word for host in hosts for word in ("--host", host)]

    assert invoke(["certs", "dev", str(folder), *words]) == 0

    certificate = x509.load_pem_x509_certificate((folder / "service.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(one) for one in names.get_values_for_type(x509.IPAddress)}
    assert {"10.0.0.7", "fe80::1", "fe80::2"} <= addresses
    assert {"*.example.com", "build-7.internal"} <= set(names.get_values_for_type(x509.DNSName))


def test_what_is_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    files = dev_access.make_access(tmp_path / "access")
    modes = {file.name: file.stat().st_mode & 0o777 for file in files}

    assert (tmp_path / "access").stat().st_mode & 0o777 == 0o700
    assert {modes[name] for name in ("service.key", "client.key", "operator.token")} == {0o600}


def test_the_console_gets_a_certificate_of_its_own_and_nothing_of_the_services(
    tmp_path: Path,
) -> None:
    folder, console = tmp_path / "access", tmp_path / "console"
    dev_access.make_for_containers(folder, console)

    assert {file.name for file in console.iterdir()} == {"ca.crt", "console.crt", "console.key"}
    assert (console / "console.key").stat().st_mode & 0o777 == 0o600
    assert console.stat().st_mode & 0o777 == 0o700
    assert (console / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()
    (certificate,) = x509.load_pem_x509_certificates((console / "console.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert SERVICE_NAME not in names.get_values_for_type(x509.DNSName)

    # Again: as they are, or whole
    before = (console / "console.key").read_bytes()
    dev_access.make_for_containers(folder, console)
    assert (console / "console.key").read_bytes() == before
    shutil.rmtree(folder)
    dev_access.make_for_containers(folder, console)
    assert (console / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()
    shutil.rmtree(console)
    with pytest.raises(FileNotFoundError, match="remove both"):
        dev_access.make_for_containers(folder, console)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["access"],
        ["access", "console", "*.slatemq-ingest.slatemq.svc"],
        ["access", "console", "--host"],
    ],
    ids=["none", "one", "three", "host without a name"],
)
def test_the_module_refuses_another_number_of_arguments_and_makes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as ended:
        dev_access.main(words)

    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "access").mkdir()

    with pytest.raises(FileExistsError):
        dev_access.make_access(tmp_path / "access")

    assert [file.name for file in tmp_path.iterdir()] == ["access"]
    assert not list((tmp_path / "access").iterdir())


def test_what_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(principal: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(dev_access, "new_token", fail)
    with pytest.raises(OSError, match="full"):
        dev_access.make_access(tmp_path / "access")

    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_variables_and_no_token(tmp_path: Path) -> None:
    folder = tmp_path / "access"

    done = CliRunner().invoke(slatemq, ["access", "init", str(folder), "--json"])

    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["variables"]["SLATEMQ_TLS_CERT"] == str(folder / "service.crt")
    assert all(Path(value).exists() for value in said["variables"].values())
    assert (folder / "operator.token").read_text().strip() not in done.output


def test_the_variables_of_a_folder_can_be_shown_again(tmp_path: Path) -> None:
    folder, runner = tmp_path / "access", CliRunner()
    absent = invoke(["access", "init", str(folder), "--show"])
    made = runner.invoke(slatemq, ["access", "init", str(folder), "--json"])

    shown = runner.invoke(slatemq, ["access", "init", str(folder), "--show", "--json"])

    assert absent == 2
    assert json.loads(shown.stdout)["variables"] == json.loads(made.stdout)["variables"]
