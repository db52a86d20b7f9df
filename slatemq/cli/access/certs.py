"""`slatemq certs`: certificates for a stack on one machine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from slatemq.cli.failures import BadInput
from slatemq.cli.output import note
from slatemq.cli.session import Group, LocalCommand, Session

hosts_option = click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another name or IP address of the services, besides those of this machine. Repeatable.",
)


@click.group("certs", cls=Group)
def certs() -> None:
    """Make certificates for a stack on this machine."""


@certs.command("dev", cls=LocalCommand)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@hosts_option
@click.option(
    "--client",
    default="dev-client",
    show_default=True,
    metavar="NAME",
    help="The name that policies call the client.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 398),
    default=30,
    show_default=True,
    metavar="N",
    help="How long the certificates are valid.",
)
def dev(session: Session, folder: Path, hosts: tuple[str, ...], client: str, days: int) -> None:
    """Make a throwaway authority, and certificates for services and a client.

    They are for development alone: production needs an authority whose key is kept, and
    certificates that are renewed.

    DIR gets ca.crt, service.crt and service.key for the services, client.crt and client.key for a
    client. The authority's own key is thrown away, so nothing more can be signed by it; make
    another DIR to add a client.

    Examples:
      slatemq certs dev certs
      slatemq certs dev certs --host build-7.internal --client ci --days 7
    """
    # Loaded when it is wanted, with the library for certificates.
    module = import_module("slatemq.cli.access.dev_certificates")
    try:
        files = module.make_certificates(folder, hosts=hosts, client=client, days=days)
    except FileExistsError as error:
        raise BadInput(f"{error}: name a new folder, or remove it first") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot make certificates in {folder}: {error}") from error
    names = [str(file) for file in files]
    session.show({"files": names}, "\n".join(names))
    note("for development alone, not for production")
