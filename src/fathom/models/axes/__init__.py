"""What mechanisms and decoder parts are built on: base classes, the configuration's fields, layer passes,
arithmetic."""
