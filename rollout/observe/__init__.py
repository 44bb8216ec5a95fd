"""Views of a run: timelines in the format of Perfetto and Chrome, the log of a run, and a report page.

Always true: a process has at most one active recorder. Without a recorder, a hook costs one attribute read. The package does
not import torch.
"""
