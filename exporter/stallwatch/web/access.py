"""`--web.config.file`: who is let in.  The schema is that of Prometheus's exporter-toolkit.

A key of that schema which stallwatch does not have is refused by its name: a protection that is written down
and not there would be worse than none.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..strict_yaml import InputError, Section, load, read_file

Stamp = tuple[int, int, int, int] | None
"""Device, inode, size and nanoseconds of the last change of a file; None: it cannot be looked at."""

HIGHEST_COST = 16
"""Of a hash: doubles the time with each step.  16 is about 5 s; at 17 no client would get its answer in time."""

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
HEADERS: Mapping[str, tuple[str, ...]] = {
    # Those that the toolkit allows -> the allowed values; () = any.
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
REFUSED: Mapping[str, str] = {
    # Keys of the toolkit that stallwatch does not have -> what to do instead.
    "rate_limit": "use --web.max-requests",
    "tls_server_config.cert": "use cert_file",
    "tls_server_config.key": "use key_file",
    "tls_server_config.client_ca": "use client_ca_file",
    "tls_server_config.cipher_suites": "OpenSSL's own choice for the version is used",
    "tls_server_config.curve_preferences": "OpenSSL's own choice is used",
}
_BCRYPT = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class Access:
    """What the file says.  The default lets everybody in."""

    tls: ssl.SSLContext | None = None
    client_names: frozenset[str] = frozenset()  # of the client's certificate, one of these; empty: any
    users: Mapping[str, bytes] = field(default_factory=dict)  # name -> bcrypt hash
    headers: Mapping[str, str] = field(default_factory=dict)  # added to each answer
    seen: Mapping[str, Stamp] = field(default_factory=dict)  # the files it was read from, as they were before


EVERYBODY = Access()


def stamp(path: str) -> Stamp:
    """What changes when a file is written or another takes its place (a link is followed, as Kubernetes swaps them)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def load_access(file: str) -> Access:
    """InputError names the file, the line, the key and the mistake; never a hash."""
    seen = {file: stamp(file)}
    top = load(file)
    if top is None:
        return Access(seen=seen)
    _refuse(top)
    tls = top.section("tls_server_config")
    http = top.section("http_server_config")
    users = top.section("basic_auth_users")
    context, names = _tls(tls, seen) if tls else (None, frozenset())
    access = Access(context, names, _users(users) if users else {}, _http(http) if http else {}, seen)
    top.finish()
    return access


def _refuse(section: Section) -> None:
    """Say of a key of the toolkit that it is not supported, rather than that it is unknown."""
    for name in section.names():
        instead = REFUSED.get(f"{section.path}.{name}" if section.path else name)
        if instead is not None:
            raise section.wrong(name, f"not supported by stallwatch; {instead}")


def _tls(section: Section, seen: dict[str, Stamp]) -> tuple[ssl.SSLContext, frozenset[str]]:
    _refuse(section)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # of TLS 1.3: two for each handshake; Prometheus, which keeps its connection, uses none
    if section.boolean("prefer_server_cipher_suites", default=True):
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    least, most = (
        VERSIONS[section.choice(key, tuple(VERSIONS), default)]
        for key, default in (("min_version", "TLS12"), ("max_version", "TLS13"))
    )
    if least > most:
        raise section.wrong("max_version", "is below min_version")
    context.minimum_version, context.maximum_version = least, most
    _certificate(section, context, seen)
    names = _clients(section, context, seen)
    section.finish()
    return context, names


def _certificate(section: Section, context: ssl.SSLContext, seen: dict[str, Stamp]) -> None:
    certificate, key = _file(section, "cert_file", seen), _file(section, "key_file", seen)
    try:
        context.load_cert_chain(certificate, key, password="")  # else OpenSSL asks at the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise section.wrong("key_file", "is not the key of the certificate in cert_file") from None
        reason = error.reason or "not PEM"
        raise section.wrong("cert_file", f"no certificate with a key that is not encrypted: {reason}") from None
    except OSError as error:
        raise section.wrong("cert_file", f"cannot be read: {error.strerror}") from None


def _clients(section: Section, context: ssl.SSLContext, seen: dict[str, Stamp]) -> frozenset[str]:
    """Whose certificates are let in; returns the names of which one must be in it."""
    kind = section.choice("client_auth_type", tuple(CLIENT_AUTH), "NoClientCert")
    mode = CLIENT_AUTH[kind]
    if "client_ca_file" in section:
        if mode == ssl.CERT_NONE:
            raise section.wrong("client_ca_file", "is of no use without client_auth_type: RequireAndVerifyClientCert")
        authority = _file(section, "client_ca_file", seen)
        try:
            context.load_verify_locations(authority)
        except (ssl.SSLError, OSError):
            raise section.wrong("client_ca_file", "holds no certificate in PEM") from None
    elif mode != ssl.CERT_NONE:
        raise section.wrong("client_auth_type", f"{kind} needs client_ca_file")
    names = frozenset(map(_name, section.texts("client_allowed_sans")))
    if "client_allowed_sans" in section and (mode != ssl.CERT_REQUIRED or not names):
        raise section.wrong("client_allowed_sans", "needs names, and client_auth_type: RequireAndVerifyClientCert")
    context.verify_mode = mode
    return names


def _file(section: Section, key: str, seen: dict[str, Stamp]) -> str:
    """The path, from the folder of the web configuration on; InputError when it cannot be read."""
    path = os.path.join(os.path.dirname(section.file), section.text(key))
    seen[path] = stamp(path)
    try:
        read_file(path)
    except OSError as error:
        raise section.wrong(key, f"cannot be read: {error.strerror}") from None
    return path


def _users(section: Section) -> dict[str, bytes]:
    """A value is never told: it may be a password that somebody forgot to hash."""
    users = {}
    for name in section.names():
        found = _BCRYPT.fullmatch(section.text(name))
        if found is None:
            raise section.wrong(name, "no bcrypt hash is given; htpasswd -nBC 10 NAME makes one")
        if int(found[1]) > HIGHEST_COST:
            raise section.wrong(name, f"a cost of {found[1]} takes too long; allowed is at most {HIGHEST_COST}")
        users[name] = found[0].encode()
    return users


def _http(section: Section) -> dict[str, str]:
    if section.boolean("http2", default=False):
        raise section.wrong("http2", "HTTP/2 is not spoken; write false, or leave the key out")
    headers = section.section("headers")
    section.finish()
    return _headers(headers) if headers else {}


def _headers(section: Section) -> dict[str, str]:
    found = {}
    for name, allowed in HEADERS.items():
        value = section.text(name, "")
        if not _HEADER_VALUE.fullmatch(value):
            raise section.wrong(name, "printable ASCII on one line is needed")
        if value and allowed and value not in allowed:
            raise section.wrong(name, f"{value!r} is unknown; allowed are {', '.join(allowed)}")
        if value:
            found[name] = value
    section.finish()
    return found


def _name(text: str) -> str:
    """A name of a certificate; addresses in one spelling."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


def names_in(certificate: Mapping[str, object] | None) -> frozenset[str]:
    """DNS names, addresses, e-mail addresses and URIs of a certificate as `ssl` tells it."""
    names = (certificate or {}).get("subjectAltName")
    return frozenset(_name(str(value)) for _, value in names) if isinstance(names, tuple) else frozenset()


def takes_away(new: Access, old: Access) -> str | None:
    """The protection that `new` no longer has, as a sentence; None when all is still there.

    A file that is just being written is empty for a moment, which must let nobody in.
    """
    for key, before, after in (
        ("tls_server_config", old.tls, new.tls),
        ("client_auth_type", old.tls and old.tls.verify_mode == ssl.CERT_REQUIRED, _requires(new)),
        ("basic_auth_users", old.users, new.users),
    ):
        if before and not after:
            return f"{key}: is taken away; that needs a restart"
    return None


def _requires(access: Access) -> bool:
    return access.tls is not None and access.tls.verify_mode == ssl.CERT_REQUIRED


__all__ = ["EVERYBODY", "Access", "InputError", "Stamp", "load_access", "names_in", "stamp", "takes_away"]
