"""Ports of this machine that are free, and servers that answer."""

import http.client
import random
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

from tailorfl.errors import UserError

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 32768)  # below those that systems give to outgoing connections


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        # As servers do: connections that have just ended do not count.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


def check_port(port: int, option: str = "--port") -> int:
    """A port that is free, or a line that says it is taken."""
    if not 1 <= port <= 65535:
        raise UserError(f"{option} {port}: allowed: ports from 1 to 65535")
    if not is_free(port):
        raise UserError(
            f"{option} {port}: the port is taken, or not for this user; allowed: a free one, or leave it out"
        )
    return port


def free_ports(number: int) -> list[int]:
    """So many different ports that are free now."""
    candidates = random.SystemRandom().sample(PORTS, len(PORTS))
    found = [port for port, _ in zip(filter(is_free, candidates), range(number), strict=False)]
    if len(found) < number:
        raise UserError(f"{number} free ports are needed on {LOOPBACK}; there are {len(found)}")
    return found


def answers(url: str, ca: Path | None = None) -> bool:
    """Whether a server says that it is well; with a CA, one that it vouches for."""
    context = ssl.create_default_context(cafile=ca) if ca else None
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False
