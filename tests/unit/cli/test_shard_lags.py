"""The lag of each shard, from the routes between them."""

from slatemq.cli.shards import lags_of
from slatemq.models import RouteStatus


def test_a_broker_lags_by_all_ingests_and_an_ingest_by_its_slowest_broker() -> None:
    routes = [
        RouteStatus(0, 0, 1, 4, 3),
        RouteStatus(0, 1, 2, 4, 2),
        RouteStatus(1, 0, 1, 6, 5),
        RouteStatus(1, 1, 6, 6, 0),
    ]
    assert lags_of(routes) == {
        ("broker", 0): 8,
        ("broker", 1): 2,
        ("ingest", 0): 3,
        ("ingest", 1): 5,
    }


def test_a_lag_is_unknown_where_that_of_one_route_is() -> None:
    routes = [
        RouteStatus(0, 0, 1, 4, 3),
        RouteStatus(0, 1, 4, 4, 0),
        RouteStatus(1, 0, 1, 1, 0, is_current=False),
    ]
    assert lags_of(routes) == {
        ("broker", 0): None,
        ("broker", 1): 0,
        ("ingest", 0): 3,
        ("ingest", 1): None,
    }
