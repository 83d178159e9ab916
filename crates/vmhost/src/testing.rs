//! Entry points for fuzzing: what is read of logs, VMMs and the pager.

use crate::capture::captured;
use crate::channels::taken;
use crate::control::answer_with_descriptors;
use crate::log;
use crate::pager::ask::exchange;
use crate::process::EventLines;
use crate::task::end;
use jiffy_sys::fds::send_with_fds;
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use jiffy_wire::vmm::{ControlResponse, ExitRecord, VmmEvent};
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use tokio::net::UnixStream;
use tokio::runtime;

/// Bytes that a socket takes in any case.
const MOST: usize = 64 << 10;

/// Reads a VM's log that is `bytes`, then appends to it.
///
/// # Panics
///
/// If the appended records can't be read.
pub fn command_log(bytes: &[u8], folder: &Path) {
    std::fs::write(folder.join("command.log"), bytes).expect("the folder can be written");
    let mut reader = log::Reader::new(folder, 0);
    while let Ok(batch) = reader.batch(u64::MAX) {
        if batch.is_empty() {
            break;
        }
    }
    let _ = log::end_of(folder);
    let Ok(mut writer) = log::Writer::open(folder) else {
        return;
    };
    let before = writer.end();
    if writer.append(log::Kind::Note, b"on").is_ok() {
        let mut reader = log::Reader::new(folder, before);
        let batch = reader.batch(writer.end()).expect("what was written");
        assert_eq!(
            batch.last().map(|record| &record.data[..]),
            Some(&b"on"[..])
        );
    }
}

/// The events that a VMM reports in pieces of this many bytes.
pub fn events(bytes: &[u8], piece: usize) -> Vec<VmmEvent> {
    let (mut lines, mut events) = (EventLines::default(), Vec::new());
    for piece in bytes.chunks(piece) {
        lines.take(piece, &mut events);
    }
    events
}

/// The last record of a VMM, if these bytes are one.
///
/// # Panics
///
/// If the folder can't be written.
pub fn exit_record(bytes: &[u8], folder: &Path) -> Option<ExitRecord> {
    std::fs::write(folder.join("exit.json"), bytes).expect("the folder can be written");
    end::exit_record(folder)
}

/// A VMM's answer that comes with these files, and how many layers of memory were captured if it is
/// that of a capture.
///
/// # Errors
///
/// If it is not an answer.
pub fn control_answer(
    bytes: &[u8],
    files: &[File],
) -> io::Result<(ControlResponse, Result<usize, String>)> {
    let read = async |stream: UnixStream| answer_with_descriptors(&stream).await;
    let (answer, descriptors) = from_stream(bytes, files, read)?;
    let captured = captured(answer.clone(), descriptors, 1 << 20);
    Ok((answer, captured.map(|captured| captured.layers.len())))
}

/// A VMM's answer to the offer of a channel.
///
/// # Errors
///
/// If it has not taken the channel.
pub fn channel_answer(bytes: &[u8]) -> io::Result<()> {
    from_stream(bytes, &[], async |mut stream| taken(&mut stream).await)
}

/// The pager's answer to a request.
///
/// # Errors
///
/// If it is not an answer.
pub fn pager_answer(bytes: &[u8]) -> io::Result<PagerResponse> {
    let read = async |stream| exchange(stream, &PagerRequest::Ping).await;
    from_stream(bytes, &[], read)
}

/// Reads from a stream that gives these bytes with these files, and then ends.
fn from_stream<T>(
    bytes: &[u8],
    files: &[File],
    read: impl AsyncFnOnce(UnixStream) -> io::Result<T>,
) -> io::Result<T> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let bytes = &bytes[..bytes.len().min(MOST)];
    if !bytes.is_empty() {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_with_fds(&theirs, bytes, &files)?;
    }
    theirs.shutdown(Shutdown::Write)?;
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async { read(UnixStream::from_std(ours)?).await })
}
