"""``events rejected``: the requests that a running receiver did not answer 200."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from .parse import add_feed, add_format, add_limit, describing

if not describing():
    import trio

    from .listen import FeedSource, call_api, feed_source
    from .settings import load
    from .terminal import print_list, say

COLUMNS = ("at", "status", "cause", "address", "webhook_id", "type", "detail")

#: The maximum number of rows in one answer of the API.
_PAGE = 200

#: Advice for those causes of 400 answers that an operator can fix.
ADVICE = {
    "no_match": "the sender signs with another secret: compare Sdk:Webhooks:Secret, or Secrets of "
    "the source, with the one that it shows for this endpoint; see Sdk:Webhooks:KeyDerivation",
    "too_old": "the sender's timestamp is too old: compare both clocks; if they agree, it is a "
    "replay",
    "too_new": "the sender's timestamp is in the future: compare both clocks",
    "not_https": "no trusted proxy reported HTTPS: see Sdk:Server:TrustedProxies",
    "own_secrets": "the tenant has its own secrets, but the delivery is signed with the host's: "
    "see Sdk:MultiTenant:OwnSecretsOnly",
    "bad_signature_header": "the signature has another format: configure the sender to sign in the "
    "format of Standard Webhooks, or correct Scheme, Header and Prefix of the source",
    "missing_header": "the request is not a delivery, or a proxy removes the headers with the "
    "signature: check the proxy",
}


def rejected_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events rejected``."""
    parser.add_argument("--cause", metavar="C", help="only this cause, such as no_match")
    add_limit(parser)
    add_feed(parser)
    add_format(parser)


def list_rejected(arguments: Namespace) -> int:
    """Print the newest requests that were rejected or refused, newest first.

    The receiver keeps the last 500 in memory, without bodies; this command queries the receiver.

    Raises:
        RelayError: the receiver does not answer, or refuses the request.
        UsageError: the token is missing, or the address is unknown.
    """
    source = feed_source(load(arguments), arguments)
    rows, answer = trio.run(_find, source, arguments.cause, arguments.limit + 1)
    of_sources = any("source" in row for row in rows)
    columns = (*COLUMNS[:5], "source", *COLUMNS[5:]) if of_sources else COLUMNS
    print_list(arguments, rows, columns, limit=arguments.limit, more="--limit N, or --cause C")
    causes: Mapping[str, int] = answer["causes"]
    if not answer["total"]:
        say("nothing has been rejected since the receiver started")
        return 0
    counts = ", ".join(f"{cause} {causes[cause]}" for cause in sorted(causes))
    say(f"{answer['total']} since the receiver started: {counts}")
    for cause in sorted(causes.keys() & ADVICE.keys()):
        say(f"{cause}: {ADVICE[cause]}")
    return 0


async def _find(
    source: FeedSource, cause: str | None, limit: int
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Return the newest rows, and the last answer with its counts."""
    found: list[dict[str, Any]] = []
    query = {} if cause is None else {"cause": cause}
    while True:
        size = min(_PAGE, limit - len(found))
        answer = await rejections(source, limit=str(size), **query)
        found += answer["rejections"]
        if len(found) == limit or len(answer["rejections"]) < size:
            return found, answer
        query["before"] = str(found[-1]["seq"])


async def rejections(source: FeedSource, **query: str) -> Mapping[str, Any]:
    """Return the receiver's newest rejections, and their number by cause.

    Raises:
        RelayError: the receiver does not answer, or refuses the request.
    """
    answer: Mapping[str, Any] = await call_api(source, "GET", "/api/rejections", query=query)
    return answer
