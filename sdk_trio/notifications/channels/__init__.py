"""The channels for notifying site managers, one file each."""
