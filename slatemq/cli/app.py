"""The root command, and how every command ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from slatemq import __version__
from slatemq.cli import interrupts
from slatemq.cli.failures import (
    EXIT_DONE,
    EXIT_REFUSED,
    EXIT_SIGNALLED,
    EXIT_USAGE,
    BadInput,
    Interrupted,
    ReaderGone,
    error_fields,
    exit_code,
    sentence,
)
from slatemq.cli.output import note
from slatemq.cli.session import SESSION_OPTIONS, CommandEntry, Group, Session
from slatemq.errors import SlateMQError
from slatemq.variables import unknown_variables

EPILOG = """\
To start, with a local stack running (`make up`):
  slatemq queue create greetings
  slatemq publish --to greetings 'hello, world'
  slatemq claim greetings
  slatemq ack LEASE            LEASE is what claim printed
  slatemq status

Whole files, and programs as consumers:
  slatemq queue create eu --filter 'headers["region"] == "eu"'
  slatemq publish --jsonl events.jsonl --headers-from /type,/region
  slatemq consume eu --exec ./work.sh --concurrency 4

Repair:
  slatemq message ls orders --state delayed
  slatemq failed ls orders
  slatemq failed redrive orders

Durations are written 500ms, 30s, 2h, 7d, 1h30m. Results go to stdout, errors
and notes to stderr. With --json, before or after the command, each result is
one JSON object on a line, with IDs as text. `slatemq COMMAND --help` has
examples.

Exit codes: 0 done, 1 refused by the server, 2 wrong usage or input,
3 unreachable, 130 after Ctrl-C, 143 after SIGTERM, 141 when the reader of the
output closed it.
"""


class _Root(Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Click would exit with 1, which means refused.
            raise ReaderGone from None


_COMMANDS = (
    ("queue", "queue.queues", "Create, list, change, pause, purge and delete queues."),
    ("publish", "publish.publishing", "Publish one message, or each line of a file with --jsonl."),
    ("claim", "consume.claiming", "Claim messages of QUEUE, and print them with their leases."),
    ("ack", "consume.claiming", "Mark claimed messages as done; they are not delivered again."),
    (
        "nack",
        "consume.claiming",
        "Return claimed messages to their queue; without attempts left they fail.",
    ),
    ("extend", "consume.claiming", "Extend the leases of claimed messages."),
    ("consume", "consume.consuming", "Take messages of QUEUE as they come, and ack them."),
    ("message", "repair.messages", "Show, cancel, reschedule and edit single messages."),
    ("done", "repair.messages", "List the messages that are done."),
    ("failed", "repair.dead_letters", "Show, edit, redrive and remove dead letters."),
    ("export", "files.exporting", "Write messages of QUEUE that are in one state to a queue file."),
    (
        "import_",
        "files.importing",
        "Import the queued messages of FILE (- reads stdin) into a queue, or publish them.",
    ),
    (
        "events",
        "publish.events",
        "Import events of S3 stores, and show how far SlateMQ's own are published.",
    ),
    (
        "outbox",
        "repair.outbox",
        "List pushes that have not arrived, and retry or discard refused ones.",
    ),
    ("task", "publish.tasks", "Show publishes accepted as tasks, and retry those that failed."),
    ("janitor", "janitor", "Run the jobs that clean up, archive and report."),
    (
        "verify",
        "verifying",
        "Verify the instance: every record, file and cross-reference; change nothing.",
    ),
    ("repair", "verifying", "Verify the instance, then remove what is left over."),
    ("shard", "shards", "List, add, drain and remove shards; move queues between them."),
    ("instance", "instance", "Show and change the settings that all processes share."),
    ("access", "access.access", "Make tokens for programs, and explain what the policy permits."),
    ("certs", "access.certs", "Make certificates for a stack on this machine."),
    (
        "explain",
        "queue.inspecting",
        "Show which queues a message with these headers would reach, and why.",
    ),
    (
        "status",
        "queue.inspecting",
        "Show every service and shard, the lag of routing, and the depth of the queues.",
    ),
    (
        "doctor",
        "monitor.doctor",
        "Examine the instance: processes, clocks, store, certificates; say what to do.",
    ),
    (
        "top",
        "monitor.top",
        "Show the queues live: rates, depth, age of the oldest message, lag of routing.",
    ),
    ("tq", "tq.commands", "Work with queue files (TextQueue), without a server."),
)

COMMANDS = {
    name.rstrip("_"): CommandEntry(f"slatemq.cli.{module}", name, summary)
    for name, module, summary in _COMMANDS
}


@click.group(
    cls=_Root,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
    no_args_is_help=True,
    params=[*SESSION_OPTIONS],
)
@click.version_option(__version__, prog_name="slatemq")
def slatemq() -> None:
    """Work with SlateMQ: durable queues on an object store."""


def main() -> int:
    _open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="slatemq: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show must not fail the command.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = interrupts.EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt):
        interrupts.raised()
        code = invoke(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
    # From here on the interpreter exits, and would print a traceback for a Ctrl-C.
    interrupts.end_with(code)
    return code


def _open_closed_streams() -> None:
    """Open what a shell has closed (`<&-`) on /dev/null, so that no file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def invoke(arguments: Sequence[str]) -> int:
    session = Session()
    if unknown := unknown_variables(os.environ):
        note(f"warning: {unknown}")
    code = EXIT_DONE
    try:
        code = _run(arguments, session)
    finally:
        try:
            for report in session.at_end:
                report()
            sys.stdout.flush()
        except (ReaderGone, BrokenPipeError):
            _silence()
        except OSError as error:  # A full disk, say.
            _silence()
            code = code or _refused_by_system(error)
    return code


def _run(arguments: Sequence[str], session: Session) -> int:
    try:
        slatemq.main(list(arguments), prog_name="slatemq", obj=session, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_REFUSED
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        error.show()
        return EXIT_USAGE
    except BadInput as error:
        note(str(error))
        return EXIT_USAGE
    except click.Abort as error:
        # After a no; a Ctrl-C may have ended a command that had done a part.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            note("nothing was done")
        return EXIT_SIGNALLED + signal.SIGINT
    except Interrupted as error:
        return EXIT_SIGNALLED + error.number
    except KeyboardInterrupt:
        return EXIT_SIGNALLED + signal.SIGINT
    except SlateMQError as error:
        _report(error, session.json)
        return exit_code(error)
    except (ReaderGone, BrokenPipeError):
        _silence()
        return EXIT_SIGNALLED + signal.SIGPIPE
    except OSError as error:
        return _refused_by_system(error)
    return EXIT_DONE


def _refused_by_system(error: OSError) -> int:
    note(f"{error.filename or 'input or output'}: {error.strerror or error}")
    return EXIT_USAGE


def _report(error: SlateMQError, as_json: bool) -> None:
    with suppress(BrokenPipeError):
        if as_json:
            print(json.dumps({"error": error_fields(error)}), file=sys.stderr)
        else:
            note(sentence(error))


def _silence() -> None:
    """What a stdout that takes nothing has in its buffers must not fail again at the exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
