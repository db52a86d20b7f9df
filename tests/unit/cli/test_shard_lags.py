"""The lag of each shard, and of all, from the routes between them."""

from slatemq._admin.instance import Status
from slatemq._admin.rates import lags_of, whole_lag
from slatemq.models import RouteStatus, ServiceStatus

SHARDS = [
    ServiceStatus(service, shard, "127.0.0.1:1", True)
    for service in ("ingest", "broker")
    for shard in (0, 1)
]


def status(*routes: RouteStatus) -> Status:
    return Status(SHARDS, [*routes], [], [])


def test_a_broker_lags_by_all_ingests_and_an_ingest_by_its_slowest_broker() -> None:
    lags = lags_of(
        status(
            RouteStatus(0, 0, 1, 4, 3),
            RouteStatus(0, 1, 2, 4, 2),
            RouteStatus(1, 0, 1, 6, 5),
            RouteStatus(1, 1, 6, 6, 0),
        )
    )
    assert lags == {
        ("broker", 0): 8,
        ("broker", 1): 2,
        ("ingest", 0): 3,
        ("ingest", 1): 5,
    }
    assert whole_lag(lags) == 10


def test_a_lag_is_unknown_where_that_of_one_route_is() -> None:
    lags = lags_of(
        status(
            RouteStatus(0, 0, 1, 4, 3),
            RouteStatus(0, 1, 4, 4, 0),
            RouteStatus(1, 0, 1, 1, 0, is_current=False),
            RouteStatus(1, 1, 4, 4, 0),
        )
    )
    assert lags == {
        ("broker", 0): None,
        ("broker", 1): 0,
        ("ingest", 0): 3,
        ("ingest", 1): None,
    }
    assert whole_lag(lags) is None


def test_a_lag_is_unknown_where_no_router_has_said_it() -> None:
    assert set(lags_of(status()).values()) == {None}
    without_one = lags_of(
        status(RouteStatus(0, 0, 1, 4, 3), RouteStatus(0, 1, 4, 4, 0), RouteStatus(1, 1, 4, 4, 0))
    )
    assert (without_one["broker", 0], without_one["broker", 1]) == (None, 0)
    assert whole_lag(lags_of(Status([], [], [], []))) is None
