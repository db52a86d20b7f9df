"""Files of revocation lists: what is taken, and what is refused with its reason."""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID

from libs.serving.access import protection_of
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import FatalError
from libs.serving.requests.auditing import Auditor
from libs.serving.revocations import revocations_of
from libs.serving.tls import client_certificate
from slatemq._admin.expiries import expiries_of
from slatemq.cli.access.dev_certificates import SERVICE_NAME, Authority
from slatemq.errors import InvalidArgument, Unauthenticated

Builder = x509.CertificateRevocationListBuilder
PEM = serialization.Encoding.PEM
AUDITOR = Auditor("broker-0", lambda act: None)


def builder_of(
    authority: Authority, *revoked: bytes, days: int = 1, name: x509.Name | None = None
) -> Builder:
    now = datetime.now(UTC)
    builder = Builder().issuer_name(name or authority.name).last_update(now - timedelta(days=9))
    builder = builder.next_update(now + timedelta(days=days))
    for pem in revoked:
        serial = x509.load_pem_x509_certificate(pem).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return builder


def signed(authority: Authority, builder: Builder) -> bytes:
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(PEM)


class Files:
    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(1, "ours"), Authority(1, "others")
        self.ca, self.lists = folder / "ca.crt", folder / "crl.pem"
        self.ca.write_bytes(self.authority.pem)
        own = {"tls_cert": folder / "service.crt", "tls_key": folder / "service.key"}
        self.tls: dict[str, Any] = {name: str(file) for name, file in own.items()}
        self.tls["tls_ca"] = str(self.ca)

    def certify(self) -> None:
        certificate, key = self.authority.sign(SERVICE_NAME, (SERVICE_NAME,))
        Path(self.tls["tls_cert"]).write_bytes(certificate)
        Path(self.tls["tls_key"]).write_bytes(key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_what_a_list_names_is_refused_and_nothing_else(files: Files) -> None:
    files.ca.write_bytes(files.authority.pem + files.other.pem)
    mine, kept, theirs = [
        one.sign("client", ("client",))[0]
        for one in (files.authority, files.authority, files.other)
    ]
    files.lists.write_bytes(
        b"of two authorities\n"
        + signed(files.authority, builder_of(files.authority, mine))
        + signed(files.other, builder_of(files.other, theirs))
    )

    revoked = revocations_of(files.lists, files.ca).value

    for pem in (mine, theirs, mine):
        with pytest.raises(Unauthenticated) as caught:
            revoked.check({"x509_pem_cert": [pem]})
        assert caught.value.reason == "CERTIFICATE_REVOKED"
    revoked.check({"x509_pem_cert": [kept]})
    revoked.check({})


def test_a_number_that_another_authority_gave_too_is_not_revoked(files: Files) -> None:
    theirs = files.other.sign("client", ("client",))[0]
    number = x509.load_pem_x509_certificate(theirs).serial_number
    entry = x509.RevokedCertificateBuilder().serial_number(number)
    entry = entry.revocation_date(datetime.now(UTC))
    named = builder_of(files.authority).add_revoked_certificate(entry.build())
    files.lists.write_bytes(signed(files.authority, named))
    revoked = revocations_of(files.lists, files.ca).value

    revoked.check({"x509_pem_cert": [theirs]})


@pytest.mark.parametrize(
    ("name", "kind"), [("ours", _ASN1Type.PrintableString), (" OURS ", _ASN1Type.UTF8String)]
)
def test_a_list_names_its_authority_however_the_name_is_written(
    files: Files, name: str, kind: _ASN1Type
) -> None:
    mine = files.authority.sign("client", ("client",))[0]
    written = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name, kind)])
    assert written.public_bytes() != files.authority.name.public_bytes()
    files.lists.write_bytes(
        signed(files.authority, builder_of(files.authority, mine, name=written))
    )

    revoked = revocations_of(files.lists, files.ca).value

    with pytest.raises(Unauthenticated):
        revoked.check({"x509_pem_cert": [mine]})


def test_what_an_authority_signed_that_was_revoked_itself_is_refused(files: Files) -> None:
    # gRPC has the leaf, and apart from it all that the client sent besides
    between = files.authority.sign("between", ("between",))[0]
    leaf = files.other.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, between)))
    revoked = revocations_of(files.lists, files.ca).value

    with pytest.raises(Unauthenticated) as caught:
        revoked.check(
            {"x509_pem_cert": [leaf], "x509_pem_cert_chain": [files.authority.pem + between]}
        )
    assert caught.value.reason == "CERTIFICATE_REVOKED"
    revoked.check({"x509_pem_cert": [leaf], "x509_pem_cert_chain": [files.authority.pem]})
    with pytest.raises(Unauthenticated):
        revoked.check({"x509_pem_cert": [leaf], "x509_pem_cert_chain": [b"what is not read"]})


def test_a_certificate_of_no_version_that_there_is_cannot_be_read(
    files: Files, tmp_path: Path
) -> None:
    """Libraries tell of that by an error of its own kind."""
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority)))
    revoked = revocations_of(files.lists, files.ca).value
    odd = of_second_version(files.authority.sign("client", ("client",))[0])
    auth = {"x509_pem_cert": [odd]}

    for look in (revoked.check, client_certificate):
        with pytest.raises(Unauthenticated):
            look(auth)
    files.ca.write_bytes(odd)
    with pytest.raises(InvalidArgument) as caught:
        revocations_of(files.lists, files.ca)
    assert caught.value.field == "tls_ca"
    assert expiries_of([files.ca]) == []
    files.certify()
    own = Path(files.tls["tls_cert"])
    own.write_bytes(of_second_version(own.read_bytes()))
    with pytest.raises(FatalError, match="cannot be used"):
        protection_of(ServingConfig(root="memory:///", **files.tls), AUDITOR)


def of_second_version(pem: bytes) -> bytes:
    """A certificate (RFC 5280, section 4.1.2.1) as of X.509 v2, which no one uses."""
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    odd = der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x01", 1)
    lines = base64.encodebytes(odd)
    return b"-----BEGIN CERTIFICATE-----\n" + lines + b"-----END CERTIFICATE-----\n"


DELTA = x509.DeltaCRLIndicator(1)


def point(
    *, indirect: bool = False, attributes: bool = False, reasons: frozenset[Any] | None = None
) -> x509.IssuingDistributionPoint:
    return x509.IssuingDistributionPoint(
        full_name=None,
        relative_name=None,
        only_contains_user_certs=False,
        only_contains_ca_certs=False,
        only_some_reasons=reasons,
        indirect_crl=indirect,
        only_contains_attribute_certs=attributes,
    )


PARTIAL = [
    DELTA,
    point(indirect=True),  # It may name certificates of other authorities.
    point(reasons=frozenset([x509.ReasonFlags.key_compromise])),
    point(attributes=True),
]


def lists_that_end_early(files: Files) -> list[bytes]:
    whole = signed(files.authority, builder_of(files.authority))
    return [whole + whole[:-60], whole + whole[:15], whole + whole[:-1].rstrip(b"-")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda files: b"", "has no revocation list"),
        (lambda files: files.authority.pem, "has no revocation list"),
        (
            lambda files: signed(files.authority, builder_of(files.authority)).replace(b"M", b"?"),
            "is damaged",
        ),
        (lambda files: signed(files.other, builder_of(files.other)), "'CN=others'.*not signed by"),
        (lambda files: signed(files.other, builder_of(files.authority)), "'CN=ours'.*not signed"),
        *(
            (
                lambda files, part=part: signed(
                    files.authority, builder_of(files.authority).add_extension(part, critical=True)
                ),
                "not a complete list",
            )
            for part in PARTIAL
        ),
        *((lambda files, at=at: lists_that_end_early(files)[at], "is cut off") for at in range(3)),
    ],
)
def test_a_file_that_is_no_list_of_our_authorities_stops_the_start(
    files: Files, content: Callable[[Files], bytes], problem: str
) -> None:
    files.lists.write_bytes(content(files))

    with pytest.raises(InvalidArgument, match=problem) as caught:
        revocations_of(files.lists, files.ca)
    assert caught.value.field == "tls_crl"


def test_a_file_that_is_not_there_or_has_no_authorities_beside_it_stops_the_start(
    files: Files,
) -> None:
    files.certify()
    for tls, problem in (
        (files.tls, f"--tls-crl: cannot read {files.lists}"),
        ({}, "--tls-crl: has no effect"),
    ):
        config = ServingConfig(root="memory:///", tls_crl=str(files.lists), **tls)
        with pytest.raises(FatalError, match=problem):
            protection_of(config, AUDITOR)


def test_a_list_that_is_out_of_date_stays_in_force_and_is_warned_about(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    mine = files.authority.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, mine, days=-1)))

    revoked = revocations_of(files.lists, files.ca).value

    assert "out of date" in caplog.text
    with pytest.raises(Unauthenticated):
        revoked.check({"x509_pem_cert": [mine]})


def test_a_list_counts_as_long_as_its_authority_is_trusted(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    mine = files.authority.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, mine)))
    file = revocations_of(files.lists, files.ca)

    files.ca.write_bytes(files.other.pem)

    assert not file.reload()
    assert "not signed by an authority" in caplog.text
    with pytest.raises(Unauthenticated):
        file.value.check({"x509_pem_cert": [mine]})
