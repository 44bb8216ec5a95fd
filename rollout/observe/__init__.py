"""Views of a run: timelines in the format of Perfetto and Chrome, the log of a run, and the page made of it.

Always true: a process has at most one active recorder; without one, a hook costs one attribute read. No torch.
"""
