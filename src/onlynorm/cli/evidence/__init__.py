"""The evidence commands: `theorems`, `reproduce`, `report` and `bench`."""
