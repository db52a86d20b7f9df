"""Groups of commands."""

from __future__ import annotations

import click


class Group(click.Group):
    """Lists its commands with the first sentence of each, whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list for the help."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(limit=500)) for name, one in found if one is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
