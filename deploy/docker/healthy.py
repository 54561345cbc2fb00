"""The image's health check: the process answers where it was told to listen (by variable; else the default).

Ends with 0 when it does, else 1.  Where TLS or passwords are asked for, a connection is all that a check may know.
"""

import os
import re
import socket
import sys

SECONDS = 3
REQUEST = b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def is_healthy() -> bool:
    host, _, port = os.environ.get("STALLWATCH_WEB_LISTEN_ADDRESS", ":10077").rpartition(":")
    host = re.sub(r"^(0\.0\.0\.0|\[::\]|)$", "127.0.0.1", host).strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            if os.environ.get("STALLWATCH_WEB_CONFIG_FILE"):
                return True
            connection.sendall(REQUEST)
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


sys.exit(not is_healthy())
