"""A pretrained model made deeper: what is added, where, and how it is trained further."""
