"""What a program finds on macOS, on Linux: names that only Linux has are gone, and so are its files of the kernel.

`python -m tests.as_on_macos MODULE ARGUMENTS`. Started processes find the same, as they load `sitecustomize`.
"""
