"""The commands that show evidence: `theorems`, `reproduce`, `report` and `bench`."""
