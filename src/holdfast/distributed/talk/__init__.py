"""How the ranks of a group exchange messages, and how a failure of one reaches all."""
