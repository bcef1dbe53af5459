"""`holdfast serve`: a read-only web server on this machine, with one page that shows a store."""
