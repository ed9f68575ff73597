"""Network addresses as they are written."""


def in_url(host: str) -> str:
    """Return the host for a URL: an IPv6 address in brackets, to separate its colons from the port's."""
    return f"[{host}]" if ":" in host else host


def connect_host(listen_host: str) -> str:
    """Return the address at which a client on this machine reaches a server that listens on `listen_host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen_host, listen_host)
