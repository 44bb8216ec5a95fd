"""Requests: their fields, segments, events, policy versions, block hashes and serialisation."""
