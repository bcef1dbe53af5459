"""The verbs that work with a second store: `copy`, `repair` and `mirror`."""
