"""What is fuzzed: each target takes any bytes, and raises nothing but what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Final

from google.protobuf.message import DecodeError

from libs.filters.syntax import FilterError
from libs.serving.requests.shape import ShapeError
from libs.storage.errors import CorruptRecord, OtherFormat
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, Unauthenticated
from slatemq.textqueue.errors import FormatError


@dataclass(frozen=True)
class Target:
    """A function of bytes, and the errors by which it refuses them.

    Attributes:
        module: Of this package: loaded when it is needed, since what is loaded is instrumented.
        name: The function.
        refuses: What it may raise.
    """

    module: str
    name: str
    refuses: tuple[type[Exception], ...]

    @cached_property
    def run(self) -> Callable[[bytes], None]:
        function: Callable[[bytes], None]
        function = getattr(import_module(f"tests.fuzz.{self.module}"), self.name)
        return function

    def __call__(self, data: bytes) -> None:
        try:
            self.run(data)
        except self.refuses:
            return


_CORRUPT: Final = (CorruptRecord,)

TARGETS: Final[Mapping[str, Target]] = {
    "record": Target("records", "record", _CORRUPT),
    "key": Target("records", "key", _CORRUPT),
    "log-entry": Target("records", "log_entry", _CORRUPT),
    "pack": Target("records", "pack", _CORRUPT),
    "arrow": Target("records", "arrow", _CORRUPT),
    "object": Target("objects", "stored_object", (CorruptRecord, OtherFormat, FailedPrecondition)),
    "request": Target("requests", "request", (ShapeError, DecodeError, InvalidArgument, NotFound)),
    "answer": Target("requests", "answer", (DecodeError,)),
    "token": Target("requests", "token", (InvalidArgument, Unauthenticated)),
    "http": Target("http", "http", ()),
    "expression": Target("files", "expression", (FilterError,)),
    "queue-file": Target("files", "queue_file", (FormatError,)),
    "document": Target("files", "document", (InvalidArgument,)),
    "encryption": Target("files", "encryption", ()),
    "event": Target("events", "event", (InvalidArgument,)),
    "delivery": Target("events", "delivery", (InvalidArgument,)),
    "s3-notification": Target("events", "s3_notification", (InvalidArgument,)),
}
