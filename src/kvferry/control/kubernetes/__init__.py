"""Whose word counts in Kubernetes: which pod a process is, and whether it has ended."""
