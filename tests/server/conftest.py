"""Configuration of the server's tests."""

from __future__ import annotations

from httpx._config import DEFAULT_TIMEOUT_CONFIG

# A busy machine may take longer than httpx' 5 s. Its functions take their default from this one object.
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.write = 120.0
