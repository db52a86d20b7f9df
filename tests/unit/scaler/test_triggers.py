"""The metadata of a trigger: what KEDA passes on, read strictly."""

from __future__ import annotations

import pytest

from services.scaler.triggers import Trigger, trigger_of
from slatemq.errors import InvalidArgument

OF_KEDA = {
    "scalerAddress": "slatemq-scaler.slatemq.svc:7420",
    "enableTLS": "true",
    "unsafeSsl": "false",
    "caCert": "/path",
    "tlsClientCert": "/path",
    "tlsClientKey": "/path",
}


def test_a_trigger_has_a_queue_a_mode_and_a_target_beside_the_keys_of_keda() -> None:
    stated = {"queue": "orders", "mode": "age", "target": "2.5"}

    assert trigger_of(OF_KEDA | stated) == Trigger("orders", "age", 2.5)


def test_the_mode_is_depth_where_none_is_stated() -> None:
    assert trigger_of({"queue": "orders", "target": "100"}) == Trigger("orders", "depth", 100)


def test_a_value_may_come_from_the_environment_of_the_workload() -> None:
    assert trigger_of({"queueFromEnv": "orders", "target": "1"}).queue_id == "orders"


@pytest.mark.parametrize("target", ["0.001", "1", "10", "1000000000000"])
def test_a_target_is_a_plain_number(target: str) -> None:
    assert trigger_of({"queue": "orders", "target": target}).target == float(target)


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({}, "queue"),
        ({"queue": "", "target": "1"}, "queue"),
        ({"queue": "q"}, "target"),
        *(
            ({"queue": "q", "target": wrong}, "target")
            for wrong in (
                "", "0", "0.0001", "-1", "+1", "1e3", "1_000", "nan", "inf", "ten", " 1", "1 ",
                "1\n", "٣", "1000000000001", "9" * 400, "1.", ".5", "0x10",
            )
        ),
        ({"queue": "q", "target": "1", "mode": ""}, "mode"),
        ({"queue": "q", "target": "1", "mode": "Depth"}, "mode"),
        ({"queue": "q", "target": "1", "mode": "backlog"}, "mode"),
        ({"queue": "q", "taget": "1"}, "taget"),
        ({"queue": "q", "target": "1", "Queue": "r"}, "Queue"),
        ({"queue": "q", "target": "1", "FromEnv": "r"}, "FromEnv"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_refused_by_its_key(metadata: dict[str, str], key: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        trigger_of(metadata)
    assert refused.value.field == key


def test_a_key_that_is_stated_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="queue is stated twice"):
        trigger_of({"queue": "q", "queueFromEnv": "r", "target": "1"})


def test_the_name_of_a_metric_can_be_a_part_of_a_path_in_lower_case() -> None:
    assert Trigger("EU/orders:v1.2 %", "rate", 1).metric_name == "slatemq-rate-eu-orders-v1-2--"
