"""Values of Spark's columns as JSON has them; docs/how-to/analyse.md tells which becomes what."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructType,
    TimestampNTZType,
)

__all__ = ["plain"]


def plain(value: Any, kind: DataType) -> Any:
    """A value of a column of this type, made of what JSON has; a row becomes an object."""
    match value, kind:
        case Row(), StructType():
            columns = zip(kind.fields, value, strict=True)
            return {field.name: plain(one, field.dataType) for field, one in columns}
        case Mapping(), MapType():
            return {
                _key(plain(key, kind.keyType)): plain(one, kind.valueType)
                for key, one in value.items()
            }
        case list(), ArrayType():
            return [plain(one, kind.elementType) for one in value]
        case datetime(), _:
            # Spark's moments come in the time of this machine, and do not say so.
            return value.isoformat() if isinstance(kind, TimestampNTZType) else _rfc_3339(value)
        case date(), _:
            return value.isoformat()
        case bytes() | bytearray(), _:
            return base64.b64encode(value).decode()
        case Decimal(), _:
            return float(value)
        case float(), _:
            return value if math.isfinite(value) else None
        case bool() | int() | str() | None, _:
            return value
    return str(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(key)


def _rfc_3339(moment: datetime) -> str:
    precision = "microseconds" if moment.microsecond % 1000 else "milliseconds"
    text = moment.astimezone(UTC).isoformat(timespec=precision)
    return text.removesuffix("+00:00") + "Z"
