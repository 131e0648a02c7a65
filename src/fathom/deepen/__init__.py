"""Add mechanisms to a pretrained model: which, in which layers, and the recipe that trains it further."""
