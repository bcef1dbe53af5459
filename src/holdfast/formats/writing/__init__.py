"""Writers of other libraries' files: a module for each format, and the streaming and atomic naming that they share."""
