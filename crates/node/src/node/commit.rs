//! What a VM has changed in its root file system, as a new image.

use super::Node;
use super::operation::joined;
use crate::agent;
use crate::clock::monotonic_ns;
use crate::error::{Error, Result};
use crate::frames::{FrameReader, ReadError};
use crate::images::Made;
use crate::vm::VmHandle;
use crate::vm::timeline::short;
use jiffy_wire::agent::{CopyFrame, Request, VERSION};
use jiffy_wire::api::{CommitVm, Committed, ImageSource, RootDisk};
use std::path::Path;
use std::sync::Arc;
use tokio::io::AsyncWriteExt;
use tracing::info;

impl Node {
    /// Makes an image of a VM's root file system as it is now. Its programs
    /// stand still while their changes are read.
    pub async fn commit(self: Arc<Self>, vm: Arc<VmHandle>, wanted: CommitVm) -> Result<Committed> {
        let name = self.images.new_name(&wanted.image, None)?;
        if self.images.has(&name) {
            self.let_image_go(&name).await;
            self.image_unused(&name).await?;
        }
        if let Some(RootDisk::Copy { .. }) = &vm.spec.root_disk {
            return Err(Error::wrong_state(format!(
                "The VM {} has a copy of its image as its disk: there is no layer of changes.",
                vm.name
            )));
        }
        let _one = vm.operation.lock().await;
        let socket = self.capturable(&vm).await?;
        let root = self.root_of(&vm).await?;
        if let Some(disk) = &root.lazy {
            self.settings.pager.complete_image(disk).await?;
        }
        let draft = self.images.draft()?;
        let begun = monotonic_ns();
        let changes = draft.path().join("changes.tar");
        let bytes = self.changes(&vm, &socket, &changes).await?;
        let pause_ns = monotonic_ns() - begun;
        let (config, from) = (vm.spec.config.clone(), vm.name.clone());
        let made = tokio::task::spawn_blocking(move || {
            let source = ImageSource {
                reference: format!("commit of {from}"),
                manifest: None,
            };
            Made::child(draft, &root, &changes, config, source)
        });
        let made = joined(made.await)?;
        let image = self
            .images
            .keep(&name, made, || self.image_unused(&name))
            .await?;
        self.settings.goldens.forget_image(&name);
        info!(image = name, vm = %vm.name, bytes, "image made of a VM's changes");
        Ok(Committed {
            image,
            pause_ns,
            bytes,
        })
    }

    /// Writes a VM's changes into a file, as a tar; gives its bytes.
    async fn changes(&self, vm: &VmHandle, socket: &Path, to: &Path) -> Result<u64> {
        let full = |error: &std::io::Error| Error::io("keep what a VM has changed", to, error);
        let failed = |why: String| {
            Error::vm_failed(format!(
                "What the VM {} has changed can't be read: {}.",
                vm.name,
                short(why.trim_end_matches('.'))
            ))
        };
        let request = Request::Changes { version: VERSION };
        let stream = agent::ask(socket, &request)
            .await
            .map_err(|error| failed(error.sentence()))?;
        let mut frames = FrameReader::new(stream);
        let mut file = tokio::fs::File::create(to)
            .await
            .map_err(|error| full(&error))?;
        let mut bytes = 0;
        loop {
            let frame = frames.next().await.map_err(|error| match error {
                ReadError::Io(error) => failed(error.to_string()),
                ReadError::Frame(error) => failed(error.to_string()),
            })?;
            match frame {
                Some(CopyFrame::Data(data)) => {
                    bytes += data.len() as u64;
                    file.write_all(&data).await.map_err(|error| full(&error))?;
                }
                Some(CopyFrame::End) => {
                    file.flush().await.map_err(|error| full(&error))?;
                    return Ok(bytes);
                }
                Some(CopyFrame::Failed { message }) => return Err(failed(message)),
                Some(CopyFrame::Entry(_)) => {
                    return Err(failed("it does not follow the protocol".into()));
                }
                None => return Err(failed("the connection to its agent ended".into())),
            }
        }
    }
}
