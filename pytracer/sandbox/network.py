"""Refuses connections to other machines, with an error that says how to allow them."""

import errno
import ipaddress
import socket
import sys
from collections.abc import Callable
from typing import Any

_WHY = "an imagined run sends nothing, so it does not reach {}; allow it with --allow-network"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg")


_refusing: list[object] = []  # who asks for it
_hook_is_there = False


def refuse() -> Callable[[], None]:
    """Refuses from now on. Returns a function that ends it. Loopback and Unix sockets work."""
    global _hook_is_there
    asks = object()
    _refusing.append(asks)
    if not _hook_is_there:  # Python never removes one
        _hook_is_there = True
        sys.addaudithook(_heard)
    return lambda: _refusing.remove(asks)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refusing or not event.startswith("socket."):
        return
    if event in _SENDS:
        one, address = arguments
        if one.family in _INTERNET and address and not _is_here(address[0]):
            raise OSError(errno.ENETUNREACH, _WHY.format(address[0]))
    elif event == "socket.getaddrinfo" and _asks_others(arguments[0]):
        raise socket.gaierror(socket.EAI_FAIL, _WHY.format(arguments[0]))


def _asks_others(name: Any) -> bool:
    """Whether the name's address is asked for at another machine."""
    return _address(name) is None and not _is_own_name(name)


def _is_here(host: Any) -> bool:
    address = _address(host)
    if address is None:
        return _is_own_name(host)
    return address.is_loopback or address.is_unspecified


def _is_own_name(host: Any) -> bool:
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
    return text in ("", "localhost", socket.gethostname()) or text.endswith(".localhost")


def _address(host: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The number, if the host is given by one."""
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
