"""Serving: many requests over one model, with a prefix cache that knows who may read what.

    request -> intake -> waiting -> starting -> running -> delivery

The `scheduler` moves sequences along and tells the `runner` what to compute; the `page_cache` says whose each page is; `tiers` keep what
leaves the device. Only `runner` and `restore` touch device data; all else is plain host code over page numbers.
"""
