//! Logs for clients: read once or followed, whole or from some line on.

use crate::handle::VmHandle;
use crate::log::{Kind, Reader};
use crate::process::readable;
use jiffy_content::error::{Error, Result};
use jiffy_wire::agent::Stream;
use jiffy_wire::api::LogChunk;
use jiffy_wire::frame::MAX_DATA;
use rustix::fs::inotify;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;

/// Most lines that can be asked for from the end.
pub const MAX_TAIL: usize = 1_000_000;

/// A log of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The first command's output.
    Command,
    /// The serial console.
    Console,
    /// The VMM's own messages.
    Vmm,
}

/// A log being read for a client.
#[derive(Debug)]
pub struct Log {
    vm: Arc<VmHandle>,
    folder: PathBuf,
    follow: bool,
    kind: LogKind,
}

#[derive(Debug)]
enum LogKind {
    Command {
        reader: Reader,
        /// Chunks that were read and not returned yet.
        ready: VecDeque<LogChunk>,
        /// Bytes of the first record that precede the first wanted line.
        skip: usize,
    },
    Plain {
        path: PathBuf,
        file: Option<File>,
        offset: u64,
        watch: Option<AsyncFd<OwnedFd>>,
    },
}

impl Log {
    /// Opens a log; `tail` lines from the end, or all. Blocking.
    ///
    /// # Errors
    ///
    /// If the log can't be opened or is damaged; not if there is none.
    pub fn open(
        vm: Arc<VmHandle>,
        folder: PathBuf,
        source: Source,
        follow: bool,
        tail: Option<usize>,
    ) -> Result<Log> {
        let kind = match source {
            Source::Command => command_log(&vm, &folder, tail)?,
            Source::Console => plain_log(&folder, "console.log", follow, tail)?,
            Source::Vmm => plain_log(&folder, "vmm.log", follow, tail)?,
        };
        Ok(Log {
            vm,
            folder,
            follow,
            kind,
        })
    }

    /// The next chunk; `None` at the end, which with `follow` is the VM's end.
    ///
    /// # Errors
    ///
    /// If the log can't be read or is damaged.
    pub async fn next(&mut self) -> io::Result<Option<LogChunk>> {
        loop {
            // The state is read before the log, so that everything written until the VM's end is
            // found.
            let active = self.vm.view.borrow().lives();
            if let Some(chunk) = self.read(active)? {
                return Ok(Some(chunk));
            }
            if !self.follow || !active {
                return Ok(None);
            }
            self.more().await;
        }
    }

    fn read(&mut self, active: bool) -> io::Result<Option<LogChunk>> {
        match &mut self.kind {
            LogKind::Command {
                reader,
                ready,
                skip,
            } => {
                // A batch may consist of start records only, which give no chunk.
                while ready.is_empty() {
                    let batch = reader.batch(self.vm.end_of_log(active, &self.folder)?)?;
                    if reader.take_dropped() > 0 {
                        ready.push_back(note("jiffy: older output was dropped.\n"));
                    }
                    if batch.is_empty() {
                        break;
                    }
                    for record in batch {
                        let stream = match record.kind {
                            Kind::Start => continue,
                            Kind::Output(stream) => stream,
                            Kind::Note => Stream::Stderr,
                        };
                        let skipped = std::mem::take(skip).min(record.data.len());
                        let data = record.data[skipped..].to_vec();
                        ready.push_back(LogChunk { stream, data });
                    }
                }
                Ok(ready.pop_front())
            }
            LogKind::Plain {
                path, file, offset, ..
            } => {
                if file.is_none() {
                    *file = open_if_there(path)?;
                }
                let Some(file) = file else {
                    return Ok(None);
                };
                let mut data = vec![0; MAX_DATA];
                let got = file.read_at(&mut data, *offset)?;
                data.truncate(got);
                *offset += got as u64;
                let stream = Stream::Stdout;
                Ok((got > 0).then_some(LogChunk { stream, data }))
            }
        }
    }

    /// Waits until the log may have grown, or the VM may have ended.
    async fn more(&mut self) {
        let mut view = self.vm.view.clone();
        let ended = async {
            let _ = view.wait_for(|view| view.removed || !view.lives()).await;
        };
        let grown = async {
            match &mut self.kind {
                LogKind::Command { reader, .. } => {
                    let position = reader.position();
                    let mut end = self.vm.log_end.clone();
                    let _ = end.wait_for(|end| *end > position).await;
                }
                LogKind::Plain {
                    watch: Some(watch), ..
                } => {
                    if let Ok(mut ready) = watch.readable().await {
                        let mut events = [std::mem::MaybeUninit::uninit(); 4096];
                        let mut reader = inotify::Reader::new(watch.get_ref(), &mut events);
                        while reader.next().is_ok() {}
                        ready.clear_ready();
                    }
                }
                LogKind::Plain { watch: None, .. } => std::future::pending().await,
            }
        };
        tokio::select! {
            () = ended => {}
            () = grown => {}
        }
    }
}

fn note(text: &str) -> LogChunk {
    LogChunk {
        stream: Stream::Stderr,
        data: text.as_bytes().to_vec(),
    }
}

fn command_log(vm: &VmHandle, folder: &Path, tail: Option<usize>) -> Result<LogKind> {
    let (position, skip) = match tail {
        None => (0, 0),
        Some(lines) => last_lines(vm, folder, lines)
            .map_err(|error| Error::io("read the command's log", folder, &error))?,
    };
    Ok(LogKind::Command {
        reader: Reader::new(folder, position),
        ready: VecDeque::new(),
        skip,
    })
}

/// Where the last `lines` lines begin: a record's position and an offset in its data.
fn last_lines(vm: &VmHandle, folder: &Path, lines: usize) -> io::Result<(u64, usize)> {
    let lives = vm.view.borrow().lives();
    let end = vm.end_of_log(lives, folder)?;
    if lines == 0 {
        return Ok((end, 0));
    }
    // The last `lines` starts of lines. A line starts at the start of the log and after each
    // newline that is followed by something.
    let mut starts = VecDeque::new();
    let mut at_start = true;
    let mut reader = Reader::new(folder, 0);
    loop {
        let batch = reader.batch(end)?;
        if batch.is_empty() {
            break;
        }
        for record in batch.iter().filter(|record| record.kind != Kind::Start) {
            for (index, byte) in record.data.iter().enumerate() {
                if at_start {
                    if starts.len() == lines {
                        starts.pop_front();
                    }
                    starts.push_back((record.position, index));
                }
                at_start = *byte == b'\n';
            }
        }
    }
    Ok(starts.front().copied().unwrap_or((0, 0)))
}

fn plain_log(folder: &Path, name: &str, follow: bool, tail: Option<usize>) -> Result<LogKind> {
    let path = folder.join(name);
    let failed = |error: io::Error| Error::io("read a log", &path, &error);
    let watch = match follow {
        true => Some(watch(folder).map_err(failed)?),
        false => None,
    };
    let file = open_if_there(&path).map_err(failed)?;
    let offset = match (&file, tail) {
        (Some(file), Some(lines)) => tail_offset(file, lines).map_err(failed)?,
        _ => 0,
    };
    Ok(LogKind::Plain {
        path: path.clone(),
        file,
        offset,
        watch,
    })
}

fn open_if_there(path: &Path) -> io::Result<Option<File>> {
    match jiffy_sys::regular::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Watches the folder, because the file may not exist yet.
fn watch(folder: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
    let watch = inotify::init(flags)?;
    let what = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE;
    inotify::add_watch(&watch, folder, what)?;
    readable(watch)
}

/// Where the last `lines` lines of a file begin.
fn tail_offset(file: &File, lines: usize) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let mut end = length;
    let mut found = 0;
    let mut block = vec![0; MAX_DATA];
    while end > 0 && lines > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - start) as usize];
        file.read_exact_at(part, start)?;
        for (index, byte) in part.iter().enumerate().rev() {
            let at = start + index as u64;
            if *byte == b'\n' && at + 1 < length {
                found += 1;
                if found == lines {
                    return Ok(at + 1);
                }
            }
        }
        end = start;
    }
    Ok(if lines == 0 { length } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_last_lines_of_a_file_are_found_across_blocks() {
        let mut file = tempfile::tempfile().unwrap();
        let mut starts = Vec::new();
        let mut length = 0;
        for index in 0..3000u32 {
            starts.push(length);
            let line = format!("{index} {}\n", "x".repeat(index as usize % 90));
            length += line.len() as u64;
            file.write_all(line.as_bytes()).unwrap();
        }
        for lines in [1, 2, 10, 2000, 3000, 5000] {
            let expected = starts[3000usize.saturating_sub(lines)];
            assert_eq!(tail_offset(&file, lines).unwrap(), expected, "{lines}");
        }
        assert_eq!(tail_offset(&file, 0).unwrap(), length);
        file.write_all(b"no newline").unwrap();
        assert_eq!(tail_offset(&file, 1).unwrap(), length);
    }
}
