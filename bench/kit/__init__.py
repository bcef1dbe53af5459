"""What suites share: timing, the state that is saved, the other formats, the limits of the machine, tables."""
