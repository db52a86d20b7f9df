"""`slatemq access`: tokens for those who call."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import click

from slatemq._tokens import NewToken, new_token
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import Parsed, parse_duration
from slatemq.cli.session import Group, Session

NAME_LENGTH_MAX = 255


@click.group("access", cls=Group)
def access() -> None:
    """Make tokens for programs that call SlateMQ."""


def _principal(text: str) -> str:
    if not 0 < len(text) <= NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"must have 1 to {NAME_LENGTH_MAX} printable characters")
    return text


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not a valid attribute (expected KEY=VALUE)")
    return name, value


@access.command("token")
@click.argument("principal", type=Parsed("name", _principal), metavar="PRINCIPAL")
@click.option(
    "--attribute",
    "attributes",
    type=Parsed("key=value", _attribute),
    multiple=True,
    metavar="KEY=VALUE",
    help="A fact of the caller that conditions of the policy can read. Repeatable; a key that is "
    "repeated has a list.",
)
@click.option(
    "--expires",
    "lifetime_ms",
    type=Parsed("duration", parse_duration),
    metavar="DURATION",
    help="How long the token is valid. [default: until its entry is removed]",
)
def token(
    session: Session,
    principal: str,
    attributes: tuple[tuple[str, str], ...],
    lifetime_ms: int | None,
) -> None:
    """Make a token for PRINCIPAL, and the entry for the services' file of tokens.

    The token is printed once and kept nowhere: give it to the program that calls, in SLATEMQ_TOKEN
    or a file. The entry has its hash alone: add it to the list `tokens` of the file that the
    services read (--access-tokens). They take it within seconds.

    Examples:
      slatemq access token shop
      slatemq access token shop --attribute tenant=acme --expires 90d
      slatemq access token shop --json | jq -r .token > shop.token
    """
    collected: dict[str, str | list[str]] = {}
    for name, value in attributes:
        before = collected.get(name)
        match before:
            case None:
                collected[name] = value
            case str():
                collected[name] = [before, value]
            case list():
                before.append(value)
    expires = None
    if lifetime_ms is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(milliseconds=lifetime_ms)
    made = new_token(principal, collected, expires)
    if session.json:
        write_json({"token": made.token, "entry": made.entry})
        return
    say(made.token)
    note("add this to the list `tokens` of the services' file:\n" + _entry_lines(made))


def _entry_lines(made: NewToken) -> str:
    """The entry in YAML, of which JSON is a part: no library is needed to write it."""
    pairs = [
        f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in made.entry.items()
    ]
    return "\n".join(("  - " if n == 0 else "    ") + pair for n, pair in enumerate(pairs))
