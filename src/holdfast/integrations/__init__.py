"""Plug-ins for training frameworks, one module each; a module needs its framework and is imported by name only."""
