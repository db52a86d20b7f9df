"""All that a local stack needs to run with TLS and a policy: for development, not for production.

Containers run `python -m slatemq.cli.access.dev_access DIR CONSOLE_DIR`, which leaves a DIR that
exists as it is. CONSOLE_DIR is what the console may read: no service's key, and no token. For
Kubernetes, `--host NAME` adds the names that the pods advertise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slatemq._tokens import new_token
from slatemq.cli.access.dev_certificates import LOOPBACK, Authority, make_certificates, write_new
from slatemq.cli.access.token_files import add_entry, write_token

OPERATOR: Final = "operator"

CONSOLE_NAME: Final = "slatemq-console"
"""The name by which the console's probes on Kubernetes ask."""

CONTAINER_DAYS: Final = 398
"""How long their certificates are valid: browsers take none that is for longer."""

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

VARIABLES: Final = {**SETTINGS, "SLATEMQ_CA": "ca.crt", "SLATEMQ_TOKEN_FILE": "operator.token"}
"""The settings of the services and of the commands, and the file of each."""


def make_access(
    folder: Path,
    hosts: Sequence[str] = (),
    days: int = 30,
    authority: Authority | None = None,
) -> list[Path]:
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
        files = make_certificates(making, hosts=hosts, days=days, authority=authority)
        token = new_token(OPERATOR)
        files += [making / name for name in ("operator.token", "tokens.yaml", "policy.yaml")]
        write_token(files[-3], token)
        add_entry(files[-2], token)
        files[-1].write_text(POLICY, encoding="utf-8")
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return [folder / file.name for file in files]


def make_for_containers(folder: Path, console: Path, hosts: Sequence[str] = ()) -> None:
    """Make both folders, unless the first is there: `ca.crt`, `console.crt` and its key for one.

    `hosts` are further names of the services.

    Raises:
        FileNotFoundError: The first is there without the other.
        OSError: Something cannot be written.
    """
    if folder.exists():
        if not console.exists():
            raise FileNotFoundError(f"there is {folder}, but no {console}: make it, or remove both")
        return
    authority = Authority(CONTAINER_DAYS)
    # Of an earlier authority, which is gone.
    shutil.rmtree(console, ignore_errors=True)
    console.mkdir(mode=0o700)
    certificate, key = authority.sign("console", (CONSOLE_NAME, *LOOPBACK))
    files = {"ca.crt": authority.pem, "console.crt": certificate, "console.key": key}
    for name, data in files.items():
        write_new(console / name, data)
    make_access(folder, hosts, CONTAINER_DAYS, authority)


def main(arguments: Sequence[str]) -> None:
    """Raises SystemExit: 2 for arguments that are wrong, 1 where a folder cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m slatemq.cli.access.dev_access", allow_abbrev=False
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("console", metavar="CONSOLE_DIR", type=Path)
    parser.add_argument("--host", dest="hosts", metavar="NAME", action="append", default=[])
    args = parser.parse_args(arguments)
    try:
        make_for_containers(args.folder, args.console, args.hosts)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
