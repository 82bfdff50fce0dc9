"""Gammas of several norms at once: products of frozen layers are solved by damped steps."""
