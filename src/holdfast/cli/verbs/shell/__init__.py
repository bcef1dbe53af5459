"""Verbs that help to type commands: help pages, and completion in shells."""
