"""Writers that write by other processes, and programs that connect."""

import errno
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path


def shell(here: Path) -> None:
    assert os.system("echo shell > model.pt; mkdir -p sh/a; rm log.csv; mv notes.txt sh/") == 0
    assert (here / "model.pt").read_text() == "shell\n"
    assert not (here / "log.csv").exists()
    assert (here / "sh" / "notes.txt").exists()


def child(here: Path) -> None:
    code = "open('model.pt', 'w').write('child'); import os; os.remove('log.csv')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (here / "model.pt").read_text() == "child"
    listed = subprocess.run(["ls"], capture_output=True, text=True, check=True).stdout.split()
    assert "log.csv" not in listed
    subprocess.run([sys.executable, "-c", code.partition(";")[0]], check=True, env={})
    (here / "own.sh").write_text("#!/bin/sh\necho own > log.csv\n")
    (here / "own.sh").chmod(0o755)
    subprocess.run([str(here / "own.sh")], check=True)
    assert (here / "log.csv").read_text() == "own\n"


def _write(name: str) -> None:
    Path(name).write_text("worker")


def workers(here: Path) -> None:
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        process = context.Process(target=_write, args=(f"{kind}.txt",))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert (here / f"{kind}.txt").read_text() == "worker"


def threads(here: Path) -> None:
    thread = threading.Thread(target=_write, args=("log.csv",))
    thread.start()
    thread.join()
    assert (here / "log.csv").read_text() == "worker"


def loopback(here: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    client.sendall(b"hello")
    assert accepted.recv(5) == b"hello"
    for one in (client, accepted, server):
        one.close()
    named = socket.socket(socket.AF_UNIX)
    named.bind(str(here / "socket"))
    named.listen()
    other = socket.socket(socket.AF_UNIX)
    other.connect("socket")
    for one in (named, other):
        one.close()


def refused(here: Path) -> None:
    """Not one byte may leave, by whatever protocol."""
    for address in (("192.0.2.1", 80), ("203.0.113.7", 443)):
        try:
            socket.create_connection(address, timeout=5)
        except OSError as problem:
            assert problem.errno == errno.ENETUNREACH, problem
        else:
            raise AssertionError(f"connected to {address}")
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        one.sendto(b"x", ("192.0.2.1", 53))
    except OSError as problem:
        assert problem.errno == errno.ENETUNREACH, problem
    else:
        raise AssertionError("sent a datagram")
    finally:
        one.close()
    try:
        socket.getaddrinfo("example.com", 80)
    except OSError:
        pass
    else:
        raise AssertionError("asked for a name")


WRITERS = {each.__name__: each for each in (shell, child, workers, threads)}
CONNECTS = {each.__name__: each for each in (loopback, refused)}
