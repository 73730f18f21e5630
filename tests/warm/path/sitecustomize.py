"""In every Python that starts with this folder on its path: hands its command over to the warm
server, and stays only to pass signals on and to end as the command ends."""

import contextlib
import os
import sys

MODULES = ("shardwright", "deepspeed.launcher.launch")


def hub_settings() -> str:
    """Ranks are always offline; what starts them says when it should be."""
    names = [
        name for name in sorted(os.environ) if name.startswith("HF_") and name != "HF_HUB_OFFLINE"
    ]
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def _is_known(words: list[str]) -> bool:
    """A command that the server has the imports of: `-m MODULE`, the deepspeed launcher, or a
    script."""
    while words and words[0] in ("-u", "-P"):
        words = words[1:]
    if not words:
        return False
    if words[0] == "-m":
        return len(words) > 1 and words[1] in MODULES
    return words[0].endswith(".py") or os.path.basename(words[0]) == "deepspeed"


def _hand_over(address: str) -> None:
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        files = [
            fd
            for fd in map(int, os.listdir("/proc/self/fd"))
            if fd != connection.fileno() and _is_open(fd)
        ]
        request = json.dumps(
            {
                "command": sys.orig_argv,
                "folder": os.getcwd(),
                "environment": dict(os.environ),
                "parent": os.getppid(),
                "files": files,
            }
        ).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], files)
        connection.sendall(request)
        pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")

        def pass_on(number: int, _: object) -> None:
            # The launcher ends a rank by SIGTERM, which from us would be a request to stop.
            ends = number == signal.SIGTERM and "RANK" in os.environ
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if ends else number)

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_on)
        status = os.waitstatus_to_exitcode(
            int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        )
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(fd: int) -> bool:
    """The listing's own file is gone by now."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


_address = os.environ.get("SHARDWRIGHT_WARM")
if (
    __name__ == "sitecustomize"  # not where a warm command imports it for hub_settings
    and _address
    and os.environ["SHARDWRIGHT_WARM_HUB"] == hub_settings()
    and _is_known(sys.orig_argv[1:])
):
    try:
        _hand_over(_address)
    except (
        BaseException
    ) as error:  # Python would go on without us, and run the command a second time
        os.write(2, f"warm start: {error!r}\n".encode())
        os._exit(70)
