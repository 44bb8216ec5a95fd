"""Creates long-lived tensors outside inference mode, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Leave inference mode: tensors created inside can be trained and changed in place later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
