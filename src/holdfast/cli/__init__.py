"""The command line: the only code that prints or reads the environment."""
