"""Several hosts on one machine: network namespaces with links between them, whose counters tell what really went over the wire."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

HEADER_BYTES = 14 + 20 + 32
"""Of each packet that a link counts: Ethernet, IPv4, and TCP with its timestamps."""


@dataclass(frozen=True)
class Host:
    """One of the hosts: a namespace, with one link to the other."""

    name: str
    link: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a Python script there."""
        command = self.command(sys.executable, "-c", script, *arguments)
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": self.link, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def can_have_hosts() -> bool:
    """Whether this process may make namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"sw-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them, while the context lasts. Whatever runs there is ended with it."""
    stem = f"sw{os.getpid()}"
    hosts = tuple(Host(f"{stem}-{at}", f"{stem}v{at}"[:15], f"10.87.{os.getpid() % 250}.{at + 1}") for at in range(2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        first, second = hosts
        _ip("link", "add", first.link, "netns", first.name, "type", "veth", "peer", "name", second.link, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
            _ip("-n", host.name, "link", "set", host.link, "up")
        yield first, second
    finally:
        for host in hosts:
            pids = subprocess.run(
                ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def finish_all(processes: Sequence[subprocess.Popen[str]], timeout_seconds: float) -> list[str]:
    """What each process printed; all must end well."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_seconds)
            if process.returncode:
                raise RuntimeError(f"A process on a host ended with {process.returncode}:\n{err}")
            found.append(out)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return found


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
