"""The format, held to the examples and the regex of the seed."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slatemq.textqueue import State, pages, parsing, render, reserve
from slatemq.textqueue.errors import BadText, FormatError, NoSuchVariable
from slatemq.textqueue.parsing import parse, scan

sre_parser: Any = import_module("re._parser")

EXAMPLE = """\
-A queued message begins with a '-' dash control character
=A processed message begins with an '=' equals sign control character
!A message that encountered a critical error begins with an `!` exclamation mark control character
-Any message can have multiple lines
 where each sequential line begins with a ' ' space
=Any message can have multiple lines
 where each sequential line begins with a ' ' space
!Any message can have multiple lines
 where each sequential line begins with a ' ' space
# A comment begins with a '#' sign
# Multiline comments are possible using a space as the starting character on
  each sequential line.
# Messages are space sensitive, so the following message will read "  I have space padding  "
-  I have space padding  \n
-Blank lines are ingored
=Processed messages can apear after queued messages
-Message Variables
\\Message variables are attached after a message
\\A message can have any number of variables
\\Message variables are fixed length and editable
\\Additional space can be reserved for the message variable with trailing spaces   \n\
\\A single message variable cannot span multiple lines
# Comment Variables
\\Comments can also have message variables
"""

TWO_LINES = (
    "Any message can have multiple lines\nwhere each sequential line begins with a ' ' space"
)

SEED_LINE = re.compile(rb"[-=# !\\][^\n]*(?:\n|\Z)|\n")
"""The seed's regex for a line; `<EOF>` is `\\Z`."""

LINES = st.tuples(
    st.sampled_from(
        [b"-", b"=", b"!", b"#", b" ", b"\\", b"", b"?", b">", b"\r", b"\xc3", "é".encode()]
    ),
    st.one_of(
        st.sampled_from(
            [b"", b" ", b"-x", b"a=b  ", b"\r", "naïve\u2028é\x85".encode(), b"\xff", b"\xc3"]
        ),
        st.text(max_size=8).map(lambda text: text.replace("\n", "").encode("utf-8", "replace")),
    ),
).map(b"".join)

FILES = st.tuples(st.lists(LINES, max_size=12).map(b"\n".join), st.sampled_from([b"", b"\n"])).map(
    b"".join
)


def test_the_seeds_example_reads_as_it_says() -> None:
    # Given the example as it stands in the seed
    document = parse(EXAMPLE.encode(), strict=True)

    # Then the queued messages are these
    queued = [entry.text for entry in document.entries if entry.state is State.QUEUED]
    assert queued == [
        "A queued message begins with a '-' dash control character",
        TWO_LINES,
        "  I have space padding  ",
        "Blank lines are ingored",
        "Message Variables",
    ]
    # And the others are what their characters say
    texts = {
        state: [entry.text for entry in document.entries if entry.state is state] for state in State
    }
    assert texts[State.PROCESSED][1:] == [
        TWO_LINES,
        "Processed messages can apear after queued messages",
    ]
    assert len(texts[State.ERROR]) == 2
    assert texts[State.COMMENT][1] == (
        " Multiline comments are possible using a space as the starting character on\n"
        " each sequential line."
    )
    # And variables belong to messages and to comments, without what is reserved
    message, comment = document.entries[-2:]
    assert len(message.variables) == 5
    assert message.variables[3].value.endswith("trailing spaces")
    assert message.variables[3].width == len(message.variables[3].value) + 3
    assert [variable.value for variable in comment.variables] == [
        "Comments can also have message variables"
    ]
    assert document.dump() == EXAMPLE.encode()


def refused(content: bytes) -> bool:
    """What the rules of issue 6 refuse, told line by line and without our parser."""
    before = ""
    for line in content.split(b"\n"):
        try:
            line.decode()
        except UnicodeDecodeError:
            return True
        if line == b"":
            continue
        if line[:1] == b" " and before in ("", "variable"):
            return True
        if line[:1] == b"\\" and before == "":
            return True
        before = "variable" if line[:1] == b"\\" else before if line[:1] == b" " else "text"
    return False


def regex_takes(content: bytes) -> bool:
    position = 0
    while position < len(content):
        found = SEED_LINE.match(content, position)
        if found is None:
            return False
        position = found.end()
    return True


@given(FILES)
@example(b"")
@example(b"-")
@example(b"\n\n")
@example(b"-a\n\n b\n\n\\c")
def test_what_the_seeds_regex_takes_is_read_and_nothing_else_is_refused(content: bytes) -> None:
    try:
        document = parse(content, strict=True)
    except FormatError:
        assert refused(content) or not regex_takes(content)
        return
    # Then strict reading took what the regex takes and no rule refuses, and gives it back
    assert regex_takes(content)
    assert not refused(content)
    assert document.dump() == content


@given(FILES)
def test_unknown_controls_alone_are_no_error(content: bytes) -> None:
    try:
        document = parse(content)
    except FormatError:
        assert refused(content)
        return
    assert not refused(content)
    assert document.dump() == content
    assert [entry.raw for entry in document.entries] == [
        content[entry.offset : entry.end] for entry in document.entries
    ]


@given(FILES, st.integers(1, 9), st.integers(4, 32))
def test_a_file_reads_the_same_in_chunks_of_any_size_and_with_long_entries(
    content: bytes, chunk_bytes: int, long_bytes: int
) -> None:
    def outcome(chunk: int) -> list[object]:
        given_bytes = memoryview(content)
        position = 0

        def read(wanted: int) -> bytes:
            nonlocal position
            got = bytes(given_bytes[position : position + min(wanted, chunk)])
            position += len(got)
            return got

        found: list[object] = []
        try:
            found.extend((entry.text, entry) for entry in scan(read, chunk_bytes=chunk))
        except FormatError as error:
            found.append(str(error))
        return found

    whole = outcome(1 << 20)
    with mock.patch.object(parsing, "PAGE_BYTES_MAX", long_bytes):
        parts = outcome(chunk_bytes)

    # Then also what comes before an error is the same, and the error's place
    assert parts == whole


@given(st.text(), st.lists(st.tuples(st.text(), st.text())), st.booleans())
def test_any_text_comes_back_exactly(
    text: str, pairs: list[tuple[str, str]], newline: bool
) -> None:
    variables = {
        name.replace("=", "").replace("\n", ""): value.replace("\n", "") for name, value in pairs
    }
    content = render(text, variables)

    [entry] = parse(content if newline else content[:-1], strict=True).entries

    assert entry.text == text
    assert {variable.name: variable.value for variable in entry.variables} == {
        name: value.rstrip(" ") for name, value in variables.items()
    }


@pytest.mark.parametrize(
    ("content", "text", "advice"),
    [
        (b" a", "f.tq:1:1: a continuation before any entry", "it begins with a space: begin the"),
        (b"\n\n\\a", "f.tq:3:1: a variable before any entry", "begin the line with - = ! or #"),
        (
            b"-a\n\\b\n\n c",
            "f.tq:4:1: a continuation after a variable",
            "it begins with a space: move",
        ),
        ("-é\n a\n é".encode() + b"\xff", "f.tq:3:3: not UTF-8: invalid start byte", "save the"),
        (b"-a\n=b\xc3\n", "f.tq:2:3: not UTF-8: invalid continuation byte", "save the file as UTF"),
        (b"\n-a\n?b", "f.tq:3:1: unknown control character '?'", "begin the line with - = ! or #"),
        ("-a\n→b".encode(), "f.tq:2:1: unknown control character '→'", "begin the line with"),
        (b"-a\r\n\r\n", "f.tq:2:1: unknown control character '\\r'", "begin the line with"),
        ("\ufeff-a".encode(), "f.tq:1:1: unknown control character '\\ufeff'", "a byte order mark"),
    ],
)
def test_an_error_names_file_line_and_column_and_what_to_do(
    content: bytes, text: str, advice: str
) -> None:
    with pytest.raises(FormatError) as caught:
        parse(content, "f.tq", strict=True)

    assert str(caught.value).startswith(f"{text}: {advice}")
    assert str(caught.value).endswith(f"{caught.value.why}: {caught.value.advice}")


def test_unknown_entries_keep_what_follows_them_to_themselves() -> None:
    content = b"-a\n>b\n c\n\\d=e\n-f\n\\g\n"

    first, unknown, last = parse(content).entries

    assert (first.text, first.variables, last.text) == ("a", (), "f")
    assert (unknown.state, unknown.control, unknown.text) == (State.UNKNOWN, ">", "b\nc")
    assert unknown.raw == b">b\n c\n\\d=e\n"


def test_blank_lines_end_nothing_and_are_no_text() -> None:
    [entry] = parse(b"\n-a\n\n\n b\n\n\\c=d\n\n").entries

    assert entry.text == "a\nb"
    assert entry.get("c") == "d"
    assert (entry.offset, entry.line) == (1, 2)


def test_a_carriage_return_is_text() -> None:
    [entry] = parse(b"-a\r\n b\r\n").entries

    assert entry.text == "a\r\nb\r"


def test_variables_go_by_index_and_by_name() -> None:
    [entry] = parse(b"-m\n\\a=1=2  \n\\plain \n\\a=3\n\\=4").entries

    assert entry.variable("a").value == "1=2"
    assert entry.variable(2).value == "3"
    assert (entry.variable(1).name, entry.variable(1).value) == (None, "plain")
    assert (entry.variable("").value, entry.variable("").width) == ("4", 1)
    assert entry.raw[entry.variable("a").offset :].startswith(b"1=2  \n")
    for key in ("plain", 4, -1):
        with pytest.raises(NoSuchVariable, match="has no variable"):
            entry.variable(key)


@pytest.mark.parametrize(
    ("text", "variables"), [("\ud800", {}), ("a", {"b": "c\nd"}), ("a", ["b\n"]), ("a", {"=": ""})]
)
def test_what_no_line_can_hold_is_refused(text: str, variables: dict[str, str] | list[str]) -> None:
    with pytest.raises(BadText):
        render(text, variables)


def test_entries_of_unknown_kinds_are_not_made() -> None:
    with pytest.raises(ValueError, match="unknown"):
        render("a", state=State.UNKNOWN)


def test_room_is_reserved_in_bytes() -> None:
    assert render("a", {"b": reserve(4, "é")}) == "-a\n\\b=é  \n".encode()


@pytest.mark.parametrize("content", [b"-a" + b"\n" * 200_000 + b" b\n", b"-" + b"\n \n" * 100_000])
def test_a_hostile_entry_is_looked_at_a_few_times_at_most(content: bytes) -> None:
    stream, lengths = io.BytesIO(content), list[int]()

    def read(wanted: int) -> bytes:
        got = stream.read(wanted)
        lengths.append(len(got))
        return got

    assert b"".join(entry.raw for entry in scan(read)) == content
    # All that is held of an entry is looked at again after each read
    assert sum(accumulate(lengths)) < 5 * len(content)


@pytest.mark.parametrize(
    "expression",
    [parsing._ENTRY, parsing._BLANK, *(pages._between(frozenset({state})) for state in State)],
)
def test_no_expression_tries_a_second_way(expression: re.Pattern[Any]) -> None:
    kinds = Counter(kinds_of(sre_parser.parse(expression.pattern)))

    assert kinds["POSSESSIVE_REPEAT"]
    assert not {"MAX_REPEAT", "MIN_REPEAT"} & kinds.keys()


def kinds_of(parsed: Any) -> Iterator[str]:
    """What a parsed expression is made of, at all depths."""
    if isinstance(parsed, sre_parser.SubPattern):
        for kind, argument in parsed:
            yield str(kind)
            yield from kinds_of(argument)
    elif isinstance(parsed, tuple | list):
        for one in parsed:
            yield from kinds_of(one)
