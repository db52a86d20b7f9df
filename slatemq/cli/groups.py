"""Groups of commands, whose modules are loaded only when one of their commands runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from slatemq.cli import interrupts
from slatemq.cli.session import Command, verbatim


class Place(NamedTuple):
    """Where a command is defined, and its line in the list of commands.

    The line repeats the command's own help, because the list is shown without loading the command.
    """

    module: str
    name: str
    summary: str


class Group(click.Group):
    """Lists its commands with the first sentence of each, in full.

    Commands in `places` are loaded when they run: loading all of them takes longer than most of
    them run.
    """

    command_class = Command

    def __init__(
        self, *args: Any, places: Mapping[str, Place] | None = None, epilog: str = "", **kwargs: Any
    ):
        super().__init__(*args, epilog=verbatim(epilog), **kwargs)
        self.places = dict(places or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.places.get(cmd_name)
        if place is None or cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        with interrupts.ending():
            command: click.Command = getattr(import_module(place.module), place.name)
        self.add_command(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._summary(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str) -> str:
        if name in self.places:
            return self.places[name].summary
        command = self.get_command(ctx, name)
        return command.get_short_help_str(limit=500) if command is not None else ""
