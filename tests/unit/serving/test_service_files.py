"""The certificates with which services serve and connect: those that others would refuse."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libs.serving.access import inherited_tls, protection_of, service_tls
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import FatalError
from libs.serving.requests.auditing import Auditor
from libs.serving.tls import measure_certificates
from slatemq import _file_status
from slatemq.cli.access.dev_certificates import SERVICE_NAME, Authority
from slatemq.errors import InvalidArgument

DAY = timedelta(days=1)

KEYS: dict[str, Callable[[], Any]] = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}

OTHER_NAMES = (
    x509.DNSName("elsewhere"),
    x509.RFC822Name(SERVICE_NAME),
    x509.UniformResourceIdentifier(SERVICE_NAME),
)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "P-521": ({"kind": "P-521"}, "a key that gRPC does not take"),
    "secp256k1": ({"kind": "secp256k1"}, "a key that gRPC does not take"),
    "Ed25519": ({"kind": "Ed25519"}, "a key that gRPC does not take"),
    "names of other kinds": ({"names": OTHER_NAMES}, f"the name {SERVICE_NAME} among its DNS"),
    "no alternative names": ({"names": ()}, f"the name {SERVICE_NAME} among its DNS"),
}

OUT_OF_TIME: dict[str, tuple[dict[str, Any], str]] = {
    "expired": ({"until": -DAY}, "has expired"),
    "not valid yet": ({"since": DAY / 2}, "is not valid before"),
}


class Files:
    """What a service is given, by one authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority(days=1)
        (folder / "ca.crt").write_bytes(self._authority.pem)
        names = {"tls_ca": "ca.crt", "tls_cert": "service.crt", "tls_key": "service.key"}
        self.settings: dict[str, Any] = {key: str(folder / name) for key, name in names.items()}
        self.config = ServingConfig(root="memory:///", **self.settings)

    def write(
        self,
        *,
        kind: str = "P-256",
        since: timedelta = -2 * DAY,
        until: timedelta = DAY,
        names: tuple[x509.GeneralName, ...] = (x509.DNSName(SERVICE_NAME),),
    ) -> None:
        key, now = KEYS[kind](), datetime.now(UTC)
        subject = x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVICE_NAME)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([subject]))
            .issuer_name(self._authority.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._authority.key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (self.folder / "service.crt").write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
        )
        (self.folder / "service.key").write_bytes(private)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("form", BAD)
def test_a_certificate_that_others_would_refuse_stops_the_start(files: Files, form: str) -> None:
    change, problem = BAD[form]
    files.write(**change)
    expected = f"--tls-cert: {files.folder / 'service.crt'} .*{problem}"

    with pytest.raises(FatalError, match=expected):
        protection_of(files.config, Auditor("broker-0", lambda act: None))
    with pytest.raises(FatalError, match=expected):
        service_tls(files.config)
    with pytest.raises(InvalidArgument, match=problem):
        inherited_tls({f"SLATEMQ_{name.upper()}": file for name, file in files.settings.items()})


def test_a_key_for_rsa_pss_alone_stops_the_start(files: Files) -> None:
    made = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa-pss"]
    made += ["-pkeyopt", "rsa_keygen_bits:2048", "-subj", f"/CN={SERVICE_NAME}"]
    made += ["-addext", f"subjectAltName=DNS:{SERVICE_NAME}"]
    made += ["-out", files.settings["tls_cert"], "-keyout", files.settings["tls_key"]]
    subprocess.run(made, check=True, capture_output=True)

    with pytest.raises(FatalError, match="has a key that gRPC does not take"):
        service_tls(files.config)


@pytest.mark.parametrize("form", OUT_OF_TIME)
def test_a_certificate_out_of_its_time_is_used_from_the_start_where_there_is_no_other(
    files: Files, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, problem = OUT_OF_TIME[form]
    files.write(**change)

    assert protection_of(files.config, Auditor("broker-0", lambda act: None)).service_tls
    assert service_tls(files.config)
    assert problem in caplog.text


@pytest.mark.parametrize("form", [*BAD, *OUT_OF_TIME])
def test_a_certificate_that_others_would_refuse_leaves_the_one_before(
    files: Files, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    change, problem = (BAD | OUT_OF_TIME)[form]
    files.write()
    incoming = protection_of(files.config, Auditor("broker-0", lambda act: None)).service_tls
    outgoing = service_tls(files.config)
    assert incoming is not None
    assert outgoing is not None
    before = outgoing.credentials

    files.write(**change)
    with caplog.at_level(logging.WARNING):
        assert incoming._changed() is None
        assert outgoing.credentials is before

    kept = [record for record in caplog.records if problem in record.getMessage()]
    assert len(kept) == 2


@pytest.mark.parametrize("refused", ["of another key", "junk", "gone"])
def test_the_expiry_of_a_certificate_is_that_of_the_one_in_force(
    files: Files, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    files.write(until=3 * DAY)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    measure_certificates(meter, files.config, files.config.service_identity)
    file = files.settings["tls_cert"]
    key = Path(files.settings["tls_key"]).read_bytes()

    def days_left() -> int:
        metrics_data: Any = reader.get_metrics_data()
        (gauge,) = metrics_data.resource_metrics[0].scope_metrics[0].metrics
        points = {point.attributes["slatemq.file"]: point.value for point in gauge.data.data_points}
        left_s: float = points[file] - time.time()
        return round(left_s / DAY.total_seconds())

    assert days_left() == 3

    # When another certificate is refused
    files.write(until=9 * DAY)
    if refused == "of another key":
        Path(files.settings["tls_key"]).write_bytes(key)
    elif refused == "junk":
        Path(file).write_bytes(b"junk")
    else:
        Path(file).unlink()

    # Then that before counts, until one is taken
    assert days_left() == 3
    files.write(until=9 * DAY)
    assert days_left() == 9


@pytest.mark.parametrize("kind", ["P-256", "P-384", "RSA"])
def test_keys_that_grpc_takes_are_taken(files: Files, kind: str) -> None:
    files.write(kind=kind)

    assert service_tls(files.config) is not None
