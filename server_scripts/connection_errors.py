"""Words for the errors of an HTTP client that cannot reach its server."""

from __future__ import annotations

import os
import socket
import ssl

import aiohttp


def reason_of(error: Exception) -> str:
    """Return why a request got no answer, without the client's internal names."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted: {_of_tls(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError):
            return f"it cannot be spoken to over TLS: {_of_tls(cause)}"
        if isinstance(cause, socket.gaierror):
            return f"the name {error.host} cannot be resolved ({cause.strerror})"
        return _of_system(cause)
    if isinstance(error, aiohttp.ServerTimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer; a server with TLS needs https://"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what it answers is not HTTP; a server with TLS needs https://"
    if isinstance(error, aiohttp.ClientOSError):
        return _of_system(error)
    return str(error) or type(error).__name__


def _of_tls(error: Exception) -> str:
    if getattr(error, "reason", None) == "WRONG_VERSION_NUMBER":
        return "a server without TLS needs http://"
    return getattr(error, "verify_message", "") or str(error)


def _of_system(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
