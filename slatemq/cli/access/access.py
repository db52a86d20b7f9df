"""`slatemq access`: tokens for callers, and what the policy permits them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slatemq._tokens import new_token
from slatemq.cli.access.certs import hosts_option
from slatemq.cli.access.policy_files import judge_by_file
from slatemq.cli.failures import EXIT_REFUSED, BadInput
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import (
    HEADER,
    Parsed,
    flag,
    format_time,
    headers_of,
    parse_duration,
)
from slatemq.cli.session import Group, LocalCommand, Session

if TYPE_CHECKING:
    from slatemq.models import AccessCheck

NAME_LENGTH_MAX = 255
ATTRIBUTES_MAX = 64
"""The services refuse a file of tokens with more of one, or with longer names, as a whole."""

KEY_LENGTH_MAX = 1024
"""YAML takes no longer names, with quotes and escapes."""

VERBS = ("publish", "consume", "inspect", "edit", "administer", "operate")

_FINDINGS = {
    "permits": "this rule permits it: {}",
    "other_queues": "this rule is only about {}",
    "condition_false": "this rule's condition is false: {}",
    "condition_failed": "this rule's condition cannot be evaluated: {}",
}


@click.group("access", cls=Group)
def access() -> None:
    """Make tokens for programs, and explain what the policy permits."""


def _principal(text: str) -> str:
    if not 0 < len(text) <= NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"must have 1 to {NAME_LENGTH_MAX} printable characters")
    return text


_Value = str | list[str]


def _attribute(text: str) -> tuple[str, _Value]:
    name, equals, value = text.partition("=")
    is_list = name.endswith("+")
    name = name.removesuffix("+")
    if not name or not equals:
        raise ValueError(f"{text!r} is not a valid attribute (expected KEY=VALUE or KEY+=VALUE)")
    return name, [value] if is_list else value


ATTRIBUTE = click.option(
    "--attribute",
    "attributes",
    type=Parsed("key=value", _attribute),
    multiple=True,
    metavar="KEY=VALUE",
    help="A fact of the caller that conditions of the policy can read. Repeatable; a key that is "
    "repeated has a list. KEY+=VALUE adds to a list, also as its only value.",
)


@access.command("token", cls=LocalCommand)
@click.argument("principal", type=Parsed("name", _principal), metavar="PRINCIPAL")
@ATTRIBUTE
@click.option(
    "--expires",
    "lifetime_ms",
    type=Parsed("duration", parse_duration),
    metavar="DURATION",
    help="How long the token is valid. [default: until its entry is removed]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the token to this new file, which only its user can read; do not print it.",
)
@click.option(
    "--add-to",
    "tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add the entry to this file of tokens, created if needed, instead of printing it.",
)
def token(
    session: Session,
    principal: str,
    attributes: tuple[tuple[str, _Value], ...],
    lifetime_ms: int | None,
    out: Path | None,
    tokens: Path | None,
) -> None:
    """Make a token for PRINCIPAL, and the entry for the services' file of tokens.

    The token is shown once and stored nowhere else: give it to the program that calls, in
    SLATEMQ_TOKEN or a file. The entry has only its hash, and belongs in the list `tokens` of the
    file that the services read (--access-tokens). They accept it within seconds.

    Examples:
      slatemq access token shop --add-to tokens.yaml --out shop.token
      slatemq access token shop --attribute tenant=acme --attribute groups+=eu --expires 90d
      slatemq access token shop --json | jq -r .token > shop.token
    """
    facts = _collected(attributes)
    _check_attributes(facts)
    expires = None
    if lifetime_ms is not None:
        if lifetime_ms < 1_000:
            raise click.UsageError("--expires must be at least 1s")
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(milliseconds=lifetime_ms)
    made = new_token(principal, facts, expires)
    files = import_module("slatemq.cli.access.token_files")
    try:
        # The token first: an entry whose token is lost would stay for ever.
        if out is not None:
            files.write_token(out, made)
        if tokens is not None:
            files.add_entry(tokens, made)
    except FileExistsError as error:
        todo = "name another file, or remove it first"
        raise BadInput(f"{error.filename} exists already: {todo}") from error
    except (OSError, ValueError) as error:
        if out is not None:
            out.unlink(missing_ok=True)
        problem = getattr(error, "strerror", None) or error
        raise BadInput(f"{getattr(error, 'filename', None) or tokens}: {problem}") from error
    if session.json:
        shown = {"token": made.token} if out is None else {"token_file": str(out)}
        write_json({**shown, "entry": made.entry})
        return
    say(made.token if out is None else str(out))
    if tokens is None:
        entry = files.entry_lines(made)
        note(f"add this to the list `tokens` of the services' file:\n{entry}")


def _collected(attributes: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    collected: dict[str, _Value] = {}
    for name, value in attributes:
        before = collected.get(name)
        collected[name] = value if before is None else [*_listed(before), *_listed(value)]
    return collected


def _check_attributes(facts: dict[str, _Value]) -> None:
    if len(facts) > ATTRIBUTES_MAX:
        raise click.UsageError(f"a token has {ATTRIBUTES_MAX} attributes at most")
    for name, value in facts.items():
        if len(name) > NAME_LENGTH_MAX:
            raise click.UsageError(f"names of attributes have {NAME_LENGTH_MAX} characters at most")
        if len(import_module("slatemq.cli.access.token_files").quoted(name)) > KEY_LENGTH_MAX:
            raise click.UsageError(f"the attribute {name!a} is too long with its escapes")
        try:
            "".join((name, *_listed(value))).encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"the attribute {name!a} is not text in UTF-8") from None


def _listed(value: _Value) -> list[str]:
    return [value] if isinstance(value, str) else value


@access.command("check")
@click.argument("principal", type=Parsed("name", _principal), metavar="PRINCIPAL")
@click.argument("verb", type=click.Choice(VERBS), metavar="VERB")
@click.argument("queue", default="", metavar="[QUEUE]")
@click.option(
    "--header",
    "pairs",
    type=HEADER,
    multiple=True,
    help="A header of the message to publish, for conditions of the policy; repeatable.",
)
@ATTRIBUTE
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Judge by this file, such as one to be rolled out, instead of asking a service.",
)
def check(
    session: Session,
    principal: str,
    verb: str,
    queue: str,
    pairs: tuple[tuple[str, str], ...],
    attributes: tuple[tuple[str, _Value], ...],
    policy: Path | None,
) -> None:
    """Explain whether the policy permits PRINCIPAL to do VERB on QUEUE, and why.

    VERB is publish, consume, inspect, edit, administer or operate. Without QUEUE, it is about all
    queues; a message published without a queue needs a rule for all of them. `operate` takes none.

    Shows the rule that decides, or all rules that come close: those of the same verb for other
    queues, or with a condition that is false. A service answers by the policy that it has loaded,
    for which the caller needs the verb operate. With --policy no service is asked; this needs the
    packages of the services.

    Exits with 0 if it is permitted, and with 1 if not.

    Examples:
      slatemq access check shop consume orders
      slatemq access check shop publish orders --header tenant=acme --attribute tenant=acme
      slatemq access check shop publish orders --policy new-policy.yaml --json | jq .rules
      slatemq access check ops operate --policy policy.yaml && kubectl apply -f policy.yaml
    """
    headers = headers_of(None, pairs)
    if headers and verb != "publish":
        raise click.UsageError("--header is for the verb publish: only its rules have conditions")
    if "queue" in headers:
        raise click.UsageError("name the queue as QUEUE, not as a header")
    if queue and verb == "operate":
        raise click.UsageError("operate covers the whole instance: leave out QUEUE")
    facts = _collected(attributes)
    if policy is not None:
        found = judge_by_file(policy, principal, verb, queue, headers, facts)
    else:
        found = session.call(
            lambda client: client.check_access(
                principal, verb, queue, headers=headers, attributes=facts
            )
        )
    if session.json:
        write_json(asdict(found))
    else:
        _show(found, verb)
    if not found.permitted:
        sys.exit(EXIT_REFUSED)


def _show(found: AccessCheck, verb: str) -> None:
    say(found.reason if found.permitted else f"not permitted: {found.reason}")
    for rule in found.rules:
        say(f"  {rule.place}, line {rule.line}, by {rule.binding}, line {rule.binding_line}")
        say(f"    {_FINDINGS[rule.finding].format(rule.detail)}")
    if not found.rules and found.roles:
        roles = ", ".join(found.roles)
        say(f"  no rule of its roles has the verb {verb}; its roles are: {roles}")
    if found.address:
        loaded = format_time(found.loaded_at_ms)
        note(
            f"by {found.policy_file}, of which {found.address} loaded version "
            f"{found.policy_version} at {loaded}"
        )


@access.command("init", cls=LocalCommand)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@hosts_option
@flag("--show", help="Make nothing: print the variables of a DIR that exists.")
def init(session: Session, folder: Path, hosts: tuple[str, ...], show: bool) -> None:
    """Make DIR with everything that a stack on this machine needs for TLS and a policy.

    DIR gets the certificates of `slatemq certs dev`, a token of a principal `operator` that may do
    everything, the file of tokens for the services, and a policy to begin with. The variables that
    are printed make the services and the commands of a shell use them.

    Examples:
      slatemq access init dev-access
      eval "$(slatemq access init dev-access)"; python -m services --data data --ports 7420
      eval "$(slatemq access init dev-access --show)"     in another shell
    """
    # Loaded when it is wanted, with the library for certificates.
    module = import_module("slatemq.cli.access.dev_access")
    here = folder.resolve()
    variables = {name: str(here / file) for name, file in module.VARIABLES.items()}
    files = sorted({Path(file) for file in variables.values()})
    if show:
        if absent := [file for file in files if not file.exists()]:
            raise BadInput(f"{absent[0]} does not exist: make {folder} without --show")
    else:
        try:
            files = module.make_access(folder, hosts)
        except FileExistsError as error:
            raise BadInput(
                f"{error}: --show prints its variables; else name a new folder, or remove it first"
            ) from error
        except (OSError, ValueError) as error:
            raise BadInput(f"cannot make {folder}: {error}") from error
        note("for development alone, not for production")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    session.show({"files": [str(file) for file in files], "variables": variables}, "\n".join(lines))
