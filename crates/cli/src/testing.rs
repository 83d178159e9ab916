//! For fuzzing: copies from and to a VM, without a VM.

use crate::copy::{Goal, Sink, TarReader, TarWriter};
use jiffy_wire::agent::{CopyEntry, CopyFrame};
use std::path::Path;

/// Writes the frames of a VM to `path` until one is refused; `name` is the root's name there. True
/// if the copy is complete.
pub fn copy_from_vm(
    frames: impl IntoIterator<Item = CopyFrame>,
    path: &Path,
    name: Option<&str>,
    keep_owners: bool,
) -> bool {
    let goal = Goal {
        path: path.into(),
        name: name.map(Into::into),
        folder: false,
    };
    let mut sink = Sink::new(goal, keep_owners);
    until_the_end(frames, |frame| sink.take(frame).ok())
}

/// The same, as a tar.
pub fn tar_from_vm(frames: impl IntoIterator<Item = CopyFrame>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut tar = TarWriter::new(&mut bytes, "root".into());
    let whole = until_the_end(frames, |frame| tar.take(frame).ok());
    drop(tar);
    whole.then_some(bytes)
}

fn until_the_end(
    frames: impl IntoIterator<Item = CopyFrame>,
    mut take: impl FnMut(CopyFrame) -> Option<bool>,
) -> bool {
    for frame in frames {
        match take(frame) {
            Some(false) => {}
            Some(true) => return true,
            None => return false,
        }
    }
    false
}

/// The frames of a tar for a VM's folder; `None` if it is refused.
pub fn tar_to_vm(tar: &[u8], root: CopyEntry, keep_owners: bool) -> Option<Vec<CopyFrame>> {
    let mut frames = Vec::new();
    let send = |frame| {
        frames.push(frame);
        Ok(())
    };
    let read = TarReader::new(root, keep_owners).read(tar, send, |_| {});
    read.is_ok().then_some(frames)
}
