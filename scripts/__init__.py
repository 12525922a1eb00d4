"""Command line entry points over the public API; what they share is in `_script` and `_terminal`."""
