"""What an endpoint does, as others can see it: records, metrics, a status page, traces."""
