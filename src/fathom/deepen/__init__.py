"""Add mechanisms to a pretrained model: choose the mechanisms and their layers, and write the recipe that trains the
model further."""
