"""The channels: one file for each way to reach a site manager."""
