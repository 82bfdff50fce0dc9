"""Methods that solve for gamma."""
