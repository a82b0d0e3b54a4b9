"""Builds a release and checks it as those will who install it: `make release-check`, CONTRIBUTING.md. In no wheel."""
