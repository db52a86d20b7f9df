"""Editors that are not there, and what some of them make of a file of dead letters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.acceptance.local_stack import wait_until
from tests.integration.cli.queue_file_calls import contents, counts, dead_letters, edited, new_queue
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack


def test_windows_line_ends_are_taken_back_where_no_line_had_one_before(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one\r and\ntwo", b"fix me", headers={"type": "order"})

    # When an editor changes nothing but them, then nothing was changed
    done = edited(cli, queue, tmp_path, "text = text.replace('\\n', '\\r\\n')")
    assert (done.code, "nothing was changed" in done.err) == (0, True)

    # When it saves the whole file with those of Windows, one message edited
    script = """
text = text.replace('!', '-').replace('fix me', 'fixed').replace('\\n', '\\r\\n').rstrip('\\r\\n')
"""
    done = edited(cli, queue, tmp_path, script)

    # Then that is reported, and nothing else has changed
    assert done.code == 0, done
    assert "saved Windows line ends (CRLF): restored those of Unix" in done.err
    assert "1 redriven, 1 replaced" in done.out.decode()
    wait_until(lambda: counts(cli, queue) == {"available": 2, "done": 1}, 60)
    assert contents(cli, queue) == [
        (text, {"type": "order", "queue": queue}) for text in ("one\r and\ntwo", "fixed")
    ]


@pytest.mark.parametrize(
    ("payload", "script"),
    [
        # Of these no one knows which were there before
        (b"of\r\nWindows", "text = text.replace('\\n', '\\r\\n')"),
        # These are of some lines only
        (b"one", "text = text.replace('\\n\\\\', '\\r\\n\\\\')"),
    ],
)
def test_windows_line_ends_that_cannot_be_taken_back_are_refused_by_their_name(
    cli: Cli, tmp_path: Path, payload: bytes, script: str
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, payload)

    done = edited(cli, queue, tmp_path, f"{script}.replace('!', '-')")

    assert done.code == 2
    assert ":6: the variable slatemq ends with a carriage return" in done.err
    assert "CRLF" in done.err
    assert ":set ff=unix" in done.err
    assert counts(cli, queue) == {"failed": 1}
    # And so is the file that was kept, by an import too
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    for words in (
        ("failed", "edit", queue, "--file", str(kept), "--yes", "--json"),
        ("import", str(kept), "--to", queue),
    ):
        refused = cli.run(*words)
        assert (refused.code, "CRLF" in refused.err) == (2, True), refused
    assert counts(cli, queue) == {"failed": 1}
    kept.unlink()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (
            {"EDITOR": "no-such-editor -w", "VISUAL": ""},
            "`no-such-editor -w` ($EDITOR)",
        ),
        ({"EDITOR": "true", "VISUAL": "/dev/null"}, "`/dev/null` ($VISUAL)"),
        (
            {"EDITOR": "", "VISUAL": "", "PATH": "/nowhere"},
            "`vi` (neither $VISUAL nor $EDITOR is",
        ),
    ],
)
def test_without_an_editor_the_export_is_kept_and_it_says_what_to_set(
    cli: Cli, variables: dict[str, str], named: str
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one")
    if "PATH" in variables:  # of which the shell alone must be found
        (cli.state / "sh").symlink_to("/bin/sh")
        variables = {**variables, "PATH": str(cli.state)}

    done = subprocess.run(
        [*COMMAND, "failed", "edit", queue],
        capture_output=True,
        text=True,
        env={**cli.environ, **variables},
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert named in done.stderr
    assert "to an editor, such as nano" in done.stderr
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    assert f"continue with `slatemq failed edit {queue} --file {kept}`" in done.stderr
    # And so it does
    kept.write_text(kept.read_text().replace("!", "-"))
    cli.ok("failed", "edit", queue, "--file", str(kept), "--yes")
    assert counts(cli, queue) == {"available": 1}
    kept.unlink()


def test_a_byte_order_mark_is_taken_out_or_reported(cli: Cli, tmp_path: Path) -> None:
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    dead_letters(cli, queue, b"one")
    cli.ok("export", queue, "--state", "failed", "--out", str(file))

    # Where someone else has edited the file, nothing is done
    file.write_text("\ufeff" + file.read_text().replace("!", "-"))
    refused = cli.run("failed", "edit", queue, "--file", str(file), "--yes")
    assert refused.code == 2
    assert f"{file}:1: a byte order mark (BOM)" in refused.err
    assert f"sed -i 's/^\\xef\\xbb\\xbf//' {file}" in refused.err
    assert counts(cli, queue) == {"failed": 1}

    # Where our editor was used, it is taken out
    script = "text = '\\ufeff' + text.replace('!', '-').replace('\\n', '\\r\\n')"
    done = edited(cli, queue, tmp_path, script)
    assert done.code == 0, done
    assert "saved a byte order mark: removed it" in done.err
    assert "restored those of Unix" in done.err
    assert counts(cli, queue) == {"available": 1}
