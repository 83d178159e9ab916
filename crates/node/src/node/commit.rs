//! Commit: makes an image of a VM's changes to its root file system.

use super::Node;
use super::operation::join_result;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::Made;
use jiffy_content::model::vm::Spec;
use jiffy_sys::causes;
use jiffy_vmhost::agent;
use jiffy_vmhost::frames::{FrameReader, ReadError};
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::text::short;
use jiffy_wire::agent::{CopyFrame, OLDEST, Request};
use jiffy_wire::api::{Action, CommitVm, Committed, ImageSource, RootDisk};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tracing::info;

/// How long an agent has to send the next part of the changes; its disk may be slow.
const FRAME_TIME: Duration = Duration::from_secs(60);
/// Least allowance for the headers of a tar, MiB.
const HEADERS_MIB: u64 = 16;

impl Node {
    /// Makes an image of a VM's current root file system. Its programs are frozen while the
    /// changes are read.
    ///
    /// # Errors
    ///
    /// If the name is not valid or a VM needs its image, the VM runs on a copy of its image, its
    /// guest is not ready or sends no valid changes, chunks can't be fetched, or there is no disk
    /// space.
    pub async fn commit(self: Arc<Self>, vm: Arc<VmHandle>, wanted: CommitVm) -> Result<Committed> {
        let name = self.images.new_name(&wanted.image, None)?;
        if self.images.has(&name) {
            self.release_image(&name).await;
            self.check_image_unused(&name).await?;
        }
        if let Some(RootDisk::Copy { .. }) = &vm.spec.root_disk {
            return Err(Error::wrong_state(format!(
                "The VM {} runs on a copy of its image: it has no layer of changes that could be committed.",
                vm.name
            )));
        }
        let _one = self.operate_for_client(&vm).await?;
        let socket = self.freezable(&vm).await?;
        let root = self.root_of(&vm).await?;
        let _whole = match &root.lazy {
            Some(disk) => Some(self.host.pager.complete_image(disk).await?),
            None => None,
        };
        let draft = self.images.draft()?;
        let begun = monotonic_ns();
        let changes = draft.path().join("changes.tar");
        let bytes = self.changes(&vm, &socket, &changes).await?;
        let pause_ns = monotonic_ns() - begun;
        let (config, from) = (vm.spec.config.clone(), vm.name.clone());
        let importer = self.images.importer().clone();
        let room = Arc::clone(&self.disk_room);
        let made = tokio::task::spawn_blocking(move || {
            let _room = room.reserve_bytes(draft.path(), "The image needs at least", bytes)?;
            let source = ImageSource {
                reference: format!("commit of {from}"),
                manifest: None,
                signed_by: Vec::new(),
            };
            Made::child(&importer, draft, &root, &changes, config, source)
        });
        let made = join_result(made.await)?;
        let image = self
            .images
            .keep(&name, made, || self.check_image_unused(&name))
            .await?;
        self.image_changed(&name, Action::Created);
        info!(image = name, vm = %vm.name, bytes, "image made of a VM's changes");
        Ok(Committed {
            image,
            pause_ns,
            bytes,
        })
    }

    /// Writes a VM's changes into a file, as a tar; returns its size in bytes.
    async fn changes(&self, vm: &VmHandle, socket: &Path, to: &Path) -> Result<u64> {
        let full = |error: &io::Error| Error::io("store the changes of a VM", to, error);
        let failed = |why: &str| {
            Error::vm_failed(format!(
                "The changes of the VM {} can't be read: {}.",
                vm.name,
                short(why.trim_end_matches('.'))
            ))
        };
        let request = Request::Changes { version: OLDEST };
        let stream = agent::ask(socket, &request)
            .await
            .map_err(|error| failed(&causes::sentence(&error)))?;
        let mut file = tokio::fs::File::create(to)
            .await
            .map_err(|error| full(&error))?;
        let most = most_changes(&vm.spec);
        let taken = take_changes(stream, &mut file, most, FRAME_TIME).await;
        taken.map_err(|error| match error {
            ChangesError::Guest(why) => failed(&why),
            ChangesError::File(error) => full(&error),
            ChangesError::TooMuch => failed(&format!("it sends more than {} MiB", most >> 20))
                .hint(
                    "Its root is smaller, but sparse files are sent with their holes: remove sparse files in the VM.",
                ),
        })
    }
}

/// Why the changes could not be taken.
#[derive(Debug)]
enum ChangesError {
    /// The guest misbehaved; the text follows a colon.
    Guest(String),
    /// The file could not be written.
    File(io::Error),
    /// The changes exceed their limit.
    TooMuch,
}

/// Most bytes of a VM's changes: the size of the disk or memory that holds them, and the headers
/// of a tar.
fn most_changes(spec: &Spec) -> u64 {
    let mib = match &spec.root_disk {
        Some(RootDisk::Layer { size_mib }) => *size_mib,
        _ => spec.ram_mib().into(),
    };
    (mib + mib / 4 + HEADERS_MIB) << 20
}

/// Writes what an agent sends into a file, within the limits of size and time; returns the bytes.
/// The agent is not trusted.
async fn take_changes(
    from: impl AsyncRead + Unpin,
    to: &mut (impl AsyncWrite + Unpin),
    most: u64,
    frame_time: Duration,
) -> std::result::Result<u64, ChangesError> {
    let guest = |why: &str| ChangesError::Guest(why.to_owned());
    let mut frames = FrameReader::new(from);
    let mut bytes = 0;
    loop {
        let frame = timeout(frame_time, frames.next())
            .await
            .map_err(|_| guest("its agent stopped sending"))?
            .map_err(|error| match error {
                ReadError::Io(error) => guest(&error.to_string()),
                ReadError::Frame(error) => guest(&error.to_string()),
            })?;
        match frame {
            Some(CopyFrame::Data(data)) if !data.is_empty() => {
                bytes += data.len() as u64;
                if bytes > most {
                    return Err(ChangesError::TooMuch);
                }
                to.write_all(&data).await.map_err(ChangesError::File)?;
            }
            Some(CopyFrame::End) => {
                to.flush().await.map_err(ChangesError::File)?;
                return Ok(bytes);
            }
            Some(CopyFrame::Failed { message }) => return Err(ChangesError::Guest(message)),
            // Empty data is refused: it would never reach the limit.
            Some(CopyFrame::Entry(_) | CopyFrame::Data(_)) => {
                return Err(guest("its agent violates the protocol"));
            }
            None => return Err(guest("the connection to its agent ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;
    use jiffy_vmhost::frames;
    use jiffy_wire::api::CreateVm;
    use tokio::io::duplex;

    /// The result for these frames, followed by one frame repeated without end, or by silence.
    async fn taken(
        first: &[CopyFrame],
        forever: Option<CopyFrame>,
        frame_time: Duration,
    ) -> (std::result::Result<u64, ChangesError>, usize) {
        let (mut agent, ours) = duplex(1 << 16);
        let mut file = Vec::new();
        let sends = async {
            for frame in first {
                frames::write(&mut agent, frame).await.unwrap();
            }
            while let Some(frame) = &forever {
                frames::write(&mut agent, frame).await.unwrap();
            }
            std::future::pending().await
        };
        let taken = tokio::select! {
            taken = take_changes(ours, &mut file, 10_000, frame_time) => taken,
            () = sends => unreachable!(),
        };
        (taken, file.len())
    }

    #[tokio::test]
    async fn incomplete_or_oversized_changes_of_a_guest_are_refused() {
        let data = |bytes| CopyFrame::Data(vec![1; bytes]);
        let all = [data(6000), data(4000), CopyFrame::End];
        let (whole, kept) = taken(&all, None, FRAME_TIME).await;
        assert_eq!((whole.unwrap(), kept), (10_000, 10_000));

        let (without_end, kept) = taken(&[], Some(data(3000)), FRAME_TIME).await;
        assert!(matches!(without_end, Err(ChangesError::TooMuch)));
        assert_eq!(kept, 9000);

        for (forever, frame_time, why) in [
            (None, Duration::from_millis(20), "stopped sending"),
            (Some(data(0)), FRAME_TIME, "protocol"),
        ] {
            let (refused, _) = taken(&[data(5)], forever, frame_time).await;
            let Err(ChangesError::Guest(said)) = refused else {
                panic!("{refused:?}");
            };
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn max_changes_follow_memory_and_layer_size() {
        let most = |root_disk| {
            let wanted = CreateVm {
                memory_mib: Some(128),
                root_disk,
                ..CreateVm::default()
            };
            most_changes(&spec::of_base(wanted)) >> 20
        };
        assert_eq!(most(None), 176);
        assert_eq!(most(Some(RootDisk::Layer { size_mib: 4096 })), 5136);
    }
}
