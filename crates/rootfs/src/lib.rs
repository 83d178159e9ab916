//! Folders and tars into read-only root file systems.
