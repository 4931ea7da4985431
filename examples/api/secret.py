# For: Secret
import sdk_trio

secret = sdk_trio.Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
print("masked:", secret.reveal() not in f"{secret} {secret!r}")
# Output: masked: True
