"""Reading: which bytes are needed, where they are, and their verification."""
