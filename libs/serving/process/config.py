"""Settings of a service: frozen dataclasses, read once at start from flags and environment.

A service declares its settings by extending `ServingConfig`, the owner of a shard `OwnerConfig`::

    @dataclass(frozen=True, kw_only=True)
    class BrokerConfig(OwnerConfig):
        shard: int = setting("Number of this broker's shard.", default=0, minimum=0)
        lease_ms: int = setting("Lease of a claim that asks for none, in ms.", default=30_000)

and `load` reads them. The settings of the instance have flags and variables too; see
`libs.serving.process.instance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from libs.serving import limits
from libs.serving.process.event_settings import read_queue_settings
from libs.serving.process.exits import EXIT_FENCED
from libs.serving.process.instance import InstanceSettings, StatedSetting
from libs.serving.process.process_config import OWN, MutualTlsConfig, SettingsReader
from libs.serving.process.settings import setting, settings_of
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.events.settings import QueueSettings

C = TypeVar("C", bound="ServingConfig")


@dataclass(frozen=True, kw_only=True)
class ServingConfig(MutualTlsConfig):
    """The settings that every service has.

    Attributes:
        queue: The `queue` section of the file `config` and its variables; None in direct mode.
        instance: The settings of the instance, once the process has joined it.
        instance_number: Of the record that they come from; 0 before.
        stated: Those that flags and variables of this process state.
    """

    queue: QueueSettings | None = None
    instance: InstanceSettings = field(default_factory=InstanceSettings)
    instance_number: int = 0
    stated: tuple[StatedSetting, ...] = ()

    root: str = setting(
        "URL of the object store folder that holds all data: file:///path, memory:///, "
        "s3://bucket/prefix?region=…, gs://bucket/prefix, az://container/prefix.",
    )
    wal_store: str = setting(
        "URL of a bucket or folder that holds the write-ahead logs alone, which every commit waits "
        "for: file:///path, s3://bucket?region=…, gs://bucket, az://container. A new instance "
        "keeps it in its record, where empty takes it from; it is not changed by a setting.",
        default="",
    )
    config: str = setting(
        "YAML file with the section `queue`, the settings of event queues; empty reads none.",
        default="",
    )
    advertised_address: str = setting(
        "host:port under which clients reach this process; empty means the one it listens on.",
        default="",
    )
    peer_port: int = setting(
        "Port for the other services, on the same address: what they call of one another is "
        "served there alone; 0 takes a free one.",
        default=0,
        minimum=0,
        maximum=65_535,
    )
    peer_address: str = setting(
        "host:port under which the other services reach that port; empty means the host of the "
        "advertised address, and the port itself.",
        default="",
    )
    service_identity: str = setting(
        "DNS name that the certificate of every service has among its alternative names.",
        default="slatemq-service",
    )
    client_certificates: str = setting(
        "Whether clients must have a certificate; its names can be principals of the policy.",
        default="none",
        choices=("none", "required"),
    )
    access_policy: str = setting(
        "YAML file that says what principals may do; empty lets all callers do everything. Files "
        "of access are read again when they change.",
        default="",
    )
    access_tokens: str = setting(
        "YAML file of static tokens, made by `slatemq access token`; empty accepts none.",
        default="",
    )
    access_issuers: str = setting(
        "YAML file of issuers whose JSON Web Tokens are accepted (OpenID Connect); empty accepts "
        "none.",
        default="",
    )
    fenced_exit_code: int = setting(
        "Exit code once another process owns the shard, after which this one must not be started "
        "again; 0 for supervisors that start again whatever fails (Docker's on-failure).",
        default=EXIT_FENCED,
        minimum=0,
        maximum=255,
    )
    concurrent_calls_max: int = setting(
        "Calls in flight at once; over it callers get RESOURCE_EXHAUSTED. A principal has half of "
        "them at most.",
        default=limits.ADMISSION_CALLS_MAX,
        minimum=1,
    )
    slow_step_ms: int = setting(
        "A step of the event loop that takes more processor time than this, in ms, is logged with "
        "its stack, since all calls wait for its end; 0 turns this off.",
        default=50,
        minimum=0,
    )
    store_prices: str = setting(
        "USD for a million requests to the object store by kind, for the metric slatemq.store.cost "
        "and commit_budget_usd, such as put=5,list=5,get=0.4,head=0.4,delete=0 (kinds left out cost"
        " nothing); empty takes these, the list prices of S3 Standard in us-east-1, and 0 on "
        "file:// and memory://.",
        default="",
    )
    wal_store_prices: str = setting(
        "The same for the store of the write-ahead logs alone; empty takes these, or with "
        "s3_express=true in its URL those of S3 Express One Zone in us-east-1: put=1.13,list=1.13,"
        "get=0.03,head=0.03,delete=0.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class OwnerConfig(ServingConfig):
    """The settings of a service that owns a shard."""

    owner_name: str = setting(
        "Name of this process as the owner of its shard, unique and kept over restarts, such as "
        "the UID of its pod: once another process has taken the shard over, one of this name ends "
        "with exit code 77 instead of taking it back. Empty: each start takes it over.",
        default="",
    )
    standby: bool = setting(
        "Wait while another process owns the shard, and take it within 3 s once that one is silent "
        "or stops. For every process of a shard that has several, the first owner too.",
        default=False,
    )


def load(config_type: type[C], program: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Read the settings of `config_type`, and those of the instance that this process states.

    Args:
        config_type: A ServingConfig whose fields are made with `setting`.
        program: How the process was called, for `--help`.
        argv: The arguments, without the program's name.
        environ: The environment.

    Raises:
        SystemExit: As of `SettingsReader.read`.
    """
    own, shared = settings_of(config_type), settings_of(InstanceSettings)
    groups = [
        (own, OWN),
        (shared, "of the instance: for a new one, and then as `slatemq instance show` has it"),
    ]
    reader = SettingsReader(config_type, program, groups, environ)
    values = reader.read(argv)
    try:
        queue = read_queue_settings(values.get("config", ""), environ)
    except InvalidArgument as error:
        reader.refuse(error.message)
    stated = tuple(
        StatedSetting(one.name, values.pop(one.name), reader.sources[one.name])
        for one in shared
        if one.name in values
    )
    return config_type(queue=queue, stated=stated, **values)
