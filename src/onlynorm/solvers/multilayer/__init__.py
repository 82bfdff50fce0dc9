"""Gammas of several layers at once, by Levenberg-Marquardt steps on the product of the layers."""
