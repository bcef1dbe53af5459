"""One module for each suite; `run(sizes, folder)` measures it and returns the rows of the table."""
