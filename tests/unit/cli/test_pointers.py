import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.cli.publish.lines import NoHeader, headers_from, parse_pointers


def found(line: bytes, *pointers: str) -> dict[str, str]:
    return headers_from(line, parse_pointers(pointers))


@pytest.mark.parametrize(
    ("pointer", "line", "headers"),
    [
        ("/type", b'{"type": "order"}', {"type": "order"}),
        ("/type", b'{"type": ""}', {"type": ""}),
        ("/actor/login", b'{"actor": {"login": "kim"}}', {"login": "kim"}),
        ("/a~1b", b'{"a/b": "x"}', {"a/b": "x"}),
        ("/m~0n", b'{"m~n": "x"}', {"m~n": "x"}),
        ("/~01", b'{"~1": "x"}', {"~1": "x"}),
        ("//x", b'{"": {"x": "y"}}', {"x": "y"}),
        ("/list/1", b'{"list": ["a", "b"]}', {"1": "b"}),
        ("/list/01", b'{"list": ["a", "b"]}', {}),
        ("/list/-", b'{"list": ["a", "b"]}', {}),
        ("/list/2", b'{"list": ["a", "b"]}', {}),
        ("/0", b'["a"]', {"0": "a"}),
        ("/type", b"{}", {}),
        ("/type", b'{"type": null}', {}),
        ("/type", b'"text"', {}),
        ("/a/b", b'{"a": "text"}', {}),
        ("/n", b'{"n": 1.0}', {"n": "1.0"}),
        ("/n", b'{"n": 1e3}', {"n": "1e3"}),
        ("/n", b'{"n": 1E+3}', {"n": "1E+3"}),
        ("/n", b'{"n": -0}', {"n": "-0"}),
        ("/n", b'{"n": 12345678901234567890123}', {"n": "12345678901234567890123"}),
        ("/n", b'{"n": 0.10000000000000000000001}', {"n": "0.10000000000000000000001"}),
        ("/n", b'{"n": ' + b"7" * 6000 + b"}", {"n": "7" * 6000}),
        ("/b", b'{"b": true}', {"b": "true"}),
        ("/b", b'{"b": false}', {"b": "false"}),
        ("/s", '{"s": "né\\u00e9"}'.encode(), {"s": "néé"}),
        ("/s", b'\xef\xbb\xbf{"s": "x"}\r', {"s": "x"}),
    ],
)
def test_a_pointer_makes_a_header(pointer: str, line: bytes, headers: dict[str, str]) -> None:
    assert found(line, pointer) == headers


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"type": {}}', "/type is an object"),
        (b'{"type": []}', "/type is an array"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"type": "x"} {}', "not JSON"),
        (b'{"type": NaN}', "not JSON"),
        (b'{"type": "\xff"}', "not UTF-8 at byte 11"),
        (b'{"type": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "too deeply"),
        (b'{"type": "' + b"x" * 65_536 + b'"}', "65536 bytes"),
    ],
)
def test_a_line_without_headers_to_make_is_refused(line: bytes, why: str) -> None:
    with pytest.raises(NoHeader, match=why):
        found(line, "/type")


@pytest.mark.parametrize("text", ["", "type", "/a,", "/a~", "/a~2", "/", "/a/", "/a,/x/a", "/a,/a"])
def test_what_is_no_list_of_pointers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"pointer|header"):
        parse_pointers([text])


def test_pointers_come_in_lists_and_in_several_options() -> None:
    pointers = parse_pointers(["/a,/b/c", "/d"])

    assert [pointer.header for pointer in pointers] == ["a", "c", "d"]


@given(st.text(min_size=1), st.text(max_size=100).filter(lambda text: text.isprintable()))
def test_any_key_can_be_pointed_at(key: str, value: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        return
    if "," in key:
        return

    pointer = "/" + key.replace("~", "~0").replace("/", "~1")

    assert found(json.dumps({key: value}).encode(), pointer) == {key: value}
