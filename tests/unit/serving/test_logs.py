import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from libs.serving.process import logs


@pytest.fixture(autouse=True)
def _restored_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.getLogger(logs.AUDIT_LOGGER).setLevel(logging.NOTSET)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_text_line_ends_with_the_facts() -> None:
    stream = io.StringIO()
    logs.configure("broker", "info", "text", stream)

    logging.getLogger("x.y").info("claimed %d", 3, extra={"queue": "orders", "why": "a b"})

    line = stream.getvalue()
    assert line.endswith(' INFO broker x.y: claimed 3 queue=orders why="a b"\n')


def test_a_fact_gives_a_terminal_no_commands() -> None:
    stream = io.StringIO()
    logs.configure("broker", "info", "text", stream)

    logging.getLogger("x.y").info("refused", extra={"queue": "a\x1b[2J\u202eb"})

    assert stream.getvalue().removesuffix("\n").isprintable()
    assert 'queue="a\\u001b[2J\\u202eb"' in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_within_a_span_has_the_ids_of_trace_and_span(form: str) -> None:
    stream = io.StringIO()
    logs.configure("broker", "info", form, stream)

    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("s") as span:
        logging.getLogger("x").info("within")
    logging.getLogger("x").info("outside")

    within, outside = stream.getvalue().splitlines()
    context = span.get_span_context()
    assert trace.format_trace_id(context.trace_id) in within
    assert trace.format_span_id(context.span_id) in within
    assert "trace_id" not in outside


def test_a_json_line_is_one_object_with_the_facts_as_fields() -> None:
    stream = io.StringIO()
    logs.configure("broker", "debug", "json", stream)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("broke", extra={"shard": 3})

    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["service"], fields["shard"]) == ("error", "broker", 3)
    assert "ValueError: two\nlines" in fields["traceback"]


def test_what_is_below_the_level_is_left_out() -> None:
    stream = io.StringIO()
    logs.configure("broker", "warning", "text", stream)

    logging.getLogger("x").info("idle")

    assert stream.getvalue() == ""


def test_acts_are_logged_at_each_level() -> None:
    stream = io.StringIO()
    logs.configure("broker", "error", "text", stream)

    logging.getLogger("slatemq.audit").info("audit", extra={"principal": "ops"})

    assert stream.getvalue().endswith(" INFO broker slatemq.audit: audit principal=ops\n")


def test_faults_of_callers_are_no_news_but_other_errors_of_grpc_are() -> None:
    stream = io.StringIO()
    logs.configure("ingest", "info", "text", stream)
    grpc_log = logging.getLogger("grpc._cython.cygrpc")

    left = type("ExecuteBatchError", (Exception,), {})("oh")
    for error in (left, UnicodeDecodeError("utf8", b"\xff", 0, 1, "oh"), KeyError("oh")):
        try:
            raise error
        except Exception:
            grpc_log.exception("raised in core")

    assert stream.getvalue().count("raised in core") == 1
    assert "KeyError" in stream.getvalue()


def test_warnings_alike_are_held_back_and_counted_and_errors_are_not() -> None:
    now = 0.0
    limit = logs.RepeatLimit(lambda: now)

    def passes(level: int, text: str, *facts: object) -> logging.LogRecord | None:
        record = logging.LogRecord("x", level, "", 0, text, facts, None)
        return record if limit.filter(record) else None

    # Given a store that is down for a quarter of an hour, and a call each second that says so
    passed = []
    for second in range(900):
        now = float(second)
        passed.append(passes(logging.WARNING, "the store is down: %s", f"call {second}"))
    said = [record for record in passed if record is not None]

    # Then the first lines pass, and then one each half a minute, with the number of the others
    assert [record is not None for record in passed[:6]] == [True] * 5 + [False]
    assert len(said) < 5 + 900 / logs.REPEAT_S
    held_back = sum(getattr(record, "held_back", 0) for record in said)
    assert held_back + len(said) > 900 - logs.REPEAT_S

    # And what is something else, or an error, is not held back
    assert passes(logging.WARNING, "the store is back") is not None
    assert all(passes(logging.ERROR, "message %d is damaged", n) for n in range(20))

    # And when it was quiet for a while, it is news again
    now += 2 * logs.REPEAT_S
    assert passes(logging.WARNING, "the store is down: %s", "once more") is not None
