"""The network of a guest that reaches hosts by a proxy alone: loopback, and on it one port at which the node's proxy listens.

The socket is made inside the guest's network namespace and is held by the daemon, so nothing of it runs in the guest, and no
other guest can connect to it.
"""

import socket
from collections.abc import Mapping

PORT = 3128  # Squid's default
ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}


def listen() -> socket.socket:
    """Return the proxy's socket, in this process's network namespace."""
    return socket.create_server(("127.0.0.1", PORT))
