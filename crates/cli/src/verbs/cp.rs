//! `jiffy cp`

use super::Context;
use crate::args::queue::WaitTime;
use crate::args::{Cp, Place};
use crate::client::{Client, FrameReader, Upgraded, encoded, vm_path};
use crate::copy::{Goal, Sink, TarReader, TarWriter, base_name, send_tree};
use crate::failure::{Failure, Kind, Outcome, Result, report};
use crate::session;
use jiffy_wire::agent::{CopyDone, CopyEntry, CopyFrame, CopyKind};
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// How copies are requested.
struct Copies<'a> {
    client: &'a Client,
    time: WaitTime,
}

/// `jiffy cp`
///
/// # Errors
///
/// If not exactly one side is in a VM, there is no node, it refuses, or a file on either side can't
/// be read or written.
pub async fn cp(context: &Context, cp: Cp) -> Result<Outcome> {
    let copies = Copies {
        client: &context.client()?,
        time: cp.time,
    };
    let archive = cp.archive;
    match (&cp.source, &cp.destination) {
        (Place::Vm { vm, path }, Place::Here(here)) => {
            let goal = Goal {
                path: here.clone(),
                name: own_name(path).map(str::to_owned),
                folder: here.as_os_str().as_encoded_bytes().ends_with(b"/"),
            };
            let in_place = goal.is_written_in_place();
            let mut sink = Sink::new(goal, archive);
            let copying = receive(&copies, vm, path, |frame| sink.take(frame));
            if in_place {
                return copying.await;
            }
            // The sink removes its unfinished file when it is dropped.
            tokio::select! {
                biased;
                signal = session::ending_signal() => Ok(Outcome::GaveUp(signal)),
                done = copying => done,
            }
        }
        (Place::Vm { vm, path }, Place::Tar) => {
            let out = BufWriter::new(std::io::stdout().lock());
            let mut tar = TarWriter::new(out, own_name(path).unwrap_or(".").to_owned());
            receive(&copies, vm, path, |frame| tar.take(frame)).await
        }
        (Place::Here(here), Place::Vm { vm, path }) => {
            send_here(&copies, here, vm, path, archive).await
        }
        (Place::Tar, Place::Vm { vm, path }) => send_tar(&copies, vm, path, archive).await,
        (Place::Vm { .. }, Place::Vm { .. }) => Err(Failure::new(
            "jiffy cp can't copy from one VM to another",
        )
        .hint("`jiffy cp A:/path - | jiffy cp - B:/folder` does, through a pipe on this host")),
        _ => Err(Failure::new("one side of a copy must be in a VM")
            .hint("write it as VM:PATH, for example `jiffy cp notes.txt box:/root/`")),
    }
}

/// The name that a copy gets in an existing folder; `None` for `/`, and for `folder/.`,
/// of which only the contents are copied.
fn own_name(path: &str) -> Option<&str> {
    match path.ends_with("/.") || path == "." {
        true => None,
        false => base_name(path),
    }
}

/// Copies out of a VM, frame by frame.
async fn receive(
    copies: &Copies<'_>,
    vm: &str,
    source: &str,
    mut take: impl FnMut(CopyFrame) -> Result<bool>,
) -> Result<Outcome> {
    let mut frames = copy_out(copies, vm, source).await?;
    loop {
        match frames.next().await? {
            Some(frame) => {
                if take(frame)? {
                    return Ok(Outcome::Done);
                }
            }
            None => return Err(copy_cut_off()),
        }
    }
}

async fn copy_out(copies: &Copies<'_>, vm: &str, source: &str) -> Result<FrameReader> {
    let order = format!("/copy-out?path={}", encoded(source));
    let path = vm_path(vm, &copies.time.after(&order));
    Ok(copies
        .client
        .upgrade::<()>(&path, None)
        .await?
        .frames
        .reader)
}

/// The folder `path` in the VM; `None` if it is not a folder.
async fn folder_in(copies: &Copies<'_>, vm: &str, path: &str) -> Result<Option<CopyEntry>> {
    let inside = format!("{}/.", path.trim_end_matches('/'));
    let mut frames = copy_out(copies, vm, &inside).await?;
    match frames.next().await? {
        Some(CopyFrame::Entry(entry)) if entry.kind == CopyKind::Folder => Ok(Some(entry)),
        Some(_) => Ok(None),
        None => Err(copy_cut_off()),
    }
}

/// Copies a file or folder into a VM.
async fn send_here(
    copies: &Copies<'_>,
    here: &Path,
    vm: &str,
    destination: &str,
    archive: bool,
) -> Result<Outcome> {
    let source = here.to_str().unwrap_or_default();
    // As in cp, a link is followed if it is written with a slash.
    let facts = match source.ends_with('/') {
        true => here.metadata(),
        false => here.symlink_metadata(),
    }
    .map_err(|error| Failure::io(format_args!("{} can't be read", here.display()), error))?;
    let name = match here.file_name() {
        _ if source.ends_with("/.") || source == "." => None,
        name => name.and_then(|name| name.to_str()),
    };
    let folder = folder_in(copies, vm, destination).await?;
    let (name, as_root) = match (folder, name) {
        // Passed separately, because the guest follows links only in the path that the user wrote.
        (Some(_), Some(name)) => (name, None),
        (Some(folder), None) if facts.is_dir() => ("", Some(folder)),
        (Some(_), None) => {
            return Err(Failure::new(format!(
                "{} has no file name for its copy in {vm}:{destination}",
                here.display()
            )));
        }
        (None, _) if destination.ends_with('/') && !facts.is_dir() => {
            return Err(Failure::new(format!(
                "there is no folder {destination} in {vm}"
            )));
        }
        (None, _) => ("", None),
    };
    let here = match facts.is_dir() {
        // Reads through the link, if it is one.
        true => here.join("."),
        false => here.to_owned(),
    };
    let mut notes = 0u32;
    let Upgraded { frames, .. } = copy_in(copies, vm, destination).await?;
    let (mut reader, mut writer) = (frames.reader, frames.writer);
    let sending = async {
        send_tree(&mut writer, &here, archive, name, as_root, |note| {
            notes += 1;
            report(note, None);
        })
        .await?;
        writer.send(&CopyFrame::End).await
    };
    send_and_await_answer(sending, &mut reader).await?;
    Ok(if notes > 0 {
        Outcome::Partly
    } else {
        Outcome::Done
    })
}

/// Unpacks a tar from stdin into a folder of a VM.
async fn send_tar(
    copies: &Copies<'_>,
    vm: &str,
    destination: &str,
    archive: bool,
) -> Result<Outcome> {
    let Some(folder) = folder_in(copies, vm, destination).await? else {
        return Err(
            Failure::new(format!("there is no folder {destination} in {vm}"))
                .hint("a tar is unpacked into a folder that exists"),
        );
    };
    let root = CopyEntry {
        path: String::new(),
        ..folder
    };
    let Upgraded { frames, .. } = copy_in(copies, vm, destination).await?;
    let (mut reader, mut writer) = (frames.reader, frames.writer);
    let (pieces, mut received) = mpsc::channel::<CopyFrame>(4);
    let left_out = Arc::new(AtomicBool::new(false));
    let noted = left_out.clone();
    // Reading stdin blocks, so it has a thread of its own.
    let reading = std::thread::spawn(move || {
        TarReader::new(root, archive).read(
            std::io::stdin().lock(),
            |frame| {
                pieces
                    .blocking_send(frame)
                    .map_err(|_| std::io::ErrorKind::BrokenPipe.into())
            },
            |note| {
                noted.store(true, Ordering::Relaxed);
                report(&note, None);
            },
        )
    });
    let sending = async move {
        while let Some(frame) = received.recv().await {
            let last = frame == CopyFrame::End;
            writer.send(&frame).await?;
            if last {
                return Ok(());
            }
        }
        // The thread ended early and has the reason.
        reading
            .join()
            .unwrap_or_else(|_| Err(Failure::new("the tar on stdin can't be read")))
    };
    send_and_await_answer(sending, &mut reader).await?;
    Ok(match left_out.load(Ordering::Relaxed) {
        true => Outcome::Partly,
        false => Outcome::Done,
    })
}

async fn copy_in(copies: &Copies<'_>, vm: &str, target: &str) -> Result<Upgraded> {
    let order = format!("/copy-in?path={}", encoded(target));
    let path = vm_path(vm, &copies.time.after(&order));
    copies.client.upgrade::<()>(&path, None).await
}

/// Sends and receives at the same time, so that a guest whose disk is full is noticed at once.
async fn send_and_await_answer(
    sending: impl Future<Output = Result<()>>,
    reader: &mut FrameReader,
) -> Result<()> {
    let answer = reader.next::<CopyDone>();
    tokio::pin!(sending, answer);
    let done = tokio::select! {
        biased;
        done = &mut answer => done?,
        sent = &mut sending => match sent {
            Ok(()) => answer.await?,
            // The other end has closed the connection; its answer has the cause.
            Err(failure) if failure.kind == Kind::Unreachable => {
                answer.await.ok().flatten().ok_or(failure).map(Some)?
            }
            Err(failure) => return Err(failure),
        },
    };
    match done {
        Some(CopyDone { error: None, .. }) => Ok(()),
        Some(CopyDone {
            error: Some(error), ..
        }) => Err(Failure::new(error)),
        None => Err(copy_cut_off()),
    }
}

fn copy_cut_off() -> Failure {
    Failure::new("the connection to jiffyd was lost before the copy was complete")
        .kind(Kind::Unreachable)
}
