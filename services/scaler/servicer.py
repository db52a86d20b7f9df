"""KEDA's calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from services.scaler.readings import Readings
from services.scaler.stubs import externalscaler_pb2
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerServicer
from services.scaler.triggers import trigger_of
from slatemq.errors import InvalidArgument, Unavailable, Unimplemented

SERVICE: Final = "externalscaler.ExternalScaler"

LOOK_S: Final = 1.0
"""How often a stream looks at its queue: about how long a message waits before its first worker is
asked for."""


class Scaler(ExternalScalerServicer):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._stopping = asyncio.Event()

    def stop_streams(self) -> None:
        """End them without an error: KEDA opens them again, at another scaler if there is one."""
        self._stopping.set()

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> externalscaler_pb2.IsActiveResponse:
        active = await self._readings.is_active(trigger_of(request.scalerMetadata))
        return externalscaler_pb2.IsActiveResponse(result=active)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        """Silent while a broker is down: the calls that KEDA polls say so.

        It would open a stream that has ended only after a wait that doubles, up to a minute.
        """
        trigger = trigger_of(request.scalerMetadata)
        sent: bool | None = None
        while not self._stopping.is_set():
            active = sent
            with suppress(Unavailable):
                active = await self._readings.is_active(trigger)
            if active is not None and active != sent:
                sent = active
                yield externalscaler_pb2.IsActiveResponse(result=active)
            try:
                await asyncio.wait_for(self._stopping.wait(), LOOK_S)
            except TimeoutError:
                continue

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        trigger = trigger_of(request.scalerMetadata)
        spec = externalscaler_pb2.MetricSpec(
            metricName=trigger.metric_name,
            targetSize=math.ceil(trigger.target),
            targetSizeFloat=trigger.target,
        )
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    def StreamMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> AsyncIterator[externalscaler_pb2.GetMetricSpecResponse]:
        """Not served: a target changes with its trigger alone, upon which KEDA asks again."""
        raise Unimplemented("targets do not change by themselves: call GetMetricSpec")

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Any
    ) -> externalscaler_pb2.GetMetricsResponse:
        trigger = trigger_of(request.scaledObjectRef.scalerMetadata)
        if request.metricName != trigger.metric_name:
            problem = f"must be {trigger.metric_name}, as GetMetricSpec says"
            raise InvalidArgument("metricName", f"{problem}, not {request.metricName!r}")
        value = await self._readings.value(trigger)
        metric = externalscaler_pb2.MetricValue(
            metricName=trigger.metric_name,
            metricValue=math.ceil(value),
            metricValueFloat=value,
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[metric])
