"""``tenant import`` and ``tenant export``: tenants as CSV and JSON files, planned row by row.

JSON is the output of ``tenant list --format json``. CSV has a column per field, with the sources of
credentials in separate columns.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import attrs

from ..errors import EXIT_FAILURE, InvalidTenantError, SdkError, StorageError, TenantError
from ..records.states import TenantStatus
from .parse import add_format, add_reason_and_actor, add_status, describing

if not describing():
    import trio

    from ..config import StorageBackend
    from ..records.tenants import CredentialSource, Tenant, TenantCredentials, source_from_text
    from ..tenants import identity
    from ..tenants.service import TenantChanges, TenantService, differing_fields, with_changes
    from .settings import load
    from .store import actor_of, run_with_tenants, why_unreachable
    from .tenant_credentials import holders_of, note_shared
    from .tenants import listed
    from .terminal import Progress, print_json, print_list, read_bytes, say

#: The fields that an import can set; ``access_token`` and ``webhook_secrets`` are sources, never
#: values.
FIELDS = (
    "identifier",
    "name",
    "organization_id",
    "site_manager_email",
    "site_manager_email_verified",
    "site_manager_phone",
    "access_token",
    "webhook_secrets",
)
#: The further fields of an export. An import compares the status, and ignores the others.
FOR_READING = ("status", "id", "created_at", "deleted_at", "version")

#: The separator between the sources in one cell.
_SEPARATOR = ";"

#: A spreadsheet evaluates a cell that starts with one of these; an apostrophe makes it text. Phone
#: numbers start with a plus, so such values cannot be omitted.
_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20'")

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


class ImportFileError(SdkError):
    """The whole file of tenants cannot be read."""


class ExportError(SdkError):
    """Tenants cannot be written in the requested form."""


class _RefusedRowError(Exception):
    """One row cannot be imported; the message gives the reason."""


@attrs.frozen
class Row:
    """One row of a file: its line or index, and its fields or its fault."""

    number: int
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    problem: str | None = None

    @property
    def identifier(self) -> str | None:
        """Return the identifier that the row names, if it is a text."""
        named = self.fields.get("identifier")
        return named if isinstance(named, str) else None


@attrs.frozen
class Step:
    """The effect of importing a row: ``create``, ``change``, ``unchanged`` or ``refused``.

    ``before`` is the current tenant, ``after`` the future one. For a row that creates a tenant, or
    is refused, they are a draft or None.
    """

    row: Row
    verdict: str
    changes: tuple[str, ...] = ()
    reason: str | None = None
    before: Tenant | None = None
    after: Tenant | None = None


# -- files -------------------------------------------------------------------------------------


def read_tenants(content: bytes) -> list[Row]:
    """Return the rows of a file; if it starts with ``[`` it is JSON, otherwise CSV.

    Raises:
        ImportFileError: it is not UTF-8 text, no JSON array, or its first line names no columns.
    """
    try:
        # Spreadsheets write a byte order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImportFileError(
            f"the file is not UTF-8 text: byte {error.start} cannot be read; save it as UTF-8"
        ) from None
    return _read_json(text) if text.lstrip()[:1] in ("[", "{") else _read_csv(text)


def _read_json(text: str) -> list[Row]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImportFileError(f"the file is not JSON: {error}") from None
    if not isinstance(document, list):
        raise ImportFileError("the file must be a JSON array of objects, one for each tenant")
    return [_json_row(number, item) for number, item in enumerate(document, start=1)]


def _json_row(number: int, item: Any) -> Row:
    if not isinstance(item, dict):
        return Row(number, problem="is not a JSON object")
    fields = {name: value for name, value in item.items() if name != "credentials"}
    credentials = item.get("credentials", {})
    if not isinstance(credentials, dict):
        return Row(number, fields, "its credentials are not a JSON object")
    # In CSV, sources are separate columns, so both forms are handled here.
    fields |= credentials
    unknown = [name for name in fields if name not in (*FIELDS, *FOR_READING)]
    return Row(number, fields, _unknown(unknown) if unknown else None)


def _read_csv(text: str) -> list[Row]:
    # Strict: an unclosed quote would swallow the rest of the file as one cell.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        head = [name.strip() for name in next(reader, [])]
        unknown = [name for name in head if name not in (*FIELDS, *FOR_READING)]
        if "identifier" not in head or unknown or len(set(head)) != len(head):
            wrong = (
                _unknown(unknown) if unknown else "has no column identifier, or has a column twice"
            )
            raise ImportFileError(
                f"the first line {wrong}; separated by commas it may name {', '.join(FIELDS)}"
            )
        # Spreadsheets leave rows of empty cells at the end.
        return [_csv_row(reader.line_num, head, cells) for cells in reader if any(cells)]
    except csv.Error as error:
        raise ImportFileError(f"line {reader.line_num} is not CSV: {error}") from None


def _unknown(names: Iterable[str]) -> str:
    return f"has unknown fields: {', '.join(name[:40] for name in names)}"


def _csv_row(number: int, head: Sequence[str], cells: Sequence[str]) -> Row:
    fields: dict[str, Any] = {
        # An empty cell means no value, as in the export.
        name: _unguarded(cell) or None
        for name, cell in zip(head, cells, strict=False)
    }
    if len(cells) != len(head):
        return Row(number, fields, f"has {len(cells)} cells, and the first line {len(head)}")
    verified = fields.get("site_manager_email_verified")
    if verified is None:
        # Not given means unchanged: false would remove a verification.
        fields.pop("site_manager_email_verified", None)
    elif verified.casefold() in (*_TRUE, *_FALSE):
        fields["site_manager_email_verified"] = verified.casefold() in _TRUE
    if "webhook_secrets" in fields:
        sources = (fields["webhook_secrets"] or "").split(_SEPARATOR)
        fields["webhook_secrets"] = [source.strip() for source in sources if source.strip()]
    return Row(number, fields)


def csv_of(tenants: Iterable[Tenant]) -> str:
    """Return tenants as CSV, which :func:`read_tenants` reads back.

    Raises:
        ExportError: a key file's path contains the separator of a cell.
    """
    file = io.StringIO()
    # csv would write CRLF, of which other tools of a shell keep the CR.
    writer = csv.writer(file, lineterminator="\n")
    columns = (*FIELDS, *FOR_READING)
    writer.writerow(columns)
    for tenant in tenants:
        row = listed(tenant)
        row |= row["credentials"]
        if any(_SEPARATOR in source for source in row["webhook_secrets"]):
            raise ExportError(
                f"the tenant {tenant.identifier!r} has a key file with {_SEPARATOR} in its path, "
                "which separates two sources in CSV: use --format json"
            )
        row["webhook_secrets"] = _SEPARATOR.join(row["webhook_secrets"])
        row["site_manager_email_verified"] = str(row["site_manager_email_verified"]).lower()
        writer.writerow(["" if row[name] is None else _guarded(row[name]) for name in columns])
    return file.getvalue()


def _guarded(value: Any) -> Any:
    """Return a cell that no spreadsheet evaluates as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _unguarded(cell: str) -> str:
    return cell[1:] if cell[:1] == "'" and cell[1:].startswith(_FORMULA) else cell


# -- the plan of an import ---------------------------------------------------------------------


def plan(rows: Iterable[Row], tenants: Iterable[Tenant]) -> list[Step]:
    """Return the effect of each row on these tenants, in the order of the rows.

    Rows are imported in order, so an organization that a row gives up is free for later rows.
    """
    known = {tenant.identifier: tenant for tenant in tenants}
    holders = {t.organization_id: t.identifier for t in known.values() if t.organization_id}
    seen: dict[str, int] = {}
    steps = []
    for row in rows:
        # Planned in the order of application, so that a plan without refusals can be applied.
        step = _step(row, known, holders, seen)
        steps.append(step)
        if step.after is not None:
            if step.before is not None and step.before.organization_id is not None:
                del holders[step.before.organization_id]
            if step.after.organization_id is not None:
                holders[step.after.organization_id] = step.after.identifier
    return steps


def _step(
    row: Row, known: Mapping[str, Tenant], holders: Mapping[str, str], seen: dict[str, int]
) -> Step:
    try:
        after = _wanted(row, known, holders, seen)
    except (InvalidTenantError, _RefusedRowError) as error:
        return Step(row, "refused", reason=str(error))
    before = known.get(after.identifier)
    if before is None:
        return Step(row, "create", after=after)
    changes = differing_fields(before, after)
    return Step(row, "change" if changes else "unchanged", changes, before=before, after=after)


def _wanted(
    row: Row, known: Mapping[str, Tenant], holders: Mapping[str, str], seen: dict[str, int]
) -> Tenant:
    """Return the future tenant of a row, if it is possible."""
    if row.problem is not None:
        raise _RefusedRowError(row.problem)
    identifier = identity.check_identifier(_text(row, "identifier") or "")
    # Two rows about one tenant have no order that their author can have meant.
    earlier = seen.setdefault(identifier, row.number)
    if earlier != row.number:
        raise _RefusedRowError(f"row {earlier} is about the same tenant")
    after = _after(row, identifier, known.get(identifier))
    holder = holders.get(after.organization_id or "", identifier)
    if holder != identifier:
        raise _RefusedRowError(f"the organization is that of {holder!r}")
    return after


def _after(row: Row, identifier: str, before: Tenant | None) -> Tenant:
    """Return the future tenant of a row; fields that the row does not name stay unchanged."""
    # A status changes by a transition, with its messages and its conditions; a column of a file
    # must not bypass them.
    status = row.fields.get("status")
    present = TenantStatus.ACTIVE if before is None else before.status
    if status not in (None, present):
        what = "a new tenant is" if before is None else "it is"
        raise _RefusedRowError(
            f"an import changes no status, and {what} {present}: use tenant suspend and the like"
        )
    if before is None:
        if "name" not in row.fields:
            raise _RefusedRowError("a new tenant needs a name")
        before = Tenant(id="", identifier=identifier, name="", created_at=0)
    changes: dict[str, Any] = {
        name: _text(row, name)
        for name in ("name", "organization_id", "site_manager_email", "site_manager_phone")
        if name in row.fields
    }
    if "name" in changes:
        changes["name"] = changes["name"] or ""
    verified = row.fields.get("site_manager_email_verified")
    if not isinstance(verified, bool | None):
        raise _RefusedRowError("site_manager_email_verified must be true or false")
    if verified is not None:
        changes["site_manager_email_verified"] = verified
    changes["credentials"] = _credentials(row, before.credentials)
    after = with_changes(before, cast("TenantChanges", changes))
    if verified and after.site_manager_email is None:
        raise _RefusedRowError("site_manager_email_verified: there is no address")
    return after


def _text(row: Row, name: str) -> str | None:
    value = row.fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _RefusedRowError(f"{name} must be a text")
    return value


def _credentials(row: Row, before: TenantCredentials) -> TenantCredentials:
    token, secrets = before.access_token, before.webhook_secrets
    if "access_token" in row.fields:
        text = _text(row, "access_token")
        token = None if text is None else _source(text)
    if "webhook_secrets" in row.fields:
        found = row.fields["webhook_secrets"] or []
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise _RefusedRowError("webhook_secrets must be a list of texts")
        secrets = tuple(map(_source, found))
    return TenantCredentials(access_token=token, webhook_secrets=secrets)


def _source(text: str) -> CredentialSource:
    try:
        return source_from_text(text)
    except ValueError as error:
        raise _RefusedRowError(str(error)) from None


COLUMNS = ("row", "identifier", "verdict", "changes", "reason")


def export_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant export``."""
    add_status(parser, "only this status")
    parser.add_argument(
        "--format", choices=("csv", "json"), default="csv", help="of standard output (default csv)"
    )


def export_tenants(arguments: Namespace) -> int:
    """Print every tenant, or those of a status, as CSV or JSON that ``tenant import`` reads."""
    status = TenantStatus(arguments.status) if arguments.status else None
    tenants = run_with_tenants(arguments, lambda service: service.all(status=status))
    if arguments.format == "json":
        print_json([listed(tenant) for tenant in tenants])
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(csv_of(tenants).encode())
    return 0


def import_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant import``."""
    parser.add_argument(
        "file", metavar="FILE", help="CSV or JSON as of 'tenant export'; - is standard input"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the result of each row, and change nothing"
    )
    add_reason_and_actor(parser)
    add_format(parser)


def import_tenants(arguments: Namespace) -> int:
    """Add and change the tenants of a file, and print the result of each row.

    All rows are checked first, and nothing is imported if one is refused. Then the rows are
    imported in order. After an interruption, importing the same file does the rest, because
    finished rows are then ``unchanged``. Returns 1 if a row was refused or failed.

    Raises:
        UnreadableFileError: the file cannot be read.
        ImportFileError: it is not CSV or JSON of tenants.
        StorageError: the store cannot be opened or written.
    """
    rows = read_tenants(read_bytes(arguments.file))

    async def work(service: TenantService) -> list[Step]:
        tenants = await service.all()
        steps = plan(rows, tenants)
        _note_shared(steps, tenants)
        # All rows or none: half of an import is hard to distinguish from a whole one.
        if arguments.dry_run or any(step.verdict == "refused" for step in steps):
            return steps
        return await _apply(service, steps, arguments)

    if arguments.dry_run and _is_new(arguments):
        # A dry run creates no store: all tenants of the file would be new.
        steps = plan(rows, ())
    else:
        steps = run_with_tenants(arguments, work, creates=not arguments.dry_run)
    print_list(arguments, [_shown(s) for s in steps], COLUMNS)
    return _summary(steps, dry_run=arguments.dry_run)


def _is_new(arguments: Namespace) -> bool:
    settings = load(arguments)
    sqlite = settings.storage.backend is StorageBackend.SQLITE
    return sqlite and why_unreachable(settings) is not None


async def _apply(service: TenantService, steps: Sequence[Step], arguments: Namespace) -> list[Step]:
    await trio.lowlevel.checkpoint()
    done: list[Step] = []
    progress = Progress("imported", len(steps))
    for step in steps:
        try:
            await _do(service, step, arguments)
        except TenantError as error:  # another process has changed it since it was checked
            done.append(Step(step.row, "failed", step.changes, str(error)))
        except StorageError:
            # Importing is idempotent, so the remedy is the same command.
            say(
                f"{len(done)} of {len(steps)} rows were done; import the same file again to "
                "continue"
            )
            raise
        else:
            done.append(step)
        progress.advance()
    return done


async def _do(service: TenantService, step: Step, arguments: Namespace) -> None:
    """Create a tenant, or change its differing fields."""
    await trio.lowlevel.checkpoint()
    before, after = step.before, step.after
    if after is None or step.verdict == "unchanged":
        return
    who: dict[str, Any] = {"reason": arguments.reason, "actor": actor_of(arguments)}
    fields = {name: getattr(after, name) for name in TenantChanges.__annotations__}
    if before is None:
        await service.add(after.identifier, **fields, **who)
    else:
        changes = cast("TenantChanges", {name: fields[name] for name in step.changes})
        await service.change(before, **changes, **who, expected_version=before.version)


def _note_shared(steps: Sequence[Step], tenants: Sequence[Tenant]) -> None:
    """Warn of sources that two tenants name once the file is imported."""
    final = {tenant.identifier: tenant for tenant in tenants}
    imported = [step.after for step in steps if step.after is not None]
    # By the future state: a source that moves between tenants within the file is not shared.
    final |= {tenant.identifier: tenant for tenant in imported}
    named = Counter(s for tenant in final.values() for s in set(tenant.credentials.sources))
    shared = {source for source, times in named.items() if times > 1}
    for tenant in imported:
        own = shared.intersection(tenant.credentials.sources)
        if own:
            others = [other for other in final.values() if other.identifier != tenant.identifier]
            note_shared(tenant, holders_of(own, others, but="-"))


def _shown(step: Step) -> dict[str, Any]:
    return {
        "row": step.row.number,
        "identifier": step.row.identifier,
        "verdict": step.verdict,
        "changes": ", ".join(step.changes) or None,
        "reason": step.reason,
    }


def _summary(steps: Sequence[Step], *, dry_run: bool) -> int:
    counts = Counter(step.verdict for step in steps)
    summary = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in sorted(counts)) or "no rows"
    if dry_run:
        say(f"{summary}; nothing was changed (--dry-run)")
    elif counts["refused"]:
        say(f"{summary}; nothing was changed: fix the refused rows, and import the file again")
    elif counts["failed"]:
        say(f"{summary}; import the same file again for the rest")
    else:
        say(summary)
    return EXIT_FAILURE if counts["refused"] or counts["failed"] else 0
