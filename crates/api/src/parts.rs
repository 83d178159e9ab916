//! Bodies, queries and upgrades.

use crate::places::Place;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::Response;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Limited};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use jiffy_content::error::{Error, Result};
use jiffy_wire::api;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::time::timeout;

/// Largest JSON body, in bytes.
const MAX_JSON: usize = 1024 * 1024;

/// How long a client has to send a JSON body.
const JSON_TIME: Duration = Duration::from_secs(30);
/// How long an uploading client may send nothing.
const UPLOAD_STALL: Duration = Duration::from_secs(600);
/// Most uploads at a time; each has a thread that waits for data.
const MAX_UPLOADS: usize = 16;

static UPLOADS: Semaphore = Semaphore::const_new(MAX_UPLOADS);

/// The JSON body of a request; an empty one is `{}`.
pub async fn json<T: DeserializeOwned>(body: Body) -> Result<T> {
    let bytes = timeout(JSON_TIME, Limited::new(body, MAX_JSON).collect())
        .await
        .map_err(|_| {
            let seconds = JSON_TIME.as_secs();
            Error::invalid(format!(
                "The request's body was not there after {seconds} s."
            ))
        })?
        .map_err(|error| Error::invalid(format!("The request's body can't be read: {error}.")))?
        .to_bytes();
    object(&bytes)
}

/// As [`json`], for a body that was read completely.
pub fn object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let bytes = if bytes.is_empty() { &b"{}"[..] } else { bytes };
    // serde would also accept an array with the fields in their order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(Error::invalid("The request's body is not a JSON object."));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| Error::invalid(format!("The request's body is not as expected: {error}.")))
}

/// The query of a request.
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

/// Takes the upgrade out of a request; an error if it asks for none.
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
            "This request becomes a stream: send `Connection: upgrade` and `Upgrade: {}`.",
            api::UPGRADE
        ))),
    }
}

/// Answers 101, and passes the connection on once the client has the answer.
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
            Err(error) => tracing::debug!(%error, "a client left before its stream began"),
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

/// A request's body as a blocking reader. If the task that feeds it ends early, the reader gets
/// an error.
pub fn blocking_body(body: Body) -> Result<impl Read + Send + 'static> {
    let place = UPLOADS.try_acquire().map_err(|_| {
        Error::no_room(format!(
            "{MAX_UPLOADS} uploads are under way, as many as may be."
        ))
        .hint("Try again when one of them is done.")
    })?;
    let (send, receive) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut pieces = body.into_data_stream();
        // A client that stalls is treated like one that disconnected.
        while let Some(piece) = match timeout(UPLOAD_STALL, pieces.next()).await {
            Ok(piece) => piece,
            Err(_) => return,
        } {
            let failed = piece.is_err();
            if send.send(Some(piece.unwrap_or_default())).await.is_err() || failed {
                // Without the final `None` the reader knows that the body is incomplete.
                return;
            }
        }
        let _ = send.send(None).await;
    });
    Ok(BodyReader {
        pieces: receive,
        current: bytes::Bytes::new(),
        whole: false,
        _place: place,
    })
}

struct BodyReader {
    _place: SemaphorePermit<'static>,
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
