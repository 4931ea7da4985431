"""The admin address: probes, metrics and its API, apart from the deliveries."""
