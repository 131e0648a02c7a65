"""Model directories, Fathom's and other projects': check them without trusting their files, open them, write them."""
