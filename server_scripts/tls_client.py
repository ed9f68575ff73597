"""TLS context of the server's own requests to its encrypted ports.

It trusts the configured certificate, whatever names that has.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from engine.settings.config import Config

CONNECT_WITHIN_S = 4.0


def client_context(config: Config) -> ssl.SSLContext:
    """Return the context. Raise OSError if the certificate cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file need not contain the certificate of its authority
    try:
        context.load_verify_locations(config.tls_cert_file)
    except OSError as error:
        raise OSError(f"TLS_CERT_FILE is {config.tls_cert_file!r}: {error}") from None
    return context


def certified_name(config: Config, host: str, port: int) -> str:
    """Return a name that the certificate of this port is valid for, because gRPC requires one.

    Raise OSError if there is none.
    """
    with socket.create_connection((host, port), CONNECT_WITHIN_S) as sock:
        with client_context(config).wrap_socket(sock) as tls:
            shown: Any = tls.getpeercert()
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in shown["subject"] for kind, value in part if kind == "commonName"]
    if not names:
        raise OSError("the certificate is for no host")
    return names[0].replace("*", "any")
