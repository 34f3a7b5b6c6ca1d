"""oneDNN through its C interface (version 3), by ctypes: convolution on plain channels-last arrays."""
