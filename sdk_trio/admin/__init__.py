"""The admin address: probes, metrics and its API, separate from deliveries."""
