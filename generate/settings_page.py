"""Makes ``docs/reference/configuration.md`` of the metadata of the settings."""

from datetime import timedelta
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from sdk_trio.config import BUNDLED_API_VERSION, Secret
from sdk_trio.config.check import LEAST_TOKEN_CHARACTERS
from sdk_trio.config.fields import pascal_case
from sdk_trio.config.secret import ISSUED_KEY_BYTES, MINIMUM_KEY_BYTES
from sdk_trio.config.show import shown_value
from sdk_trio.config.table import GREATEST_INT, Setting, full_key, table

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"

_INTRODUCTION = f"""\
# Configuration

This page is generated from the metadata of the settings: run `make generate` after changing them.

Every setting is optional except `Sdk:AccessToken`, which the standalone receiver does not need,
and one webhook secret, which the receiver does. All problems are reported at once, each with its
full key and its source, and end the program with exit code 78. Unknown keys under `Sdk` are a
warning.

## Where settings come from

Later sources win:

1. The defaults below; `Storage:Path` also from `STATE_DIRECTORY`, the first of its directories.
2. The files that `--config` names, JSON or TOML, in their order. Without any, `appsettings.json`
   and then `sdk.toml` of the working directory, if they exist. Each file is followed by the one
   for the environment: `appsettings.Production.json`. A file that `--config` does not name must
   belong to this user or root, and no other user may write it, except a group of the owner's own.
   Otherwise every command ends with 78 and names the owner.
3. `.env` of the working directory, only in Development, and only if it belongs to this user.
   Elsewhere one with settings that nothing else sets is a warning.
4. Directories with one file per key: `/run/secrets`, then `$CREDENTIALS_DIRECTORY`. A file is
   named like `Sdk__Webhooks__Secret`; one line break at its end does not count.
5. `SDK_ENVIRONMENT` (only for `Environment`), then variables such as `SDK__WEBHOOKS__PATH`.
6. Arguments: `--set Sdk:Webhooks:Path=/hooks/sdk`.

Keys are case-insensitive. `:` and `__` separate their parts, in files a dot does, too. In a file
the settings are under the root key `Sdk`; other root keys are ignored. The same key twice in one
source is a problem, even if its case differs. A time span is written `90s`, `30m`, `2h` or `3d`,
or `[d.]hh:mm:ss[.fffffff]`.

The column *Change* shows when a changed value comes into force: at a reload (HUP, or
`Runtime.reload`), or with a restart. [`run`](cli-run.md#run) has the details.

**Lists** are set as a whole, which replaces the list of earlier sources, or by index
(`SDK__WEBHOOKS__SECRETS__0`), which replaces one item. In a variable or argument a list is a JSON
array; addresses, CIDR blocks and secrets that all begin with `whsec_` or `whpk_` may be separated
by commas.

**Text** of every source is converted: `"30000"` is a number, `yes`, `on` and `1` are true. An
empty text means null where null is allowed, except for secrets.

## Webhook secrets

`Secret` and `Secrets` are combined, `Secret` first. A secret is `whsec_` and base64, `whpk_` and
the base64 of an ed25519 public key, or any text that the upstream signs with.

These faults end the start, with the key of the secret and never its text:

- empty or blank, white space or a line break at an end, a quote at both ends
- a prefix alone or in capitals, two prefixes, a private key (`whsk_`)
- fewer than {MINIMUM_KEY_BYTES} bytes of key (without the prefix)
- a public key without its prefix, or one of small order, which no one can own
- under `KeyDerivation` `Standard`, text that is not base64; under `Auto` it is used unchanged

These are warnings: fewer than {ISSUED_KEY_BYTES} bytes of key, the same secret twice, and, except
under `Utf8`, no prefix.

`v1,whsec_...`, as Supabase shows it, is read without `v1,`. Under `Utf8` it ends the start,
because such a sender signs with the decoded key. So do several secrets in one text.

A public secret ends the start; in Development it is a warning. Public are the examples of Standard
Webhooks' documentation, and keys of equal, repeated or counting bytes.

A bare base64 text of 32 bytes may be a shared secret or a public key. If these bytes are a point
that a public key can be (one random secret in sixteen is), it is refused: write `whsec_` or `whpk_`
before it, or set `KeyDerivation` to `Utf8`.

## Settings that open it to others

These are warnings, in the log of `run`, in `config check` and in `doctor`:

- `RequireHttps` false, or Development, on an address that other machines can reach
- an admin address that other machines can reach, because it speaks plain HTTP
- `TrustedProxies` with a block larger than /8 (IPv6: /32)
- a socket with `?mode=0666`
- a configured webhook secret in Development
- an `Environment` that is neither `Development` (`dev`) nor `Production` (`prod`), and so counts
  as the latter

The value of `Admin:TokenEnvVar` must have {LEAST_TOKEN_CHARACTERS} characters if the admin address
can be reached from elsewhere. A shorter one ends the start; on this machine's own addresses it is
a warning.

The bundled API version is `{BUNDLED_API_VERSION}`.
"""


def files() -> dict[Path, str]:
    """Return the page and its text."""
    return {PAGE: reference_page()}


def reference_page() -> str:
    """Return the whole page as Markdown."""
    parts = [_INTRODUCTION]
    for path, settings in groupby(_by_section(), key=lambda setting: setting.path[:-1]):
        parts.append(f"## {full_key(path)}\n\n{_table(list(settings))}")
    return "\n".join(parts)


def _by_section() -> list[Setting]:
    """Return the settings so that each section stands together, in the order of the first key."""
    order: dict[tuple[str, ...], int] = {}
    for setting in table():
        order.setdefault(setting.path[:-1], len(order))
    return sorted(table(), key=lambda setting: order[setting.path[:-1]])


def _table(settings: list[Setting]) -> str:
    rows = [
        "| Key | Type | Default | Range or form | Meaning | Change |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{setting.path[-1]}` | {_type_name(setting)} | {_default(setting)} | {_range(setting)} "
        f"| {_cell(setting.about.doc)} | {_change(setting)} |"
        for setting in settings
    ]
    items = [_items(setting) for setting in settings if setting.is_section_list]
    return "\n".join([*rows, *items]) + "\n"


def _items(setting: Setting) -> str:
    """Return the keys of each item of a list of sections."""
    first = setting.item(0)
    return (
        f"\n## {full_key(setting.path)}:N\n\nN counts from 0; in a file it is a list of objects "
        f"(`[[{'.'.join(('Sdk', *setting.path))}]]` in TOML).\n\n{_table(list(first))}"
    ).rstrip("\n")


def _type_name(setting: Setting) -> str:
    """Return the type of a setting in words."""
    if setting.is_section_list:
        name = "section"
    elif issubclass(setting.kind, StrEnum):
        name = ", ".join(f"`{member}`" for member in setting.kind)
    elif setting.kind is Secret:
        name = "secret"
    else:
        names = {int: "int", float: "number", bool: "bool", str: "string", timedelta: "time span"}
        name = names[setting.kind]
    return f"list of {name}" if setting.many else f"{name} or null" if setting.nullable else name


def _default(setting: Setting) -> str:
    note = setting.about.default_note
    if setting.default in ("", ()):
        return "empty"
    if setting.default is None:
        return f"null ({note})" if note else "null"
    return f"`{_cell(shown_value(setting.default))}`"


def _range(setting: Setting) -> str:
    least, greatest = setting.bounds
    words = []
    if setting.kind in (int, float, timedelta) and least is not None:
        bounded = greatest is not None and greatest != GREATEST_INT
        words.append(f"{least:.15g}-{greatest:.15g}" if bounded else f"at least {least:.15g}")
    if setting.about.unit:
        words.append(setting.about.unit)
    if setting.about.at_least:
        words.append(f"at least `{pascal_case(setting.about.at_least)}`")
    if setting.about.form:
        words.append(_cell(setting.about.form.value))
    if setting.about.required and setting.default in ("", None):
        words.append("required where its section is used")
    return ", ".join(words)


def _change(setting: Setting) -> str:
    return "reload" if setting.about.live else "restart"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "\\n")
