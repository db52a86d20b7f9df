"""Files of YAML that people write: what is said of one that is wrong."""

from __future__ import annotations

import pytest

from libs.documents import Document
from slatemq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('queue:\n  url: "redis://:SECRET@host\n', "unexpected end of stream (line 3, column 1)"),
        ("url: redis://:SECRET: @host", "mapping values are not allowed here (line 1, column 21)"),
        ("password: *SECRET", "found undefined alias (line 1, column 11)"),
        (
            "password: !SECRET x",
            "could not determine a constructor for the tag (line 1, column 11)",
        ),
        ("password: !SECRET!x y", "found undefined tag handle (line 1, column 11)"),
        ("a: 1\nb: [x, {y: !!int SECRET}]", "is not what its form or tag says (line 2, column 12)"),
        ("a: 2026-13-01", "is not what its form or tag says (line 1, column 4)"),
        ("a: 1\nb: SECRET\x01", "a character that does not print (line 2, column 10)"),
        ("[" * 3_000, "it is nested too deep"),
    ],
)
def test_an_error_says_what_is_wrong_and_where_and_quotes_nothing(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Document("queue.yaml", text, "config")

    assert caught.value.field == "config"
    assert caught.value.description.startswith("queue.yaml is not YAML: ")
    assert said in caught.value.description
    assert "SECRET" not in caught.value.description
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "key", ["on", "No", "1", "0x1F", "1.50", "null", "~", "2026-02-22", "!!int 5"]
)
def test_a_key_that_is_no_text_is_refused_as_it_is_written(key: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Document("queue.yaml", f"a:\n  b:\n    - x: 1\n    - {key}: SECRET\n", "config")

    assert caught.value.field == f"a.b[1].{key.removeprefix('!!int ')}"
    assert caught.value.description == (
        "the key must be a text: write it in quotes (line 4 of queue.yaml)"
    )


@pytest.mark.parametrize("key", ["'on'", '"1"', "!!str 1", "plain"])
def test_a_key_in_quotes_is_a_text(key: str) -> None:
    assert Document("queue.yaml", f"{key}: 1").values == {key.split()[-1].strip("'\""): 1}


def test_a_mapping_may_be_merged_into_another() -> None:
    text = "a: &a {x: 1}\nb:\n  <<: *a\n  y: 2\n"
    assert Document("queue.yaml", text).values == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}
