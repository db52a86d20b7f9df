"""`slatemq instance`: the settings that all processes of the instance share."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

from slatemq.cli.output import note, say, write_json, write_table
from slatemq.cli.parameters import Parsed, flag, format_duration, format_time, parse_duration
from slatemq.cli.session import Group, Session

if TYPE_CHECKING:
    from slatemq._admin.instance import Instance
    from slatemq.client import Client

SETTINGS: Final = (
    "payload_bytes_max",
    "retention_s",
    "max_message_delay_ms",
    "dedupe_window_s",
    "request_id_window_s",
    "replay_window_s",
    "purge_grace_s",
)
"""Their names, which shells complete without loading the client."""

ENDLESS: Final = ("retention_s", "replay_window_s")
"""The settings of which 0 means forever."""

UNITS_MS: Final = {"_ms": 1, "_s": 1000}


def _pair(text: str) -> tuple[str, int]:
    """The name of a setting, and its value in the unit of the setting."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ValueError(f"{text!r} is not a valid setting (expected KEY=VALUE)")
    if name not in SETTINGS:
        known = ", ".join(SETTINGS)
        raise ValueError(f"{name!r} is not a setting of the instance; the settings are {known}")
    if value.isascii() and value.isdigit() and len(value) <= 18:
        return name, int(value)
    unit_ms = _unit_ms(name)
    if unit_ms is None:
        raise ValueError(f"{name} takes a whole number, not {value!r}")
    try:
        length_ms = parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if length_ms % unit_ms:
        raise ValueError(f"{name} is in whole seconds: leave out the milliseconds")
    return name, length_ms // unit_ms


class _Pair(Parsed[tuple[str, int]]):
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(f"{name}=") for name in SETTINGS if name.startswith(incomplete)]


@click.group("instance", cls=Group)
def instance() -> None:
    """Show and change the settings that all processes share."""


@instance.command("show")
def show(session: Session) -> None:
    """Show the settings of the instance.

    Examples:
      slatemq instance show
      slatemq instance show --json | jq .settings.replay_window_s
    """
    found = session.call(lambda client: client.get_instance())
    if session.json:
        write_json(asdict(found))
        return
    say(f"instance record {found.number}, written {format_time(found.written_at_ms)}")
    rows = [(name, value, _readable(name, value)) for name, value in found.settings.items()]
    write_table(("setting", "value", ""), rows)
    if found.wal_store:
        say(f"the write-ahead logs are in {found.wal_store}")


@instance.command("set")
@click.argument(
    "changes", type=_Pair("key=value", _pair), metavar="KEY=VALUE...", nargs=-1, required=True
)
@flag(
    "--accept-loss",
    help="Permit a shorter replay_window_s or purge_grace_s, which may remove messages that "
    "the longer one would have kept.",
)
def set_(session: Session, changes: tuple[tuple[str, int], ...], accept_loss: bool) -> None:
    """Change settings of the instance, unless something would be lost.

    Examples:
      slatemq instance set replay_window_s=14d
      slatemq instance set max_message_delay_ms=3600000 retention_s=0
      slatemq instance set replay_window_s=1d --accept-loss

    A value is a whole number in the unit of the setting, or a duration such as
    7d where that unit is one of time. A process uses the new values once it is
    restarted; `slatemq status` names those that run with older ones.
    """

    async def change(client: Client) -> tuple[Instance, Instance]:
        before = await client.get_instance()
        return before, await client.update_instance(dict(changes), accept_loss=accept_loss)

    before, after = session.call(change)
    is_same = before.number == after.number
    same = " has these values already" if is_same else ""
    session.show(asdict(after), f"instance record {after.number}{same}")
    if is_same:
        return
    if not session.json:
        for name, value in after.settings.items():
            if before.settings.get(name) != value:
                say(f"  {name}  {before.settings.get(name)} -> {value}")
    note(
        "restart each process to apply it: brokers, routers and janitors first, ingests last. "
        "`slatemq status` names the processes that run with an older record"
    )


def _unit_ms(name: str) -> int | None:
    return next((unit_ms for suffix, unit_ms in UNITS_MS.items() if name.endswith(suffix)), None)


def _readable(name: str, value: int) -> str:
    if value == 0 and name in ENDLESS:
        return "forever"
    unit_ms = _unit_ms(name)
    if unit_ms is not None:
        return format_duration(value * unit_ms)
    return f"{value / (1 << 20):,.1f} MiB"
