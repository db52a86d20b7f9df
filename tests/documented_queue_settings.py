"""docs/reference/event-queue-settings.md, made from the classes of the settings.

`python -m tests.documented_queue_settings` writes the page; tests/unit/events holds it to the code.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from libs.events.settings import QueueSettings, variable_of

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/event-queue-settings.md"

HEAD = """\
# Settings of event queues

They are the section `queue` of a YAML file, which every service and `python -m services` take with
`--config FILE` or `SLATEMQ_CONFIG`. The file with all defaults:

```yaml
{defaults}```

A variable goes before the file: `queue.redis.url` is `SLATEMQ_QUEUE_REDIS_URL`. A list in a
variable is separated by commas. A key of the file that is not on this page, a key given twice, and
a value that its key does not allow end the process with exit code 2. The message names the key, and
the line of the file or the variable. A variable that is not on this page is passed over, and the
log warns of it, as of each unknown variable that begins with `SLATEMQ_`.

While `queue.enabled` is false, the services run in **direct mode**: the settings are checked, and
nothing of event queues is loaded. Of `queue.consistency`, `async` and `sync`
take publishes [through the backend](../how-to/async.md);
with `write-through` and `fire-and-forget` what was stored is
[published as events](../how-to/write-through.md), to any of the backends.

This page is written by `python -m tests.documented_queue_settings`; a test compares it with the
code.

"""

Kind = type[msgspec.Struct]


def page() -> str:
    """The whole page."""
    sections = [_section("queue", QueueSettings)]
    for name, kind in typing.get_type_hints(QueueSettings).items():
        if _is_section(kind):
            sections.append(_section(f"queue.{name}", kind))
    defaults = "queue:\n" + "".join(_yaml(QueueSettings(), 1))
    return HEAD.format(defaults=defaults) + "\n".join(sections)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _yaml(section: msgspec.Struct, depth: int) -> typing.Iterator[str]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        indent = "  " * depth
        if isinstance(value, msgspec.Struct):
            yield f"\n{indent}{name}:\n"
            yield from _yaml(value, depth + 1)
        elif isinstance(value, str) and "{" in value:
            yield f'{indent}{name}: "{value}"\n'
        else:
            yield f"{indent}{name}: {_value(value)}\n"


def _section(key: str, kind: Kind) -> str:
    texts = _attributes(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    defaults = kind()
    rows = "".join(
        f"| `{key}.{name}` | `{variable_of(f'{key}.{name}')}` "
        f"| `{_value(getattr(defaults, name))}` | {texts[name]}{_bounds(hints[name])} |\n"
        for name in kind.__struct_fields__
        if not _is_section(hints[name])
    )
    return f"## {key}\n\n| key | variable | default | what |\n|---|---|---|---|\n{rows}"


def _value(value: object) -> str:
    if value == "":
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value)


def _attributes(kind: Kind) -> dict[str, str]:
    """What the docstring of a section says of each key."""
    _, _, listed = (kind.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", listed, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def _bounds(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " One of " + ", ".join(f"`{choice}`" for choice in typing.get_args(hint)) + "."
    for meta in typing.get_args(hint)[1:]:
        if isinstance(meta, msgspec.Meta) and meta.ge is not None:
            return f" {meta.ge:,} to {meta.le:,}."
        if isinstance(meta, msgspec.Meta) and meta.pattern is not None:
            return " Letters, digits, `.`, `_` and `-`."
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
