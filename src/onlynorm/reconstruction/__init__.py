"""A target network -> a frozen random network of the same function, by choosing norm parameters only."""
