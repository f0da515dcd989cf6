"""Trainer to rollout engines: what is sent (manifest), how it is cut (buckets) and carried (transport)."""
