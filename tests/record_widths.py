"""How wide the fields of a record are on disk, and how large each may become.

A record that a commit loop cannot encode ends the process. So each that is written often is in a
table, with the bits of each field and the most that the checks before it let through. `check`
holds the table to the codec: all of a record at its most is written; a number of one bit more than
its width is not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

INT64 = (1 << 63) - 1
"""The most that a caller can put into a field of type int64, where nothing else bounds it."""

UINT64 = (1 << 64) - 1


class Number(NamedTuple):
    """A number.

    Attributes:
        bits: Its width on disk, without the sign.
        most: The most that it can be.
        bound: What sees to that.
    """

    bits: int
    most: int
    bound: str


class Value(NamedTuple):
    """A text, or a list: its most as it is."""

    most: Any
    bound: str


def text(bytes_max: int, bound: str) -> Value:
    """A text of at most this many bytes."""
    return Value("x" * bytes_max, bound)


class Record(NamedTuple):
    """A record, or the rows of one.

    Attributes:
        make: Makes a row of these fields.
        fields: All of them.
        write: Encodes rows.
        rows_max: How many rows a record has at most.
        counted: What sees to that.
    """

    make: Callable[..., Any]
    fields: dict[str, Number | Value]
    write: Callable[[list[Any]], bytes]
    rows_max: int = 1
    counted: str = ""


def check(record: Record) -> None:
    """Holds a record's table to its codec."""
    most = {name: field.most for name, field in record.fields.items()}
    names = getattr(record.make, "_fields", None)
    assert names is None or set(names) == set(most), "each field has its line"

    assert record.write([record.make(**most)] * record.rows_max)

    for name, field in record.fields.items():
        if isinstance(field, Number):
            widest = (1 << field.bits) - 1
            assert field.most <= widest, f"{name}: {field.bound}"
            assert record.write([record.make(**most | {name: widest})])
            with pytest.raises(ValueError, match="fit"):
                record.write([record.make(**most | {name: widest + 1})])


def encoders(folders: Sequence[str]) -> set[str]:
    """The encoders of stored records that the files in these folders import."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "libs.storage"
                ):
                    found |= {one.name for one in node.names if one.name.startswith("encode_")}
    return found
