# For: verify_notification, VerificationError
import sdk_trio
from sdk_trio.testing import verify_notification

try:
    verify_notification({}, b"{}", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
except sdk_trio.VerificationError as error:
    print("refused:", error.cause)
