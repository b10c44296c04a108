"""The remote shell: the command that starts an agent on a host, and what a failure of it means to the user."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

AGENT = str(Path(__file__).parents[1] / "host" / "agent.py")
_CONNECT_S = 10

# What ssh says (in any case) -> what to do. The first that matches counts.
_FIXES = (
    ("could not resolve hostname", "no such host: correct the name in the hostfile, or add it to /etc/hosts or DNS"),
    ("name or service not known", "no such host: correct the name in the hostfile, or add it to /etc/hosts or DNS"),
    ("connection refused", "no ssh server answers there: start sshd on it, or give its port with --ssh_port"),
    ("connection timed out", "it does not answer: is it up, and reachable from here (firewall)?"),
    ("no route to host", "it does not answer: is it up, and reachable from here (firewall)?"),
    ("network is unreachable", "this machine has no route to it: check the network"),
    (
        "host key verification failed",
        "its key is not known here: run `ssh {host}` once, or `ssh-keyscan {host} >> ~/.ssh/known_hosts`",
    ),
    (
        "remote host identification has changed",
        "its key has changed: if that is right, `ssh-keygen -R {host}` and `ssh {host}` once",
    ),
    ("permission denied", "it wants a password: `ssh-copy-id {host}`, so that `ssh {host} true` asks for nothing"),
    (
        "too many authentication failures",
        "it wants a password: `ssh-copy-id {host}`, so that `ssh {host} true` asks for nothing",
    ),
    ("bad configuration option", "ssh did not understand its options: see --launcher_args and ~/.ssh/config"),
    ("unknown option", "ssh did not understand its options: see --launcher_args"),
    (
        "can't open file",
        "deepc is not installed there at {agent}: the environment must be at the same path on every host",
    ),
    (
        "no such file or directory",
        "there is no {python} on it: Python and deepc must be at the same path on every host",
    ),
    ("not found", "there is no {python} on it: Python and deepc must be at the same path on every host"),
)


def command(host: str, *, port: int | None, arguments: str, before: str | None) -> list[str]:
    """Starts an agent on `host` that speaks on its stdin and stdout. arguments: further ones of ssh. before: a script
    to be sourced there."""
    remote = f"exec {shlex.quote(sys.executable)} -IS {shlex.quote(AGENT)} 0 1"
    if before:
        remote = f". {shlex.quote(before)} && {remote}"
    options = [
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={_CONNECT_S}",
        "-o",
        "ServerAliveInterval=5",
        "-o",
        "ServerAliveCountMax=3",
        "-T",
        "-x",
    ]
    if port is not None:
        options += ["-p", str(port)]
    return ["ssh", *shlex.split(arguments), *options, "--", host, remote]


def explain(host: str, code: int | None, said: str) -> str:
    """One line: why no agent came up on `host`, and what to do. said: what ssh and the remote shell wrote."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("Warning:")]
    text = "; ".join(lines[-3:]) or (f"ssh ended with code {code}" if code is not None else "no answer")
    for pattern, fix in _FIXES:
        if pattern in said.lower():
            return f"{host}: {text}. Fix: {fix.format(host=host, python=sys.executable, agent=AGENT)}"
    return f"{host}: {text}. Try `ssh {host} true`: it must work without a question"
