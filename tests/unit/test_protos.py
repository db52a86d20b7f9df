"""What the protos say to compilers of other languages."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.rpc import status_pb2

PROTOS = Path(__file__).resolve().parents[2] / "protos"
OURS = sorted((PROTOS / "slatemq").rglob("*.proto"))
GOOGLES = sorted((PROTOS / "google").rglob("*.proto"))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_every_proto_names_its_package_in_go_and_java(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert 'option go_package = "slatemq/v1;slatemqv1";\n' in text
    assert 'option java_package = "slatemq.v1";\n' in text
    assert "option java_multiple_files = true;\n" in text


@pytest.mark.parametrize("path", GOOGLES, ids=lambda path: path.name)
def test_protos_of_google_are_those_that_our_stubs_are_made_with(path: Path) -> None:
    theirs = Path(status_pb2.__file__).parent / path.name

    assert path.read_text(encoding="utf-8") == theirs.read_text(encoding="utf-8")


def test_protos_of_google_are_all_that_errors_need() -> None:
    assert {path.name for path in GOOGLES} == {"error_details.proto", "status.proto"}
