"""Plain records and enumerations of stored data; no I/O, so commands start fast."""
