"""Files of other libraries: import, export, and the receipts that prove them."""
