"""Records of rare commands, encoded before the command changes memory.

What the commit loop cannot encode would end the process, and a request that is sent again would end
the next one, too. So a command whose record does not fit its layout fails here, by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from libs.storage.errors import Unstorable
from slatemq.errors import InvalidArgument

UNSTORABLE = "UNSTORABLE"

P = ParamSpec("P")


def storable(
    record: str, encode: Callable[P, bytes], /, *args: P.args, **kwargs: P.kwargs
) -> bytes:
    """The bytes of a record; InvalidArgument (UNSTORABLE) that names one which does not fit."""
    try:
        return encode(*args, **kwargs)
    except ValueError as error:
        raise InvalidArgument(
            "", f"the {record} cannot be stored: {error}", reason=UNSTORABLE
        ) from error


@contextmanager
def encoding(record: str) -> Iterator[None]:
    """Names the record of a commit that cannot be encoded, in Unstorable."""
    try:
        yield
    except (ValueError, struct.error) as error:
        raise Unstorable(f"{record}: {error}") from error
