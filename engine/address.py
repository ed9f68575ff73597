"""Network addresses as they are written."""


def in_url(host: str) -> str:
    """An IPv6 address is put in brackets, as its colons would be taken for a port's."""
    return f"[{host}]" if ":" in host else host


def connect_host(listen_host: str) -> str:
    """Where a client on this machine finds a server that listens on `listen_host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen_host, listen_host)
