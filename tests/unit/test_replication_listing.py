"""Listing replicas at an object store: the signature, pages, and what does not count as one."""

import calendar

import httpx
import pytest
import respx

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import ObjectStoreOptions, ReplicationOptions
from sdk_trio.errors import ReplicatorError
from sdk_trio.replication.listing import list_replicas, sign_request

ID = "8c5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11"
KEYS = {"OBJECT_STORE_ACCESS_KEY_ID": "id", "OBJECT_STORE_SECRET_ACCESS_KEY": "secret"}


def options(**changes):
    store = ObjectStoreOptions(bucket="b", path_prefix="sdk/tenants/", **changes)
    return ReplicationOptions(
        replica_target_type=ReplicaTargetType.OBJECT_STORE, object_store=store
    )


def page(*names, token=None):
    found = "".join(
        f"<CommonPrefixes><Prefix>sdk/tenants/{n}/</Prefix></CommonPrefixes>" for n in names
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return httpx.Response(200, text=f"<ListBucketResult>{found}{more}</ListBucketResult>")


def test_the_signature_is_that_of_the_providers_example():
    """docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, "List Objects"."""
    headers = sign_request(
        "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J",
        region="us-east-1",
        key_id="AKIAIOSFODNN7EXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        now=calendar.timegm((2013, 5, 24, 0, 0, 0)),
    )
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


@respx.mock
async def test_every_page_is_read_and_only_replicas_count():
    route = respx.get("https://b.s3.us-east-1.amazonaws.com/")
    route.side_effect = [page(f"bolt.{ID}", "logs", ID, token="a&amp;b="), page(f"acme.{ID}")]
    assert await list_replicas(options(), KEYS) == [f"acme.{ID}", f"bolt.{ID}"]
    first, second = (call.request.url.params for call in route.calls)
    assert first["prefix"] == "sdk/tenants/"
    assert second["continuation-token"] == "a&b="


@respx.mock
async def test_a_refusal_names_the_stores_reason_and_no_key():
    body = "<Error><Code>AccessDenied</Code><AWSAccessKeyId>id-of-key</AWSAccessKeyId></Error>"
    respx.get("http://minio:9000/b").respond(403, text=body)
    at_home = options(endpoint_url="http://minio:9000", force_path_style=True)
    with pytest.raises(ReplicatorError, match=r"status 403 \(AccessDenied\); check") as raised:
        await list_replicas(at_home, KEYS)
    assert "id-of-key" not in str(raised.value)


async def test_without_keys_a_person_is_asked_to_name_the_directory():
    with pytest.raises(ReplicatorError, match=r"s3://b/sdk/tenants/ cannot be listed .*IDENT"):
        await list_replicas(options(), {})
