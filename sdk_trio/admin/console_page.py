"""The files of the console: one page, its script and its style sheet, as the package ships them.

Their sources are in ``console/`` of the repository. They contain no data, so they need no token: a
browser could not send one with the first request. All data on the page comes from the API.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from .api import Reply

#: The page's permissions: its own script and style sheet, and requests to its own origin. It sets
#: styles by script, which this allows, and evaluates nothing. A browser with Trusted Types refuses
#: every text that a script would pass as HTML or code.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)

#: The files by their path.
_FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/console.js": ("console.js", b"text/javascript; charset=utf-8"),
    "/console.css": ("console.css", b"text/css; charset=utf-8"),
    "/licences.txt": ("licences.txt", b"text/plain; charset=utf-8"),
}


def is_of_console(path: str) -> bool:
    """Return whether the console has a file at this path."""
    return path in _FILES


def console_file(path: str, headers: Mapping[str, str]) -> Reply:
    """Return the file at ``path``, or 304 if the browser has it.

    Args:
        path: one that :func:`is_of_console` knows.
        headers: those of the request, by their names in lower case.
    """
    name, content_type = _FILES[path]
    body, tag = _read(name)
    # Revalidated each time, so that the page matches the program after an update.
    extra = ((b"etag", tag), (b"content-security-policy", _POLICY), (b"cache-control", b"no-cache"))
    if headers.get("if-none-match") == tag.decode():
        return Reply(304, b"", content_type, extra)
    return Reply(200, body, content_type, extra)


@cache
def _read(name: str) -> tuple[bytes, bytes]:
    body = (files(__package__) / "static" / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
