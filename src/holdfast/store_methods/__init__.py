"""The methods of `Store`, in groups by what they work on; `facade.Store` inherits them all.

Modules that need torch are imported inside methods: opening, listing and collecting never load torch.
"""
