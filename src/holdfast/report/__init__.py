"""The comparison of two runs as one page of HTML that needs nothing else: no network, no library, no server."""
