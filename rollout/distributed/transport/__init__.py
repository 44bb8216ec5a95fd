"""Authenticated message connections over ZMQ."""
