"""`python -m services.broker`: one broker shard; `--help` lists its settings."""

from libs.filters import load_parser
from libs.serving.main import main
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService

if __name__ == "__main__":
    load_parser()  # before there are claims for it to hold up
    main("broker", BrokerConfig, BrokerService)
