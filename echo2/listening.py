"""Sockets that listen, and what is said of an address where none can."""

from __future__ import annotations

import errno
import socket

from echo2.errors import UserError

BACKLOG = 1024


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket, for IPv6 where `host` is such an address; port 0 lets the system choose. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except TypeError:
        listener.close()
        raise OSError(errno.EADDRNOTAVAIL, "no host has such a name") from None
    except OSError:
        listener.close()
        raise
    return listener


def cannot_listen(error: OSError, host_setting: str, host: str, port_setting: str, port: int) -> UserError:
    """What to say of an address that cannot be had."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        advice = f"set {port_setting} = 0 to let the system choose a free port"
    else:
        advice = f"set {host_setting} to an address of this machine"
    return UserError(f"{host_setting} = {host!r}, {port_setting} = {port}: cannot listen there ({error.strerror}); {advice}")
