"""`slatemq instance`: the settings that all processes of the instance have alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from slatemq.cli.durations import format_duration, parse_duration
from slatemq.cli.groups import Group
from slatemq.cli.output import note, say, write_json, write_table
from slatemq.cli.queue_options import format_time
from slatemq.cli.session import Session, pass_session, run, session_options

if TYPE_CHECKING:
    from slatemq._admin.instance import Instance

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

WITHOUT_END: Final = ("retention_s", "replay_window_s")
"""Those of which 0 is for ever."""

UNITS_MS: Final = {"_ms": 1, "_s": 1000}

SHOW_EPILOG = """\
\b
Examples:
  slatemq instance show
  slatemq instance show --json | jq .settings.replay_window_s
"""

SET_EPILOG = """\
\b
Examples:
  slatemq instance set replay_window_s=14d
  slatemq instance set max_message_delay_ms=3600000 retention_s=0
  slatemq instance set replay_window_s=1d --accept-loss

\b
A value is a whole number in the unit of the setting, or a duration such as
7d where that unit is one of time. Each process follows once it is started
again; `slatemq status` names those that run with an older record.
"""


class _Pair(click.ParamType[tuple[str, int]]):
    """`KEY=VALUE`; gives the name of a setting and its value in the unit of the setting."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not text:
            self.fail(f"{value!r} is not a change: write KEY=VALUE", param, ctx)
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            self.fail(f"{name!r} is not a setting of the instance; there are {known}", param, ctx)
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return name, int(text)
        unit_ms = _unit_ms(name)
        if unit_ms is None:
            self.fail(f"{name} takes a whole number, not {text!r}", param, ctx)
        try:
            length_ms = parse_duration(text)
        except ValueError as error:
            self.fail(f"{name}: {error}", param, ctx)
        if length_ms % unit_ms:
            self.fail(f"{name} is in whole seconds: leave out the milliseconds", param, ctx)
        return name, length_ms // unit_ms

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(f"{name}=") for name in SETTINGS if name.startswith(incomplete)]


@click.group("instance", cls=Group)
def instance() -> None:
    """See and change the settings that all processes of the instance have alike."""


@instance.command("show", epilog=SHOW_EPILOG)
@session_options
@pass_session
def show(session: Session) -> None:
    """Show the settings of the instance."""

    async def work() -> Instance:
        async with session.connect() as client:
            return await client.get_instance()

    found = run(work())
    if session.json:
        write_json(_fields(found))
        return
    say(f"instance record {found.number}, written {format_time(found.written_at_ms)}")
    rows = [(name, value, _readable(name, value)) for name, value in found.settings.items()]
    write_table(("setting", "value", ""), rows)


@instance.command("set", epilog=SET_EPILOG)
@click.argument("changes", type=_Pair(), metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Permit a shorter replay_window_s or purge_grace_s, by which messages may be removed "
    "that would have been kept.",
)
@session_options
@pass_session
def set_(session: Session, changes: tuple[tuple[str, int], ...], accept_loss: bool) -> None:
    """Change settings of the instance, unless something would be lost."""

    async def work() -> tuple[Instance, Instance]:
        async with session.connect() as client:
            before = await client.get_instance()
            return before, await client.update_instance(dict(changes), accept_loss=accept_loss)

    before, after = run(work())
    if session.json:
        write_json(_fields(after))
    elif before.number == after.number:
        say(f"instance record {after.number} has these values already")
    else:
        say(f"instance record {after.number}")
        for name, value in after.settings.items():
            if before.settings.get(name) != value:
                say(f"  {name}  {before.settings.get(name)} -> {value}")
    if before.number != after.number:
        note(
            "each process follows once it is started again: brokers, routers and janitors first, "
            "ingests last. `slatemq status` names those that run with an older record"
        )


def _fields(found: Instance) -> dict[str, Any]:
    return {
        "number": found.number,
        "written_at_ms": found.written_at_ms,
        "settings": dict(found.settings),
    }


def _unit_ms(name: str) -> int | None:
    for suffix, unit_ms in UNITS_MS.items():
        if name.endswith(suffix):
            return unit_ms
    return None


def _readable(name: str, value: int) -> str:
    if value == 0 and name in WITHOUT_END:
        return "for ever"
    unit_ms = _unit_ms(name)
    if unit_ms is not None:
        return format_duration(value * unit_ms)
    return f"{value / (1 << 20):,.1f} MiB"
