"""The default texts of messages to site managers, one set a transition. Pure (spec 2.9).

English, short, and in the 7-bit alphabet of SMS. They say what happened, why, and what it means;
nothing is asked for that a message could be imitated to get, such as a click or a password.
"""

import attrs


@attrs.frozen
class TemplateTexts:
    """The three texts of one transition."""

    email_subject: str
    email_body: str
    sms_body: str


def _texts(happened: str, meaning: str) -> TemplateTexts:
    return TemplateTexts(
        email_subject=f"{{TenantName}} {happened}",
        email_body=(
            "Hello,\n"
            "\n"
            f"{{TenantName}} ({{TenantIdentifier}}) {happened}.\n"
            "\n"
            "Reason: {Reason}\n"
            "When: {OccurredAt}\n"
            "Status: {NewStatus} (it was {PreviousStatus})\n"
            "\n"
            f"{meaning}\n"
            "\n"
            "You receive this message because you are the site manager. If you did not expect it, "
            "please get in touch with us.\n"
        ),
        sms_body=f"{{TenantName}} {happened}. Reason: {{Reason}}",
    )


SUSPENDED = _texts(
    "has been suspended",
    "Access is paused for now. Nothing has been removed, and everything is there again once it "
    "has been reactivated.",
)
REACTIVATED = _texts(
    "has been reactivated",
    "It is active, and everything can be used again. Thank you for your patience.",
)
DEACTIVATED = _texts(
    "has been deactivated",
    "It is switched off. Its data is kept, and it can be reactivated.",
)
DELETED = _texts(
    "has been deleted",
    "Its data is kept for a limited time, in which it can still be restored. After that it is "
    "removed for good. If you want it back, please tell us soon.",
)
