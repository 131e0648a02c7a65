"""The base of mechanisms and parts of the decoder: roles, the configuration's fields, visits, arithmetic."""
