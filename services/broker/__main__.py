"""`python -m services.broker`: one broker shard; `--help` lists its settings."""

from libs.serving.main import main
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService

if __name__ == "__main__":
    main("broker", BrokerConfig, BrokerService)
