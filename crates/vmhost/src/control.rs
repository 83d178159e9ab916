//! A VMM's control socket: one command and one answer, possibly with descriptors.

use crate::dial::dial;
use jiffy_sys::fds::recv_with_fds;
use jiffy_wire::lines;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Longest line from a VMM's control socket: a list of ranges of RAM.
const MAX_ANSWER: usize = 4 << 20;
/// Most descriptors with an answer; a VM with more layers is captured in full again.
const MAX_DESCRIPTORS: usize = 1024;
/// How long a VMM has to answer. A vCPU may first have to wait for a page that the pager fetches
/// from a registry.
const ANSWER_TIME: Duration = Duration::from_secs(120);

/// Sends a VMM one command and returns its answer.
///
/// # Errors
///
/// If the VMM does not listen, its answer is not valid, or it does not answer within 120 seconds,
/// so that the VM's operation ends.
pub async fn request(socket: &Path, request: ControlRequest) -> io::Result<ControlResponse> {
    in_time(socket, request, ANSWER_TIME).await
}

async fn in_time(
    socket: &Path,
    request: ControlRequest,
    limit: Duration,
) -> io::Result<ControlResponse> {
    match timeout(limit, request_with_descriptors(socket, request)).await {
        Ok(answered) => answered.map(|(answer, _)| answer),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("timed out after {limit:?}"),
        )),
    }
}

/// Sends a VMM one command.
///
/// # Errors
///
/// If [`request`] fails or the VMM refuses: a sentence without its full stop.
pub async fn order(socket: &Path, order: ControlRequest) -> Result<(), String> {
    match request(socket, order).await {
        Ok(ControlResponse::Ok | ControlResponse::Balloon(_) | ControlResponse::Memory(_)) => {
            Ok(())
        }
        Ok(ControlResponse::Error(why)) => Err(why.trim_end_matches('.').to_owned()),
        Ok(other) => Err(format!("its VMM gave the unexpected answer {other:?}")),
        Err(error) => Err(format!("its VMM does not answer: {error}")),
    }
}

/// Sends a VMM one command and returns its answer with the descriptors that came with it.
///
/// # Errors
///
/// If the VMM does not listen, or its answer is too long or not valid. There is no limit of time.
pub async fn request_with_descriptors(
    socket: &Path,
    request: ControlRequest,
) -> io::Result<(ControlResponse, Vec<OwnedFd>)> {
    answer_with_descriptors(&send(socket, request).await?).await
}

/// Receives an answer and the descriptors that come with it.
pub(crate) async fn answer_with_descriptors(
    stream: &UnixStream,
) -> io::Result<(ControlResponse, Vec<OwnedFd>)> {
    let mut line = Vec::new();
    let mut descriptors = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut bytes = [0; 4096];
        let read = || recv_with_fds(stream, &mut bytes, &mut descriptors);
        let got = stream.async_io(Interest::READABLE, read).await?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&bytes[..got]);
        if line.len() > MAX_ANSWER || descriptors.len() > MAX_DESCRIPTORS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "its answer is too long",
            ));
        }
    }
    Ok((serde_json::from_slice(&line)?, descriptors))
}

/// Starts a held VM. Does not wait for an answer: a VM that can't start ends.
///
/// # Errors
///
/// If the VMM does not listen.
pub fn begin(socket: &Path) -> io::Result<()> {
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    std::io::Write::write_all(&mut stream, &lines::encode(&ControlRequest::Begin)?)
}

async fn send(socket: &Path, request: ControlRequest) -> io::Result<UnixStream> {
    let mut stream = dial(socket).await?;
    stream.write_all(&lines::encode(&request)?).await?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::fds::send_with_fds;
    use std::fs::File;
    use std::io::{BufRead, Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn a_request_to_a_hanging_vmm_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let _silent = UnixListener::bind(&path).unwrap();
        let asked = in_time(&path, ControlRequest::Resume, Duration::from_millis(50));
        assert_eq!(asked.await.unwrap_err().to_string(), "timed out after 50ms");
    }

    #[tokio::test]
    async fn descriptors_arrive_with_an_answer_split_anywhere() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            std::io::BufReader::new(stream.try_clone().unwrap())
                .read_line(&mut line)
                .unwrap();
            assert_eq!(line, "{\"capture\":{\"resume\":true}}\n");
            let answer = ControlResponse::Captured {
                layers: 98,
                pause_ns: 5,
                copied_bytes: 6,
            };
            let text = lines::encode(&answer).unwrap();
            let files: Vec<File> = (0..100).map(|_| tempfile::tempfile().unwrap()).collect();
            (&files[99]).write_all(b"last").unwrap();
            for (part, piece) in files.chunks(50).zip(text.chunks(10)) {
                let part: Vec<_> = part.iter().map(AsFd::as_fd).collect();
                send_with_fds(&stream, piece, &part).unwrap();
            }
            stream.write_all(&text[20..]).unwrap();
        });
        let asked = ControlRequest::Capture { resume: true };
        let (answer, descriptors) = request_with_descriptors(&path, asked).await.unwrap();
        server.join().unwrap();
        assert!(matches!(
            answer,
            ControlResponse::Captured { layers: 98, .. }
        ));
        assert_eq!(descriptors.len(), 100);
        let mut last = File::from(descriptors.into_iter().last().unwrap());
        std::io::Seek::rewind(&mut last).unwrap();
        let mut text = String::new();
        last.read_to_string(&mut text).unwrap();
        assert_eq!(text, "last");
    }
}
