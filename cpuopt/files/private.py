"""Folders and files that only this user can change, because what they hold is run as code or decides what runs.

A checksum does not keep others from writing there. So each access walks from the root of the file system, by
descriptors: nobody can put another folder in the place of one that was checked. Owner and mode of every file are
checked on the descriptor that is read.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from .reading import LARGEST

LINKS = 40
"""Symbolic links in one path, as many as Linux follows."""
FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PARENT = FOLDER | getattr(os, "O_PATH", 0)  # to pass through, a folder need not be readable
OTHERS = stat.S_IWGRP | stat.S_IWOTH
ELSEWHERE = "set CPUOPT_CACHE_DIR to a directory that only you can change"


class UnsafeError(PermissionError):
    """A folder or a file that other users can change; ``strerror`` has the reason and the advice."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPERM, why)


@contextmanager
def opened(folder: Path, *, make: bool = True) -> Iterator[int]:
    """Yield the descriptor of a folder that belongs to this user, and make it if it is missing, unless told not to.

    Raises
    ------
    UnsafeError
        If others can write to it, or can put another folder in its place.
    OSError
        As the system says it.
    """
    here = _walk(folder.absolute(), make)
    try:
        yield here
    finally:
        os.close(here)


def _walk(folder: Path, make: bool) -> int:
    """Open a folder, each part of the path from its parent's descriptor; links are resolved here."""
    left, links = [*reversed(folder.parts[1:])], 0
    here, at = os.open("/", PARENT), Path("/")
    try:
        system = {0, os.fstat(here).st_uid}  # root's number may have no name in a container
        while left:
            _require_parent(here, at, system)
            name = left.pop()
            if target := _link(here, name, at, system):
                links += 1
                if links > LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                left += reversed(target.parts)
                name = left.pop() if target.is_absolute() else "."
            there = _open(here, name, PARENT if left else FOLDER, make)
            passed, here, at = here, there, Path(os.path.normpath(at / name))
            os.close(passed)  # last: after a Ctrl-C here, what is closed below is open
        _require_own(os.fstat(here), folder)
    except BaseException:
        os.close(here)
        raise
    return here


def _open(here: int, name: str, flags: int, make: bool) -> int:
    """Open a folder in a folder; make it if it is missing."""
    try:
        return os.open(name, flags, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another process was faster
        os.mkdir(name, 0o700, dir_fd=here)
    return os.open(name, flags, dir_fd=here)


def _link(here: int, name: str, at: Path, system: set[int]) -> Path | None:
    """Return where a name in a folder leads, if it is a symbolic link."""
    try:
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    if status.st_uid not in {os.geteuid(), *system}:
        raise UnsafeError(f"the link {at / name} in its path belongs to another user; {ELSEWHERE}")
    return Path(os.readlink(name, dir_fd=here))


def _require_parent(here: int, at: Path, system: set[int]) -> None:
    """Refuse a parent in which others can rename folders; in one with the sticky bit, such as /tmp, they cannot."""
    status = os.fstat(here)
    if status.st_uid not in {os.geteuid(), *system}:
        raise UnsafeError(f"{at}, in which it lies, belongs to another user; {ELSEWHERE}")
    free = status.st_mode & OTHERS and not status.st_mode & stat.S_ISVTX
    if free and (status.st_mode & stat.S_IWOTH or not _only_mine(status.st_gid) or _shared_by_name(here)):
        raise UnsafeError(f"other users can write to {at}, in which it lies, and so can replace it; {ELSEWHERE}")


def _only_mine(group: int) -> bool:
    """Return whether a group is this user's alone; many systems give each user such a group and let it write."""
    with suppress(KeyError):
        me, those = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return (me.pw_gid, me.pw_name) == (group, those.gr_name) and set(those.gr_mem) <= {me.pw_name}
    return False


def _shared_by_name(here: int) -> bool:
    """Return whether a folder has an access list; the mode shows the rights of those in it as the group's."""
    with suppress(OSError, AttributeError):  # a system without lists, or without /proc
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{here}")
    return False


def _require_own(status: os.stat_result, folder: Path) -> None:
    """Refuse a folder of another user, and one that others can write to: what is in it may be theirs."""
    if status.st_uid != os.geteuid():
        raise UnsafeError(f"it belongs to another user; {ELSEWHERE}")
    if status.st_mode & OTHERS:
        raise UnsafeError(
            f"other users can write to it, and what is in it may be theirs; delete it: rm -r {quote(str(folder))}"
        )


def read(path: Path) -> bytes:
    """Read a file that this user wrote, in a folder of this user's; mark it as used.

    Raises
    ------
    UnsafeError
        If others can change the file or its folder, or wrote the file.
    OSError
        As the system says it; also for what is no regular file, or is larger than `LARGEST`.
    """
    with opened(path.parent, make=False) as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path.name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
                raise OSError(errno.EINVAL, f"{path.name} is no file of at most {LARGEST >> 20} MB")
            names = status.st_nlink  # 0: another process put a new file in its place since it was opened
            if status.st_uid != os.geteuid() or status.st_mode & OTHERS or names > 1:
                raise UnsafeError(f"files in it may be another user's; delete it: rm -r {quote(str(path.parent))}")
            content = file.read()
            with suppress(OSError):  # a disk that is read-only
                os.utime(file.fileno())
            return content


def write(path: Path, parts: Iterable[bytes], *, durable: bool = True) -> None:
    """Write a file that only this user can read and write, whole or not at all, in a folder of this user's.

    Parameters
    ----------
    durable : whether to wait for the disk.

    Raises
    ------
    UnsafeError
        If others can change the folder.
    OSError
        As the system says it.
    """
    with opened(path.parent) as folder:
        part = f"{path.name}.{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            try:
                file.writelines(parts)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        if durable:
            os.fsync(folder)
