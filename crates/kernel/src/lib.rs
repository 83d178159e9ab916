//! Guest kernels: build, list, check, default command line.
