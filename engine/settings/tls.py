"""The certificate that the ports for clients show, when there is one."""

from __future__ import annotations

import ssl
from pathlib import Path

from engine.errors import ConfigError
from engine.settings.config import Config


def server_context(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context of the servers, or None without a certificate. Raises ConfigError that names the wrong
    file and the reason."""
    if not config.tls_cert_file:
        return None
    for name, path in (("TLS_CERT_FILE", config.tls_cert_file), ("TLS_KEY_FILE", config.tls_key_file)):
        _read(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, password=_no_password)
    except ssl.SSLError as error:
        files = f"TLS_CERT_FILE is {config.tls_cert_file!r}, TLS_KEY_FILE is {config.tls_key_file!r}"
        raise ConfigError(f"{files}: {_reason(error)}") from None
    return context


def key_and_chain(config: Config) -> tuple[bytes, bytes]:
    """Return the contents of the key file and the certificate file, which `server_context` has checked."""
    return _read("TLS_KEY_FILE", config.tls_key_file), _read("TLS_CERT_FILE", config.tls_cert_file)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be read: {error.strerror}") from None


def _no_password() -> str:
    raise ConfigError("TLS_KEY_FILE is encrypted, and its password cannot be entered here; decrypt it")


def _reason(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return f"these are no certificate and its key in PEM ({error.reason or error})"
