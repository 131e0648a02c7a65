"""Recurrences, which decide how many iterations a token makes through the layers, and the input of each iteration."""
