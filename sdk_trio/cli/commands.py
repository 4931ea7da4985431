"""The table of commands: words, help text, and the function of each, with that of its arguments.

Parser, documentation and tests read this table. It imports no part of the program: the file of a
group is imported when one of its commands is chosen.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """One command: ``words`` choose it, ``target`` is ``module:function`` inside this package.

    The function takes the parsed arguments and returns the exit status. ``arguments`` names the
    function of the same module that adds the command's arguments to its parser, "" if it has none.
    With ``takes_fields``, undeclared options are collected in the list ``fields`` of the arguments.
    """

    words: str
    summary: str
    target: str
    arguments: str = ""
    takes_fields: bool = False


COMMANDS = (
    Command("run", "run the receiver until it is told to stop", "run:run", "run_arguments"),
    Command(
        "health", "ask a running receiver how it is", "health:check_health", "health_arguments"
    ),
    Command("dev", "run a receiver to try, without any file", "dev:dev", "dev_arguments"),
    Command("init", "write the files of a new application", "init:init", "init_arguments"),
    Command(
        "config check", "report every problem of the settings", "config:check", "check_arguments"
    ),
    Command("config show", "show the settings and their origins", "config:show", "show_arguments"),
    Command("config schema", "print the JSON Schema of the settings", "config:schema"),
    Command("doctor", "find what is wrong, with remedies", "doctor.run:doctor", "doctor_arguments"),
    Command("events list", "list events of the inbox", "events:list_events", "list_arguments"),
    Command("events show", "show one event", "events:show_event", "show_arguments"),
    Command(
        "events replay",
        "run dead, parked or retrying events again",
        "events:replay",
        "replay_arguments",
    ),
    Command("events trigger", "send a signed sample", "trigger:trigger", "trigger_arguments"),
    Command(
        "events reconcile",
        "ask the upstream for what was missed",
        "upstream:reconcile",
        "reconcile_arguments",
    ),
    Command("events tail", "print changes as they happen", "events:tail", "tail_arguments"),
    Command("call", "call the upstream API", "upstream:call", "call_arguments", takes_fields=True),
    Command("sign", "sign a body as the upstream would", "sign:sign_file", "sign_arguments"),
    Command(
        "verify", "say whether a delivery is authentic", "sign:verify_file", "verify_arguments"
    ),
    Command("secrets new", "make a webhook secret", "sign:new_secrets", "new_arguments"),
    Command("tenant list", "list tenants", "tenants:list_tenants", "list_arguments"),
    Command("tenant show", "show one tenant", "tenants:show_tenant", "show_arguments"),
    Command("tenant add", "add a tenant", "tenants:add", "add_arguments"),
    Command(
        "tenant change",
        "change a tenant's name or organization",
        "tenants:change",
        "change_arguments",
    ),
    Command(
        "tenant contact",
        "change whom a tenant's messages go to",
        "tenants:change_contact",
        "contact_arguments",
    ),
    Command(
        "tenant credentials show",
        "show where a tenant's own token and secrets are",
        "tenant_credentials:show_credentials",
        "show_arguments",
    ),
    Command(
        "tenant credentials set",
        "say where a tenant's own token and secrets are",
        "tenant_credentials:set_credentials",
        "set_arguments",
    ),
    Command(
        "tenant credentials rotate",
        "add a new webhook secret, or remove an old one",
        "tenant_credentials:rotate_credentials",
        "rotate_arguments",
    ),
    Command(
        "tenant import",
        "add and change the tenants of a file",
        "tenant_import:import_tenants",
        "import_arguments",
    ),
    Command(
        "tenant export",
        "print tenants as CSV or JSON",
        "tenant_import:export_tenants",
        "export_arguments",
    ),
    Command(
        "tenant suspend", "suspend an active tenant", "tenants:suspend", "transition_arguments"
    ),
    Command(
        "tenant reactivate",
        "make a tenant active again",
        "tenants:reactivate",
        "transition_arguments",
    ),
    Command(
        "tenant deactivate", "deactivate a tenant", "tenants:deactivate", "transition_arguments"
    ),
    Command("tenant delete", "delete a tenant softly", "tenants:delete", "delete_arguments"),
    Command("tenant audit", "show who changed what, and why", "tenants:audit", "audit_arguments"),
    Command(
        "tenant purge",
        "remove long deleted tenants",
        "tenant_purge:purge_tenants",
        "purge_arguments",
    ),
    Command(
        "replication run",
        "run a replicator that reloads on SIGHUP",
        "replication:run_replicator",
        "run_arguments",
    ),
    Command(
        "replication status",
        "show how far behind each tenant's replica is",
        "replication:show_status",
        "status_arguments",
    ),
    Command(
        "replication render",
        "print the replicator's configuration",
        "replication:render",
        "render_arguments",
    ),
    Command(
        "replication restore",
        "restore a tenant's database into a file",
        "restore:restore",
        "restore_arguments",
    ),
    Command(
        "replication verify",
        "prove that replicas can be restored",
        "replication:verify",
        "verify_arguments",
    ),
    Command("upgrade", "move a single tenant's data", "upgrade:run_upgrade", "upgrade_arguments"),
    Command(
        "notify preview",
        "show what a message would say",
        "notifications:preview",
        "preview_arguments",
    ),
    Command("notify test", "send one real test message", "notifications:test", "test_arguments"),
    Command("notify list", "list messages", "notifications:list_notifications", "list_arguments"),
    Command("notify show", "show one message", "notifications:show_notification", "show_arguments"),
    Command(
        "notify retry",
        "send messages again that did not arrive",
        "notifications:retry",
        "retry_arguments",
    ),
    Command("openapi", "print the OpenAPI document", "config:openapi", "openapi_arguments"),
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
