//! Waits for the answer to a request, but not for a node that answers nothing at all.

use super::body::RequestBody;
use super::{Client, Endpoint};
use crate::failure::{Failure, Kind, Result};
use hyper::body::Incoming;
use hyper::{Method, Response};
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// After this time without an answer, `when_slow` is called.
const SLOW: Duration = Duration::from_secs(3);
/// After this time without an answer, the node is asked whether it answers other requests,
const ASK_AFTER: Duration = Duration::from_secs(30);
/// and has this time to do so: on a busy computer it may be slow.
const ASK_TIME: Duration = Duration::from_secs(90);

impl Client {
    /// The answer, or why there was none, or why it is not waited for any longer.
    pub(super) async fn answer(
        &self,
        answer: impl Future<Output = hyper::Result<Response<Incoming>>>,
    ) -> Result<hyper::Result<Response<Incoming>>> {
        tokio::select! {
            biased;
            answer = answer => Ok(answer),
            why = self.until_given_up() => Err(why),
        }
    }

    /// Ends if waiting makes no sense: with the error of `when_slow`, or when the node does not
    /// answer other requests either.
    async fn until_given_up(&self) -> Failure {
        let mut asked = Instant::now();
        loop {
            sleep(SLOW).await;
            if let Some(when_slow) = self.when_slow.clone()
                && let Ok(Err(why)) = tokio::task::spawn_blocking(move || when_slow()).await
            {
                return why;
            }
            if asked.elapsed() >= ASK_AFTER {
                if timeout(ASK_TIME, self.ask()).await.is_err() {
                    return self.unresponsive();
                }
                asked = Instant::now();
            }
        }
    }

    /// Sends a request that any node answers at once. If it is refused or fails, the first request
    /// is, too.
    async fn ask(&self) -> Result<()> {
        let request = self.request(Method::GET, "/v1/info", RequestBody::empty())?;
        let mut sender = self.connect().await?;
        let _ = sender.send_request(request).await;
        Ok(())
    }

    fn unresponsive(&self) -> Failure {
        let (place, hint) = match &self.endpoint {
            Endpoint::Unix(_) => ("", "if jiffyd is restarted, its VMs go on"),
            Endpoint::Tcp { .. } => (
                " in the machine",
                "`jiffy machine stop` ends the machine and its VMs; the next command starts it again",
            ),
        };
        let seconds = ASK_TIME.as_secs();
        Failure::new(format!(
            "jiffyd{place} has not answered any request for {seconds} s"
        ))
        .hint(hint)
        .kind(Kind::Unreachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{UnixListener, UnixStream};

    /// A node that never answers the first request, and others if `answers`. Counts requests.
    fn node(socket: &Path, answers: bool) -> Arc<AtomicUsize> {
        let listener = UnixListener::bind(socket).unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let number = counted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(serve(stream, answers && number > 0));
            }
        });
        count
    }

    async fn serve(mut stream: UnixStream, answers: bool) {
        let mut bytes = [0; 4096];
        while let Ok(1..) = stream.read(&mut bytes).await {
            if answers {
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                stream.write_all(answer).await.unwrap();
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_answers_nothing_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let requests = node(&socket, false);
        let client = Client::new(Endpoint::Unix(socket));
        let begin = Instant::now();
        let failure = client.get::<serde_json::Value>("/v1/vms").await;
        let failure = failure.unwrap_err();
        assert_eq!(
            failure.message,
            "jiffyd has not answered any request for 90 s"
        );
        assert_eq!(requests.load(Ordering::Relaxed), 2);
        assert_eq!(begin.elapsed().as_secs(), 120);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_answer_of_a_node_that_lives_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let requests = node(&socket, true);
        let client = Client::new(Endpoint::Unix(socket));
        let answer = client.get::<serde_json::Value>("/v1/vms");
        let hour = timeout(Duration::from_secs(3600), answer).await;
        assert!(hour.is_err(), "the request was given up");
        assert!(requests.load(Ordering::Relaxed) > 100);
    }
}
