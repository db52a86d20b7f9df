"""Whether a server executes all that the backend asks of it, before a publish depends on that.

Keys of several hash slots, as in Redis Cluster, are refused with the script itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from redis import asyncio as aioredis
from redis import exceptions

from libs.events.redis.transactions import BEGIN, Command
from libs.events.settings import RedisSettings
from slatemq.errors import InvalidArgument

TRY: Final = f"""{BEGIN}
local REFUSALS = {{'^NOPERM', '^ACL failure', '^The user executing the script can', '^[Uu]nknown'}}
local at = 1
while at < #ARGV do
    local last = at + ARGV[at]
    local answer = redis.pcall(unpack(ARGV, at + 1, last))
    local why = type(answer) == 'table' and answer.err or ''
    why = why:gsub('^@%S+: %d+: ', ''):gsub('^ERR ', '')
    for _, beginning in ipairs(REFUSALS) do
        if why:find(beginning) then
            return {{table.concat(ARGV, ' ', at + 1, last), why}}
        end
    end
    at = last + 1
end
"""
"""Executes commands; returns the first that permissions refuse, or that this server does not have,
and why. Only the beginning of an error counts: behind it are names of keys, and Redis 6 puts a line
of the script before it."""

_NO_ID: Final = "0-0"
"""No entry has it, and XADD refuses it."""

_CLUSTER: Final = (
    "Redis Cluster is not supported, since tasks need several keys at once: "
    "use a Redis without cluster mode, with replicas where one server is not enough"
)


async def check_commands(
    client: aioredis.Redis, settings: RedisSettings, *, has_tasks: bool
) -> None:
    """Raise InvalidArgument that names the key where the server refuses a command.

    Of those of tasks only where they are used: what publishes events alone needs no right to them.
    """
    untyped: Any = client
    tried = untyped.register_script(TRY)
    keys = [f"{settings.stream_prefix}:{name}" for name in ("tasks", "tasks:delayed")]
    commands: list[Command] = [("XADD", f"{settings.stream_prefix}:events", _NO_ID, "", "")]
    if has_tasks:
        of_tasks = _list_commands if settings.task_structure == "lists" else _stream_commands
        commands += [*_common_commands(settings.stream_prefix), *of_tasks(settings.stream_prefix)]
    parts = [part for command in commands for part in (len(command), *command)]
    try:
        refused = await tried(keys=keys, args=parts)
    except exceptions.ClusterCrossSlotError as error:
        raise InvalidArgument("queue.redis.url", _CLUSTER) from error
    if refused is not None:
        command, why = (" ".join(text.decode().split()) for text in refused)
        raise InvalidArgument("queue.redis.url", f"{command}: {why}")


# Each with arguments by which it changes nothing, and reads nothing large.


def _common_commands(prefix: str) -> Iterator[Command]:
    """Those of tasks in either structure."""
    dead, delayed = f"{prefix}:dead-letter", f"{prefix}:tasks:delayed"
    yield "XADD", dead, _NO_ID, "", ""
    yield "XDEL", dead, _NO_ID
    yield "XLEN", dead
    yield "XRANGE", dead, _NO_ID, _NO_ID
    yield "XREVRANGE", dead, _NO_ID, _NO_ID
    yield "ZADD", delayed, "XX", 0, ""
    yield "ZREM", delayed, ""
    yield "ZCARD", delayed
    yield "ZRANGE", delayed, 1, 0
    yield "ZRANGEBYSCORE", delayed, 1, 0


def _stream_commands(prefix: str) -> Iterator[Command]:
    """Those of a group fail, since none has an empty name."""
    tasks = f"{prefix}:tasks"
    yield "XADD", tasks, _NO_ID, "", ""
    yield "XDEL", tasks, _NO_ID
    yield "XLEN", tasks
    yield "XRANGE", tasks, _NO_ID, _NO_ID
    yield "XACK", tasks, "", _NO_ID
    yield "XCLAIM", tasks, "", "", 0, _NO_ID
    yield "XPENDING", tasks, ""
    yield "XINFO", "CONSUMERS", tasks, ""
    yield "XGROUP", "DELCONSUMER", tasks, "", ""
    yield "XREADGROUP", "GROUP", "", "", "STREAMS", tasks, ">"


def _list_commands(prefix: str) -> Iterator[Command]:
    """What is pushed is removed by the next one, before another client sees it."""
    tasks, consumers = f"{prefix}:tasks", f"{prefix}:tasks:consumers"
    nowhere = f"{tasks}:processing:"
    yield "LLEN", tasks
    yield "LRANGE", tasks, 1, 0
    yield "LREM", nowhere, 1, ""
    yield "LMOVE", nowhere, tasks, "LEFT", "RIGHT"
    for push in ("RPUSH", "LPUSH"):
        yield push, nowhere, ""
        yield "LREM", nowhere, 1, ""
    yield "ZADD", consumers, "XX", 0, ""
    yield "ZRANGE", consumers, 1, 0
    yield "ZREVRANGEBYSCORE", consumers, 0, 1
    yield "ZREMRANGEBYSCORE", consumers, 1, 0
    yield ("TIME",)
