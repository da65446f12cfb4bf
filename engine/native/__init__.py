"""The native CPU step: C++ built when the package is installed, and its thin binding. See README.md."""
