//! Locks between threads and processes.
