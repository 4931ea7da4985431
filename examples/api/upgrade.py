# For: HostUpgrade, SqliteTenantIds, Quiescence, DefaultTenantResolver, UpgradeStep, StepBatch
import sdk_trio

quiescence = sdk_trio.Quiescence()
upgrade = sdk_trio.HostUpgrade(
    steps=[sdk_trio.SqliteTenantIds("/var/lib/app/app.db", "orders")],
)
# `Runtime(..., host_upgrade=upgrade, quiescence=quiescence)` moves the data at its start, once
# nothing else writes it:
quiescence.signal("the old workers have stopped")
