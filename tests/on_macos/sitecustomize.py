"""Python on Linux as it is on macOS, for programs that have this folder on PYTHONPATH: `sys.platform` says so, names
that only Linux has are gone from the standard library, and so are the kernel's files and vector instructions of x86.

What the libraries ask when they are imported has its answer before. psutil, which has a macOS of its own, reads on.
"""

import importlib
import os
import sys
import sysconfig
import zoneinfo  # noqa: F401

sysconfig.get_config_vars()

import asyncio  # noqa: E402, F401
import subprocess  # noqa: E402, F401

import numba  # noqa: E402, F401
import psutil  # noqa: E402
import pydantic.main  # noqa: E402, F401
import torch.distributed  # noqa: E402
import transformers  # noqa: E402, F401

ONLY_LINUX = {
    "os": "sched_getaffinity sched_setaffinity memfd_create eventfd pidfd_open posix_fallocate posix_fadvise "
    "copy_file_range fdatasync pipe2 getrandom splice O_DIRECT",
    "mmap": "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_REMOVE MAP_POPULATE MAP_NORESERVE",
    "resource": "prlimit",
    "socket": "MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE TCP_USER_TIMEOUT SO_PEERCRED",
    "fcntl": "F_SETPIPE_SZ F_GETPIPE_SZ F_OFD_SETLK F_OFD_GETLK F_OFD_SETLKW",
    "signal": "sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX",
}
if os.environ.get("AS_ON_MACOS_BEFORE_313"):
    ONLY_LINUX["os"] += " waitid"
for module, names in ONLY_LINUX.items():
    for name in names.split():
        if hasattr(importlib.import_module(module), name):
            delattr(importlib.import_module(module), name)


def refuse(event, arguments):
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | bytes):
        return
    path, frame = os.fsdecode(arguments[0]), sys._getframe(1)
    if path.startswith(("/proc", "/sys/")):
        while frame is not None:
            if os.path.dirname(psutil.__file__) in frame.f_code.co_filename:
                return
            frame = frame.f_back
        raise FileNotFoundError(2, "as on macOS", path)


init_process_group = torch.distributed.init_process_group


def on_loopback(*arguments, **keys):
    """The loopback is called otherwise here after all."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return init_process_group(*arguments, **keys)


torch.distributed.init_process_group = on_loopback
sys.addaudithook(refuse)
sys.platform = "darwin"
