//! Freezes a guest's programs and captures its VM.

use crate::agent::{self, AgentError};
use crate::control;
use crate::frames::{FrameReader, ReadError};
use crate::text::short;
use jiffy_content::snapshots::captured::Captured;
use jiffy_sys::causes;
use jiffy_wire::agent::{Done, OLDEST, Request};
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long a guest has to freeze its programs and write its disks back.
const QUIESCE_TIME: Duration = Duration::from_secs(60);
/// How long a VMM has to capture its VM.
const CAPTURE_TIME: Duration = Duration::from_secs(60);

/// A guest whose programs are frozen until this is dropped.
#[derive(Debug)]
pub struct FrozenGuest {
    _connection: FrameReader<UnixStream>,
}

/// Freezes the guest's programs.
///
/// # Errors
///
/// If the agent does not answer or does not freeze them in time: a sentence without its full stop.
pub async fn quiesce(vsock: &Path, drop_caches: bool) -> Result<FrozenGuest, String> {
    let request = Request::Quiesce {
        version: OLDEST,
        drop_caches,
    };
    let exchange = async {
        let mut connection = FrameReader::new(agent::ask(vsock, &request).await?);
        let answer = connection
            .next::<Done>()
            .await
            .map_err(|error| match error {
                ReadError::Io(error) => AgentError::Io(error),
                ReadError::Frame(error) => AgentError::Protocol(error),
            })?;
        Ok::<_, AgentError>((answer, connection))
    };
    match timeout(QUIESCE_TIME, exchange).await {
        Ok(Ok((Some(Done::Ok), connection))) => Ok(FrozenGuest {
            _connection: connection,
        }),
        Ok(Ok((Some(Done::Error(why)), _))) => Err(short(why.trim_end_matches('.'))),
        Ok(Ok((None, _))) => Err("the guest's agent closed the connection".to_owned()),
        Ok(Err(error)) => Err(causes::sentence(&error)),
        Err(_) => Err("the guest did not freeze its programs in time".to_owned()),
    }
}

/// Has a VMM capture its VM, which has this many bytes of RAM.
///
/// # Errors
///
/// If the VMM does not answer in time, refuses, or sends no state or other files than it says: a
/// sentence without its full stop.
pub async fn capture(control: &Path, resume: bool, ram: u64) -> Result<Captured, String> {
    let asked = control::request_with_descriptors(control, ControlRequest::Capture { resume });
    let (answer, descriptors) = match timeout(CAPTURE_TIME, asked).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => return Err(format!("its VMM does not answer: {error}")),
        Err(_) => return Err("its VMM did not capture the VM in time".to_owned()),
    };
    captured(answer, descriptors, ram)
}

/// The captured VM, with this many bytes of RAM, in a VMM's answer and the descriptors that came
/// with it.
pub(crate) fn captured(
    answer: ControlResponse,
    descriptors: Vec<OwnedFd>,
    ram: u64,
) -> Result<Captured, String> {
    let (layers, pause_ns) = match answer {
        ControlResponse::Captured {
            layers, pause_ns, ..
        } => (layers, pause_ns),
        ControlResponse::Error(why) => return Err(short(why.trim_end_matches('.'))),
        other => return Err(format!("its VMM gave the unexpected answer {other:?}")),
    };
    let mut files = descriptors.into_iter().map(Arc::new);
    let (Some(state), Some(layout)) = (files.next(), files.next()) else {
        return Err("its VMM sent no state".to_owned());
    };
    let captured = Captured {
        state,
        layout,
        layers: files.collect(),
        ram,
        pause_ns,
    };
    if captured.layers.is_empty() || captured.layers.len() != layers as usize {
        return Err(format!(
            "its VMM announced {layers} layers of memory and sent {}",
            captured.layers.len()
        ));
    }
    Ok(captured)
}
