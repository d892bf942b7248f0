"""Where the hub listens."""

from __future__ import annotations

import socket

from echo2.listening import cannot_listen, listen_on


def listen(host: str, port: int, port_setting: str = "hub.port") -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises UserError if the port is taken or the address is not ours."""
    try:
        return listen_on(host, port)
    except OSError as error:
        raise cannot_listen(error, "hub.host", host, port_setting, port) from None


def url_of(listener: socket.socket) -> str:
    """The address under which `listener` is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
