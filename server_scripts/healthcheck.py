"""Exit status 0 when the server on this machine is ready: for a container's health check."""

from __future__ import annotations

import http.client
import sys

from engine.settings.config import Config
from server_scripts.ports import connect_host

TIMEOUT_S = 4.0


def main() -> int:
    config = Config.from_env()
    connection = http.client.HTTPConnection(
        connect_host(config.service_host), config.health_http_port, timeout=TIMEOUT_S
    )
    try:
        connection.request("GET", "/v2/health/ready")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(error)
        return 1
    finally:
        connection.close()
    print(text)
    return 0 if response.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
