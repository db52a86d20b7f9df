"""Objects of JSON: what people or other programs put there by hand raises one kind of error."""

from __future__ import annotations

import json
from typing import Any


def load_json(data: bytes) -> Any:
    """The value of these bytes. Raises ValueError for what is not JSON, or nested too deeply."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError(str(error)) from error  # whose repr has no bytes of the file
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
