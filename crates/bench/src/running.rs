//! Child processes that are killed when their owner ends.

use std::process::Child;

/// Kills its child when dropped.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The child may have exited already; then this does nothing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
