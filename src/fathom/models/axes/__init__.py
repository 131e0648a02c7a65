"""What mechanisms and parts of the decoder are made of: roles, the configuration's fields, visits, arithmetic."""
