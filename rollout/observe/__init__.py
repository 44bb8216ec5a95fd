"""Views of a training run: timelines for Perfetto and Chrome, a log file, and a report page.

Always true: a process has at most one active recorder. Without an active recorder, each recording call costs one attribute
read. The package does not import torch.
"""
