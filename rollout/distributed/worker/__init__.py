"""Connects one engine to a coordinator."""
