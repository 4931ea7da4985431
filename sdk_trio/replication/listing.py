"""List the replicas at the target, and find the one that a person selects.

The replicator's binary lists the files of one replica, but not the replicas. This module lists
those in a directory and an object store. For other targets a person lists them with the target's
own tools and passes the full name: a client per target would be a library for a rare command.
"""

import hashlib
import hmac
import html
import os
import posixpath
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode, urlsplit

import httpx
import trio

from ..base.clock import wall
from ..base.executor import run_in_thread
from ..base.times import readable
from ..config.fields import ReplicaTargetType
from ..config.options.tenants import ObjectStoreOptions, ReplicationOptions
from ..errors import ReplicatorError, RestoreError, UnknownTenantError
from .manifest import replica_path, split_replica_name, unset_variables
from .replica import LIST_SECONDS, ReplicaReader, newest_time

#: The number of names that a message shows.
_SHOWN: Final = 10

_PREFIX: Final = re.compile(r"<CommonPrefixes>\s*<Prefix>([^<]*)</Prefix>")
_TOKEN: Final = re.compile(r"<NextContinuationToken>([^<]*)</NextContinuationToken>")

_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")

_OK = 200


async def find_replica(
    options: ReplicationOptions,
    reader: ReplicaReader,
    key: str,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the name of the only replica of a tenant at the target.

    Args:
        options: with ``UseReplication``.
        reader: reads the replicas, if a person has to choose one of several.
        key: an identifier, an id, or the full name of a replica, which is not searched for.
        environ: where the target's keys are.

    Raises:
        UnknownTenantError: the target has no replica of the tenant.
        RestoreError: it has several; the message lists them.
        ReplicatorError: the target cannot be listed.
    """
    if split_replica_name(key) is not None:
        await trio.lowlevel.checkpoint()
        return key
    names = await list_replicas(options, environ)
    found = [name for name in names if key in (split_replica_name(name) or ())]
    where = replica_location(options, "")
    if not found:
        held = ", ".join(names[:_SHOWN]) + (" and more" if len(names) > _SHOWN else "")
        raise UnknownTenantError(
            f"no tenant {key!r} is known here, and {where} has no replica of that name; it "
            f"has {held or 'none at all: check the section Replication'}"
        )
    if len(found) > 1:
        described = [await _described(reader, name) for name in found[:_SHOWN]]
        raise RestoreError(
            f"{where} has {len(found)} replicas of {key!r}: {'; '.join(described)}. Name one of "
            f"them, such as --tenant {found[0]}"
        )
    return found[0]


async def _described(reader: ReplicaReader, name: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        newest = newest_time(await reader.prepare(name, Path(scratch)).list_files())
    return f"{name} (empty)" if newest is None else f"{name} (newest state {readable(newest)})"


async def list_replicas(
    options: ReplicationOptions, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the names of all tenants' replicas at the target.

    Raises:
        ReplicatorError: the target cannot be reached, or this program cannot list it.
    """
    match options.replica_target_type:
        case ReplicaTargetType.LOCAL_DISK:
            found = await run_in_thread(list_directory, replica_location(options, ""))
        case ReplicaTargetType.OBJECT_STORE if not unset_variables(options, environ):
            found = await _list_bucket(options, environ)
        case _:
            await trio.lowlevel.checkpoint()
            raise ReplicatorError(
                f"the replicas at {replica_location(options, '')} cannot be listed from here: list "
                "them with the target's own tools, and name one by its whole directory: --tenant "
                "IDENTIFIER.ID"
            )
    return sorted(name for name in found if split_replica_name(name) is not None)


def replica_location(options: ReplicationOptions, name: str) -> str:
    """Return the location of a replica in the form that the target's own tools use.

    Args:
        options: valid options.
        name: the name of the replica; empty: the location of all replicas.
    """
    # Use the function that renders the manifest, so that both always agree.
    path = replica_path(options, name, working_directory=os.getcwd())
    match options.replica_target_type:
        case ReplicaTargetType.LOCAL_DISK:
            return path
        case ReplicaTargetType.SFTP:
            return f"sftp://{options.sftp.user}@{options.sftp.host}:{options.sftp.port}{path}"
        case ReplicaTargetType.OBJECT_STORE:
            return f"s3://{options.object_store.bucket}/{path}"
        case ReplicaTargetType.BLOB_STORE:
            return f"abs://{options.blob_store.account_name}/{options.blob_store.container}/{path}"
        case ReplicaTargetType.CLOUD_STORAGE:
            return f"gs://{options.cloud_storage.bucket}/{path}"


def list_directory(directory: str) -> list[str]:
    """Return the names in a directory of replicas; none if it does not exist. Blocks.

    Raises:
        ReplicatorError: it cannot be read.
    """
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReplicatorError(
            f"the replicas in {directory} cannot be read ({error.strerror}); make the directory "
            "readable for this user"
        ) from error


async def _list_bucket(options: ReplicationOptions, environ: Mapping[str, str]) -> list[str]:
    """List the directories in the prefix, a thousand in one request."""
    query = {"delimiter": "/", "list-type": "2", "prefix": replica_path(options, "")}
    found: list[str] = []
    try:
        async with httpx.AsyncClient(timeout=LIST_SECONDS) as client:
            while True:
                page = await _ask_bucket(client, options.object_store, environ, query)
                prefixes = map(html.unescape, _PREFIX.findall(page))
                found += [posixpath.basename(prefix.rstrip("/")) for prefix in prefixes]
                more = _TOKEN.search(page)
                if more is None:
                    return found
                query["continuation-token"] = html.unescape(more[1])
    except httpx.HTTPError as error:
        problem = str(error) or type(error).__name__
        raise ReplicatorError(
            f"the replicas at {replica_location(options, '')} cannot be listed: {problem}; check "
            "the target, its keys, and the section Sdk:MultiTenant:FileDb:Replication"
        ) from error


async def _ask_bucket(
    client: httpx.AsyncClient,
    store: ObjectStoreOptions,
    environ: Mapping[str, str],
    query: Mapping[str, str],
) -> str:
    """Return one page of the list.

    Raises:
        httpx.HTTPError: the store answered without a page; with its reason.
    """
    # The signature covers this order and encoding.
    url = f"{_bucket_url(store)}?{urlencode(sorted(query.items()), quote_via=quote)}"
    headers = sign_request(
        url,
        region=store.region,
        key_id=environ[store.access_key_id_env_var],
        secret=environ[store.secret_access_key_env_var],
        now=wall(),
    )
    answer = await client.get(url, headers=headers)
    if answer.status_code != _OK:
        # Only the code: the rest of the answer may repeat the key.
        code = _CODE.search(answer.text)
        raise httpx.HTTPError(f"status {answer.status_code}" + (f" ({code[1]})" if code else ""))
    return answer.text


def _bucket_url(store: ObjectStoreOptions) -> str:
    endpoint = (store.endpoint_url or f"https://s3.{store.region}.amazonaws.com").rstrip("/")
    if store.force_path_style:
        return f"{endpoint}/{quote(store.bucket)}"
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{store.bucket}.{host}/"


def sign_request(url: str, *, region: str, key_id: str, secret: str, now: float) -> dict[str, str]:
    """Return the headers that sign a GET without a body for an object store (AWS Signature 4).

    Args:
        url: with its query sorted and percent-encoded.
        region: the store's.
        key_id: the id of the access key.
        secret: the access key.
        now: Unix seconds.
    """
    parts = urlsplit(url)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    body = hashlib.sha256(b"").hexdigest()
    headers = {"host": parts.netloc, "x-amz-content-sha256": body, "x-amz-date": moment}
    signed = ";".join(headers)
    lines = [f"{name}:{value}\n" for name, value in headers.items()]
    request = "\n".join(("GET", parts.path or "/", parts.query, "".join(lines), signed, body))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return headers | {
        "authorization": f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={signed}, "
        f"Signature={signature}"
    }
