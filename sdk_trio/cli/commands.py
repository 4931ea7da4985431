"""The table of commands: words, help text, arguments, and the function of each.

Parser, documentation and tests read this table. It imports no part of the program except the
parser's, so that help is printed without delay.
"""

from argparse import ArgumentParser
from collections.abc import Callable

import attrs

from . import command_arguments as arguments


@attrs.frozen
class Command:
    """One command: ``words`` choose it, ``target`` is ``module:function`` inside this package.

    The function takes the parsed arguments and returns the exit status. With ``takes_fields``,
    undeclared options are collected in the list ``fields`` of the arguments.
    """

    words: str
    summary: str
    target: str
    add_arguments: Callable[[ArgumentParser], None]
    takes_fields: bool = False


COMMANDS = (
    Command("run", "run the receiver until it is told to stop", "run:run", arguments.run),
    Command("health", "ask a running receiver how it is", "health:check_health", arguments.health),
    Command("dev", "run a receiver to try, without any file", "dev:dev", arguments.dev),
    Command("init", "write the files of a new application", "init:init", arguments.init),
    Command(
        "config check",
        "report every problem of the settings",
        "config:check",
        arguments.config_check,
    ),
    Command(
        "config show", "show the settings and their origins", "config:show", arguments.config_show
    ),
    Command(
        "config schema", "print the JSON Schema of the settings", "config:schema", arguments.nothing
    ),
    Command("doctor", "find what is wrong, with remedies", "doctor.run:doctor", arguments.doctor),
    Command("events list", "list events of the inbox", "events:list_events", arguments.events_list),
    Command("events show", "show one event", "events:show_event", arguments.events_show),
    Command(
        "events replay",
        "run dead, parked or retrying events again",
        "events:replay",
        arguments.events_replay,
    ),
    Command("events trigger", "send a signed sample", "trigger:trigger", arguments.events_trigger),
    Command(
        "events reconcile",
        "ask the upstream for what was missed",
        "reconcile:reconcile",
        arguments.events_reconcile,
    ),
    Command("events tail", "print changes as they happen", "events:tail", arguments.events_tail),
    Command("call", "call the upstream API", "call:call", arguments.call, takes_fields=True),
    Command("sign", "sign a body as the upstream would", "sign:sign_file", arguments.sign),
    Command("verify", "say whether a delivery is authentic", "sign:verify_file", arguments.verify),
    Command("secrets new", "make a webhook secret", "sign:new_secrets", arguments.secrets_new),
    Command("tenant list", "list tenants", "tenants:list_tenants", arguments.tenant_list),
    Command("tenant show", "show one tenant", "tenants:show_tenant", arguments.tenant_show),
    Command("tenant add", "add a tenant", "tenants:add", arguments.tenant_add),
    Command(
        "tenant change",
        "change a tenant's name or organization",
        "tenants:change",
        arguments.tenant_change,
    ),
    Command(
        "tenant contact",
        "change whom a tenant's messages go to",
        "tenants:change_contact",
        arguments.tenant_contact,
    ),
    Command(
        "tenant credentials show",
        "show where a tenant's own token and secrets are",
        "tenant_credentials:show_credentials",
        arguments.tenant_show,
    ),
    Command(
        "tenant credentials set",
        "say where a tenant's own token and secrets are",
        "tenant_credentials:set_credentials",
        arguments.tenant_credentials_set,
    ),
    Command(
        "tenant credentials rotate",
        "add a new webhook secret, or remove an old one",
        "tenant_credentials:rotate_credentials",
        arguments.tenant_credentials_rotate,
    ),
    Command(
        "tenant import",
        "add and change the tenants of a file",
        "tenant_import:import_tenants",
        arguments.tenant_import,
    ),
    Command(
        "tenant export",
        "print tenants as CSV or JSON",
        "tenant_import:export_tenants",
        arguments.tenant_export,
    ),
    Command(
        "tenant suspend", "suspend an active tenant", "tenants:suspend", arguments.tenant_transition
    ),
    Command(
        "tenant reactivate",
        "make a tenant active again",
        "tenants:reactivate",
        arguments.tenant_transition,
    ),
    Command(
        "tenant deactivate",
        "deactivate a tenant",
        "tenants:deactivate",
        arguments.tenant_transition,
    ),
    Command("tenant delete", "delete a tenant softly", "tenants:delete", arguments.tenant_delete),
    Command(
        "tenant audit", "show who changed what, and why", "tenants:audit", arguments.tenant_audit
    ),
    Command(
        "tenant purge",
        "remove long deleted tenants",
        "tenant_purge:purge_tenants",
        arguments.tenant_purge,
    ),
    Command(
        "replication run",
        "run a replicator that reloads on SIGHUP",
        "replication:run_replicator",
        arguments.replication_run,
    ),
    Command(
        "replication status",
        "show how far behind each tenant's replica is",
        "replication:show_status",
        arguments.replication_status,
    ),
    Command(
        "replication render",
        "print the replicator's configuration",
        "replication:render",
        arguments.replication_render,
    ),
    Command(
        "replication restore",
        "restore a tenant's database into a file",
        "restore:restore",
        arguments.replication_restore,
    ),
    Command(
        "replication verify",
        "prove that replicas can be restored",
        "replication:verify",
        arguments.replication_verify,
    ),
    Command("upgrade", "move a single tenant's data", "upgrade:run_upgrade", arguments.upgrade),
    Command(
        "notify preview",
        "show what a message would say",
        "notification_test:preview",
        arguments.notify_preview,
    ),
    Command(
        "notify test",
        "send one real test message",
        "notification_test:test",
        arguments.notify_test,
    ),
    Command(
        "notify list", "list messages", "notifications:list_notifications", arguments.notify_list
    ),
    Command(
        "notify show", "show one message", "notifications:show_notification", arguments.notify_show
    ),
    Command(
        "notify retry",
        "send messages again that did not arrive",
        "notifications:retry",
        arguments.notify_retry,
    ),
    Command("openapi", "print the OpenAPI document", "config:openapi", arguments.openapi),
)

#: The help text of each group of commands.
GROUPS = {
    "config": "the settings: check them, show them, describe them",
    "events": "the inbox: what came, what became of it, what to run again",
    "replication": "the replication of the tenants' databases",
    "secrets": "webhook secrets",
    "notify": "messages to site managers: what they say, what became of them",
    "tenant credentials": "where a tenant's own access token and webhook secrets are",
    "tenant": "tenants: who they are, where they stand, who changed that",
}
