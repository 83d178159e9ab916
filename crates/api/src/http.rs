//! Bodies, queries and upgrades.

use crate::client_slots::{Place, Places};
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONNECTION, CONTENT_TYPE, UPGRADE};
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::Response;
use futures_util::{Stream, StreamExt};
use http_body_util::{BodyExt, Limited};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use jiffy_content::error::{Error, Result};
use jiffy_wire::api;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::io::{self, Read};
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

/// Largest JSON body, in bytes.
const MAX_JSON: usize = 1024 * 1024;

/// How long a client has to send a JSON body.
const JSON_TIME: Duration = Duration::from_secs(30);
/// How long an uploading client may take for each [`UPLOAD_PIECE`].
const UPLOAD_TIME: Duration = Duration::from_secs(600);
/// In bytes.
const UPLOAD_PIECE: usize = 1024 * 1024;
/// Most uploads at a time; each has a thread that waits for data.
const MAX_UPLOADS: usize = 16;

static UPLOADS: LazyLock<Arc<Places>> =
    LazyLock::new(|| Places::new("uploads in progress", MAX_UPLOADS));

/// Runs work that waits for files or the kernel, outside the threads that serve requests.
///
/// # Errors
///
/// If `work` fails or panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| {
            Err(Error::internal(format!(
                "A task of jiffyd did not finish: {error}."
            )))
        })
}

/// The JSON body of a request; an empty one is `{}`.
///
/// # Errors
///
/// If the body is not complete within 30 s, is larger than 1 MiB, or is not as expected (see
/// [`object`]).
pub async fn json<T: DeserializeOwned>(body: Body) -> Result<T> {
    let bytes = timeout(JSON_TIME, Limited::new(body, MAX_JSON).collect())
        .await
        .map_err(|_| {
            let seconds = JSON_TIME.as_secs();
            Error::invalid(format!(
                "The request's body was not complete after {seconds} s."
            ))
        })?
        .map_err(|error| Error::invalid(format!("The request's body can't be read: {error}.")))?
        .to_bytes();
    object(&bytes)
}

/// As [`json`], for a body that was read completely.
///
/// # Errors
///
/// If it is not a JSON object, or its fields are not those of `T`.
pub fn object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let bytes = if bytes.is_empty() { &b"{}"[..] } else { bytes };
    // serde would also accept an array with the fields in order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(Error::invalid("The request's body is not a JSON object."));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| Error::invalid(format!("The request's body is not as expected: {error}.")))
}

/// The query of a request.
///
/// # Errors
///
/// If its parameters are not those of `T`.
pub fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T> {
    axum::extract::Query::try_from_uri(uri)
        .map(|axum::extract::Query(query)| query)
        .map_err(|error| Error::invalid(format!("The request's query is wrong: {error}.")))
}

/// A connection to upgrade to a stream; it keeps its place.
#[derive(Debug)]
pub struct Upgrade {
    upgrade: OnUpgrade,
    place: Option<Arc<Place>>,
}

/// Takes the upgrade out of a request.
///
/// # Errors
///
/// If it requests none, or not to [`api::UPGRADE`].
pub fn upgrade(request: &mut Request) -> Result<Upgrade> {
    let wanted = request.headers().get(UPGRADE);
    let right = wanted.is_some_and(|wanted| {
        wanted
            .as_bytes()
            .eq_ignore_ascii_case(api::UPGRADE.as_bytes())
    });
    match request.extensions_mut().remove::<OnUpgrade>() {
        Some(upgrade) if right => Ok(Upgrade {
            upgrade,
            place: request.extensions_mut().remove::<Arc<Place>>(),
        }),
        _ => Err(Error::invalid(format!(
            "This request needs an upgrade to a stream: send `Connection: upgrade` and `Upgrade: {}`.",
            api::UPGRADE
        ))),
    }
}

/// Answers 101, and calls `serve` with the connection when the client has the answer.
pub fn switch<F>(
    Upgrade { upgrade, place }: Upgrade,
    serve: impl FnOnce(TokioIo<hyper::upgrade::Upgraded>) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        match upgrade.await {
            Ok(stream) => serve(TokioIo::new(stream)).await,
            Err(error) => tracing::debug!(%error, "a client disconnected before its stream began"),
        }
        drop(place);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(api::UPGRADE));
    response
}

/// An answer of JSON lines, one for each item.
pub fn lines<T: Serialize>(batches: impl Stream<Item = Vec<T>> + Send + 'static) -> Response {
    let lines = batches.map(|batch| {
        let mut text = Vec::new();
        for item in &batch {
            serde_json::to_writer(&mut text, item)?;
            text.push(b'\n');
        }
        Ok::<_, io::Error>(text)
    });
    let mut response = Response::new(Body::from_stream(lines));
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// A request's body as a blocking reader, for the client of this connection. If the task that
/// feeds it ends early, the reader gets an error.
///
/// # Errors
///
/// If too many bodies are being uploaded, by all clients or by this one.
pub fn blocking_body(connection: &Place, body: Body) -> Result<impl Read + Send + 'static> {
    let place = UPLOADS.take(connection.client())?;
    let (send, receive) = mpsc::channel(4);
    tokio::spawn(async move { feed(body.into_data_stream(), send).await });
    Ok(BodyReader {
        pieces: receive,
        current: bytes::Bytes::new(),
        whole: false,
        _place: place,
    })
}

/// Sends the pieces of a body, and `None` at its end: without that the reader knows that the body
/// is incomplete. A client that stalls or trickles is treated like one that disconnected.
async fn feed<E>(
    body: impl Stream<Item = std::result::Result<bytes::Bytes, E>>,
    send: mpsc::Sender<Option<bytes::Bytes>>,
) {
    let mut body = pin!(body);
    // The rest of the time for this piece. Time spent by the reader does not count.
    let (mut time, mut missing) = (UPLOAD_TIME, UPLOAD_PIECE);
    loop {
        let asked = Instant::now();
        let piece = match timeout(time, body.next()).await {
            Ok(Some(Ok(piece))) => piece,
            Ok(None) => break,
            Ok(Some(Err(_))) | Err(_) => return,
        };
        time = time.saturating_sub(asked.elapsed());
        missing = missing.saturating_sub(piece.len());
        if missing == 0 {
            (time, missing) = (UPLOAD_TIME, UPLOAD_PIECE);
        }
        if send.send(Some(piece)).await.is_err() {
            return;
        }
    }
    let _ = send.send(None).await;
}

struct BodyReader {
    _place: Arc<Place>,
    pieces: mpsc::Receiver<Option<bytes::Bytes>>,
    current: bytes::Bytes,
    whole: bool,
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.whole {
            match self.pieces.blocking_recv() {
                Some(Some(piece)) => self.current = piece,
                Some(None) => self.whole = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let got = buffer.len().min(self.current.len());
        buffer[..got].copy_from_slice(&self.current.split_to(got));
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    /// How many bytes arrive of a body that sends `piece` bytes every `pause`, and whether it is
    /// complete.
    async fn fed(piece: usize, count: usize, pause: Duration) -> (usize, bool) {
        let body = stream::iter(0..count).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, io::Error>(bytes::Bytes::from(vec![0; piece]))
        });
        let (send, mut receive) = mpsc::channel(4);
        tokio::spawn(feed(body, send));
        let mut bytes = 0;
        while let Some(piece) = receive.recv().await {
            match piece {
                Some(piece) => bytes += piece.len(),
                None => return (bytes, true),
            }
        }
        (bytes, false)
    }

    #[tokio::test(start_paused = true)]
    async fn a_trickling_upload_times_out_and_a_slow_one_does_not() {
        let minute = Duration::from_secs(60);
        // Nine bytes in nine minutes; the tenth comes too late.
        assert_eq!(
            fed(1, 100, minute + Duration::from_secs(1)).await,
            (9, false)
        );
        // A small body is complete before its time is over.
        assert_eq!(fed(1, 9, minute).await, (9, true));
        // A body that makes progress may take any time.
        let slow = UPLOAD_PIECE / 9;
        assert_eq!(fed(slow + 1, 100, minute).await, ((slow + 1) * 100, true));
        // A body that stalls.
        let never = UPLOAD_TIME + Duration::from_secs(1);
        assert_eq!(fed(UPLOAD_PIECE, 2, never).await, (0, false));
    }
}
