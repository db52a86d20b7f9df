"""The gRPC services, by name."""

import pkgutil
from importlib import import_module
from typing import Any

from google.protobuf import descriptor_pool

from slatemq import v1


def service_of(name: str) -> Any:
    """The descriptor of `slatemq.v1.NAME`, whichever module has it."""
    for module in pkgutil.iter_modules(v1.__path__, f"{v1.__name__}."):
        if module.name.endswith("_pb2"):
            import_module(module.name)
    return descriptor_pool.Default().FindServiceByName(f"slatemq.v1.{name}")
