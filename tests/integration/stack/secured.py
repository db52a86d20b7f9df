"""A whole stack with TLS, tokens and a policy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import slatemq
from slatemq._tokens import NewToken, new_token
from slatemq.cli.access.dev_certificates import make_certificates
from tests.acceptance.local_stack import LocalStack

POLICY: dict[str, Any] = {
    "roles": {
        "shop": [
            {
                "verbs": ["publish"],
                "queues": ["orders*"],
                "when": "headers.tenant == principal.tenant",
            },
            {"verbs": ["consume", "inspect"], "queues": ["orders*"]},
        ],
        "editor": [
            {
                "verbs": ["publish"],
                "queues": ["orders*"],
                "when": "headers.tenant == principal.tenant",
            },
            {"verbs": ["inspect", "edit"], "queues": ["orders*"]},
        ],
        "all": [
            {"verbs": ["publish", "consume", "inspect", "edit", "administer", "operate"]},
        ],
    },
    "bindings": [
        {"principals": ["shop"], "roles": ["shop"]},
        {"principals": ["editor"], "roles": ["editor"]},
        {"principals": ["ops"], "roles": ["all"]},
    ],
    "limits": [{"principals": ["shop"], "publish_messages_per_s": 5}],
}


class Secured:
    """The stack, and what its clients have."""

    def __init__(
        self,
        folder: Path,
        policy: Mapping[str, Any] = POLICY,
        names: Sequence[str] = ("shop", "editor", "ops", "stranger"),
    ) -> None:
        """Write a policy, and tokens of these principals."""
        self.folder = folder
        self.certificates = folder / "certs"
        make_certificates(self.certificates)
        self.tokens = {name: new_token(name, {"tenant": "acme"}) for name in names}
        self.write_tokens(*self.tokens.values())
        self.write_policy(policy)

    def write_policy(self, policy: Mapping[str, Any]) -> None:
        (self.folder / "policy.yaml").write_text(yaml.safe_dump(dict(policy)))

    def write_tokens(self, *tokens: NewToken) -> None:
        entries = [token.entry for token in tokens]
        (self.folder / "tokens.yaml").write_text(yaml.safe_dump({"tokens": entries}))

    @property
    def environ(self) -> dict[str, str]:
        return {
            "SLATEMQ_TLS_CA": str(self.certificates / "ca.crt"),
            "SLATEMQ_TLS_CERT": str(self.certificates / "service.crt"),
            "SLATEMQ_TLS_KEY": str(self.certificates / "service.key"),
            "SLATEMQ_ACCESS_POLICY": str(self.folder / "policy.yaml"),
            "SLATEMQ_ACCESS_TOKENS": str(self.folder / "tokens.yaml"),
        }

    @contextmanager
    def running(self, *arguments: str) -> Iterator[LocalStack]:
        """The stack itself, started with these arguments."""
        before = dict(os.environ)
        os.environ.update(self.environ)
        try:
            with LocalStack(self.folder / "stack", *arguments, ready=True) as stack:
                yield stack
        finally:
            os.environ.clear()
            os.environ.update(before)

    def credentials(self, name: str) -> slatemq.Credentials:
        token = self.tokens[name].token if name else ""
        return slatemq.Credentials(ca=self.certificates / "ca.crt", token=token)
