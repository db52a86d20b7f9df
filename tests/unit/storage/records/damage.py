"""Rows whose values are not as they were written."""

from __future__ import annotations

from hypothesis import strategies as st

Row = tuple[bytes, bytes]


def damage(rows: list[Row], data: st.DataObject) -> None:
    """Cut one of the values short, or give it another byte somewhere, or one more."""
    which = data.draw(st.integers(0, len(rows) - 1))
    key, value = rows[which]
    place = data.draw(st.integers(0, len(value)))
    if data.draw(st.booleans()):
        value = value[:place]
    else:
        value = value[:place] + bytes((data.draw(st.integers(0, 255)),)) + value[place + 1 :]
    rows[which] = (key, value)
