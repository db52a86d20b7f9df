"""Files of tokens: one for the caller, with the token, and one for the services, with hashes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slatemq._tokens import NewToken

HEAD = "tokens:\n"

_ITEM = re.compile(r"^( *)- ", re.MULTILINE)


def write_token(file: Path, made: NewToken) -> None:
    """Write a new file that only its user can read. Raises OSError, FileExistsError too."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{made.token}\n")


def add_entry(file: Path, made: NewToken) -> None:
    """Add a token's entry to the services' file, whole or not at all; make the file if need be.

    Raises:
        OSError: It cannot be read or written.
        ValueError: It has another form than `tokens:` with a list below.
    """
    file = file.resolve()  # A link stays one.
    with _locked(file.parent):
        _add(file, made)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change files of a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # Of file systems that lock no folders.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add(file: Path, made: NewToken) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else HEAD
    lines = [line for line in text.splitlines() if line.split("#")[0].strip()]
    rest = "\n".join(lines[1:])
    item = _ITEM.search(rest)
    is_list = lines[:1] == [HEAD.strip()] and (item is None) == (not rest)
    if not is_list or re.search(r"^[^ -]", rest, re.MULTILINE):
        raise ValueError("must be the line `tokens:` with a list below: add the entry by hand")
    indent = item[1] if item is not None else "  "
    # In a folder that others write to: a name that cannot be guessed, of a file that is new.
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            if file.exists():
                os.fchmod(descriptor, file.stat().st_mode & 0o777)
            ended = text if text.endswith("\n") else f"{text}\n"
            opened.write(f"{ended}{entry_lines(made, indent)}\n")
            opened.flush()
            os.fsync(opened.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def entry_lines(made: NewToken, indent: str = "  ") -> str:
    """A token's entry in YAML, of which JSON is a part: no library is needed to write it."""
    pairs = [f"{name}: {quoted(value)}" for name, value in made.entry.items()]
    return "\n".join(f"{indent}{'  ' if n else '- '}{pair}" for n, pair in enumerate(pairs))


def quoted(value: object) -> str:
    """A value in JSON, but with YAML's escapes: of JSON's, a character over U+FFFF would be two."""
    return "".join(map(_escaped, json.dumps(value, ensure_ascii=False)))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
