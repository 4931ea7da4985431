"""One sentence for each operation, derived from its name, with exceptions listed here."""

#: Operations whose name is not a verb about their resource.
_WRITTEN = {
    "benefits.files": "List the files of a benefit.",
    "benefits.grants": "List the grants of a benefit.",
    "checkouts.client_confirm": "Confirm a checkout by its client secret.",
    "checkouts.client_get": "Get a checkout by its client secret.",
    "checkouts.client_update": "Update a checkout by its client secret.",
    "customer_portal.customer_session.get_authenticated_user": "Get who the token belongs to.",
    "customer_portal.customer_session.introspect": "Get the session that the token belongs to.",
    "customer_portal.customers.add_payment_method": "Add a payment method.",
    "customer_portal.customers.check_email_update": "Check a token for a change of email address.",
    "customer_portal.customers.confirm_payment_method": "Confirm a payment method.",
    "customer_portal.customers.delete_payment_method": "Delete a payment method.",
    "customer_portal.customers.get": "Get the customer whom the token belongs to.",
    "customer_portal.customers.list_payment_methods": "List the payment methods.",
    "customer_portal.customers.request_email_update": "Ask for a change of the email address.",
    "customer_portal.customers.update": "Update the customer whom the token belongs to.",
    "customer_portal.customers.verify_email_update": "Change the email address, by a token.",
    "customer_portal.members.add_member": "Add a member.",
    "customer_portal.members.list_members": "List the members.",
    "customer_portal.members.remove_member": "Remove a member.",
    "customer_portal.members.update_member": "Update a member.",
    "customer_portal.orders.confirm_retry_payment": "Confirm that an order's payment is retried.",
    "customer_portal.orders.get_payment_status": "Get the state of an order's payment.",
    "customer_portal.organizations.get": "Get the seller by slug.",
    "customer_portal.seats.assign_seat": "Assign a seat.",
    "customer_portal.seats.list_claimed_subscriptions": "List the subscriptions of claimed seats.",
    "customer_portal.seats.list_seats": "List the seats.",
    "customer_portal.seats.resend_invitation": "Send the invitation to a seat again.",
    "customer_portal.seats.revoke_seat": "Revoke a seat.",
    "customer_seats.assign_seat": "Assign a seat.",
    "customer_seats.claim_seat": "Claim a seat by an invitation's token.",
    "customer_seats.get_claim_info": "Get what an invitation's token claims.",
    "customer_seats.list_seats": "List the seats of a subscription or order.",
    "customer_seats.resend_invitation": "Send the invitation to a seat again.",
    "customer_seats.revoke_seat": "Revoke a seat.",
    "customers.get_state": "Get the state of a customer: subscriptions, benefits, meters.",
    "customers.list_payment_methods": "List the payment methods of a customer.",
    "events.ingest": "Record events of usage.",
    "events.list_names": "List the names of events, with their counts.",
    "files.uploaded": "Complete the upload of a file.",
    "license_keys.get_activation": "Get one activation of a license key.",
    "license_keys.activate": "Activate a license key.",
    "license_keys.deactivate": "Deactivate a license key's activation.",
    "license_keys.rotate": "Replace a license key by a new one.",
    "meters.quantities": "Get what a meter has counted over time.",
    "metrics.create_dashboard": "Create a dashboard.",
    "metrics.delete_dashboard": "Delete a dashboard.",
    "metrics.export": "Export the metrics as CSV.",
    "metrics.get": "Get figures over time.",
    "metrics.get_dashboard": "Get one dashboard.",
    "metrics.limits": "Get the spans and intervals that metrics can be asked for.",
    "metrics.list_dashboards": "List the dashboards.",
    "metrics.update_dashboard": "Update a dashboard.",
    "oauth2.authorize": "Begin an authorization.",
    "oauth2.introspect_token": "Get what a token may do.",
    "oauth2.request_token": "Get a token for a code or a refresh token.",
    "oauth2.revoke_token": "Revoke a token.",
    "oauth2.userinfo": "Get who the token belongs to.",
    "orders.generate_invoice": "Make the invoice of an order.",
    "orders.invoice": "Get the invoice of an order.",
    "orders.receipt": "Get the receipt of an order.",
    "products.update_benefits": "Replace the benefits of a product.",
    "webhooks.list_webhook_deliveries": "List the deliveries to webhook endpoints.",
    "webhooks.redeliver_webhook_event": "Deliver a webhook event again.",
    "webhooks.reset_webhook_endpoint_secret": "Replace the secret of a webhook endpoint.",
}

#: Names of resources that differ from the words for one of their items.
_THINGS = {"oauth2.clients.oauth2": "OAuth 2 client", "customer_portal.seats": "seat"}


def summary(full_name: str) -> str:
    """Return what an operation does, in one sentence."""
    external = full_name.endswith("_external")
    name = full_name.removesuffix("_external")
    text = _WRITTEN.get(name) or _WRITTEN.get(name.removeprefix("customer_portal.")) or _made(name)
    if external:
        text = f"{text.removesuffix('.')}, by the application's own id."
    if full_name.startswith("customer_portal."):
        text = f"{text.removesuffix('.')}, as the customer."
    return text


def _made(full_name: str) -> str:
    resource, _, name = full_name.rpartition(".")
    thing = _THINGS.get(resource) or resource.rpartition(".")[2].removesuffix("s").replace("_", " ")
    verb, _, rest = name.partition("_")
    if resource == "webhooks" or resource in _THINGS:
        thing = _THINGS.get(resource) or rest.removesuffix("s").replace("_", " ")
    if verb == "list":
        return f"List the {thing}s."
    if verb == "export":
        return f"Export the {thing}s as CSV."
    if verb == "get":
        return f"Get one {thing}."
    article = "an" if thing[0] in "aeioO" else "a"
    return f"{verb.capitalize()} {article} {thing}."
