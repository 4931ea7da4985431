"""``openapi``: the OpenAPI description of the receiver or of the admin address."""

from argparse import Namespace

from .._version import __version__
from ..console.openapi import admin_document
from ..webhooks.openapi import receiver_document
from .printer import print_json
from .settings_reader import load


def openapi(arguments: Namespace) -> int:
    """Print the OpenAPI 3.1 document; the receiver's has the path of the settings."""
    if arguments.admin:
        print_json(admin_document(version=__version__))
    else:
        settings = load(arguments)
        path, tenants = settings.webhooks.path, settings.multi_tenant.enabled
        print_json(receiver_document(path=path, version=__version__, tenants=tenants))
    return 0
