"""Network addresses as they are written."""


def in_url(host: str) -> str:
    """An IPv6 address is put in brackets, as its colons would be taken for a port's."""
    return f"[{host}]" if ":" in host else host
