"""Memory that an engine shares with its child processes, without a name that could be left behind.

On Linux it is a memfd: it never appears in /dev/shm, isn't bound by that folder's size (64 MB in a
default container), can be opened by no other user, and is gone with the last process that holds it,
however that process ended. Elsewhere it is a temporary file that only this user can open.
"""

import mmap
import os
import sys
import tempfile
from multiprocessing.reduction import DupFd
from typing import Protocol

_IS_LINUX = sys.platform == "linux"


class _InheritedFd(Protocol):
    def detach(self) -> int: ...


class SharedFile:
    """A file of fixed size, all of whose space is reserved when it is made.

    It can be an argument of a process that multiprocessing spawns, and of nothing else: the child
    inherits the descriptor.

    Raises:
        OSError: There is no room for it. Reserving now makes that an error here; a full file system
            would otherwise be a SIGBUS in whoever first writes the missing page.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._named: tempfile._TemporaryFileWrapper[bytes] | None = None
        if _IS_LINUX:
            self.fd = os.memfd_create("nanovllm")
            os.fchmod(self.fd, 0o600)  # made for everybody, though only this user can get at it
        else:
            self._named = tempfile.NamedTemporaryFile()  # noqa: SIM115 - close() closes it
            self.fd = os.dup(self._named.fileno())
        try:
            _reserve(self.fd, num_bytes)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno, f"no room for {num_bytes} bytes of shared memory: {error.strerror}"
            ) from error

    @property
    def path(self) -> str:
        """A path by which this process can open the file anew, until `close`."""
        return self._named.name if self._named else f"/proc/self/fd/{self.fd}"

    def map(self) -> mmap.mmap:
        """The file's bytes, shared with every process that maps them."""
        return mmap.mmap(self.fd, self.num_bytes)

    def close(self) -> None:
        """Let go of the file; mappings stay valid. Calling it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._named is not None:
            self._named.close()

    def __reduce__(self) -> tuple[object, ...]:
        name = self._named.name if self._named else None
        return _inherit, (DupFd(self.fd), self.num_bytes, name)


class _Inherited(SharedFile):
    """The same file in a child, which never removes its name."""

    def __init__(self, fd: int, num_bytes: int, name: str | None) -> None:
        self.fd, self.num_bytes, self._name = fd, num_bytes, name
        self._named = None

    @property
    def path(self) -> str:
        return self._name or f"/proc/self/fd/{self.fd}"


def _inherit(inherited: _InheritedFd, num_bytes: int, name: str | None) -> SharedFile:
    return _Inherited(inherited.detach(), num_bytes, name)


def _reserve(fd: int, num_bytes: int) -> None:
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    written = 0
    while written < num_bytes:  # macOS: what has been written has its space
        written += os.pwrite(fd, bytes(min(1 << 20, num_bytes - written)), written)
