//! Connecting to programs of the node.

use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::sleep;

/// How long a full backlog is left alone.
const PAUSE: Duration = Duration::from_millis(5);

/// Connects to a Unix socket. Waits while its backlog is full, as a blocking connect(2) does: the
/// caller limits the time.
pub(crate) async fn dial(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(PAUSE).await,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::private_socket::bind_private;
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_burst_larger_than_the_backlog_waits_until_it_is_accepted() {
        const BURST: usize = 40;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = bind_private(&path, 4).unwrap();
        let mut dialing = JoinSet::new();
        for _ in 0..BURST {
            let path = path.clone();
            dialing.spawn(async move { dial(&path).await.map(drop) });
        }
        let mut connected = 0;
        while let Ok(Some(done)) = timeout(Duration::from_millis(100), dialing.join_next()).await {
            done.unwrap().unwrap();
            connected += 1;
        }
        assert!(connected < BURST, "the backlog must be full");
        for _ in 0..BURST {
            let accepting = listener.try_clone().unwrap();
            let accepted = tokio::task::spawn_blocking(move || accepting.accept());
            accepted.await.unwrap().unwrap();
        }
        while let Some(done) = dialing.join_next().await {
            done.unwrap().unwrap();
        }
        // A child that another test forks keeps it open until it executes its program.
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
        drop(listener);
        let gone = dial(&path).await.unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
    }
}
