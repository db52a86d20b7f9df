"""All that a local stack needs to run with TLS and a policy: for development, not for production.

Containers run `python -m slatemq.cli.access.dev_access DIR HOST...`, which leaves a DIR that exists
as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slatemq._tokens import NewToken, new_token
from slatemq.cli.access.dev_certificates import make_certificates

OPERATOR: Final = "operator"

POLICY: Final = f"""\
# What principals may do: docs/how-to/secure.md
roles:
  all:
    - verbs: [publish, consume, inspect, edit, administer, operate]
bindings:
  - principals: [{OPERATOR}]
    roles: [all]
"""

SETTINGS: Final = {
    "SLATEMQ_TLS_CA": "ca.crt",
    "SLATEMQ_TLS_CERT": "service.crt",
    "SLATEMQ_TLS_KEY": "service.key",
    "SLATEMQ_ACCESS_POLICY": "policy.yaml",
    "SLATEMQ_ACCESS_TOKENS": "tokens.yaml",
}
"""The settings of the services, and the file of each."""


def make_access(folder: Path, hosts: Sequence[str] = (), days: int = 30) -> list[Path]:
    """Make a folder with all files or none, with mode 0700, and 0600 for what is secret.

    ::

        ca.crt, service.*, client.*   as of `make_certificates`
        operator.token                of a principal that may do everything
        tokens.yaml                   its hash, for the services
        policy.yaml                   says what it may do

    Raises:
        FileExistsError: The folder is there.
        OSError: Something cannot be written.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        files = make_certificates(making, hosts=hosts, days=days)
        token = new_token(OPERATOR)
        texts = {
            "operator.token": f"{token.token}\n",
            "tokens.yaml": f"tokens:\n{entry_lines(token)}\n",
            "policy.yaml": POLICY,
        }
        for name, text in texts.items():
            files.append(making / name)
            files[-1].touch(0o600)
            files[-1].write_text(text, encoding="utf-8")
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return [folder / file.name for file in files]


def entry_lines(made: NewToken) -> str:
    """A token's entry in YAML, of which JSON is a part: no library is needed to write it."""
    pairs = [
        f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in made.entry.items()
    ]
    return "\n".join(("  - " if n == 0 else "    ") + pair for n, pair in enumerate(pairs))


if __name__ == "__main__":
    made_in = Path(sys.argv[1])
    if not made_in.exists():
        make_access(made_in, sys.argv[2:], days=398)
