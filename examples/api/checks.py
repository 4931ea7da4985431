# For: Check
import sdk_trio

# The runtime calls such a function for each `/readyz`: see the page on monitoring.
check = sdk_trio.Check("database", ok=True, detail="12 of 20 connections")
print(check.name, check.ok)
# Output: database True
