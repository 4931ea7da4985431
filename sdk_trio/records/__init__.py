"""Plain records and enumerations of what is stored; nothing here waits, so commands start fast."""
