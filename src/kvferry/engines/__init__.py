"""Plug-ins for serving engines. Imports nothing, so that no engine needs the packages of another."""
