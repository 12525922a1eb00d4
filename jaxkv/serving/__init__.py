"""Serving: many requests over one model, with a prefix cache that knows who may read what.

Everything here but `runner` is plain host code that works on page numbers, never on device data.
"""
