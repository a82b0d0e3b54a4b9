"""The registry that is etcd: its addresses, its members, what they say, and leases."""
