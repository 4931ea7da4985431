"""Values as YAML, for a reader that first replaces ``$NAME`` and ``${NAME}`` as text. Pure.

The replicator expands variables in the whole file before it parses it, so quotes protect nothing
from that: a ``$`` of ours must not be in the file, and a value that it puts in must not end the
quotes that it is put into.
"""

# Readable as they are between double quotes; a dollar would be expanded.
_PLAIN = frozenset(map(chr, range(0x20, 0x7F))) - set('"\\$')


def quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar that means exactly it, whatever it holds.

    Raises:
        ValueError: it holds bytes that are no text (a file name that is not UTF-8).
    """
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in _PLAIN:
        return character
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("the replicator reads UTF-8 only: rename what is not")
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def from_variable(name: str) -> str:
    """Return a YAML scalar that stands for the value of an environment variable, by reference.

    Between single quotes everything but ``'`` and line breaks stands for itself, so keys with
    ``#``, ``:`` or a quotation mark arrive whole.
    """
    return f"'${{{name}}}'"
