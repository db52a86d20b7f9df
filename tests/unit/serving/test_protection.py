"""What protects the ports of a process, by its settings."""

from __future__ import annotations

from pathlib import Path

from libs.serving.access import protection_of
from libs.serving.process.config import ServingConfig
from libs.serving.requests.auditing import Auditor
from slatemq.cli.access.dev_access import make_access


def test_a_policy_that_leaves_the_port_for_services_open_is_warned_about(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    make_access(folder)
    tls = {
        "tls_ca": str(folder / "ca.crt"),
        "tls_cert": str(folder / "service.crt"),
        "tls_key": str(folder / "service.key"),
    }

    def warning(policy: str, **settings: str) -> str:
        config = ServingConfig(root="memory:///", access_policy=policy, **settings)  # type: ignore[arg-type]
        return protection_of(config, Auditor(lambda act: None)).warning

    policy = str(folder / "policy.yaml")
    assert "the policy does not hold on the port for services" in warning(policy)
    assert warning(policy, **tls) == warning("") == ""
