"""Saves, loads and messages of many ranks; a failure of one rank is raised on all. A single process is one rank."""
