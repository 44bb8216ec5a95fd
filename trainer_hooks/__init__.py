"""Integrations with trainers, one framework per file.

One rule: the policy version moves because the optimizer stepped, never because somebody remembered to say so. Nothing
is imported here, so that a hook costs only the framework it is for.
"""
