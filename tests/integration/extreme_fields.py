"""Each field of a request at its extremes: for tests of what a service takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.forms import FULL

FAULTS: Final = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}

NUMBERS: Final = sorted(
    {
        near
        for bound in (
            *(0, 255, 1_000, 10_000, 65_536, 100_000, 1_000_000, 1 << 31, 1 << 32, 1 << 48),
            *(43_200_000, 604_800_000, 1 << 43, 1 << 63),  # 12 h, 7 days, the end of orders
        )
        for near in (bound - 1, bound)
    }
)
"""The bounds of all fields, and a number on the other side: the largest that is taken is here."""

SIZES: Final = (1, 128, 255, 256, 1_000, 1_024, 8_192, 65_535)
"""The bounds of all texts, in bytes."""


def extremes(field: FieldDescriptor) -> list[Any]:
    """What the field may have at most, and a little more; a third of it in the short form."""
    return _all_extremes(field)[:: 1 if FULL else -3]


def _all_extremes(field: FieldDescriptor) -> list[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return [b"", b"\xff" * 65_535]
        case FieldDescriptor.CPPTYPE_STRING:
            texts = ["t" * size for size in SIZES]
            if field.name in ("filter", "priority"):  # expressions must be ones
                texts = [f"{'1' * 9} == 1 // {'x' * (size - 20)}" for size in SIZES[3:]]
            return [*texts, *("𝔮" * (size // 4) for size in SIZES[1:])]
        case FieldDescriptor.CPPTYPE_BOOL:
            return [True]
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return [0.0, 1.0, 5e-324, 1.7e308, float("nan"), float("inf")]
        case FieldDescriptor.CPPTYPE_ENUM:
            return [value.number for value in field.enum_type.values] if field.enum_type else []
        case FieldDescriptor.CPPTYPE_INT32:
            return [n for n in NUMBERS if n < 1 << 31]
        case FieldDescriptor.CPPTYPE_INT64:
            return [n for n in NUMBERS if n < 1 << 63]
        case _:
            return [0, (1 << 32) - 1]


Change = Callable[[Any], object]
"""Sets something in a request."""


def changes(message: Any, depth: int = 0) -> Iterator[Change]:
    """Each field of a message set to each of its extremes."""
    for field in message.DESCRIPTOR.fields:
        name, inner = field.name, field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            for texts in ({"k" * 65_535: "𝔮" * 16_383}, {f"{n}": "v" for n in range(255)}):
                yield partial(fill, name, texts)
        elif inner is not None and field.is_repeated:
            for place, element in enumerate(getattr(message, name)):
                for change in changes(element, depth + 1):
                    yield partial(within_element, name, place, change)
        elif inner is not None:
            if message.HasField(name) or (depth < 3 and field.containing_oneof is None):
                for change in changes(getattr(message, name), depth + 1):
                    yield partial(within, name, change)
        elif field.is_repeated:
            for value in extremes(field) if getattr(message, name) else ():
                yield partial(set_first, name, value)
        else:
            for value in extremes(field):
                yield partial(set_field, name, value)


async def count_taken(
    call: Callable[[Any], Awaitable[Any]], make: Callable[[], Awaitable[Any]]
) -> int:
    """How many were taken of a request as it is, and with each field at its extremes.

    `make` makes the request, and another after each that was taken. Fails where one meets a fault.
    """
    taken, usual = 0, await make()
    for change in [repr, *changes(await make())]:  # first as it is
        request = type(usual)()
        request.CopyFrom(usual)
        change(request)
        try:
            await call(request)
        except grpc.aio.AioRpcError as error:
            if error.code() in FAULTS:
                pytest.fail(f"{error.details()}: {str(request)[:2000]}")
        else:
            taken += 1
            usual = await make()
    return taken


def fill(name: str, texts: dict[str, str], message: Any) -> None:
    getattr(message, name).update(texts)


def within(name: str, change: Change, message: Any) -> None:
    change(getattr(message, name))


def within_element(name: str, place: int, change: Change, message: Any) -> None:
    change(getattr(message, name)[place])


def set_first(name: str, value: Any, message: Any) -> None:
    getattr(message, name)[0] = value


def set_field(name: str, value: Any, message: Any) -> None:
    setattr(message, name, value)


def caller(channel: grpc.aio.Channel, method: Any) -> Callable[[Any], Awaitable[Any]]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call: Any = channel.unary_unary(path, request.SerializeToString, response.FromString)
    return call  # type: ignore[no-any-return]
