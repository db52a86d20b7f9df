"""One setting: a field of a frozen dataclass, with its text, bounds, flag and variable.

::

    @dataclass(frozen=True, kw_only=True)
    class BrokerConfig(ServingConfig):
        shard: int = setting("Number of this broker's shard.", default=0, minimum=0)

`libs.serving.process.config.load` reads them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

ENVIRONMENT_PREFIX: Final = "SLATEMQ_"

_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in (str, int, bool)}


@dataclass(frozen=True)
class Setting:
    """The metadata of a config field beside its name, type and default."""

    text: str
    minimum: int | None
    maximum: int | None
    choices: tuple[str, ...]
    is_secret: bool


def setting(
    text: str,
    *,
    default: Any = dataclasses.MISSING,
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """A field of a config dataclass, of type str, int or bool; required when it has no default.

    Args:
        text: What it does, with its unit; shown by `--help`.
        default: Its value when neither flag nor variable states one.
        minimum: The least value of an int.
        maximum: The greatest value of an int.
        choices: The values allowed for a str; none means any.
        is_secret: Whether it has no flag: every user of the machine can read command lines.
    """
    described = Setting(text, minimum, maximum, choices, is_secret)
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": described})


def settings_of(config_type: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config_type) if "setting" in field.metadata]


def kind_of(field: dataclasses.Field[Any]) -> type:
    name = field.type if isinstance(field.type, str) else field.type.__name__
    if name not in _KINDS:
        raise TypeError(f"a setting is str, int or bool, not {name}")
    return _KINDS[name]


def has_flag(field: dataclasses.Field[Any]) -> bool:
    described: Setting = field.metadata["setting"]
    return not described.is_secret


def flag_of(name: str) -> str:
    """The flag of a setting, such as `--drain-ms`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting, such as `SLATEMQ_DRAIN_MS`."""
    return ENVIRONMENT_PREFIX + name.upper()


def parse(field: dataclasses.Field[Any], text: str) -> str | int | bool:
    """Parse the text of a flag or variable. Raises ValueError with the rule it breaks."""
    described: Setting = field.metadata["setting"]
    kind = kind_of(field)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    if kind is int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        check_bounds(described, value)
        return value
    if described.choices and text not in described.choices:
        raise ValueError("must be one of " + ", ".join(described.choices))
    return text


def check_bounds(described: Setting, value: int) -> None:
    """Raise ValueError with the bound that the value of an int setting breaks."""
    if described.minimum is not None and value < described.minimum:
        raise ValueError(f"must be at least {described.minimum}")
    if described.maximum is not None and value > described.maximum:
        raise ValueError(f"must be at most {described.maximum}")
