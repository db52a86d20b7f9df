"""What the errors of Redis mean."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from libs.events.redis.connection import translated
from slatemq.errors import Unavailable

READ_ONLY = (
    "ERR Error running script (call to f_0): @user_script:2: @user_script: 2: "
    "-READONLY You can't write against a read only replica."
)
"""Of a script on Redis 6.2; redis-py has a class for what Redis 7 answers, and for a command's."""


async def test_a_replica_that_refuses_a_script_is_waited_for() -> None:
    with pytest.raises(Unavailable), translated():
        raise ResponseError(READ_ONLY)
