"""How values look to people: reprs, and HTML in notebooks. Needs no torch, and prints nothing."""
