"""What users find when they look at the package."""

from __future__ import annotations

import pydoc

import pytest

import slatemq
from slatemq.models import payload_bytes


def test_the_names_of_the_package_are_those_for_users() -> None:
    names = {name for name in dir(slatemq) if not name.startswith("__")}
    assert names == {*slatemq.__all__, "codecs", "encryption", "errors", "events", "sync"}
    for name in names:
        assert getattr(slatemq, name) is not None


def test_the_help_of_the_package_shows_the_client() -> None:
    text = pydoc.plain(pydoc.render_doc(slatemq))
    assert "class Client(" in text
    assert "connect(endpoint" in text
    assert "import_module" not in text


@pytest.mark.parametrize(
    "payload", ["ü", "ü".encode(), bytearray("ü".encode()), memoryview("ü".encode())]
)
def test_a_payload_may_be_anything_that_holds_bytes(
    payload: str | bytes | bytearray | memoryview,
) -> None:
    sent = payload_bytes(payload)
    assert sent == "ü".encode()
    assert type(sent) is bytes
