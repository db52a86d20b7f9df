"""What protects the ports of a process, by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.serving.access import protection_of
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import FatalError
from libs.serving.requests.auditing import Auditor
from slatemq.cli.access.dev_access import make_access


def tls_of(folder: Path) -> dict[str, str]:
    """The settings of TLS with the certificates of this folder, which are made."""
    make_access(folder)
    return {
        "tls_ca": str(folder / "ca.crt"),
        "tls_cert": str(folder / "service.crt"),
        "tls_key": str(folder / "service.key"),
    }


def test_a_service_with_tls_and_no_name_of_services_does_not_start(tmp_path: Path) -> None:
    settings: dict[str, Any] = tls_of(tmp_path / "access")
    config = ServingConfig(root="memory:///", service_identity="", **settings)

    with pytest.raises(FatalError, match="--service-identity: must be set: a DNS name"):
        protection_of(config, Auditor("broker-0", lambda act: None))


def test_a_policy_that_leaves_the_port_for_services_open_is_warned_about(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    tls = tls_of(folder)

    def warning(policy: str, **settings: str) -> str:
        config = ServingConfig(root="memory:///", access_policy=policy, **settings)  # type: ignore[arg-type]
        return protection_of(config, Auditor("broker-0", lambda act: None)).warning

    policy = str(folder / "policy.yaml")
    assert "the policy does not hold on the port for services" in warning(policy)
    assert warning(policy, **tls) == warning("") == ""


def test_a_file_that_is_refused_is_named_until_it_is_good_again(tmp_path: Path) -> None:
    make_access(tmp_path / "access")
    policy, tokens = tmp_path / "access/policy.yaml", tmp_path / "access/tokens.yaml"
    config = ServingConfig(
        root="memory:///", access_policy=str(policy), access_tokens=str(tokens), host="127.0.0.1"
    )
    protection = protection_of(config, Auditor("ingest 0", lambda act: None))
    assert protection.callers is not None

    def note_with(text: str) -> str:
        tokens.write_text(text)
        for file in protection.callers.files:  # type: ignore[union-attr]
            file.reload()
        return protection.note

    good = tokens.read_text()
    assert protection.note == ""
    assert note_with("tokens: [secret").startswith("'tokens.yaml' is refused as it is now")
    assert "secret" not in protection.note
    assert "policy.yaml" not in protection.note
    assert note_with(good) == ""
