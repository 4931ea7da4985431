"""The SMS channel: SmsProviderA's ``Messages.json``."""

import base64
from urllib.parse import quote, urlencode

from ...config.table import NOTIFICATIONS
from ...net.poster import PostAnswer
from ...records.tenants import OutboxRecord
from ..send import (
    Outcome,
    ProviderChannel,
    Request,
    Skipped,
    accepted,
    classify_response,
    credential,
    document_of,
    explained,
)
from ..templates import render, template_of


class SmsSender(ProviderChannel):
    """Sends one SMS to the site manager."""

    repeatable = False

    def _prepare(self, record: OutboxRecord) -> Request | Skipped:
        options = self._options
        provider = options.sms.sms_provider_a
        recipient = record.site_manager_phone
        if not options.enabled_channels.sms:
            return Skipped(f"{NOTIFICATIONS}:EnabledChannels:Sms is false")
        if not recipient:
            return Skipped("the tenant has no site manager's phone number")
        if not provider.from_number:
            return Skipped(f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber is empty")
        account = credential(self._read_variable, provider.account_sid_env_var)
        if isinstance(account, Skipped):
            return account
        token = credential(self._read_variable, provider.auth_token_env_var)
        if isinstance(token, Skipped):
            return token
        text = render(template_of(options.templates, record.transition), record).sms_text
        if not text:
            return Skipped(f"{NOTIFICATIONS}:Templates:{record.transition}:SmsBody is empty")
        base = provider.base_url.rstrip("/")
        pair = base64.b64encode(f"{account}:{token}".encode()).decode()
        fields = {"To": recipient, "From": provider.from_number, "Body": text}
        return Request(
            # Quoted, because an id with a slash would name another resource.
            url=f"{base}/2010-04-01/Accounts/{quote(account, safe='')}/Messages.json",
            headers={
                "authorization": f"Basic {pair}",
                "content-type": "application/x-www-form-urlencoded",
                "accept": "application/json",
            },
            body=urlencode(fields).encode("ascii"),
            timeout_seconds=options.sms.timeout_seconds,
            classify=lambda answer: self._judge(
                # Searched without the plus, so that the number is found in both spellings.
                answer,
                hidden=(pair, token, account, recipient.lstrip("+")),
            ),
        )

    def _judge(self, answer: PostAnswer, *, hidden: tuple[str, ...]) -> Outcome:
        document = document_of(answer)
        if answer.status == 201:
            return accepted(answer, document.get("sid"))
        provider = self._options.sms.sms_provider_a
        return classify_response(
            answer,
            repeatable=self.repeatable,
            explanation=explained(document.get("message"), hidden),
            advice=f"check the variables {provider.account_sid_env_var} and "
            f"{provider.auth_token_env_var}",
            now=self._clock(),
        )
