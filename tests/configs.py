"""Configs of services for tests that start a service's parts themselves."""

from __future__ import annotations

from typing import Any, TypeVar

from libs.serving.process.config import ServingConfig
from libs.serving.process.instance import InstanceSettings
from libs.serving.process.settings import settings_of

C = TypeVar("C", bound=ServingConfig)

SHARED = {field.name for field in settings_of(InstanceSettings)}


def config_of(config_type: type[C], **settings: Any) -> C:
    """A config with these settings, those of the instance where they belong."""
    shared = {name: settings.pop(name) for name in SHARED & settings.keys()}
    return config_type(instance=InstanceSettings(**shared), **settings)
