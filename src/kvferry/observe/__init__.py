"""How an endpoint's work is seen from outside: records, metrics, a status page, traces."""
