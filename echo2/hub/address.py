"""Where the hub listens."""

from __future__ import annotations

import socket

from echo2.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises UserError if the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, socket.gaierror) as error:
        listener.close()
        raise UserError(
            f"hub.host = {host!r}, hub.port = {port}: cannot listen there ({error.strerror or error}); "
            "set hub.port = 0 to let the system choose a free port"
        ) from None
    listener.listen(1024)
    return listener


def url_of(listener: socket.socket) -> str:
    """The address under which `listener` is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
