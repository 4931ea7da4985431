"""Ownership of files and links: another user's are refused. Does I/O.

Nobody names these files, so whoever can write one would choose addresses, programs and the
upstream of a command that is merely run beside it (CWE-427; as git's safe.directory).
"""

import os
import stat
from pathlib import Path

#: The user that can change every file anyway.
_ROOT_USER = 0

_ADVICE = "or name it with --config if you trust whoever wrote it"


def foreign_fault(path: Path, opened: os.stat_result) -> str | None:
    """Say why a file that nobody named is not read, as the end of a sentence; None: it is ours.

    Args:
        path: its path; a symbolic link there has to be ours, too.
        opened: the status of the file that was opened.
    """
    if os.name != "posix":
        return None
    for status in (opened, os.lstat(path)):
        if status.st_uid not in (os.geteuid(), _ROOT_USER):
            return (
                f"belongs to the user {user_name(status.st_uid)}, and settings of the working "
                f"directory are read from files of this user ({user_name(os.geteuid())}) or root "
                f"alone: give it to this user, {_ADVICE}"
            )
    if opened.st_mode & stat.S_IWOTH or (opened.st_mode & stat.S_IWGRP and not _is_private(opened)):
        return (
            f"can be written by others (mode {stat.S_IMODE(opened.st_mode):04o}, owner "
            f"{user_name(opened.st_uid)}): chmod go-w {path}, {_ADVICE}"
        )
    return None


def is_foreign_link(path: Path) -> bool:
    """Say whether ``path`` is a symbolic link that another user than this one or root has made."""
    if os.name != "posix" or not path.is_symlink():
        return False
    return path.lstat().st_uid not in (os.geteuid(), _ROOT_USER)


def user_name(uid: int) -> str:
    """Return the name of a user for people, its number where it has none."""
    import pwd  # on the path of a mistake only

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_private(status: os.stat_result) -> bool:
    """Whether the group is the owner's own: distributions give each user one, and a umask of 002.

    Such a group has the name and the only member of its user.
    """
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    own = owner.pw_gid == status.st_gid and group.gr_name == owner.pw_name
    return own and set(group.gr_mem) <= {owner.pw_name}
