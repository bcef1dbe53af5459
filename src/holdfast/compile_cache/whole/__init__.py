"""Stores a compiled callable as a whole, so that later processes start it without dynamo and torch's compiler."""
