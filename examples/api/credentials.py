# For: TenantCredentials, EnvironmentVariable, KeyFile
import sdk_trio

credentials = sdk_trio.TenantCredentials(
    access_token=sdk_trio.EnvironmentVariable("ACME_TOKEN"),
    webhook_secrets=(sdk_trio.KeyFile("/etc/sdk/acme.keys"),),
)
print(len(credentials.sources))
# Output: 2
