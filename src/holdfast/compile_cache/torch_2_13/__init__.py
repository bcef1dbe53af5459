"""Everything that needs private names of the compiler of torch 2.13. Only `inductor` imports it."""
