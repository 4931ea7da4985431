"""The deliveries in a store's file, read by SQL while the daemon runs."""

#: The beginning of a statement that reads the deliveries of a SQLite store as a table ``delivery``.
DELIVERIES = """
WITH delivery AS (
    SELECT arrival.sequence, delivery_key, type, received_at, signed_at, subject, ordered,
        tenant_id, raw, coalesce(work.state, 'done') AS state,
        coalesce(work.queued, ended.queued) AS queued,
        coalesce(work.attempts, ended.attempts) AS attempts,
        coalesce(work.process_ends, ended.process_ends) AS process_ends,
        coalesce(work.last_error, ended.last_error) AS last_error,
        iif(signer = '', delivery_key,
            substr(delivery_key, 1, length(delivery_key) - length(signer) - 1)) AS webhook_id
    FROM arrival
    LEFT JOIN work ON work.sequence = arrival.sequence
    LEFT JOIN ended ON ended.sequence = arrival.sequence
)
"""

#: The number of deliveries in each state.
STATES = f"{DELIVERIES} SELECT state, count(*) FROM delivery GROUP BY state"

#: The state of each delivery, by its id.
STATE_OF_EACH = f"{DELIVERIES} SELECT webhook_id, state FROM delivery"
