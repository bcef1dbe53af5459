"""The verb `run`: recorded runs on the command line."""
