"""The manifest: the replicator's configuration file, rendered from the options and the databases.

Rendering is pure; :class:`ManifestWriter` writes the file atomically. The schema is that of
Litestream 0.5. It ignores unknown keys, so a mistake here causes no error there: tests check with
the real binary what it replicates.

The replicator expands ``$NAME`` and ``${NAME}`` in the whole file before it parses it, even in
quotes. So the file must not contain another ``$``, and an expanded value must not end its quotes.
"""

import glob
import os
import posixpath
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import attrs

from ..base.opener import open_file, sync_file, sync_path
from ..base.ownership import is_foreign_link
from ..config.check_tenants import MISREAD_IN_PATHS
from ..config.fields import ReplicaTargetType
from ..config.options.tenants import ReplicationOptions
from ..config.table import REPLICATION
from ..errors import ReplicationError
from ..tenants.identity import is_tenant_id

# Characters that need no escape between double quotes. A dollar would be expanded.
_PLAIN_TEXT = frozenset(map(chr, range(0x20, 0x7F))) - set('"\\$')

#: The address of the replicator's metrics, which serves this machine only.
METRICS_HOST: Final = "127.0.0.1"

#: With more databases than this the replicator compacts less often.
LARGE_FLEET: Final = 20

# For each idle database the defaults make 13 requests a minute, and object stores bill them; these
# settings make one. In return, states older than five minutes can be restored only to every fifth
# minute, not to every thirtieth second.
_LARGE_FLEET_LINES: Final = (
    "levels: [{interval: 5m}, {interval: 1h}]",
    "l0-retention-check-interval: 10m",
)

# Comments are expanded too, so they contain no dollar sign.
_HEADER: Final = (
    "# Written by sdk_trio and replaced at every change of the tenants: edit its settings instead.",
    "# It contains no key, only the names of the variables with the keys.",
)

#: Variables of our environment that the replicator gets for every target. It is a third party's
#: program, and other variables contain the secrets of webhooks, tenants and providers.
PASSED_ON: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_EC2_METADATA_DISABLED"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        # For its own runtime, and for an interpreter that starts it to find its libraries.
        *("GOMEMLIMIT", "GOMAXPROCS", "LD_LIBRARY_PATH"),
    }
)

# Without keys, a machine's role grants access. AWS_CA_BUNDLE is excluded: the replicator would use
# a bundle made for Python, and trust nothing else.
_ROLE_OF_AMAZON: Final = frozenset(
    {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
        *("AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        *("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_STS_REGIONAL_ENDPOINTS"),
    }
)
_ROLE_OF_AZURE: Final = frozenset(
    {
        *("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_AUTHORITY_HOST"),
        *("AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_FEDERATED_TOKEN_FILE"),
        *("IDENTITY_ENDPOINT", "IDENTITY_HEADER", "MSI_ENDPOINT", "MSI_SECRET"),
    }
)

_REFERENCE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)

# Characters that mean the same in an address and in the configuration, however often they are
# decoded.
_PLAIN: Final = re.compile(r"[A-Za-z0-9/_~.-]+")

#: The sync interval of a database that is registered over the control socket, in seconds.
_REGISTERED_SYNC_SECONDS: Final = 1

#: Mode of the file: it names hosts, accounts and tenants, so only its owner may read it.
MODE = 0o600

#: An older partial file is that of a killed process, in seconds; no write takes as long.
_ABANDONED_SECONDS = 3600.0


def quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar with exactly that value.

    Raises:
        ValueError: it contains bytes that are not text (a file name that is not UTF-8).
    """
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in _PLAIN_TEXT:
        return character
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("the replicator reads only UTF-8: rename the file")
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def from_variable(name: str) -> str:
    """Return a YAML scalar that refers to the value of an environment variable.

    In single quotes everything except ``'`` and line breaks is literal, so keys with ``#``, ``:``
    or a quotation mark arrive unchanged.
    """
    return f"'${{{name}}}'"


def replica_name(identifier: str, tenant_id: str) -> str:
    """Return the name of a tenant's directory in the target: ``IDENTIFIER.ID``.

    People find a replica by the identifier. The id distinguishes tenants that had the same
    identifier one after the other, or on two hosts with one target. Neither ever changes.
    """
    return f"{identifier}.{tenant_id}"


def split_replica_name(name: str) -> tuple[str, str] | None:
    """Return the identifier and the id in a name of :func:`replica_name`; None for another name."""
    # An identifier is a slug, so it has no dot and needs no escape in a path.
    identifier, _, tenant_id = name.partition(".")
    return (identifier, tenant_id) if identifier and is_tenant_id(tenant_id) else None


@attrs.frozen(order=True)
class TenantDatabaseFile:
    """The database file of one tenant: the name of its replica, and its absolute path.

    ``replica`` is the name of :func:`replica_name`. ``identity`` distinguishes the file from
    another one with the same path; it contains no line break.
    """

    replica: str
    path: str
    identity: str = ""


def render_manifest(
    options: ReplicationOptions,
    databases: Iterable[TenantDatabaseFile],
    *,
    working_directory: str = "/",
    socket_path: str | None = None,
) -> str:
    """Return the configuration of a replicator of exactly these databases.

    The same databases in any order give the same text; a replaced file does not. Keys are referred
    to by the names of their variables; the file is the same for an operator's replicator and for a
    supervised one.

    Args:
        options: valid options; ``use_replication`` is ignored.
        databases: those of the active tenants, with absolute paths.
        working_directory: where a relative ``LocalDisk:Path`` starts.
        socket_path: the path of the replicator's control socket; None: no socket.

    Raises:
        ValueError: a value cannot be written (not UTF-8), or the replicator would open another file
            than the database (see :data:`MISREAD_IN_PATHS`).
    """
    # Sorted, so that the same databases give the same text: another text is a reload.
    entries = sorted(set(databases))
    lines = [*_HEADER, *_head(options, len(entries), socket_path)]
    if not entries:
        lines.append("dbs: []")
    else:
        lines.append("dbs:")
        target = list(_target(options))
        for entry in entries:
            path = replica_path(options, entry.replica, working_directory=working_directory)
            # The replicator opens a path as a URI, and makes an empty database of the shorter name.
            if not MISREAD_IN_PATHS.isdisjoint(entry.path):
                raise ValueError(
                    f"the path {entry.path!r} holds a character (# ? %) by which the replicator "
                    "would take it for another file: move the tenants' databases to another path"
                )
            lines += [
                f"  - path: {quoted(entry.path)}",
                # A replicator keeps a file that it has opened. With the identity in a comment, a
                # replaced file changes the text, and so causes a reload.
                *([f"    # file {entry.identity}"] if entry.identity else ()),
                "    replica:",
                *(f"      {line}" for line in target),
                f"      path: {quoted(path)}",
            ]
    return "\n".join(lines) + "\n"


def replica_path(options: ReplicationOptions, name: str, *, working_directory: str = "/") -> str:
    """Return the path of a tenant's replica in the target.

    Args:
        options: valid options.
        name: the name of its directory, see :func:`replica_name`; empty: the parent directory.
        working_directory: where a relative ``LocalDisk:Path`` starts.
    """
    match options.replica_target_type:
        case ReplicaTargetType.LOCAL_DISK:
            parent = posixpath.normpath(posixpath.join(working_directory, options.local_disk.path))
        case ReplicaTargetType.SFTP:
            parent = options.sftp.path
        case ReplicaTargetType.OBJECT_STORE:
            parent = options.object_store.path_prefix.strip("/")
        case ReplicaTargetType.BLOB_STORE:
            parent = options.blob_store.path_prefix.strip("/")
        case ReplicaTargetType.CLOUD_STORAGE:
            parent = options.cloud_storage.path_prefix.strip("/")
    return posixpath.join(parent, name)


def replica_url(
    options: ReplicationOptions, name: str, *, working_directory: str = "/"
) -> str | None:
    """Return a tenant's replica as an address for the control socket.

    None if an address cannot express the configuration: a key file and a host key, a sync interval
    other than a second, an endpoint of a blob store, a path with special characters. Such a
    database needs a restart.

    Args:
        options: valid options.
        name: the name of the replica's directory.
        working_directory: where a relative ``LocalDisk:Path`` starts.
    """
    path = replica_path(options, name, working_directory=working_directory)
    if options.sync_interval_seconds != _REGISTERED_SYNC_SECONDS or not _PLAIN.fullmatch(path):
        return None
    match options.replica_target_type:
        case ReplicaTargetType.LOCAL_DISK:
            return f"file://{path}"
        case ReplicaTargetType.OBJECT_STORE:
            store = options.object_store
            # The replicator detects a provider's region and endpoint in a name with a dot.
            if "." in store.bucket or not _PLAIN.fullmatch(store.bucket):
                return None
            asked = {
                "region": store.region,
                "force-path-style": str(store.force_path_style).lower(),
            }
            if store.endpoint_url:
                asked["endpoint"] = store.endpoint_url
            return f"s3://{store.bucket}/{path}?{urlencode(asked)}"
        case ReplicaTargetType.CLOUD_STORAGE:
            bucket = options.cloud_storage.bucket
            return f"gs://{bucket}/{path}" if _PLAIN.fullmatch(bucket) else None
        case ReplicaTargetType.BLOB_STORE:
            blobs = options.blob_store
            names = (blobs.account_name, blobs.container)
            # The address cannot contain an endpoint; it would be ignored.
            if blobs.endpoint_url or not all(map(_PLAIN.fullmatch, names)):
                return None
            return f"abs://{blobs.account_name}@{blobs.container}/{path}"
        case _:
            return None


def child_environment(
    options: ReplicationOptions, environ: Mapping[str, str], text: str = ""
) -> dict[str, str]:
    """Return the environment of a replicator started by this program: only what it needs.

    Args:
        options: valid options.
        environ: the program's own environment, whose variables the manifest refers to.
        text: the replicator's configuration; an operator's own may refer to other variables.
    """
    named = {name for _, name in key_variables(options)}
    passed = PASSED_ON | named | {each[1] or each[2] for each in _REFERENCE.finditer(text)}
    # Without keys the machine's role is meant.
    unset = bool(unset_variables(options, environ))
    match options.replica_target_type:
        case ReplicaTargetType.OBJECT_STORE if unset:
            passed |= _ROLE_OF_AMAZON
        case ReplicaTargetType.BLOB_STORE if unset:
            passed |= _ROLE_OF_AZURE
        case ReplicaTargetType.CLOUD_STORAGE:
            passed |= {"STORAGE_EMULATOR_HOST"}
    found = {name: value for name, value in environ.items() if name in passed}
    # Outside of a cloud, the query for a machine role's credentials hangs for seconds. In a cloud,
    # settings without keys mean that role.
    if options.replica_target_type is not ReplicaTargetType.OBJECT_STORE or not unset:
        found.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    if options.replica_target_type is ReplicaTargetType.OBJECT_STORE and not unset:
        # Needed for databases that are registered while it runs: an address cannot name variables.
        store = options.object_store
        found["LITESTREAM_ACCESS_KEY_ID"] = environ[store.access_key_id_env_var]
        found["LITESTREAM_SECRET_ACCESS_KEY"] = environ[store.secret_access_key_env_var]
    if options.replica_target_type is ReplicaTargetType.BLOB_STORE and not unset:
        found["LITESTREAM_AZURE_ACCOUNT_KEY"] = environ[options.blob_store.access_key_env_var]
    if options.replica_target_type is ReplicaTargetType.CLOUD_STORAGE:
        found["GOOGLE_APPLICATION_CREDENTIALS"] = options.cloud_storage.credentials_json_path
    return found


def key_variables(options: ReplicationOptions) -> tuple[tuple[str, str], ...]:
    """Return the variables with the target's keys, each with the full key that names it."""
    match options.replica_target_type:
        case ReplicaTargetType.OBJECT_STORE:
            store, below = options.object_store, f"{REPLICATION}:ObjectStore"
            return (
                (f"{below}:AccessKeyIdEnvVar", store.access_key_id_env_var),
                (f"{below}:SecretAccessKeyEnvVar", store.secret_access_key_env_var),
            )
        case ReplicaTargetType.BLOB_STORE:
            blobs = options.blob_store
            return ((f"{REPLICATION}:BlobStore:AccessKeyEnvVar", blobs.access_key_env_var),)
        case _:
            return ()


def unset_variables(options: ReplicationOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return one sentence for each variable of :func:`key_variables` that is not set."""
    return tuple(
        f"{key} names the variable {name}, which is not set"
        for key, name in key_variables(options)
        if not environ.get(name)
    )


def _head(options: ReplicationOptions, count: int, socket_path: str | None) -> Iterator[str]:
    yield f"addr: {quoted(f'{METRICS_HOST}:{options.metrics_port}')}"
    if socket_path is not None:
        yield "socket:"
        yield "  enabled: true"
        yield f"  path: {quoted(socket_path)}"
        # Anyone who can use the socket can unregister databases.
        yield "  permissions: 0600"
    yield "logging: {type: json, stderr: true}"
    yield f"sync-interval: {options.sync_interval_seconds}s"
    # Without it, the replicator never writes to an emptied store again.
    yield "auto-recover: true"
    yield "snapshot:"
    yield f"  interval: {options.snapshot_interval_minutes}m"
    yield f"  retention: {options.retention_days * 24}h"
    if is_large_fleet(options, count):
        yield from _LARGE_FLEET_LINES


def is_large_fleet(options: ReplicationOptions, count: int) -> bool:
    """Return whether there are so many databases that compaction runs less often."""
    return count > LARGE_FLEET and options.replica_target_type is not ReplicaTargetType.LOCAL_DISK


def _target(options: ReplicationOptions) -> Iterator[str]:
    """Yield the lines of a replica that are the same for each database."""
    match options.replica_target_type:
        case ReplicaTargetType.OBJECT_STORE:
            store = options.object_store
            yield "type: s3"
            yield f"bucket: {quoted(store.bucket)}"
            yield f"region: {quoted(store.region)}"
            if store.endpoint_url:
                yield f"endpoint: {quoted(store.endpoint_url)}"
            # Always written, because with an endpoint the replicator's own default is true.
            yield f"force-path-style: {'true' if store.force_path_style else 'false'}"
            yield f"access-key-id: {from_variable(store.access_key_id_env_var)}"
            yield f"secret-access-key: {from_variable(store.secret_access_key_env_var)}"
        case ReplicaTargetType.BLOB_STORE:
            blobs = options.blob_store
            yield "type: abs"
            yield f"account-name: {quoted(blobs.account_name)}"
            yield f"account-key: {from_variable(blobs.access_key_env_var)}"
            yield f"bucket: {quoted(blobs.container)}"
            if blobs.endpoint_url:
                yield f"endpoint: {quoted(blobs.endpoint_url)}"
        case ReplicaTargetType.CLOUD_STORAGE:
            yield "type: gs"
            yield f"bucket: {quoted(options.cloud_storage.bucket)}"
        case ReplicaTargetType.SFTP:
            sftp = options.sftp
            yield "type: sftp"
            yield f"host: {quoted(_address(sftp.host, sftp.port))}"
            yield f"user: {quoted(sftp.user)}"
            yield f"key-path: {quoted(sftp.private_key_path)}"
            if sftp.host_key:
                yield f"host-key: {quoted(sftp.host_key)}"
        case ReplicaTargetType.LOCAL_DISK:
            yield "type: file"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class ManifestWriter:
    """Writes one file, atomically and durably.

    Args:
        path: the file; a link is followed, and its target is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_current(self, text: str) -> bool:
        """Return whether the file has exactly ``text`` and only its owner can read it."""
        try:
            with open(self.path, "rb", opener=open_file) as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                # Reads one byte more than expected, not all of a large foreign file.
                expected = text.encode()
                return mode == MODE and file.read(len(expected) + 1) == expected
        except OSError:
            return False

    def write(self, text: str) -> bool:
        """Replace the file unless it is current; return whether it was replaced.

        A reader sees the complete old or new text, even after a power cut. If writing fails, the
        old text stays.

        Raises:
            ReplicationError: it cannot be written; the message has the reason.
        """
        if is_foreign_link(self.path):
            raise ReplicationError(
                f"the replicator's configuration {self.path} is a symbolic link of another user, "
                "and its target would be overwritten: remove it, or set "
                "Sdk:MultiTenant:FileDb:Replication:ConfigOutputPath to another path"
            )
        if self.is_current(text):
            return False
        # An operator's link stays a link: a rename over it would replace it by a file.
        target = Path(os.path.realpath(self.path))
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        try:
            try:
                _write_durably(partial, text.encode())
                os.replace(partial, target)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
            # A rename is durable once its directory is synced: otherwise, after a power cut, the
            # old name could have the old text, which the replicator does not expect.
            sync_path(target.parent)
            _sweep(target)
        except OSError as error:
            raise ReplicationError(
                f"the replicator's configuration {self.path} cannot be written "
                f"({error.strerror}): make its directory writable for this user, with space left, "
                "or set Sdk:MultiTenant:FileDb:Replication:ConfigOutputPath to another path"
            ) from error
        return True


def _write_durably(file: Path, content: bytes) -> None:
    descriptor = open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    with open(descriptor, "wb") as stream:
        # The umask removes bits from the mode that was passed to open().
        os.chmod(file, MODE)
        stream.write(content)
        stream.flush()
        sync_file(stream.fileno())


def _sweep(target: Path) -> None:
    """Remove partial files of killed processes."""
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            if partial.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                partial.unlink()
