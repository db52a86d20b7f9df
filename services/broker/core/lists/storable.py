"""Records of rare commands, encoded before the command changes memory.

What the commit loop cannot encode would end the process, and a retry of the request would end the
next one. So a command whose record does not fit its layout fails here, before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

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
