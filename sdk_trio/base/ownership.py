"""Check the owner of files and links, and refuse files of other users. Does I/O.

These files are found in the working directory, without being named by the user. Another user who
can write one would choose the addresses, programs and upstream of any command run in that directory
(CWE-427; compare git's safe.directory).
"""

import os
import stat
from pathlib import Path

#: The user that can change every file anyway (root).
_ROOT_USER = 0

_ADVICE = "or name it with --config if you trust its author"


def foreign_fault(path: Path, opened: os.stat_result) -> str | None:
    """Return why a file found without being named is refused, as the end of a sentence.

    None if it is ours.

    Args:
        path: its path; a symbolic link there must be ours as well.
        opened: the status of the file that was opened.
    """
    if os.name != "posix":
        return None
    for status in (opened, os.lstat(path)):
        if status.st_uid not in (os.geteuid(), _ROOT_USER):
            return (
                f"belongs to the user {user_name(status.st_uid)}, and settings of the working "
                f"directory are read from files of this user ({user_name(os.geteuid())}) or root "
                f"only: change its owner to this user, {_ADVICE}"
            )
    if opened.st_mode & stat.S_IWOTH or (opened.st_mode & stat.S_IWGRP and not _is_private(opened)):
        return (
            f"can be written by others (mode {stat.S_IMODE(opened.st_mode):04o}, owner "
            f"{user_name(opened.st_uid)}): chmod go-w {path}, {_ADVICE}"
        )
    return None


def is_foreign_link(path: Path) -> bool:
    """Return whether ``path`` is a symbolic link made by a user other than this one or root."""
    if os.name != "posix" or not path.is_symlink():
        return False
    return path.lstat().st_uid not in (os.geteuid(), _ROOT_USER)


def user_name(uid: int) -> str:
    """Return a user's name, or its number if it has no name."""
    import pwd  # needed only for error messages

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_private(status: os.stat_result) -> bool:
    """Return whether only the owner is in the group.

    Distributions give each user such a group, with a umask of 002.

    Such a group has the user's name and no other member.
    """
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    own = owner.pw_gid == status.st_gid and group.gr_name == owner.pw_name
    return own and set(group.gr_mem) <= {owner.pw_name}
