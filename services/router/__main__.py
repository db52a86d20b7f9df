"""`python -m services.router`: one router process."""

from __future__ import annotations

from libs.filters import load_parser
from libs.serving.main import main
from services.router.config import RouterConfig
from services.router.service import RouterProcess

if __name__ == "__main__":
    load_parser()  # before there are messages for it to hold up
    main("router", RouterConfig, RouterProcess)
