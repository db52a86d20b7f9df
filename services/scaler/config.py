"""Settings of the scaler."""

from __future__ import annotations

from dataclasses import dataclass

from libs.serving.process.process_config import MutualTlsConfig
from libs.serving.process.settings import setting


@dataclass(frozen=True, kw_only=True)
class ScalerConfig(MutualTlsConfig):
    """The SlateMQ scaler: answers KEDA how much work a queue has (docs/how-to/autoscale.md)."""

    endpoint: str = setting(
        "host:port of any service of the instance, as clients reach it; several, separated by "
        "commas, are tried in turn.",
        default="127.0.0.1:7420",
    )
    token_file: str = setting(
        "File with the token of the principal that the scaler acts as, which needs the verb "
        "inspect on the queues; empty: that of its certificate, or none.",
        default="",
    )
    keda_identity: str = setting(
        "DNS name that KEDA's certificate has among its alternative names, where the scaler serves "
        "with TLS; other callers are refused.",
        default="slatemq-keda",
    )
