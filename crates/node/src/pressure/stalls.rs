//! The kernel's notification that programs wait for memory (Documentation/accounting/psi.rst).

use jiffy_vmhost::process::ready_for;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::debug;

const FILE: &str = "/proc/pressure/memory";
/// More than 100 ms of waits within 2 s, the only window that users other than root may set.
const TRIGGER: &[u8] = b"some 100000 2000000\0";

/// Notifications, at most one in two seconds.
#[derive(Debug)]
pub struct Stalls(Option<AsyncFd<OwnedFd>>);

impl Stalls {
    /// Notifications of this host; none if the kernel lacks PSI.
    pub fn of_host() -> Stalls {
        let opened = open();
        if let Err(error) = &opened {
            debug!(%error, "memory stalls (PSI) can't be watched");
        }
        Stalls(opened.ok())
    }

    /// Waits for the next notification.
    pub async fn next(&mut self) {
        let Some(file) = &mut self.0 else {
            return std::future::pending().await;
        };
        match file.ready_mut(Interest::PRIORITY).await {
            Ok(mut ready) => ready.clear_ready(),
            Err(error) => {
                debug!(%error, "memory stalls (PSI) can't be watched any more");
                self.0 = None;
            }
        }
    }
}

fn open() -> io::Result<AsyncFd<OwnedFd>> {
    let mut file = OpenOptions::new().read(true).write(true).open(FILE)?;
    file.write_all(TRIGGER)?;
    ready_for(file.into(), Interest::PRIORITY)
}
