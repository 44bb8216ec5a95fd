"""OpenAI-compatible HTTP server over one `LLM`.

Names are resolved lazily: importing the package loads neither torch nor a web framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.server.app import build_app as build_app
    from rollout.server.server import Server as Server
    from rollout.server.server import serve as serve

_HOME = {"Server": "server", "build_app": "app", "serve": "server"}

__all__ = ["Server", "build_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
